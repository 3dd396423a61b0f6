#include "rails/verbs/verbs_rail.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <utility>

#include "link/device_memory.hpp"

namespace r2ccl {
namespace {

constexpr std::uint32_t credit_only = 1U << 31U;
constexpr std::uint32_t count_mask = credit_only - 1;
constexpr int rounds_per_pump = 4;
// Reads of a rail whose peer has ended: as many as empty the completion queue.
constexpr int queue_reads = 4;
constexpr TimeNs base_window_ns = 10'000 * ns_per_ms;
// Time limit for an UP rail to finish reading caller memory of a message that another rail has
// delivered.
constexpr TimeNs recall_patience_ns = 20 * ns_per_ms;

// True if the payload is written to its slot or target ahead of the header.
bool is_placed(const FrameHeader& header) {
  return header.payload_bytes > max_eager_bytes || (header.flags & frame_flag::in_target) != 0;
}

}  // namespace

VerbsRail::VerbsRail(Link& link, RailId rail, std::unique_ptr<VerbsSession> session,
                     FileDescriptor liveness_socket, Note note)
    : link_(link),
      rail_(rail),
      epoch_(link.epoch(rail)),
      session_(std::move(session)),
      liveness_socket_(std::move(liveness_socket)),
      note_(std::move(note)) {}

VerbsRail::~VerbsRail() {
  session_->begin_fence(0);
  if (!session_->fenced()) session_->abandon_memory();
}

bool VerbsRail::open() const { return link_.connected(rail_) && link_.epoch(rail_) == epoch_; }

bool VerbsRail::fail(RailCause cause, const std::string& why, TimeNs now) {
  if (note_ && open()) note_(why);
  link_.rail_failed(rail_, epoch_, cause, now);
  return false;
}

// ---- out ----

bool VerbsRail::has_room() const {
  return sent_ - std::min(completed_, credited_) < verbs_ring_frames &&
         std::find(bounce_used_.begin(), bounce_used_.end(), false) != bounce_used_.end();
}

bool VerbsRail::pump_out(TimeNs now) {
  bool moved = false;
  for (std::uint32_t i = 0; i < batch && open(); ++i) {
    if (muted_ ? swallowed_ >= verbs_ring_frames : !has_room()) break;
    OutFrame frame;
    if (!link_.next_frame(rail_, frame, now)) break;
    moved = true;
    if (muted_)
      ++swallowed_;
    else
      post(frame, now);
  }
  return moved;
}

void VerbsRail::post(OutFrame& frame, TimeNs now) {
  FrameHeader& header = frame.header;
  if (header.type == FrameType::slots || header.type == FrameType::target) add_key(header);
  InFlightFrame& flight = frames_in_flight_[sent_ % verbs_ring_frames];
  position_ += sizeof(FrameHeader) + header.payload_bytes;
  flight = {.header = header, .position = position_, .posted_at = now};

  std::byte* const entry = session_->out_entry(sent_);
  std::memcpy(entry, &header, sizeof(header));
  std::array<VerbsWrite, 2> writes;
  std::size_t count = 0;
  std::uint32_t bytes = sizeof(header);
  if (is_placed(header)) {
    if (!place(frame, flight, writes[count++])) return fail_to_copy(now);
  } else if (header.payload_bytes > 0) {
    if (!copy_bytes(entry + bytes, frame.payload, header.payload_bytes)) return fail_to_copy(now);
    bytes += header.payload_bytes;
  }
  writes[count++] = {
      .id = request_id(VerbsRequest::frame, sent_),
      .source = {entry, bytes, session_->local_key()},
      .remote_address = session_->peer.ring_address + sent_ % verbs_ring_frames * ring_stride,
      .remote_key = session_->peer.ring_key,
      .immediate = static_cast<std::uint32_t>(consumed_) & count_mask,
      .signaled = true,
      .inlined = bytes <= session_->pair->inline_bytes()};
  credit_sent_ = consumed_;
  ++sent_;
  if (!flight.reads_zero_copy) link_.frame_written(header);
  if (const int error = session_->pair->post({writes.data(), count}); error != 0)
    fail(RailCause::device_loss, std::string("posting a send: ") + std::strerror(error), now);
}

// Adds the remote key to a frame that offers slots or a target: the peer writes with this key.
void VerbsRail::add_key(FrameHeader& header) const {
  const bool slots = header.type == FrameType::slots;
  const std::uint64_t address = slots ? header.number : header.delivered;
  const auto keys =
      session_->pool().find(session_->device(), reinterpret_cast<const std::byte*>(address),
                            slots ? 1 : static_cast<std::size_t>(header.credit));
  if (!keys.has_value() && !slots) header.credit = 0;  // the frame then offers no target
  header.epoch = keys.has_value() ? keys->remote : 0;
  seal(header);
}

// Prepares the write of a payload into its slot or target.  Memory registered with the device is
// the direct source; other memory is first copied into a bounce buffer.  Returns false if the copy
// failed.
bool VerbsRail::place(const OutFrame& frame, InFlightFrame& flight, VerbsWrite& write) {
  const std::uint32_t bytes = frame.header.payload_bytes;
  const std::byte* data = frame.payload;
  std::uint32_t key = session_->local_key();
  if (const auto keys = session_->pool().find(session_->device(), data, bytes); keys.has_value()) {
    key = keys->local;
    flight.reads_zero_copy = frame.zero_copy;
  } else {
    const auto free = std::find(bounce_used_.begin(), bounce_used_.end(), false);
    assert(free != bounce_used_.end());
    *free = true;
    flight.bounce = static_cast<int>(free - bounce_used_.begin());
    std::byte* const copy = session_->bounce(static_cast<std::size_t>(flight.bounce));
    if (!copy_bytes(copy, data, bytes)) return false;
    data = copy;
  }
  write = {.id = request_id(VerbsRequest::frame, sent_),
           .source = {data, bytes, key},
           .remote_address = frame.remote_address,
           .remote_key = frame.remote_key,
           .immediate = {}};
  return true;
}

void VerbsRail::fail_to_copy(TimeNs now) {
  fail(RailCause::device_loss, "the GPU failed to copy a payload to send", now);
}

void VerbsRail::send_credit(TimeNs now) {
  if (credit_in_flight_ || credit_sent_ == consumed_ || muted_) return;
  const VerbsWrite write{
      .id = request_id(VerbsRequest::credit, 0),
      .source = {},
      .remote_address = session_->peer.ring_address,
      .remote_key = session_->peer.ring_key,
      .immediate = (static_cast<std::uint32_t>(consumed_) & count_mask) | credit_only,
      .signaled = true};
  credit_sent_ = consumed_;
  credit_in_flight_ = true;
  if (const int error = session_->pair->post({&write, 1}); error != 0)
    fail(RailCause::device_loss, std::string("posting credit: ") + std::strerror(error), now);
}

// A device cannot be stopped from reading a posted payload.  So a queue pair that does not finish
// soon is taken down, and its fence ends the reads.
bool VerbsRail::detach(const DetachScope& scope, TimeNs now) {
  if (!detached(scope)) (void)pump_in(now);  // a completion may be waiting in the queue
  if (detached(scope)) {
    recall_asked_ = 0;
    return true;
  }
  if (recall_asked_ == 0) recall_asked_ = now;
  if (open() && (link_.state(rail_) != RailState::up || now - recall_asked_ > recall_patience_ns))
    link_.rail_failed(rail_, epoch_, RailCause::recalled, now);
  return false;
}

bool VerbsRail::detached(const DetachScope& scope) const {
  for (std::uint64_t frame = completed_; frame < sent_; ++frame) {
    const InFlightFrame& flight = frames_in_flight_[frame % verbs_ring_frames];
    if (flight.reads_zero_copy && scope.covers(flight.header, /*zero_copy=*/true)) return false;
  }
  return true;
}

void VerbsRail::heal() {
  muted_ = false;
  // Frames given to a muted rail are lost, so the epoch must end.
  if (swallowed_ > 0) early_.emplace_back().status = "a drill dropped frames";
}

// ---- in ----

bool VerbsRail::pump_in(TimeNs now) {
  if (muted_) return false;
  bool arrived = false;
  for (int round = 0; round < rounds_per_pump; ++round) {
    std::array<VerbsCompletion, batch> completions;
    std::size_t count = 0;
    while (!early_.empty() && count < batch) {
      completions[count++] = early_.front();
      early_.pop_front();
    }
    if (count == 0) {
      const int got = session_->pair->poll(completions);
      if (got < 0) return !fail(RailCause::device_loss, "polling for completions failed", now);
      count = static_cast<std::size_t>(got);
    }
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t before = consumed_;
      if (!take(completions[i], now)) return true;
      arrived |= consumed_ != before;
    }
    if (receives_due_ > 0) {
      const std::uint32_t due = std::exchange(receives_due_, 0);
      const int error = session_->pair->post_receives(request_id(VerbsRequest::receive, 0), due);
      if (error != 0)
        return !fail(RailCause::device_loss,
                     std::string("posting receives: ") + std::strerror(error), now);
    }
    if (consumed_ - credit_sent_ >= verbs_ring_frames / 2) send_credit(now);
    if (!open()) return true;
    if (count < batch) break;
  }
  return arrived;
}

