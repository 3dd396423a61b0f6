// Posted receives: messages out, and questions about permissions.
#include <algorithm>
#include <utility>

#include "link/link.hpp"
#include "link/mutants.hpp"
#include "link/posted.hpp"

namespace r2ccl {
namespace {

constexpr TimeNs ask_min_ns = 20 * ns_per_ms;
constexpr TimeNs ask_max_ns = 500 * ns_per_ms;

}  // namespace

void Posted::open_sends(ConnectionId connection) {
  auto made = std::make_unique<Sends>();
  made->connection = connection;
  sends_.try_emplace(connection, std::move(made));
}

std::optional<std::uint32_t> Posted::room(ConnectionId connection) const {
  const Sends& sends = *sends_.at(connection);
  const Room next = sends.room(sends.next);
  if (next.attempt == 0) return std::nullopt;
  return next.bytes;
}

std::optional<std::uint64_t> Posted::send(ConnectionId connection,
                                          std::span<const std::byte> source, TimeNs now) {
  Sends& sends = *sends_.at(connection);
  const Room room = sends.room(sends.next);
  if (sends.next - sends.first >= most_posted || sends.closing) return std::nullopt;
  if (room.attempt == 0) {
    if (!sends.waits) {
      sends.waits = true;
      sends.asked_at = now;
      sends.interval = ask_min_ns;
    }
    return std::nullopt;
  }
  if (source.size() > room.bytes) return std::nullopt;
  const std::uint64_t number = sends.next++;
  sends.waits = false;
  Send& send = sends.at(number);
  send.asking = std::exchange(sends.asking, {});
  send.source = source.data();
  send.bytes = static_cast<std::uint32_t>(source.size());
  send.used = send.sent = 0;
  send.taken = false;
  send.asked_at = now;
  send.interval = ask_min_ns;
  send.attempts.clear();
  queue_put(sends, number, now);
  return number;
}

// Returns true if the attempt may still read its source.
bool Posted::reads(const Attempt& attempt) const {
  const auto& rail = link_.rails_[attempt.rail];
  if (rail.own_fenced >= attempt.epoch) return false;
  return rail.epoch == attempt.epoch && rail.path.acked < attempt.position;
}

SendState Posted::send_state(ConnectionId connection, std::uint64_t number) const {
  const Sends& sends = *sends_.at(connection);
  const Send& send = sends.at(number);
  const auto path_acked = [&] {
    return send.used != 0 && send.sent == send.bytes && send.attempts.back().position != 0 &&
           !reads(send.attempts.back());
  };
  if (number >= sends.delivered && !(planted(Mutant::sent_before_delivery) && path_acked()))
    return SendState::sending;
  if (planted(Mutant::sent_while_read)) return SendState::done;
  SendState state = SendState::done;
  for (const Attempt& attempt : send.attempts) {
    if (!reads(attempt)) continue;
    if (link_.rails_[attempt.rail].one_sided()) return SendState::sending;
    state = SendState::detach;
  }
  return state;
}

void Posted::take_sent(ConnectionId connection, std::uint64_t number) {
  Sends& sends = *sends_.at(connection);
  sends.at(number).taken = true;
  while (sends.first < sends.next && sends.at(sends.first).taken) ++sends.first;
}

bool Posted::uses(ConnectionId connection, std::span<const std::byte> memory) const {
  const Sends* const sends = sends_of(connection);
  if (sends == nullptr) return false;
  for (std::uint64_t number = sends->first; number < sends->next; ++number) {
    const Send& send = sends->at(number);
    const bool inside = send.source >= memory.data() && send.source < memory.data() + memory.size();
    if (!send.taken && send.bytes > 0 && inside) return true;
  }
  return false;
}

bool Posted::close_sends(ConnectionId connection, TimeNs now) {
  const auto found = sends_.find(connection);
  if (found == sends_.end()) return true;
  Sends& sends = *found->second;
  sends.closing = true;
  for (RailId id = 0; id < rails_.size(); ++id) {
    rails_[id].puts.erase_if([&](const PutDue& due) { return due.of == &sends; });
    rails_[id].needs.erase_if([&](const NeedDue& due) { return due.of == &sends; });
    mark(id);
  }
  bool safe = true;
  for (std::uint64_t number = sends.first; number < sends.next; ++number) {
    for (const Attempt& attempt : sends.at(number).attempts) {
      if (!link_.rails_[attempt.rail].one_sided() || !reads(attempt)) continue;
      safe = false;
      link_.rail_failed(attempt.rail, attempt.epoch, RailCause::recalled, now);
    }
  }
  if (safe) sends_.erase(found);
  return safe;
}

// ---- permissions ----

bool Posted::on_room(const FrameHeader& header, TimeNs now) {
  Sends* const found = sends_of(header.communicator);
  const Room room = room_of(header);
  if (found == nullptr) {
    // The peer waits for a message that never comes.
    if (room.attempt != 0) add_orphan(header.communicator);
    return true;
  }
  Sends& sends = *found;
  if (room.delivered > sends.next) return false;
  sends.delivered = std::max(sends.delivered, room.delivered);
  if (room.attempt == 0 || room.number < sends.delivered) return true;
  if (room.number >= sends.next + most_posted) return false;
  if (room.attempt <= sends.room(room.number).attempt) return true;  // repeated, or late
  const bool posted = room.number < sends.next;
  if (posted && room.bytes < sends.at(room.number).bytes) return false;
  sends.rooms[room.number % sends.rooms.size()] = room;
  if (!posted) return true;
  Send& send = sends.at(room.number);
  send.asked_at = now;
  send.interval = ask_min_ns;
  queue_put(sends, room.number, now);
  return true;
}

// Returns true if the permission is of no use any more: its epoch has ended here.
bool Posted::permission_ended(const Room& room) const {
  const auto& rail = link_.rails_[room.rail];
  return rail.epoch > room.epoch || (rail.epoch == room.epoch && !link_.connected(room.rail));
}

// Returns true if another rail is UP, to take over from a suspected rail.  Without such a rail the
// peer may be stopped, and no rail is to blame.
bool Posted::has_better(RailId id) const {
  const RailId best = link_.best_rail();
  return best != any_rail && best != id && link_.state(best) == RailState::up;
}

// Queues the posting that the message's last ROOM permits.
void Posted::queue_put(Sends& sends, std::uint64_t number, TimeNs now) {
  const Room room = sends.room(number);
  Send& send = sends.at(number);
  if (sends.closing || room.attempt <= send.used) return;
  if (permission_ended(room)) return ask(sends, number, room.attempt, now);
  const auto& rail = link_.rails_[room.rail];
  if (rail.epoch != room.epoch || !link_.usable(rail)) return;  // not open here yet
  if (rail.state == RailState::suspect && has_better(room.rail))
    return ask(sends, number, room.attempt, now);
  Rail& own = rails_[room.rail];
  if (rail.one_sided()) {
    const auto memory = own.remote.find(room.memory);
    if (memory == own.remote.end()) return;  // MEMORY is on its way
    const std::uint64_t bytes = memory->second.bytes;
    if (room.bytes > bytes || room.offset > bytes - room.bytes) return;
  }
  if (!send.attempts.empty()) {
    const RailId lost_on = send.attempts.back().rail;
    ++link_.rails_[lost_on].counters.replayed_chunks;
    if (link_.observer_ != nullptr) link_.observer_->on_replay(lost_on, 1, /*hedge=*/false);
  }
  send.used = room.attempt;
  send.sent = 0;
  send.attempts.push_back({room.rail, room.epoch, 0});
  own.puts.push_back({&sends, number, room.attempt});
  mark(room.rail);
}

// A rail came UP, or its MEMORY arrived: permissions may be of use now.
void Posted::queue_puts(TimeNs now) {
  for (const auto& [connection, sends] : sends_)
    for (std::uint64_t number = sends->delivered; number < sends->next; ++number)
      queue_put(*sends, number, now);
}

// Asks for the next permission of a message, over every usable rail but the permitted rail.
// `attempt` below the last try: the question is for a repetition only.
void Posted::ask(Sends& sends, std::uint64_t number, std::uint32_t attempt, TimeNs now) {
  const Room room = sends.room(number);
  Asking& asking = sends.asking_of(number);
  asking.attempt = asking.queued == 0 ? attempt : std::max(asking.attempt, attempt);
  if (number < sends.next) sends.at(number).asked_at = now;
  link_.each_usable([&](RailId id, const auto&) {
    const bool in_doubt = attempt != 0 && id == room.rail && !permission_ended(room);
    if (in_doubt) return;
    if ((asking.queued & bit_of(id)) != 0) return;
    asking.queued |= bit_of(id);
    rails_[id].needs.push_back({&sends, number});
    mark(id);
  });
}

// Returns true while the frames of the last posting are on their way.  Loss of their rail ends the
// permission, and a slow rail is no reason for a question.
bool Posted::under_way(const Send& send, const Room& room) const {
  if (send.used == 0 || send.used != room.attempt) return false;
  const Attempt& last = send.attempts.back();
  return last.position == 0 || send.sent < send.bytes || reads(last);
}

void Posted::ask_overdue(Sends& sends, TimeNs now) {
  if (sends.waits && now - sends.asked_at >= sends.interval) {
    sends.asked_at = now;
    sends.interval = std::min(2 * sends.interval, ask_max_ns);
    ask(sends, sends.next, 0, now);
  }
  for (std::uint64_t number = sends.delivered; number < sends.next; ++number) {
    Send& send = sends.at(number);
    if (now - send.asked_at < send.interval) continue;
    const Room room = sends.room(number);
    const bool lost = permission_ended(room) ||
                      (link_.state(room.rail) == RailState::suspect && has_better(room.rail));
    if (!lost && under_way(send, room)) {
      send.asked_at = now;
      continue;
    }
    send.interval = std::min(2 * send.interval, ask_max_ns);
    ask(sends, number, lost ? room.attempt : 0, now);
  }
}

bool Posted::on_memory(RailId id, const FrameHeader& header, TimeNs now) {
  if (header.number > ~MemoryId{0}) return false;
  const auto memory = static_cast<MemoryId>(header.number);
  auto& remote = rails_[id].remote;
  if (header.credit == 0) {
    remote.erase(memory);
    return true;
  }
  if (remote.size() >= most_announced_ranges && !remote.contains(memory)) return false;
  remote[memory] = {header.delivered, header.credit, header.epoch};
  queue_puts(now);
  return true;
}

// ---- frames ----

// The frame has left the queue of the rail, or the queue has ended.
void Posted::leave_queue(const NeedDue& due, RailId rail) {
  if (due.number >= due.of->delivered) due.of->asking_of(due.number).queued &= ~bit_of(rail);
}

bool Posted::next_need(RailId id, FrameHeader& header) {
  auto& needs = rails_[id].needs;
  while (!needs.empty()) {
    const NeedDue due = needs.front();
    needs.pop_front();
    Sends& sends = *due.of;
    if (due.number < sends.delivered) continue;  // the question has been answered
    leave_queue(due, id);
    header.type = FrameType::need;
    header.communicator = sends.connection;
    header.number = due.number;
    header.offset = sends.asking_of(due.number).attempt;
    header.slot = id;  // the question goes over usable rails only: each is a good choice
    return true;
  }
  return false;
}

bool Posted::next_put(RailId id, OutFrame& frame) {
  auto& puts = rails_[id].puts;
  for (; !puts.empty(); puts.pop_front()) {
    const PutDue due = puts.front();
    Sends& sends = *due.of;
    if (due.number < sends.delivered) continue;
    Send& send = sends.at(due.number);
    const Room room = sends.room(due.number);
    if (send.used != due.attempt || room.attempt != due.attempt) continue;  // a newer ROOM is here
    const bool one_sided = link_.rails_[id].one_sided();
    const auto memory = rails_[id].remote.find(room.memory);
    if (one_sided && memory == rails_[id].remote.end()) continue;  // withdrawn by the peer
    FrameHeader& header = frame.header;
    header.type = FrameType::put;
    header.communicator = sends.connection;
    header.number = due.number;
    header.epoch = due.attempt;
    header.offset = send.sent;
    header.message_bytes = send.bytes;
    header.payload_bytes = std::min(link_.options_.put_bytes, send.bytes - send.sent);
    frame.payload = send.source + send.sent;
    frame.zero_copy = true;
    if (link_.options_.shape.checksum)
      header.payload_crc =
          crc32c(frame.payload, header.payload_bytes) ^ (link_.rails_[id].corrupt ? 1U : 0U);
    if (one_sided) {
      frame.remote_address = memory->second.address + room.offset + send.sent;
      frame.remote_key = memory->second.key;
    }
    send.sent += header.payload_bytes;
    send.attempts.back().position =
        link_.rails_[id].path.sent + sizeof(FrameHeader) + header.payload_bytes;
    if (send.sent == send.bytes) puts.pop_front();
    return true;
  }
  return false;
}

}  // namespace r2ccl
