#include "sim/connection.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

namespace r2ccl::sim {

TimeNs Connection::latency() {
  return delays_.latency_ns +
         static_cast<TimeNs>(random_.below(static_cast<std::uint64_t>(delays_.jitter_ns) + 1));
}

void Connection::send(Side from, Parcel parcel) {
  Lane& lane = lanes_[from];
  lane.free_at = std::max(lane.free_at, events_.now()) +
                 static_cast<TimeNs>(parcel.frame_bytes()) * delays_.ns_per_byte;
  parcel.due = lane.free_at + latency();
  if (!lane.parcels.empty()) parcel.due = std::max(parcel.due, lane.parcels.back().due);
  lane.parcels.push_back(std::move(parcel));
  schedule_arrival(from);
}

void Connection::close(Side side) {
  ends_[side] = nullptr;
  if (ends_[other(side)] == nullptr) {
    for (Lane& lane : lanes_) lane.parcels.clear();
  } else if (path_.cut()) {
    // A closed socket repeats nothing, and its reset does not get through either.
    lanes_[side].parcels.clear();
  } else {
    send(side, {});
  }
}

void Connection::reset(Side first) {
  for (Lane& lane : lanes_) lane.parcels.clear();
  events_.after(latency(), [this, first] { break_end(other(first)); });
  break_end(first);
}

void Connection::break_end(Side side) {
  if (ends_[side] == nullptr) return;
  std::exchange(ends_[side], nullptr)->on_broken();
}

void Connection::retry() {
  for (const Side from : {acceptor_side, connector_side}) {
    Lane& lane = lanes_[from];
    const TimeNs earliest = events_.now() + delays_.retransmit_ns;
    for (Parcel& parcel : lane.parcels) parcel.due = std::max(parcel.due, earliest);
    schedule_arrival(from);
    if (std::exchange(lane.ack_lost, false)) schedule_ack(from);
  }
}

bool Connection::carries_other_message(Side from, const FrameHeader& header) const {
  if (ends_[other(from)] == nullptr) return false;
  const auto& parcels = lanes_[from].parcels;
  return std::any_of(parcels.begin(), parcels.end(), [&](const Parcel& parcel) {
    return parcel.header.type == FrameType::data &&
           parcel.header.communicator == header.communicator && parcel.header.slot == header.slot &&
           parcel.header.number != header.number;
  });
}

void Connection::schedule_arrival(Side from) {
  Lane& lane = lanes_[from];
  if (lane.arrival_due || lane.parcels.empty()) return;
  lane.arrival_due = true;
  events_.at(std::max(events_.now(), lane.parcels.front().due), [this, from] { arrive(from); });
}

void Connection::arrive(Side from) {
  Lane& lane = lanes_[from];
  lane.arrival_due = false;
  if (lane.parcels.empty() || path_.blocked(from)) return;  // retry() continues
  if (lane.parcels.front().due > events_.now()) return schedule_arrival(from);
  End* end = ends_[other(from)];
  if (end == nullptr) {
    // Nobody is there: a reset comes back, or after the next retry() if that is lost.
    events_.after(latency(), [this, from] {
      if (!path_.blocked(other(from))) break_end(from);
    });
    return;
  }
  const Parcel parcel = std::move(lane.parcels.front());
  lane.parcels.pop_front();
  schedule_arrival(from);
  if (parcel.kind == Parcel::Kind::reset) return break_end(other(from));
  if (parcel.kind != Parcel::Kind::handshake) {
    lane.arrived += parcel.frame_bytes();
    schedule_ack(from);
  }
  end->on_parcel(parcel);
}

void Connection::schedule_ack(Side from) {
  Lane& lane = lanes_[from];
  if (lane.ack_due) return;
  lane.ack_due = true;
  events_.after(latency(), [this, from] { acknowledge(from); });
}

void Connection::acknowledge(Side from) {
  Lane& lane = lanes_[from];
  lane.ack_due = false;
  if (path_.blocked(other(from)))
    lane.ack_lost = true;
  else if (ends_[from] != nullptr)
    ends_[from]->on_path_acked(lane.arrived);
}

}  // namespace r2ccl::sim
