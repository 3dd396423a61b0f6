// Posted receives: permissions of attempts, and messages in.
#include <algorithm>
#include <utility>

#include "link/link.hpp"
#include "link/mutants.hpp"
#include "link/posted.hpp"

namespace r2ccl {
namespace {

constexpr std::uint64_t no_message = ~std::uint64_t{0};  // a ROOM without permission

}  // namespace

void Posted::open_receives(ConnectionId connection) {
  auto made = std::make_unique<Receives>();
  made->connection = connection;
  receives_.try_emplace(connection, std::move(made));
}

std::optional<std::uint64_t> Posted::receive(ConnectionId connection, const PostedMemory& into) {
  Receives& receives = *receives_.at(connection);
  if (receives.next - receives.first >= most_posted || receives.closing) return std::nullopt;
  const std::uint64_t number = receives.next++;
  receives.at(number) = {};
  receives.at(number).into = into;
  receives.at(number).state = Receive::State::due;
  grant(receives, number);
  return number;
}

std::optional<std::uint32_t> Posted::received(ConnectionId connection, std::uint64_t number) const {
  const Receives& receives = *receives_.at(connection);
  if (!receives.has(number)) return std::nullopt;
  const Receive& receive = receives.at(number);
  if (receive.state != Receive::State::done) return std::nullopt;
  return receive.message_bytes;
}

bool Posted::holds_message(ConnectionId connection) const {
  return std::ranges::any_of(receives_.at(connection)->ring, [](const Receive& receive) {
    return receive.state == Receive::State::done;
  });
}

void Posted::take_received(ConnectionId connection, std::uint64_t number) {
  Receives& receives = *receives_.at(connection);
  receives.at(number).state = Receive::State::free;
  while (receives.first < receives.next &&
         receives.at(receives.first).state == Receive::State::free)
    ++receives.first;
}

bool Posted::uses(ConnectionId connection, MemoryId id) const {
  const Receives* const receives = receives_of(connection);
  if (receives == nullptr) return false;
  return std::ranges::any_of(receives->ring, [id](const Receive& receive) {
    const bool open =
        receive.state == Receive::State::due || receive.state == Receive::State::permitted;
    return open && receive.into.memory == id;
  });
}

bool Posted::close_receives(ConnectionId connection, TimeNs now) {
  const auto found = receives_.find(connection);
  if (found == receives_.end()) return true;
  Receives& receives = *found->second;
  receives.closing = true;
  bool safe = true;
  for (std::uint64_t number = receives.first; number < receives.next; ++number) {
    Receive& receive = receives.at(number);
    if (receive.state != Receive::State::permitted) continue;
    if (!link_.rails_[receive.rail].one_sided()) {
      receive.state = Receive::State::due;
      continue;
    }
    safe = false;
    link_.rail_failed(receive.rail, receive.epoch, RailCause::recalled, now);
  }
  if (!safe) return false;
  for (RailId id = 0; id < rails_.size(); ++id) {
    rails_[id].rooms.erase_if([&](const RoomDue& due) { return due.of == &receives; });
    mark(id);
  }
  remember(receives);
  receives_.erase(found);
  return true;
}

// Reports the last messages of a connection that is closed, and keeps the report for questions.
void Posted::remember(const Receives& receives) {
  if (receives.delivered == 0) return;
  if (closed_.size() >= most_closed_connections) {
    closed_.erase(closed_order_.front());
    closed_order_.pop_front();
  }
  if (closed_.try_emplace(receives.connection, receives.delivered).second)
    closed_order_.push_back(receives.connection);
  const RailId best = link_.best_rail();
  if (receives.reported != receives.delivered && best != any_rail) part(best, receives.connection);
}

void Posted::part(RailId id, ConnectionId connection) {
  const auto known = closed_.find(connection);
  if (known == closed_.end()) return;
  auto& last_reports = rails_[id].last_reports;
  const bool queued = std::ranges::any_of(
      last_reports, [&](const LastReport& last) { return last.connection == connection; });
  if (queued) return;
  last_reports.push_back({connection, known->second});
  mark(id);
}

// ---- permissions ----

bool Posted::carries(RailId id) const {
  return id < rails_.size() && link_.state(id) == RailState::up &&
         (link_.carries_now(link_.rails_[id]) || id == link_.best_rail());
}

// Returns the rail of the next attempt: the home rail, else the rail that the sender wants, else
// any rail in turn.  any_rail: no rail is UP.
RailId Posted::choose(const Receive& receive, RailId except) {
  const auto good = [&](RailId id) {
    return id != except && carries(id) && link_.last_tick_ >= rails_[id].avoid_until;
  };
  if (good(receive.into.home)) return receive.into.home;
  if (good(receive.wanted)) return receive.wanted;
  for (std::size_t step = 1; step <= rails_.size(); ++step) {
    const auto id = static_cast<RailId>((turn_ + step) % rails_.size());
    if (!good(id)) continue;
    turn_ = id;
    return id;
  }
  const RailId best = link_.best_rail();  // better an avoided rail than none
  return best != except && carries(best) ? best : any_rail;
}

void Posted::grant(Receives& receives, std::uint64_t number) {
  Receive& receive = receives.at(number);
  if (receive.state != Receive::State::due || receives.closing) return;
  const RailId rail = choose(receive, any_rail);
  if (rail == any_rail) return;
  receive.state = Receive::State::permitted;
  ++receive.attempt;
  receive.asked = false;
  receive.rail = rail;
  receive.epoch = link_.epoch(rail);
  receive.arrived = 0;
  send_room(receives, number);
}

void Posted::grant_all() {
  if (link_.best_rail() == any_rail) return;
  for (const auto& [connection, receives] : receives_) {
    for (std::uint64_t number = receives->first; number < receives->next; ++number) {
      const Receive& receive = receives->at(number);
      if (receive.state == Receive::State::due)
        grant(*receives, number);
      else if (receive.state == Receive::State::permitted && receive.room_rail == any_rail)
        send_room(*receives, number);
    }
  }
}

void Posted::send_room(Receives& receives, std::uint64_t number) {
  Receive& receive = receives.at(number);
  const RailId over = receive.asked_over;
  const bool same_way = over != any_rail && link_.state(over) == RailState::up;
  const RailId rail = same_way ? over : link_.best_rail();
  receive.room_rail = rail;
  if (rail == any_rail) return;
  queue_room(receives, number, rail);
}

void Posted::queue_room(Receives& receives, std::uint64_t number, RailId rail) {
  RailBits& queued = number == no_message ? receives.queued : receives.at(number).queued;
  if ((queued & bit_of(rail)) != 0) return;
  queued |= bit_of(rail);
  rails_[rail].rooms.push_back({&receives, number});
  mark(rail);
}

// The frame has left the queue of the rail.
void Posted::leave_queue(const RoomDue& due, RailId rail) {
  if (due.number == no_message)
    due.of->queued &= ~bit_of(rail);
  else if (due.of->has(due.number))
    due.of->at(due.number).queued &= ~bit_of(rail);
}

void Posted::report(Receives& receives, RailId rail) {
  if (rail == any_rail || !link_.usable(link_.rails_[rail])) return;
  receives.owed_now = false;
  receives.owed_since = 0;
  queue_room(receives, no_message, rail);
}

void Posted::put_room(const RoomDue& due, FrameHeader& header) {
  Receives& receives = *due.of;
  Room room;
  room.delivered = receives.delivered;
  if (receives.has(due.number) && receives.at(due.number).state == Receive::State::permitted) {
    const Receive& receive = receives.at(due.number);
    room.number = due.number;
    room.attempt = receive.attempt;
    room.rail = receive.rail;
    room.epoch = receive.epoch;
    room.memory = receive.into.memory;
    room.offset = receive.into.offset;
    room.bytes = receive.into.bytes;
  }
  receives.reported = receives.delivered;
  receives.owed_now = false;
  receives.owed_since = 0;
  header.type = FrameType::room;
  header.communicator = receives.connection;
  put(room, header);
}

// The epoch of the rail has ended.  A byte stream has no late writes: bytes of an older try are
// dropped.  An RDMA rail writes until its fence is complete.
void Posted::lose_permissions(RailId id, bool fenced) {
  const bool over = fenced || !link_.rails_[id].one_sided() || planted(Mutant::room_before_fence);
  if (!over) return;
  for (const auto& [connection, receives] : receives_) {
    for (std::uint64_t number = receives->first; number < receives->next; ++number) {
      Receive& receive = receives->at(number);
      if (receive.state == Receive::State::permitted && receive.rail == id)
        receive.state = Receive::State::due;
    }
  }
  grant_all();
}

// The frames that the rail carried may be lost, or late.
void Posted::lose_rooms(RailId id, bool lost) {
  for (const auto& [connection, receives] : receives_) {
    if (lost && receives->delivered > 0) receives->owed_now = true;
    for (std::uint64_t number = receives->first; number < receives->next; ++number) {
      Receive& receive = receives->at(number);
      if (receive.state != Receive::State::permitted || receive.room_rail != id) continue;
      if (lost && receive.rail == id) continue;  // the permission ends, too
      const bool better = link_.best_rail() != id;
      if (!better || planted(Mutant::room_not_repeated)) continue;
      send_room(*receives, number);
    }
  }
}

bool Posted::on_need(RailId id, const FrameHeader& header) {
  Receives* const receives = receives_of(header.communicator);
  if (receives == nullptr) {
    part(id, header.communicator);
    const auto known = closed_.find(header.communicator);
    // The peer waits for a receive that is never posted.
    if (known == closed_.end() || header.number >= known->second) add_orphan(header.communicator);
    return true;
  }
  if (header.number >= receives->next) return true;
  link_.probed_ = true;
  const bool here = !receives->has(header.number) ||
                    receives->at(header.number).state == Receive::State::done ||
                    receives->at(header.number).state == Receive::State::free;
  if (here) {
    report(*receives, id);
    return true;
  }
  Receive& receive = receives->at(header.number);
  if (header.offset > receive.attempt) return false;
  if (receive.state != Receive::State::permitted) return true;  // the next ROOM is due
  if (header.offset == receive.attempt) {
    receive.wanted = header.slot;
    receive.asked_over = id;
    if (!std::exchange(receive.asked, true))
      questions_.push_back({header.communicator, header.number, receive.attempt});
  } else if (planted(Mutant::old_try_answered) && header.offset != 0) {
    receive.state = Receive::State::due;
    grant(*receives, header.number);
  } else if (!planted(Mutant::room_not_repeated)) {
    queue_room(*receives, header.number, id);
  }
  return true;
}

// Answers the questions about present tries.  All rails have been read since, so that the message
// may be here.
void Posted::answer(TimeNs now) {
  for (const Question& question : std::exchange(questions_, {})) {
    Receives* const receives = receives_of(question.connection);
    if (receives == nullptr || !receives->has(question.number)) continue;
    Receive& receive = receives->at(question.number);
    if (receive.attempt != question.attempt) continue;
    receive.asked = false;
    if (receive.state == Receive::State::done) {
      report(*receives, receive.asked_over);
    } else if (receive.state == Receive::State::permitted) {
      const RailId rail = receive.rail;
      if (link_.rails_[rail].one_sided()) {
        // The fence leads to the next ROOM, see rail_moved().
        link_.rail_failed(rail, receive.epoch, RailCause::recalled, now);
      } else if (choose(receive, rail) != any_rail) {
        rails_[rail].avoid_until = now + link_.options_.dead_deadline_ns;
        receive.state = Receive::State::due;
        grant(*receives, question.number);
      }
    }
  }
}

// ---- messages in ----

bool Posted::put_valid(RailId id, const FrameHeader& header) const {
  const std::uint64_t end = std::uint64_t{header.offset} + header.payload_bytes;
  if (header.epoch == 0 || end > header.message_bytes) return false;
  if (header.payload_bytes == 0 && header.message_bytes != 0) return false;
  const Receives* const receives = receives_of(header.communicator);
  if (receives == nullptr) return true;
  if (header.number >= receives->next) return false;
  if (!receives->has(header.number)) return true;  // a late copy
  const Receive& receive = receives->at(header.number);
  if (header.epoch > receive.attempt) return false;
  if (receive.state != Receive::State::permitted || header.epoch < receive.attempt) return true;
  if (id != receive.rail || header.message_bytes > receive.into.bytes) return false;
  if (receive.arrived > 0 && header.message_bytes != receive.message_bytes) return false;
  return header.offset <= receive.arrived;
}

bool Posted::permits(RailId id, const FrameHeader& header) const {
  const Receives* const receives = receives_of(header.communicator);
  if (receives == nullptr || !receives->has(header.number)) return false;
  const Receive& receive = receives->at(header.number);
  return receive.state == Receive::State::permitted && receive.attempt == header.epoch &&
         receive.rail == id && receive.epoch == link_.epoch(id) &&
         receive.arrived == header.offset && header.message_bytes <= receive.into.bytes &&
         memory_.contains(receive.into.memory);
}

std::byte* Posted::destination(RailId id, const FrameHeader& header) const {
  if (!permits(id, header)) return nullptr;
  const Receive& receive = receives_of(header.communicator)->at(header.number);
  std::byte* const memory = memory_.at(receive.into.memory).data();
  return memory == nullptr ? nullptr : memory + receive.into.offset + header.offset;
}

bool Posted::on_put(RailId id, const FrameHeader& header, TimeNs now) {
  if (!permits(id, header)) return true;  // a copy, or an older try
  if (link_.options_.shape.checksum && header.payload_bytes > 0 &&
      crc32c(destination(id, header), header.payload_bytes) != header.payload_crc)
    return false;
  Receives& receives = *receives_of(header.communicator);
  Receive& receive = receives.at(header.number);
  receive.message_bytes = header.message_bytes;
  receive.arrived += header.payload_bytes;
  if (receive.arrived < receive.message_bytes) return true;
  receive.state = Receive::State::done;
  link_.inbound_ = id;
  if (receive.attempt > 1) ++link_.disturbances_;
  while (receives.delivered < receives.next) {
    // A receive taken out of order is `free`, and was done before.
    if (receives.delivered >= receives.first) {
      const Receive::State state = receives.at(receives.delivered).state;
      if (state != Receive::State::done && state != Receive::State::free) break;
    }
    ++receives.delivered;
  }
  if (receives.owed_since == 0) receives.owed_since = now;
  return true;
}

}  // namespace r2ccl
