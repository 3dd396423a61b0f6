// Memory that rails of one-sided writes reach by themselves: where the peer may write, where we
// may, and when memory of a stream that is closed can serve something else.
#include <algorithm>
#include <utility>

#include "link/link.hpp"
#include "link/mutants.hpp"

namespace r2ccl {
namespace {

constexpr std::uint64_t bit(RailId rail) { return std::uint64_t{1} << rail; }

}  // namespace

void Link::offer_slots(InStream& stream, RailId id) {
  if (rails_[id].one_sided() && stream.block().base() != nullptr)
    rails_[id].control.slots.push_back(&stream);
}

void Link::on_slots(RailId id, const FrameHeader& header) {
  // Of a communicator that is closed here nothing is under way, nor will be.
  Rail& rail = rails_[id];
  if (!closed_.contains(header.communicator))
    rail.remote_slots[header.communicator] = {header.number, header.epoch};
  else if (std::find(rail.control.released.begin(), rail.control.released.end(),
                     header.communicator) == rail.control.released.end())
    rail.control.released.push_back(header.communicator);
}

void Link::on_released(RailId id, std::uint64_t communicator) {
  if (const auto found = streams_.find(communicator); found != streams_.end())
    found->second->in.offered &= ~bit(id);
  for (Buried& buried : buried_)
    if (buried.communicator == communicator) buried.written_by &= ~bit(id);
  exhume();
}

void Link::attempts_landed(RailId id, Epoch epoch, std::uint64_t position, TimeNs now) {
  Rail& rail = rails_[id];
  if (epoch != rail.epoch || position > rail.sent || position <= rail.landed) return;
  rail.landed = position;
  reap(rail);
  for (auto& [communicator, pair] : streams_) open_and_queue(pair->out, now);
}

// Nothing of the rail's last epoch reaches memory of either side any more.
void Link::forget_memory(RailId id) {
  rails_[id].remote_slots.clear();
  for (auto& [communicator, pair] : streams_) pair->in.offered &= ~bit(id);
  for (Buried& buried : buried_) {
    buried.written_by &= ~bit(id);
    std::erase_if(buried.read_by, [id](const auto& reader) { return reader.first == id; });
  }
  exhume();
}

// The memory of a stream that is closed is kept while a rail may still read or write it.
void Link::bury(Streams& pair) {
  const std::uint64_t communicator = pair.in.communicator();
  Buried buried{communicator, pair.in.offered, {}, pair.in.take_block(), pair.out.take_block()};
  for (RailId id = 0; id < rails_.size(); ++id) {
    Rail& rail = rails_[id];
    if (!rail.one_sided()) continue;
    std::erase(rail.control.slots, &pair.in);
    if (rail.acked < rail.sent) buried.read_by.emplace_back(id, rail.sent);
    if (rail.remote_slots.erase(communicator) > 0 && connected(id))
      rail.control.released.push_back(communicator);
  }
  buried_.push_back(std::move(buried));
  exhume();
}

void Link::exhume() {
  std::erase_if(buried_, [this](Buried& buried) {
    std::erase_if(buried.read_by, [this](const auto& reader) {
      return rails_[reader.first].acked >= reader.second;
    });
    return (buried.read_by.empty() && buried.written_by == 0) || planted(Mutant::buried_at_once);
  });
}

}  // namespace r2ccl
