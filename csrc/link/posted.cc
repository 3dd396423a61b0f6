// Posted receives: the parts common to both ends of a connection, and the frames of a rail.
#include "link/posted.hpp"

#include <algorithm>

#include "link/link.hpp"

namespace r2ccl {

Posted::Posted(Link& link) : link_(link), rails_(link.rail_count()) {}

Posted::Receives* Posted::receives_of(ConnectionId connection) const {
  const auto found = receives_.find(connection);
  return found == receives_.end() ? nullptr : found->second.get();
}

Posted::Sends* Posted::sends_of(ConnectionId connection) const {
  const auto found = sends_.find(connection);
  return found == sends_.end() ? nullptr : found->second.get();
}

void Posted::mark(RailId id) { link_.rails_[id].control.posted = rails_[id].due(); }

std::size_t Posted::queued() const {
  std::size_t frames = 0;
  for (const Rail& rail : rails_) frames += rail.due();
  return frames;
}

bool Posted::settled() const {
  const bool sent = std::ranges::all_of(
      sends_, [](const auto& entry) { return entry.second->delivered == entry.second->next; });
  const bool reported = std::ranges::all_of(receives_, [](const auto& entry) {
    return entry.second->reported == entry.second->delivered;
  });
  return sent && reported &&
         std::ranges::all_of(rails_, [](const Rail& rail) { return rail.last_reports.empty(); });
}

void Posted::add_orphan(ConnectionId connection) {
  const bool known = std::ranges::find(orphans_, connection) != orphans_.end();
  if (!known && orphans_.size() < most_orphans) orphans_.push_back(connection);
}

// ---- memory ----

MemoryId Posted::add_memory(std::span<std::byte> memory) {
  const MemoryId id = ++last_memory_;
  memory_[id] = memory;
  for (RailId rail = 0; rail < rails_.size(); ++rail) {
    if (!link_.rails_[rail].one_sided() || !link_.connected(rail)) continue;
    rails_[rail].memory.push_back(id);
    mark(rail);
  }
  return id;
}

void Posted::remove_memory(MemoryId id) {
  memory_.erase(id);
  for (RailId rail = 0; rail < rails_.size(); ++rail) {
    if (!link_.rails_[rail].one_sided() || !link_.connected(rail)) continue;
    std::erase(rails_[rail].memory, id);
    rails_[rail].memory.push_back(id);
    mark(rail);
  }
}

// ---- rails ----

// Called at the end of each move of a rail; a rail that moves to FENCING is fenced at this end.
void Posted::rail_moved(RailId id, RailState to, TimeNs now) {
  Rail& rail = rails_[id];
  switch (to) {
    case RailState::probation:
      if (!link_.rails_[id].one_sided()) break;
      for (const auto& [memory, span] : memory_) rail.memory.push_back(memory);
      mark(id);
      break;
    case RailState::up:
      grant_all();
      queue_puts(now);
      break;
    case RailState::suspect: lose_rooms(id, /*lost=*/false); break;
    case RailState::down:
      for (; !rail.rooms.empty(); rail.rooms.pop_front()) leave_queue(rail.rooms.front(), id);
      for (; !rail.needs.empty(); rail.needs.pop_front()) leave_queue(rail.needs.front(), id);
      rail = {};
      mark(id);
      lose_rooms(id, /*lost=*/true);
      lose_permissions(id, /*fenced=*/false);
      break;
    case RailState::fencing: lose_permissions(id, /*fenced=*/true); break;
    case RailState::connecting: break;
  }
  if (to != RailState::down && !(to == RailState::suspect && has_better(id))) return;
  for (const auto& [connection, sends] : sends_) {
    for (std::uint64_t number = sends->delivered; number < sends->next; ++number) {
      const Room room = sends->room(number);
      if (sends->at(number).used != 0 && room.rail == id) ask(*sends, number, room.attempt, now);
    }
  }
}

void Posted::tick(TimeNs now) {
  constexpr TimeNs report_after_ns = ns_per_ms;
  answer(now);
  grant_all();
  for (const auto& [connection, receives] : receives_) {
    const bool due = receives->owed_since != 0 && now - receives->owed_since >= report_after_ns;
    if (receives->owed_now || due) report(*receives, link_.best_rail());
  }
  for (const auto& [connection, sends] : sends_) ask_overdue(*sends, now);
}

// ---- frames ----

bool Posted::next_frame(RailId id, OutFrame& frame) {
  Rail& rail = rails_[id];
  FrameHeader& header = frame.header;
  const bool usable = link_.usable(link_.rails_[id]);
  bool found = true;
  if (!rail.memory.empty()) {
    const MemoryId memory = rail.memory.front();
    rail.memory.pop_front();
    header.type = FrameType::memory;
    header.number = memory;
    if (const auto known = memory_.find(memory); known != memory_.end()) {
      header.delivered = reinterpret_cast<std::uintptr_t>(known->second.data());
      header.credit = known->second.size();
    }
  } else if (usable && !rail.rooms.empty()) {
    const RoomDue due = rail.rooms.front();
    rail.rooms.pop_front();
    leave_queue(due, id);
    put_room(due, header);
  } else if (usable && !rail.last_reports.empty()) {
    const LastReport last = rail.last_reports.front();
    rail.last_reports.pop_front();
    header.type = FrameType::room;
    header.communicator = last.connection;
    put({.delivered = last.delivered}, header);
  } else {
    found = usable && (next_need(id, header) || next_put(id, frame));
  }
  mark(id);
  return found;
}

bool Posted::valid(RailId id, const FrameHeader& header) const {
  switch (header.type) {
    case FrameType::room: return header.slot < rails_.size() || header.offset == 0;
    case FrameType::need: return header.slot < rails_.size();
    case FrameType::memory: return link_.rails_[id].one_sided();
    case FrameType::put: return link_.may_carry_data(id) && put_valid(id, header);
    default: return false;
  }
}

bool Posted::take(RailId id, const FrameHeader& header, TimeNs now) {
  switch (header.type) {
    case FrameType::room: return on_room(header, now);
    case FrameType::need: return on_need(id, header);
    case FrameType::memory: return on_memory(id, header, now);
    case FrameType::put: return on_put(id, header, now);
    default: return false;
  }
}

}  // namespace r2ccl
