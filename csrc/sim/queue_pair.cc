#include "sim/queue_pair.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "link/posted.hpp"

namespace r2ccl::sim {
namespace {

constexpr TimeNs receiver_not_ready_ns = 100'000;

// Returns true if the port writes the payload to memory of the receiver.
bool is_direct(const FrameHeader& header) {
  return header.type == FrameType::data || header.type == FrameType::put;
}

}  // namespace

// ---- both queue pairs ----

QueuePairs::QueuePairs(Epoch of, EventQueue& events, Random& random, const Delays& delays,
                       Path& path)
    : epoch(of),
      events_(events),
      random_(random),
      delays_(delays),
      path_(path),
      delay_lines_{
          DelayLine<Packet>(events, path, acceptor_side,
                            [this](Packet& packet) { return arrive(acceptor_side, packet); }),
          DelayLine<Packet>(events, path, connector_side,
                            [this](Packet& packet) { return arrive(connector_side, packet); })} {}

void QueuePairs::post(Side side, Packet packet) {
  lanes_[side].queue.push_back(std::move(packet));
  read_next(side);
}

// The port reads messages in order.  Each read takes as long as sending the message.
void QueuePairs::read_next(Side from) {
  Lane& lane = lanes_[from];
  if (lane.reading || lane.queue.empty()) return;
  lane.reading = true;
  const std::size_t bytes = sizeof(FrameHeader) + lane.queue.front().header.payload_bytes;
  const TimeNs time = static_cast<TimeNs>(bytes) * delays_.ns_per_byte * path_.ports[from].slowdown;
  events_.after(time, [this, from, bytes] {
    Lane& sending = lanes_[from];
    sending.reading = false;
    if (sending.queue.empty()) return;  // flushed
    Packet packet = std::move(sending.queue.front());
    sending.queue.pop_front();
    if (packet.zero_copy && on_zero_copy_read) on_zero_copy_read(from, packet.header);
    packet.payload.assign(packet.source, packet.source + packet.header.payload_bytes);
    packet.source = nullptr;
    delay_lines_[from].send(std::move(packet), bytes,
                            events_.now() + path_.latency(from, delays_, random_));
    read_next(from);
  });
}

TimeNs QueuePairs::arrive(Side from, Packet& packet) {
  const Side to = other(from);
  if (left_[to]) {
    events_.after(delays_.latency_ns, [this, from] {
      if (ends_[from] != nullptr && !silent_ && !path_.blocked(other(from)))
        ends_[from]->on_broken();
    });
    return 0;
  }
  // The peer's queue pair is not open yet, so its port does not answer.
  if (ends_[to] == nullptr && !left_[from]) return delays_.retransmit_ns;
  // A receiver that does not run has no receives left, so its port asks for a retry.
  Lane& lane = lanes_[from];
  if (ends_[to] != nullptr && !ends_[to]->has_receives(lane.landing.size()))
    return receiver_not_ready_ns;
  Port& port = path_.ports[from];
  lane.arrived = packet.position;
  schedule_ack(from);
  const bool data = is_direct(packet.header);
  // Messages sent only once per rail (abort, close, slots, released, target, memory) are lost only
  // if the port dies, so `lost_notices` spares these types.
  const bool notice =
      !data && packet.header.type != FrameType::abort && packet.header.type != FrameType::close &&
      packet.header.type != FrameType::slots && packet.header.type != FrameType::released &&
      packet.header.type != FrameType::target && packet.header.type != FrameType::memory;
  std::uint32_t* const lost = port.phantoms > 0                 ? &port.phantoms
                              : notice && port.lost_notices > 0 ? &port.lost_notices
                                                                : nullptr;
  if (lost != nullptr) {
    --*lost;
    path_.disturbed_at = events_.now();
    return 0;
  }
  if (port.flips > 0 || port.duplicates > 0) path_.disturbed_at = events_.now();
  const auto late =
      static_cast<TimeNs>(random_.below(static_cast<std::uint64_t>(port.landing_ns) + 1));
  lane.last_landing = std::max(lane.last_landing, events_.now() + late);
  lane.landing.push_back(std::move(packet));
  if (lane.last_landing == events_.now())
    land_next(from);
  else
    events_.at(lane.last_landing, [this, from] { land_next(from); });
  return 0;
}

void QueuePairs::land_next(Side from) {
  Lane& lane = lanes_[from];
  if (lane.landing.empty()) return;  // the receiving end has left
  const Packet packet = std::move(lane.landing.front());
  lane.landing.pop_front();
  if (ends_[other(from)] != nullptr) ends_[other(from)]->on_landed(packet, path_.ports[from]);
}

void QueuePairs::found(Side side, std::uint64_t position) {
  lanes_[other(side)].found = position;
  schedule_ack(other(side));
}

bool QueuePairs::may_read(Side side, std::uint64_t connection, std::uint64_t number) const {
  const auto matches = [&](const Packet& packet) {
    const FrameHeader& header = packet.header;
    return header.type == FrameType::put && header.communicator == connection &&
           header.number == number && header.payload_bytes > 0;
  };
  return !left_[side] &&
         (std::ranges::any_of(lanes_[side].queue, matches) || delay_lines_[side].any(matches));
}

void QueuePairs::flush(Side side) { lanes_[side].queue.clear(); }

void QueuePairs::leave(Side side) {
  flush(side);
  while (!lanes_[other(side)].landing.empty()) land_next(other(side));
  ends_[side] = nullptr;
  left_[side] = true;
}

void QueuePairs::retry() {
  for (const Side from : both_sides) {
    delay_lines_[from].retry(events_.now() + delays_.retransmit_ns);
    if (std::exchange(lanes_[from].ack_lost, false)) schedule_ack(from);
  }
}

void QueuePairs::schedule_ack(Side from) {
  Lane& lane = lanes_[from];
  if (std::exchange(lane.ack_due, true)) return;
  events_.after(path_.latency(other(from), delays_, random_), [this, from] { acknowledge(from); });
}

void QueuePairs::acknowledge(Side from) {
  Lane& lane = lanes_[from];
  lane.ack_due = false;
  if (path_.blocked(other(from)))
    lane.ack_lost = true;
  else if (ends_[from] != nullptr)
    ends_[from]->on_acked(lane.arrived, lane.found);
}

bool QueuePairs::carries_other_message(Side from, const FrameHeader& header) const {
  if (left_[other(from)]) return false;
  const auto other_message = [&](const Packet& packet) {
    return packet.header.type == FrameType::data &&
           packet.header.communicator == header.communicator && packet.header.slot == header.slot &&
           packet.header.number != header.number;
  };
  const auto& queue = lanes_[from].queue;
  const auto& landing = lanes_[from].landing;
  return std::any_of(queue.begin(), queue.end(), other_message) ||
         delay_lines_[from].any(other_message) ||
         std::any_of(landing.begin(), landing.end(), other_message);
}

// ---- a single queue pair ----

QueuePair::QueuePair(Link& link, RailId rail, const Memory& memory, QueuePairs& pairs, Side side,
                     EventSink& owner, EventQueue& events, Random& random, const Delays& delays,
                     TimeNs fence_ns)
    : link_(link),
      rail_(rail),
      epoch_(link.epoch(rail)),
      memory_(memory),
      pairs_(pairs),
      side_(side),
      owner_(owner),
      events_(events),
      random_(random),
      delays_(delays),
      fence_ns_(fence_ns) {
  pairs.attach(side, *this);
}

bool QueuePair::pump_out(TimeNs now) {
  bool moved = false;
  while (!muted_ && pairs_.unread(side_) < send_depth) {
    OutFrame frame;
    if (!link_.next_frame(rail_, frame, now)) break;
    if (frame.header.type == FrameType::slots) add_key(frame.header, frame.header.number, 1);
    if (frame.header.type == FrameType::target || frame.header.type == FrameType::memory)
      add_key(frame.header, frame.header.delivered, frame.header.credit);
    posted_ += sizeof(FrameHeader) + frame.header.payload_bytes;
    pairs_.post(side_, {.header = frame.header,
                        .source = frame.payload,
                        .target = reinterpret_cast<std::byte*>(frame.remote_address),
                        .key = frame.remote_key,
                        .zero_copy = frame.zero_copy,
                        .payload = {},
                        .position = posted_});
    moved = true;
  }
  return moved;
}

void QueuePair::add_key(FrameHeader& header, std::uint64_t address, std::uint64_t bytes) const {
  header.epoch = memory_.key(reinterpret_cast<const std::byte*>(address), bytes);
  seal(header);
}

bool QueuePair::pump_in(TimeNs now) {
  if (broken_) {
    link_.rail_failed(rail_, epoch_, RailCause::socket_error, now);
    return true;
  }
  if (!reported_) report_path(now);
  bool arrived = false;
  while (!muted_ && !completions_.empty() && completions_.front().visible_at <= events_.now()) {
    const Completion completion = std::move(completions_.front());
    completions_.pop_front();
    arrived = true;
    pairs_.found(side_, completion.position);
    if (!take(completion, now)) break;
  }
  return arrived;
}

bool QueuePair::take(const Completion& completion, TimeNs now) {
  if (!link_.connected(rail_) || link_.epoch(rail_) != epoch_) return false;
  if (!link_.frame_begin(rail_, completion.header, now)) return false;
  if (completion.header.payload_bytes == 0) return true;
  if (is_direct(completion.header)) {
    link_.payload_placed(rail_, now);
    return true;
  }
  for (std::size_t begin = 0; begin < completion.payload.size();) {
    const auto room = link_.payload_room(rail_);
    const std::size_t bytes = std::min(room.size(), completion.payload.size() - begin);
    std::memcpy(room.data(), completion.payload.data() + begin, bytes);
    begin += bytes;
    link_.payload_filled(rail_, bytes, now);
  }
  return true;
}

void QueuePair::report_path(TimeNs now) {
  reported_ = true;
  link_.path_acked(rail_, epoch_, acked_, /*peer_limited=*/false, now);
  link_.attempts_landed(rail_, epoch_, found_, now);
  link_.path_round_trip(rail_, 2 * delays_.latency_ns, 2 * delays_.latency_ns, 0);
}

// A port cannot be redirected to other memory.  The rail is taken down, and the port may continue
// to read until the fence completes.
bool QueuePair::detach(const DetachScope& scope, TimeNs now) {
  if (detached(scope)) return true;
  link_.rail_failed(rail_, epoch_, RailCause::recalled, now);
  return false;
}

bool QueuePair::detached(const DetachScope& scope) const {
  const auto& queue = pairs_.queue(side_);
  return std::none_of(queue.begin(), queue.end(), [&](const auto& packet) {
    return scope.covers(packet.header, packet.zero_copy);
  });
}

bool QueuePair::fence(TimeNs /*now*/) {
  if (fence_asked_ == 0) {
    completions_.clear();
    fence_asked_ = events_.now();
    if (fence_ns_ > 0) events_.after(fence_ns_, [&owner = owner_] { owner.on_event(); });
  }
  const bool done = fence_ns_ >= 0 && events_.now() - fence_asked_ >= fence_ns_;
  if (done) pairs_.flush(side_);
  return done;
}

void QueuePair::on_landed(const QueuePairs::Packet& packet, Port& port) {
  const bool data = is_direct(packet.header);
  std::byte* target = data && packet.header.payload_bytes > 0 ? packet.target : nullptr;
  if (target != nullptr && memory_.key(target, packet.payload.size()) != packet.key) {
    if (!memory_.is_revoked(packet.key)) pairs_.on_stray_write(packet.header);
    target = nullptr;
  }
  // Only the payload of a chunk not yet counted is corrupted.  The checksum does not protect a
  // counted chunk against a later write (a known gap).
  const bool flips = target != nullptr && port.flips > 0;
  const bool flip_payload = flips && random_.below(2) == 0 && wants(packet.header);
  if (target != nullptr) {
    std::memcpy(target, packet.payload.data(), packet.payload.size());
    if (flip_payload)
      target[random_.below(packet.payload.size())] ^=
          static_cast<std::byte>(1U << random_.below(8));
  }
  if (fence_asked_ != 0) return;
  const auto wait =
      static_cast<TimeNs>(random_.below(static_cast<std::uint64_t>(delays_.poll_ns) + 1));
  TimeNs visible_at = events_.now() + wait;
  if (!completions_.empty()) visible_at = std::max(visible_at, completions_.back().visible_at);
  Completion completion{packet.header, data ? std::vector<std::byte>() : packet.payload,
                        packet.position, visible_at};
  if (flips) --port.flips;
  if (flips && !flip_payload) {
    auto* header = reinterpret_cast<std::byte*>(&completion.header);
    header[random_.below(sizeof(FrameHeader))] ^= static_cast<std::byte>(1U << random_.below(8));
  } else if (port.duplicates > 0) {
    --port.duplicates;
    completions_.push_back(completion);
  }
  completions_.push_back(std::move(completion));
  events_.at(visible_at, [&owner = owner_] { owner.on_event(); });
}

bool QueuePair::wants(const FrameHeader& header) const {
  if (header.type == FrameType::put) return link_.posted().destination(rail_, header) != nullptr;
  return link_.in_stream(header.communicator).wants(header);
}

void QueuePair::on_acked(std::uint64_t position, std::uint64_t found) {
  acked_ = position;
  found_ = found;
  reported_ = false;
  owner_.on_event();
}

void QueuePair::on_broken() {
  broken_ = true;
  owner_.on_event();
}

}  // namespace r2ccl::sim
