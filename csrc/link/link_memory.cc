// Memory accessed by verbs rails: announcements of memory for RDMA writes in both directions, and
// the release of memory of closed streams.
#include <algorithm>

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
  // A communicator closed here has no RDMA writes in flight and starts none: answer RELEASED.
  Rail& rail = rails_[id];
  const auto& known = rail.path.remote_slots;
  // Beyond the limit, this rail carries nothing of the communicator.
  if (known.size() >= most_streams() && !known.contains(header.communicator)) return;
  if (!closed_.contains(header.communicator))
    rail.path.remote_slots[header.communicator] = {header.number, header.epoch};
  else if (std::find(rail.control.released.begin(), rail.control.released.end(),
                     header.communicator) == rail.control.released.end())
    rail.control.released.push_back(header.communicator);
}

bool Link::on_target(RailId id, const FrameHeader& header) {
  const auto slots = rails_[id].path.remote_slots.find(header.communicator);
  if (slots == rails_[id].path.remote_slots.end())
    return closed_.contains(header.communicator) ||
           rails_[id].path.remote_slots.size() >= most_streams();
  slots->second.target_first = header.number;
  slots->second.target_bytes = header.credit;
  slots->second.target_address = header.delivered;
  slots->second.target_key = header.epoch;
  return true;
}

// Checks the target fields of a data frame: only verbs rails write to a target, and only a replay
// names the rail of its first attempt.
bool Link::target_fields_valid(RailId id, const FrameHeader& header) const {
  const bool replay = (header.flags & frame_flag::replay) != 0;
  return header.epoch <= (replay ? rails_.size() : 0) &&
         ((header.flags & frame_flag::in_target) == 0 || rails_[id].one_sided());
}

bool Link::offer_target(InStream& stream, std::uint64_t skip, std::span<std::byte> memory) {
  // A target costs a frame per rail, more than the copy of a small message.
  if (memory.size() <= options_.small_message_bytes) return false;
  stream.target = {.memory = memory.data(),
                   .bytes = memory.size(),
                   .first = stream.consumed() + skip,
                   .offered = 0,
                   .pending_writes = {},
                   .wanted_since = 0};
  if (options_.memory == nullptr || !options_.memory->is_registered(memory)) return false;
  for (RailId id = 0; id < rails_.size(); ++id)
    if (rails_[id].one_sided() && connected(id)) rails_[id].control.targets.push_back(&stream);
  return true;
}

bool Link::reclaim_target(InStream& stream, bool received, TimeNs now) {
  Target& target = stream.target;
  if (target.memory == nullptr) return true;
  for (Rail& rail : rails_) std::erase(rail.control.targets, &stream);
  std::uint64_t writers = received ? 0 : target.offered;
  for (const Target::PendingWrite& write : target.pending_writes) writers |= bit(write.rail);
  if (planted(Mutant::target_not_recalled)) writers = 0;
  if (target.wanted_since == 0) target.wanted_since = now;
  // A late write on a rail still UP lands soon: wait up to the ack deadline floor.
  const bool patient = received && now - target.wanted_since <= options_.ack_deadline_floor_ns;
  for (RailId id = 0; id < rails_.size(); ++id) {
    if ((writers & bit(id)) == 0 || (patient && rails_[id].state == RailState::up)) continue;
    rail_failed(id, rails_[id].epoch, RailCause::recalled, now);
  }
  if (writers != 0) return false;
  target = {};
  return true;
}

void Link::revoke_target(InStream& stream) {
  if (stream.target.memory != nullptr && options_.memory != nullptr)
    options_.memory->revoke({stream.target.memory, stream.target.bytes});
  stream.target = {};
}

void Link::on_released(RailId id, std::uint64_t communicator) {
  if (const auto found = streams_.find(communicator); found != streams_.end())
    found->second->in.offered &= ~bit(id);
  for (DeferredFree& deferred : deferred_frees_)
    if (deferred.communicator == communicator) deferred.written_by &= ~bit(id);
  free_deferred();
}

void Link::attempts_landed(RailId id, Epoch epoch, std::uint64_t position, TimeNs now) {
  Rail& rail = rails_[id];
  if (epoch != rail.epoch || position > rail.path.sent || position <= rail.path.landed) return;
  rail.path.landed = position;
  reap(rail);
  for (auto& [communicator, pair] : streams_) open_and_queue(pair->out, now);
}

// Clears all memory access of the rail: its last epoch is fenced on this side.
void Link::forget_memory(RailId id) {
  rails_[id].path.remote_slots.clear();
  for (auto& [communicator, pair] : streams_) {
    InStream& stream = pair->in;
    stream.offered &= ~bit(id);
    stream.target.offered &= ~bit(id);
    std::erase_if(stream.target.pending_writes,
                  [id](const auto& write) { return write.rail == id; });
  }
  for (DeferredFree& deferred : deferred_frees_) {
    deferred.written_by &= ~bit(id);
    std::erase_if(deferred.read_by, [id](const auto& reader) { return reader.first == id; });
  }
  free_deferred();
}

// Keeps the memory of closed streams while a rail may still read or write the blocks.  Streams
// without their blocks cannot work, so all that may throw comes before.
void Link::defer_free(Streams& pair) {
  const std::uint64_t communicator = pair.in.communicator();
  DeferredFree& deferred = deferred_frees_.emplace_back();
  deferred.communicator = communicator;
  deferred.written_by = pair.in.offered;
  for (RailId id = 0; id < rails_.size(); ++id) {
    Rail& rail = rails_[id];
    if (!rail.one_sided()) continue;
    std::erase(rail.control.slots, &pair.in);
    std::erase(rail.control.targets, &pair.in);
    if (rail.own_fenced < rail.epoch && rail.path.acked < rail.path.sent)
      deferred.read_by.emplace_back(id, rail.path.sent);
    if (!rail.path.remote_slots.contains(communicator)) continue;
    if (connected(id)) rail.control.released.push_back(communicator);
    rail.path.remote_slots.erase(communicator);
  }
  deferred.in.emplace(pair.in.take_block());
  deferred.out.emplace(pair.out.take_block());
  free_deferred();
}

void Link::free_deferred() {
  std::erase_if(deferred_frees_, [this](DeferredFree& deferred) {
    std::erase_if(deferred.read_by, [this](const auto& reader) {
      return rails_[reader.first].path.acked >= reader.second;
    });
    return (deferred.read_by.empty() && deferred.written_by == 0) || planted(Mutant::freed_at_once);
  });
}

}  // namespace r2ccl
