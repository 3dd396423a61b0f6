// Moves frames between a link and one epoch of a rail that is a byte pipe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "link/link.hpp"
#include "rails/byte_pipe.hpp"

namespace r2ccl {

class FramedRail {
 public:
  // `leftover`: bytes of the frame stream that arrived with the handshake.
  FramedRail(Link& link, RailId rail, std::unique_ptr<BytePipe> pipe,
             std::span<const std::byte> leftover);

  // Sends one batch of what the link has; receives one portion of what is there.  Batches are small
  // enough that rails take turns and neither direction starves the other.  True: something moved.
  // On a broken pipe the link is told, and the rail must not be used again.
  bool pump_out(TimeNs now);
  bool pump_in(TimeNs now);

  // Tells the link what the path has acknowledged.
  void report_path(TimeNs now);
  // Lets the peer's end know what arrived here, if nothing has told it yet.
  void acknowledge();

  // Copies what is still to be sent, so that nothing outside this object is read any more.
  void detach();

  // A black hole inside the engine: bytes in both directions are held back until heal().
  void mute() { muted_ = true; }
  void heal();
  [[nodiscard]] bool muted() const { return muted_; }

  [[nodiscard]] bool wants_write() const { return blocked_; }
  [[nodiscard]] BytePipe& pipe() { return *pipe_; }

 private:
  static constexpr std::size_t batch_frames = 8;
  static constexpr std::size_t input_bytes = 20U << 10;  // 16 KiB and a header in one read
  static constexpr std::size_t read_bytes = 256U << 10;  // per call: larger ones starve the sends

  void pull(TimeNs now);
  bool write_pending(TimeNs now);
  void advance(std::size_t bytes);
  bool parse(TimeNs now);
  void hold_back();

  Link& link_;
  const RailId rail_;
  const Epoch epoch_;
  std::unique_ptr<BytePipe> pipe_;
  std::uint64_t written_ = 0;

  std::array<OutFrame, batch_frames> frames_;
  std::array<iovec, 2 * batch_frames> parts_{};
  std::size_t frame_count_ = 0;
  std::size_t part_begin_ = 0;  // first part not written in full
  std::size_t part_end_ = 0;
  std::vector<std::vector<std::byte>> detached_;  // copies that parts_ point to
  bool blocked_ = false;
  bool owes_path_ack_ = false;  // something was read since the last report

  std::vector<std::byte> input_;
  std::size_t input_begin_ = 0;
  std::size_t input_end_ = 0;
  std::size_t payload_left_ = 0;  // of the frame begun

  bool muted_ = false;
  std::vector<std::byte> held_;  // bytes that a muted rail pretends to have sent
};

}  // namespace r2ccl
