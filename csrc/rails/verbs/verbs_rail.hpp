// A verbs rail: moves frames between a link and an RDMA queue pair during one epoch.
//
// A frame is an RDMA WRITE WITH IMMEDIATE of its header into an entry of the peer's ring.  A small
// payload travels in the same write.  A larger payload, or a payload for a target, goes ahead of
// the header, by an RDMA WRITE into its slot or target.  The receiver sees a header only after all
// earlier writes on the same queue pair are in memory.
//
// The immediate carries the number of frames that its sender has consumed in this epoch.  The
// attempts of these frames have landed, and the receiver of the immediate may reuse their ring
// entries.
//
//   bit 31      the message carries no frame, only this credit
//   bits 0..30  frames consumed, modulo 2^31
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/file_descriptor.hpp"
#include "link/link.hpp"
#include "rails/rail.hpp"
#include "rails/verbs/session.hpp"

namespace r2ccl {

class VerbsRail final : public Rail {
 public:
  using Note = std::function<void(const std::string&)>;

  // Takes a connected session with posted receives.  `liveness_socket`: TCP connection to the
  // peer's process, closed when the process is gone; invalid if there is none.  `note` receives the
  // reason when the rail is taken down.
  VerbsRail(Link& link, RailId rail, std::unique_ptr<VerbsSession> session,
            FileDescriptor liveness_socket, Note note);
  ~VerbsRail() override;
  VerbsRail(const VerbsRail&) = delete;
  VerbsRail& operator=(const VerbsRail&) = delete;

  bool pump_out(TimeNs now) override;
  bool pump_in(TimeNs now) override;
  [[nodiscard]] bool wants_write() const override { return false; }
  void report_path(TimeNs now) override;
  void acknowledge(TimeNs now) override;
  bool detach(const DetachScope& scope, TimeNs now) override;
  [[nodiscard]] bool detached(const DetachScope& scope) const override;
  bool fence(TimeNs now) override;
  [[nodiscard]] std::optional<pollfd> arm() override;
  void sever() override { (void)session_->pair->fail(); }
  void mute() override { muted_ = true; }
  void heal() override;
  [[nodiscard]] bool muted() const override { return muted_; }

  // Returns the number of the queue pair; 0 while the queue pair is being fenced.
  [[nodiscard]] std::uint32_t number() const {
    return session_->pair ? session_->pair->number() : 0;
  }
  // Returns the address by which the peer reaches this end.
  [[nodiscard]] const VerbsAddress& address() const { return session_->own; }

 private:
  static constexpr std::uint32_t batch = 16;
  static constexpr int no_bounce = -1;

  // A frame in flight.
  struct InFlightFrame {
    FrameHeader header{};
    std::uint64_t position = 0;  // end of the frame in the epoch's byte stream
    TimeNs posted_at = 0;
    int bounce = no_bounce;
    bool reads_zero_copy = false;  // the device reads a caller's memory
  };

  [[nodiscard]] bool open() const;  // true while the rail's epoch is open
  [[nodiscard]] bool has_room() const;
  void post(OutFrame& frame, TimeNs now);
  void add_key(FrameHeader& header) const;
  bool place(const OutFrame& frame, InFlightFrame& flight, VerbsWrite& write);
  void fail_to_copy(TimeNs now);
  void send_credit(TimeNs now);
  // Process a completion.  Return false if the epoch has ended.
  bool take(const VerbsCompletion& completion, TimeNs now);
  bool take_sent(const VerbsCompletion& completion, TimeNs now);
  bool take_arrived(const VerbsCompletion& completion, TimeNs now);
  bool take_credit(std::uint32_t consumed, TimeNs now);
  bool take_frame(std::uint32_t bytes, TimeNs now);
  void measure(TimeNs sample, TimeNs now);
  bool fail(RailCause cause, const std::string& why, TimeNs now);  // always returns false

  Link& link_;
  const RailId rail_;
  const Epoch epoch_;
  const std::unique_ptr<VerbsSession> session_;
  const FileDescriptor liveness_socket_;
  const Note note_;

  // Index: frame number modulo verbs_ring_frames.
  std::array<InFlightFrame, verbs_ring_frames> frames_in_flight_;
  std::uint64_t sent_ = 0;       // frames sent
  std::uint64_t completed_ = 0;  // frames accepted by the peer's device
  std::uint64_t credited_ = 0;   // frames consumed by the peer
  std::uint64_t position_ = 0;   // bytes of all frames sent
  std::uint64_t acked_position_ = 0;
  std::array<bool, bounce_chunks> bounce_used_{};

  std::uint64_t consumed_ = 0;     // frames of the peer consumed here
  std::uint64_t credit_sent_ = 0;  // consumed frames reported to the peer
  bool credit_in_flight_ = false;
  std::uint32_t receives_due_ = 0;
  std::deque<VerbsCompletion> early_;  // completions to process before the next poll

  TimeNs recall_asked_ = 0;  // start of a caller's wait for its memory; 0 = no wait

  TimeNs round_trip_ = 0;
  TimeNs base_ = 0;       // minimum of the current window
  TimeNs last_base_ = 0;  // minimum of the previous window
  TimeNs base_since_ = 0;

  bool muted_ = false;
  std::uint64_t swallowed_ = 0;  // frames taken by a muted rail, not sent
};

}  // namespace r2ccl