bool VerbsRail::take(const VerbsCompletion& completion, TimeNs now) {
  if (!completion.ok) return fail(RailCause::completion_error, std::string(completion.status), now);
  switch (static_cast<VerbsRequest>(completion.id & 3U)) {
    case VerbsRequest::frame: return take_sent(completion, now);
    case VerbsRequest::credit: credit_in_flight_ = false; return true;
    case VerbsRequest::receive: return take_arrived(completion, now);
    case VerbsRequest::marker: break;
  }
  return fail(RailCause::completion_error, "a completion of an unknown work request", now);
}

bool VerbsRail::take_sent(const VerbsCompletion& completion, TimeNs now) {
  const std::uint64_t frame = completion.id >> 2U;
  if (frame < completed_ || frame >= sent_)
    return fail(RailCause::completion_error, "the completion of a frame not in flight", now);
  for (; completed_ <= frame; ++completed_) {
    InFlightFrame& flight = frames_in_flight_[completed_ % verbs_ring_frames];
    acked_position_ = flight.position;
    if (flight.bounce != no_bounce) bounce_used_[static_cast<std::size_t>(flight.bounce)] = false;
    flight.bounce = no_bounce;
    if (std::exchange(flight.reads_zero_copy, false)) link_.frame_written(flight.header);
    if (completed_ == frame) measure(now - flight.posted_at, now);
  }
  return true;
}

