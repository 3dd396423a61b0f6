#include "rails/framed_rail.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/limits.hpp"
#include "link/device_memory.hpp"

namespace r2ccl {
namespace {

// Reads of a rail whose write has failed: as many as empty the largest socket buffer of usual
// systems.
constexpr int rest_reads = 32;

}  // namespace

FramedRail::FramedRail(Link& link, RailId rail, std::unique_ptr<BytePipe> pipe,
                       std::span<const std::byte> leftover)
    : link_(link),
      rail_(rail),
      epoch_(link.epoch(rail)),
      pipe_(std::move(pipe)),
      input_(std::max(input_bytes, leftover.size())) {
  std::copy(leftover.begin(), leftover.end(), input_.begin());
  input_end_ = leftover.size();
}

// ---- out ----

bool FramedRail::pump_out(TimeNs now) {
  if (muted_) {
    hold_back();
    if (held_.size() >= most_held_bytes) return false;
  }
  if (part_begin_ == part_end_) {
    if (!link_.has_frames(rail_)) return false;
    pull(now);
    if (frame_count_ == 0 || link_.epoch(rail_) != epoch_ || !link_.connected(rail_)) return false;
  }
  if (!muted_) return write_pending(now);
  hold_back();
  return true;
}

void FramedRail::pull(TimeNs now) {
  frame_count_ = part_begin_ = part_end_ = 0;
  std::size_t bytes = 0;
  while (frame_count_ < batch_frames && bytes < read_bytes) {
    OutFrame& frame = frames_[frame_count_];
    if (!link_.next_frame(rail_, frame, now)) break;
    ++frame_count_;
    if (frame.ahead != nullptr) {
      std::memcpy(frame.ahead, &frame.header, sizeof(FrameHeader));
      payload_of_[part_end_] = &frame;
      parts_[part_end_++] = {frame.ahead, sizeof(FrameHeader) + frame.header.payload_bytes};
      bytes += sizeof(FrameHeader) + frame.header.payload_bytes;
      continue;
    }
    payload_of_[part_end_] = nullptr;
    parts_[part_end_++] = {&frame.header, sizeof(FrameHeader)};
    if (frame.header.payload_bytes > 0) {
      payload_of_[part_end_] = &frame;
      parts_[part_end_] = {const_cast<std::byte*>(frame.payload), frame.header.payload_bytes};
      ++part_end_;
      if (is_device_memory(frame.payload) && !copy_out(part_end_ - 1))
        return link_.rail_failed(rail_, epoch_, RailCause::device_loss, now);
    }
    bytes += sizeof(FrameHeader) + frame.header.payload_bytes;
  }
}

// Writes pending parts.  Returns false if the pipe is full or broken.
bool FramedRail::write_pending(TimeNs now) {
  const std::span<const iovec> parts(parts_.data() + part_begin_, part_end_ - part_begin_);
  std::size_t bytes = 0;
  const Io result = pipe_->write(parts, bytes);
  if (result == Io::broken) {
    read_rest(now);
    link_.rail_failed(rail_, epoch_, RailCause::socket_error, now);
    return false;
  }
  blocked_ = result == Io::again;
  if (blocked_) return false;
  advance(bytes);
  return true;
}

// Reads what arrived before a write failed.  The last frames of a peer that has ended tell why, and
// the peer cannot send them on another rail.
void FramedRail::read_rest(TimeNs now) {
  for (int read = 0; read < rest_reads && link_.connected(rail_); ++read)
    if (!pump_in(now)) return;
}

void FramedRail::advance(std::size_t bytes) {
  written_ += bytes;
  owes_path_ack_ = false;  // a data segment carries the acknowledgement
  while (bytes > 0) {
    iovec& part = parts_[part_begin_];
    if (bytes < part.iov_len) {
      part.iov_base = static_cast<std::byte*>(part.iov_base) + bytes;
      part.iov_len -= bytes;
      return;
    }
    bytes -= part.iov_len;
    ++part_begin_;
  }
  if (part_begin_ < part_end_) return;
  for (std::size_t i = 0; i < frame_count_; ++i) link_.frame_written(frames_[i].header);
  frame_count_ = 0;
  detached_.clear();
}

bool FramedRail::detach(const DetachScope& scope, TimeNs /*now*/) {
  for (std::size_t i = part_begin_; i < part_end_; ++i) {
    const OutFrame* frame = payload_of_[i];
    if (frame != nullptr && scope.covers(frame->header, frame->zero_copy)) (void)copy_out(i);
  }
  return true;
}

// Copies the unsent rest of a payload into memory of this object.  Returns false if the copy
// failed.
bool FramedRail::copy_out(std::size_t part) {
  detached_.emplace_back(parts_[part].iov_len);  // may throw, so comes before the first change
  payload_of_[part] = nullptr;
  const bool copied =
      copy_bytes(detached_.back().data(), static_cast<const std::byte*>(parts_[part].iov_base),
                 parts_[part].iov_len);
  parts_[part].iov_base = detached_.back().data();
  return copied;
}

void FramedRail::hold_back() {
  std::size_t bytes = 0;
  for (std::size_t i = part_begin_; i < part_end_; ++i) {
    const auto* begin = static_cast<const std::byte*>(parts_[i].iov_base);
    held_.insert(held_.end(), begin, begin + parts_[i].iov_len);
    bytes += parts_[i].iov_len;
  }
  const std::uint64_t before = written_;
  advance(bytes);
  written_ = before;  // bytes held back are not sent
}

void FramedRail::heal() {
  muted_ = false;
  if (held_.empty()) return;
  // The bytes held back go out before newer frames.
  detached_.push_back(std::move(held_));
  held_.clear();
  parts_[0] = {detached_.back().data(), detached_.back().size()};
  payload_of_[0] = nullptr;
  part_begin_ = 0;
  part_end_ = 1;
  frame_count_ = 0;
}

bool FramedRail::fence(TimeNs /*now*/) {
  pipe_->abandon();
  pipe_.reset();
  return true;
}

std::optional<pollfd> FramedRail::arm() {
  const short events = pipe_->arm(blocked_);
  if (events == 0) return std::nullopt;
  return pollfd{pipe_->fd(), events, 0};
}

void FramedRail::acknowledge(TimeNs /*now*/) {
  if (owes_path_ack_) pipe_->acknowledge();
  owes_path_ack_ = false;
}

void FramedRail::report_path(TimeNs now) {
  const PathReport report = pipe_->path();
  const std::uint64_t acked = written_ - std::min(written_, report.unacknowledged);
  if (report.advanced) link_.path_advanced(rail_, epoch_, now);
  link_.path_acked(rail_, epoch_, acked, report.peer_limited, now);
  if (report.round_trip > 0)
    link_.path_round_trip(rail_, report.round_trip, report.base_round_trip, report.held_back);
}

// ---- in ----

bool FramedRail::pump_in(TimeNs now) {
  if (muted_) return false;
  const std::size_t parsed = input_begin_;
  if (input_end_ > input_begin_ && !parse(now)) return true;
  bool arrived = input_begin_ > parsed;  // an incomplete header does not count
  for (std::size_t total = 0; total < read_bytes;) {
    if (input_begin_ == input_end_) {
      input_begin_ = input_end_ = 0;
    } else if (input_begin_ > 0) {  // a partial header is left
      std::memmove(input_.data(), input_.data() + input_begin_, input_end_ - input_begin_);
      input_end_ -= input_begin_;
      input_begin_ = 0;
    }
    const bool between = payload_left_ == 0 && input_end_ == 0;
    const auto likely = between ? link_.likely_room() : std::span<std::byte>();
    std::size_t asked = likely.size();
    std::size_t bytes = 0;
    const Io result = likely.empty() ? read(asked, bytes, now) : read_in_place(likely, bytes, now);
    if (result == Io::again) return arrived;
    if (result == Io::broken) {
      link_.rail_failed(rail_, epoch_, RailCause::socket_error, now);
      return true;
    }
    arrived = owes_path_ack_ = true;
    total += bytes;
    if (!parse(now)) return true;
    if (bytes < asked) return true;  // the pipe is empty
  }
  return arrived;
}

// Reads the rest of the current payload into its slot or target, and the bytes after the payload
// into the buffer.
Io FramedRail::read(std::size_t& asked, std::size_t& bytes, TimeNs now) {
  std::array<iovec, 2> parts{};
  std::size_t count = 0;
  std::size_t direct = 0;
  if (payload_left_ > 0) {
    const auto room = link_.payload_room(rail_);
    direct = std::min({room.size(), payload_left_, read_bytes});
    parts[count++] = {room.data(), direct};
  }
  // Read only the next header behind a payload, so that the next payload can also go straight into
  // its slot.
  const std::size_t most = direct > 0 ? sizeof(FrameHeader) : first_bytes;
  if (direct == payload_left_)
    parts[count++] = {input_.data() + input_end_, std::min(most, input_.size() - input_end_)};
  asked = parts[0].iov_len + parts[1].iov_len;
  const Io result = pipe_->read({parts.data(), count}, bytes);
  const std::size_t into_payload = std::min(bytes, direct);
  input_end_ += bytes - into_payload;  // payload_filled() may throw, so comes last
  if (into_payload > 0) {
    payload_left_ -= into_payload;
    link_.payload_filled(rail_, into_payload, now);
  }
  return result;
}

// Reads a frame into the memory that the link predicts for it.  Bytes that belong elsewhere are
// moved to the buffer.
Io FramedRail::read_in_place(std::span<std::byte> room, std::size_t& bytes, TimeNs now) {
  const iovec part{room.data(), room.size()};
  const Io result = pipe_->read({&part, 1}, bytes);
  std::size_t taken = 0;
  std::size_t in_place = 0;
  if (bytes >= sizeof(FrameHeader)) {
    if (!begin_frame(room.data(), now)) return result;
    taken = sizeof(FrameHeader);
    if (payload_left_ > 0 && link_.payload_room(rail_).data() == room.data() + taken)
      in_place = std::min(payload_left_, bytes - taken);
    taken += in_place;
  }
  input_end_ = bytes - taken;
  std::memcpy(input_.data(), room.data() + taken, input_end_);
  payload_left_ -= in_place;
  if (in_place > 0) link_.payload_filled(rail_, in_place, now);
  return result;
}

// Processes the buffered frames and leaves at most an incomplete header.  Returns false if the rail
// has failed.
bool FramedRail::parse(TimeNs now) {
  for (;;) {
    if (!link_.connected(rail_) || link_.epoch(rail_) != epoch_) return false;
    const std::size_t buffered = input_end_ - input_begin_;
    if (payload_left_ > 0) {
      if (buffered == 0) return true;
      const auto room = link_.payload_room(rail_);
      const std::size_t bytes = std::min({room.size(), payload_left_, buffered});
      std::memcpy(room.data(), input_.data() + input_begin_, bytes);
      input_begin_ += bytes;
      payload_left_ -= bytes;
      link_.payload_filled(rail_, bytes, now);
    } else {
      if (buffered < sizeof(FrameHeader)) return true;
      const std::byte* const at = input_.data() + input_begin_;
      input_begin_ += sizeof(FrameHeader);
      if (!begin_frame(at, now)) return false;
    }
  }
}

bool FramedRail::begin_frame(const std::byte* at, TimeNs now) {
  FrameHeader header;
  std::memcpy(&header, at, sizeof(header));
  if (!link_.frame_begin(rail_, header, now)) return false;
  payload_left_ = header.payload_bytes;
  return true;
}

}  // namespace r2ccl
