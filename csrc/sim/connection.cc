#include "sim/connection.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace r2ccl::sim {
namespace {

constexpr std::size_t send_buffer_bytes = 16U << 10;
constexpr std::size_t window_bytes = 16U << 10;  // limit of bytes in flight or unread
constexpr std::size_t segment_bytes = 1448;
// Smallest segment to corrupt; only frames with data make segments of this size.
constexpr std::size_t flipped_bytes = 150;
// After this time, probes of a closed window count as unanswered.
constexpr TimeNs probes_unanswered_ns = 10 * ns_per_ms;

}  // namespace

Connection::Connection(EventQueue& events, Random& random, const Delays& delays, Path& path)
    : events_(events),
      random_(random),
      delays_(delays),
      path_(path),
      delay_lines_{
          DelayLine<Segment>(events, path, acceptor_side,
                             [this](Segment& segment) { return arrive(acceptor_side, segment); }),
          DelayLine<Segment>(events, path, connector_side, [this](Segment& segment) {
            return arrive(connector_side, segment);
          })} {}

std::size_t Connection::write(Side side, std::span<const std::byte> bytes) {
  Lane& lane = lanes_[side];
  const auto used = static_cast<std::size_t>(lane.written - lane.acked);
  const std::size_t taken = std::min(bytes.size(), send_buffer_bytes - used);
  lane.to_send.insert(lane.to_send.end(), bytes.begin(),
                      bytes.begin() + static_cast<std::ptrdiff_t>(taken));
  lane.written += taken;
  transmit(side);
  return taken;
}

void Connection::transmit(Side from) {
  Lane& lane = lanes_[from];
  std::size_t sent = 0;
  while (sent < lane.to_send.size() && !path_.ports[from].refuses) {
    const std::size_t window = delay_lines_[from].bytes() + lane.inbox.size();
    if (window >= window_bytes) break;
    const std::size_t most =
        std::min({segment_bytes, lane.to_send.size() - sent, window_bytes - window});
    const std::size_t bytes = 1 + random_.below(most);
    Segment segment;
    const auto begin = lane.to_send.begin() + static_cast<std::ptrdiff_t>(sent);
    segment.bytes.assign(begin, begin + static_cast<std::ptrdiff_t>(bytes));
    sent += bytes;
    lane.free_at = std::max(lane.free_at, events_.now()) +
                   static_cast<TimeNs>(bytes) * delays_.ns_per_byte * path_.ports[from].slowdown;
    if (Nic* const nic = path_.nics[from]; nic != nullptr) {
      nic->sent_bytes += bytes;
      lane.free_at = nic->sends_until =
          std::max(nic->sends_until, events_.now()) + static_cast<TimeNs>(bytes) * nic->ns_per_byte;
    }
    delay_lines_[from].send(std::move(segment), bytes,
                            lane.free_at + path_.latency(from, delays_, random_));
  }
  lane.to_send.erase(lane.to_send.begin(),
                     lane.to_send.begin() + static_cast<std::ptrdiff_t>(sent));
}

TimeNs Connection::arrive(Side from, Segment& segment) {
  const Side to = other(from);
  if (segment.reset) {
    if (!silent_) break_end(to);
    return 0;
  }
  if (ends_[to] == nullptr) {
    // No receiver: a reset travels back, unless the path loses the reset.
    events_.after(delays_.latency_ns, [this, from] {
      if (!silent_ && !path_.blocked(other(from))) break_end(from);
    });
    return 0;
  }
  if (Nic* const nic = path_.nics[to]; nic != nullptr && !segment.received) {
    segment.received = true;
    nic->receives_until = std::max(nic->receives_until, events_.now()) +
                          static_cast<TimeNs>(segment.bytes.size()) * nic->ns_per_byte;
    if (nic->receives_until > events_.now()) return nic->receives_until - events_.now();
  }
  Port& port = path_.ports[from];
  if (port.flips > 0 && segment.bytes.size() >= flipped_bytes) {
    --port.flips;
    path_.disturbed_at = events_.now();
    segment.bytes[random_.below(segment.bytes.size())] ^=
        static_cast<std::byte>(1U << random_.below(8));
  }
  Lane& lane = lanes_[from];
  lane.arrived += segment.bytes.size();
  std::vector<std::byte>& arrivals = port.boxed ? lane.held : lane.inbox;
  arrivals.insert(arrivals.end(), segment.bytes.begin(), segment.bytes.end());
  schedule_ack(from);
  if (!port.boxed) notify(to);
  return 0;
}

void Connection::deliver_held(Side from) {
  Lane& lane = lanes_[from];
  if (path_.ports[from].boxed || lane.held.empty()) return;
  lane.inbox.insert(lane.inbox.end(), lane.held.begin(), lane.held.end());
  lane.held.clear();
  notify(other(from));
}