void VerbsRail::measure(TimeNs sample, TimeNs now) {
  round_trip_ = round_trip_ == 0 ? sample : round_trip_ + (sample - round_trip_) / 8;
  if (base_ == 0 || now - base_since_ > base_window_ns) {
    last_base_ = base_;
    base_ = sample;
    base_since_ = now;
  }
  base_ = std::min(base_, sample);
}

bool VerbsRail::take_arrived(const VerbsCompletion& completion, TimeNs now) {
  ++receives_due_;
  if (!completion.receive || !completion.immediate.has_value())
    return fail(RailCause::protocol, "a message without an immediate", now);
  if (!take_credit(*completion.immediate & count_mask, now)) return false;
  if ((*completion.immediate & credit_only) != 0) return true;
  return take_frame(completion.bytes, now);
}

bool VerbsRail::take_credit(std::uint32_t consumed, TimeNs now) {
  const std::uint64_t more = (consumed - credited_) & count_mask;
  if (more > sent_ - credited_)
    return fail(RailCause::protocol, "credit for more frames than were sent", now);
  if (more == 0) return true;
  credited_ += more;
  link_.attempts_landed(rail_, epoch_,
                        frames_in_flight_[(credited_ - 1) % verbs_ring_frames].position, now);
  return open();
}

bool VerbsRail::take_frame(std::uint32_t bytes, TimeNs now) {
  const std::byte* const entry = session_->in_entry(consumed_);
  FrameHeader header;
  if (bytes < sizeof(header)) return fail(RailCause::protocol, "a frame without a header", now);
  std::memcpy(&header, entry, sizeof(header));
  const std::uint32_t with_it = bytes - static_cast<std::uint32_t>(sizeof(header));
  const bool placed = is_placed(header);
  const bool fits =
      placed ? with_it == 0 && header.type == FrameType::data : with_it == header.payload_bytes;
  if (!fits) return fail(RailCause::protocol, "the size of a frame differs from its header", now);
  if (!link_.frame_begin(rail_, header, now)) return false;
  if (placed) link_.payload_placed(rail_, now);
  for (std::uint32_t done = 0; !placed && done < with_it && open();) {
    const auto room = link_.payload_room(rail_);
    const auto part =
        static_cast<std::uint32_t>(std::min<std::size_t>(room.size(), with_it - done));
    std::memcpy(room.data(), entry + sizeof(header) + done, part);
    done += part;
    link_.payload_filled(rail_, part, now);
  }
  ++consumed_;
  return open();
}

// ---- time ----

void VerbsRail::report_path(TimeNs now) {
  link_.path_acked(rail_, epoch_, acked_position_, /*peer_limited=*/false, now);
  if (round_trip_ > 0) {
    const TimeNs base = last_base_ == 0 ? base_ : std::min(base_, last_base_);
    link_.path_round_trip(rail_, round_trip_, base, 0);
  }
  if (!liveness_socket_.valid() || muted_ || !open()) return;
  std::byte unexpected{};
  const ssize_t got = ::recv(liveness_socket_.get(), &unexpected, 1, MSG_DONTWAIT | MSG_PEEK);
  if (got >= 0 || (errno != EAGAIN && errno != EINTR)) {
    // The last frames of a peer that has ended tell why.
    for (int read = 0; read < queue_reads && pump_in(now) && open(); ++read) continue;
    fail(RailCause::socket_error, "the liveness socket is closed", now);
  }
}

void VerbsRail::acknowledge(TimeNs now) {
  if (open()) send_credit(now);
}

bool VerbsRail::fence(TimeNs now) {
  session_->begin_fence(now);
  if (session_->fenced()) return true;
  session_->judge_device(session_->fence_begun(), now);
  return false;
}

std::optional<pollfd> VerbsRail::arm() {
  if (!early_.empty() || session_->pair->arm() != 0) return std::nullopt;
  // A completion that arrived before arm() raises no event, so poll again.
  std::array<VerbsCompletion, batch> completions;
  const int got = session_->pair->poll(completions);
  if (got != 0) {
    if (got > 0) early_.assign(completions.begin(), completions.begin() + got);
    return std::nullopt;
  }
  return pollfd{session_->pair->fd(), POLLIN, 0};
}

}  // namespace r2ccl
