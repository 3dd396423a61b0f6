// Checks of memory that was returned to its owner.
#include <string>

#include "sim/world.hpp"

namespace r2ccl::sim {

void World::on_memory_returned(const LinkEnd& at, std::uint64_t communicator) {
  returned_[{at.rank, at.peer, communicator}] =
      end(at.rank, at.peer).link.out_stream(communicator).delivered();
}

void World::on_source_returned(const LinkEnd& at, std::uint64_t connection, std::uint64_t number) {
  sources_returned_[{at.rank, at.peer, connection}].insert(number);
  for (RailId rail = 0; rail < options_.rails.size(); ++rail)
    for (const QueuePairs& pairs : history(at.rank, at.peer, rail).pairs)
      if (pairs.may_read(at.side, connection, number))
        shadow_.report("I2: a port of rank " + std::to_string(at.rank) + " may read message " +
                       std::to_string(number) + " to rank " + std::to_string(at.peer) +
                       " after its source was returned to the caller");
}

void World::check_zero_copy(const Shadow::Stream& stream, const FrameHeader& header) {
  if (header.type == FrameType::put) {
    const auto sources = sources_returned_.find(stream);
    if (sources == sources_returned_.end() || !sources->second.contains(header.number)) return;
  } else {
    const auto found = returned_.find(stream);
    if (found == returned_.end() || header.number >= found->second) return;
  }
  shadow_.report("I2: a port of rank " + std::to_string(stream.from) + " reads message " +
                 std::to_string(header.number) + " to rank " + std::to_string(stream.to) +
                 " after its memory was returned to the caller");
}

}  // namespace r2ccl::sim