std::size_t Connection::read(Side side, std::span<std::byte> room) {
  Lane& lane = lanes_[other(side)];
  const std::size_t bytes = std::min(room.size(), lane.inbox.size());
  std::copy_n(lane.inbox.begin(), bytes, room.begin());
  lane.inbox.erase(lane.inbox.begin(), lane.inbox.begin() + static_cast<std::ptrdiff_t>(bytes));
  if (ends_[other(side)] != nullptr) transmit(other(side));
  return bytes;
}

PathReport Connection::path(Side side) const {
  const Lane& lane = lanes_[side];
  PathReport report;
  report.unacknowledged = lane.written - lane.acked;
  report.round_trip = report.base_round_trip = 2 * delays_.latency_ns;
  // A sender stalled by a closed window counts as limited by the peer.  Bytes that the own host
  // refuses to send are no sign of a closed window.  Condition: the path answers window probes, or
  // the last fault event is younger than probes_unanswered_ns.
  const std::size_t window = window_bytes - std::min(window_bytes, lane.inbox.size());
  const bool closed = window < std::min(segment_bytes, lane.to_send.size());
  const bool probes_answered = !path_.blocked(side) && !path_.blocked(other(side)) &&
                               !path_.ports[side].refuses && !path_.ports[other(side)].refuses;
  report.peer_limited =
      closed && delay_lines_[side].bytes() == 0 && lane.acked == lane.arrived &&
      (probes_answered || events_.now() - path_.disturbed_at < probes_unanswered_ns);
  return report;
}

void Connection::close(Side side) {
  if (ends_[side] == nullptr) return;
  ends_[side] = nullptr;
  lanes_[side].to_send.clear();
  if (ends_[other(side)] == nullptr) {
    for (DelayLine<Segment>& line : delay_lines_) line.clear();
  } else if (path_.cut() || path_.ports[side].refuses) {
    delay_lines_[side].clear();  // a closed socket sends nothing again; its reset is lost
  } else {
    delay_lines_[side].send({.bytes = {}, .reset = true}, 0,
                            events_.now() + path_.latency(side, delays_, random_));
  }
}

void Connection::reset(Side first) {
  for (DelayLine<Segment>& line : delay_lines_) line.clear();
  for (Lane& lane : lanes_) lane.held.clear();
  events_.after(delays_.latency_ns, [this, first] { break_end(other(first)); });
  break_end(first);
}

void Connection::break_end(Side side) {
  if (EventSink* end = std::exchange(ends_[side], nullptr)) end->on_event();
}

void Connection::retry() {
  for (const Side from : both_sides) {
    deliver_held(from);
    delay_lines_[from].retry(events_.now() + delays_.retransmit_ns);
    if (std::exchange(lanes_[from].ack_lost, false)) schedule_ack(from);
    if (ends_[from] != nullptr) transmit(from);
  }
}

void Connection::schedule_ack(Side from) {
  Lane& lane = lanes_[from];
  if (std::exchange(lane.ack_due, true)) return;
  events_.after(path_.latency(other(from), delays_, random_) + path_.ports[other(from)].ack_ns,
                [this, from] { acknowledge(from); });
}

void Connection::acknowledge(Side from) {
  Lane& lane = lanes_[from];
  lane.ack_due = false;
  if (path_.blocked(other(from)) || path_.ports[other(from)].refuses) {
    lane.ack_lost = true;
    return;
  }
  lane.acked = lane.arrived;
  notify(from);
}

Io SimPipe::write(std::span<const iovec> parts, std::size_t& bytes) {
  if (connection_.broken(side_)) return Io::broken;
  for (const iovec& part : parts) {
    const std::size_t taken =
        connection_.write(side_, {static_cast<const std::byte*>(part.iov_base), part.iov_len});
    bytes += taken;
    if (taken < part.iov_len) break;
  }
  return bytes == 0 ? Io::again : Io::ok;
}

Io SimPipe::read(std::span<const iovec> parts, std::size_t& bytes) {
  if (connection_.broken(side_)) return Io::broken;
  // A kernel may return fewer bytes than available, cut at any position.
  std::size_t most = random_.below(4) == 0 ? 1 + random_.below(200) : SIZE_MAX;
  for (const iovec& part : parts) {
    const std::size_t wanted = std::min(part.iov_len, most);
    const std::size_t taken =
        connection_.read(side_, {static_cast<std::byte*>(part.iov_base), wanted});
    bytes += taken;
    most -= taken;
    if (taken < part.iov_len) break;
  }
  return bytes == 0 ? Io::again : Io::ok;
}

}  // namespace r2ccl::sim
