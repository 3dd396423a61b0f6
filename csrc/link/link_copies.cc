// Messages sent to several rails at once.  The first copy to arrive counts, so the loss of a rail
// costs no time.
//
// A copy is an attempt: the ack deadlines of its rail run, and its slot is kept until the attempt
// is resolved.  Further copies are neither replays nor hedges, and a lost copy is replayed only if
// no other rail UP carries the message.
#include <algorithm>

#include "link/link.hpp"

namespace r2ccl {

StreamShape LinkOptions::shape_of(std::uint64_t communicator) const {
  if (communicator != streams_communicator) return shape;
  StreamShape made = shape;
  made.slot_bytes = std::min(streams.slot_bytes, shape.slot_bytes);
  made.staging_bytes = made.slot_bytes;
  made.ack_later_bytes = streams.ack_later_bytes;
  made.slots = streams.slots;
  made.spare_slots = streams.spare_slots;
  return made;
}

bool Link::takes_copies(const Rail& rail) const {
  return rail.state == RailState::up && may_carry_data(rail) && !rests(rail);
}

// A control rail has neither copies nor acks of streams while two data rails are UP that share no
// unit: the loss of one of them costs no time.  At the death of the peer's process, the rail then
// has no unread bytes, so that the peer's kernel ends the connection with a FIN, which proves the
// death.
bool Link::rests(const Rail& rail) const {
  if (rail.carries_data()) return false;
  const Rail* first = nullptr;
  for (const Rail& each : rails_) {
    if (!each.carries_data() || each.state != RailState::up) continue;
    if (first == nullptr)
      first = &each;
    else if (each.place.unit == 0 || each.place.unit != first->place.unit)
      return true;
  }
  return false;
}

// Returns true if the rail may take the first attempt of a copied message.  Any rail UP may: the
// best rail can be full of bulk data, or silent and not suspected yet.
bool Link::begins(RailId id, const OutStream& stream) const {
  if (!stream.may_copy_to(id, rails_.size())) return false;
  return takes_copies(rails_[id]) || (id == best_ && usable(rails_[id]));
}

bool Link::begins_any(RailId id) const {
  return std::any_of(posting_.begin(), posting_.end(), [&](OutStream* stream) {
    const OutMessage* message = stream->posting();
    return message != nullptr && message->copies != 1 && begins(id, *stream);
  });
}

// Queues the copies of a message whose first attempt goes out on rail `id`.
void Link::queue_copies(RailId id, OutStream& stream, const OutMessage& message) {
  const std::size_t rails = rails_.size();
  std::size_t left = message.copies == every_rail ? rails : message.copies;
  for (std::size_t step = 1; step < rails && left > 1; ++step) {
    const auto other = static_cast<RailId>((id + step) % rails);
    if (!takes_copies(rails_[other]) || !stream.may_copy_to(other, rails)) continue;
    // A rail that takes no bytes must not gather copies of messages that have arrived.
    auto& copies = rails_[other].copies;
    while (!copies.empty() && copies.front().number < copies.front().stream->delivered())
      copies.pop_front();
    copies.push_back({&stream, message.number});
    --left;
  }
}

bool Link::next_copy(RailId id, OutFrame& frame) {
  Rail& rail = rails_[id];
  while (!rail.copies.empty()) {
    const Copy copy = rail.copies.front();
    rail.copies.pop_front();
    OutStream& stream = *copy.stream;
    if (copy.number < stream.delivered()) continue;  // another copy has arrived
    OutMessage& message = stream.message(copy.number);
    const bool sent = (message.carriers >> id & 1U) != 0;  // a replay was faster
    if (sent || !stream.may_copy_to(id, rails_.size()) || !can_place(rail, stream)) continue;
    fill_chunk(id, stream, message, 0, frame, /*copy=*/true);
    ++rail.counters.copies;
    return true;
  }
  return false;
}

// Returns true if a rail UP carries the message.
bool Link::carried(const OutMessage& message, RailId except) const {
  for (RailId id = 0; id < rails_.size(); ++id)
    if (id != except && (message.carriers >> id & 1U) != 0 && rails_[id].state == RailState::up)
      return true;
  return false;
}

// Returns true if the loss of the rail, or its suspicion (`hedge`), calls for a replay.
bool Link::loses_copy(RailId id, OutMessage& message, bool hedge) const {
  const std::uint64_t bit = std::uint64_t{1} << id;
  const bool had = (message.carriers & bit) != 0;
  if (!hedge) message.carriers &= ~bit;
  return had && !carried(message, id);
}

}  // namespace r2ccl
