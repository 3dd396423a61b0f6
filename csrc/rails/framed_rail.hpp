// A rail over a byte pipe: moves frames between a link and the pipe during one epoch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "link/link.hpp"
#include "rails/byte_pipe.hpp"
#include "rails/rail.hpp"

namespace r2ccl {

class FramedRail final : public Rail {
 public:
  // `leftover`: bytes of the frame stream that arrived with the handshake.
  FramedRail(Link& link, RailId rail, std::unique_ptr<BytePipe> pipe,
             std::span<const std::byte> leftover);

  bool pump_out(TimeNs now) override;
  bool pump_in(TimeNs now) override;
  [[nodiscard]] bool wants_write() const override { return part_begin_ != part_end_; }
  void report_path(TimeNs now) override;
  void acknowledge(TimeNs now) override;
  bool detach(const DetachScope& scope, TimeNs now) override;  // copies unsent payloads
  bool fence(TimeNs now) override;                             // closing the pipe is enough
  [[nodiscard]] std::optional<pollfd> arm() override;
  void sever() override {
    severed_ = true;
    pipe_->sever();
  }
  void mute() override { muted_ = true; }
  void heal() override;
  [[nodiscard]] bool muted() const override { return muted_; }
  // A pipe severed by this end reads the end of file, too.
  [[nodiscard]] bool closed_by_peer() const override {
    return pipe_ && !severed_ && pipe_->closed_by_peer();
  }

 private:
  static constexpr std::size_t batch_frames = 8;
  static constexpr std::size_t input_bytes = max_likely_bytes + 2 * sizeof(FrameHeader);
  // Size of a read between frames: fits a 16 KiB payload with its header.
  static constexpr std::size_t first_bytes = 20U << 10;
  static constexpr std::size_t read_bytes = 256U << 10;  // per call; larger reads starve the sends

  void pull(TimeNs now);
  bool write_pending(TimeNs now);
  void read_rest(TimeNs now);
  void advance(std::size_t bytes);
  bool copy_out(std::size_t part);
  Io read(std::size_t& asked, std::size_t& bytes, TimeNs now);
  Io read_in_place(std::span<std::byte> room, std::size_t& bytes, TimeNs now);
  bool begin_frame(const std::byte* at, TimeNs now);
  bool parse(TimeNs now);
  void hold_back();

  Link& link_;
  const RailId rail_;
  const Epoch epoch_;
  std::unique_ptr<BytePipe> pipe_;
  std::uint64_t written_ = 0;

  std::array<OutFrame, batch_frames> frames_;
  std::array<iovec, 2 * batch_frames> parts_{};
  // Frame of each part that lies outside this object, in memory of the link or a caller; null for
  // headers and copies.
  std::array<const OutFrame*, 2 * batch_frames> payload_of_{};
  std::size_t frame_count_ = 0;
  std::size_t part_begin_ = 0;  // first part not written in full
  std::size_t part_end_ = 0;
  std::vector<std::vector<std::byte>> detached_;  // copies referenced by parts_
  bool blocked_ = false;
  bool owes_path_ack_ = false;  // bytes were read since the last acknowledgement

  std::vector<std::byte> input_;
  std::size_t input_begin_ = 0;
  std::size_t input_end_ = 0;
  std::size_t payload_left_ = 0;  // bytes of the current payload still to come

  bool muted_ = false;
  bool severed_ = false;
  std::vector<std::byte> held_;  // output of a muted rail, not sent
};

}  // namespace r2ccl
