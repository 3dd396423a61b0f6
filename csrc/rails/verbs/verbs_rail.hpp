// Moves frames between a link and one epoch of a rail that is an RDMA queue pair.
//
// A frame is an RDMA WRITE WITH IMMEDIATE of its header into an entry of the peer's ring, together
// with a small payload; a larger one goes ahead of it, by an RDMA WRITE into its slot.  The
// receiver finds a header only when all that was written before it on the same queue pair is in
// memory.  The immediate tells how many frames the other direction has consumed: entries of its
// ring that may be written again, and attempts that have landed.
//
//   bit 31      nothing but credit
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

  // The session is connected, with its receives posted.  `liveness_socket`: a TCP connection to the
  // peer's process, which says when that is gone; invalid: there is none.  `note` is told why a
  // device gives the rail up.
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

  // Of the queue pair; 0: it is being fenced.
  [[nodiscard]] std::uint32_t number() const {
    return session_->pair ? session_->pair->number() : 0;
  }
  // What the epoch's peer reaches this end by.
  [[nodiscard]] const VerbsAddress& address() const { return session_->own; }

 private:
  static constexpr std::uint32_t batch = 16;
  static constexpr int no_bounce = -1;

  // A frame on its way.
  struct InFlightFrame {
    FrameHeader header{};
    std::uint64_t position = 0;  // of the epoch's byte stream, after it
    TimeNs posted_at = 0;
    int bounce = no_bounce;
    bool reads_zero_copy = false;  // the device reads a caller's memory
  };

  [[nodiscard]] bool open() const;  // the epoch is
  [[nodiscard]] bool has_room() const;
  void post(OutFrame& frame, TimeNs now);
  void add_key(FrameHeader& header) const;
  bool place(const OutFrame& frame, InFlightFrame& flight, VerbsWrite& write);
  void fail_to_copy(TimeNs now);
  void send_credit(TimeNs now);
  // False: the epoch is over.
  bool take(const VerbsCompletion& completion, TimeNs now);
  bool take_sent(const VerbsCompletion& completion, TimeNs now);
  bool take_arrived(const VerbsCompletion& completion, TimeNs now);
  bool take_credit(std::uint32_t consumed, TimeNs now);
  bool take_frame(std::uint32_t bytes, TimeNs now);
  void measure(TimeNs sample, TimeNs now);
  bool fail(RailCause cause, const std::string& why, TimeNs now);  // false

  Link& link_;
  const RailId rail_;
  const Epoch epoch_;
  const std::unique_ptr<VerbsSession> session_;
  const FileDescriptor liveness_socket_;
  const Note note_;

  std::array<InFlightFrame, ring_frames> frames_in_flight_;  // by frame number modulo their count
  std::uint64_t sent_ = 0;                                   // frames
  std::uint64_t completed_ = 0;                              // of these, taken by the peer's device
  std::uint64_t credited_ = 0;                               // of these, consumed by the peer
  std::uint64_t position_ = 0;                               // bytes of all frames sent
  std::uint64_t acked_position_ = 0;
  std::array<bool, bounce_chunks> bounce_used_{};

  std::uint64_t consumed_ = 0;     // frames of the peer
  std::uint64_t credit_sent_ = 0;  // of these, the peer knows
  bool credit_in_flight_ = false;
  std::uint32_t receives_due_ = 0;
  std::deque<VerbsCompletion> early_;  // found while going to sleep

  TimeNs recall_asked_ = 0;  // since when a caller waits for its memory; 0: none does

  TimeNs round_trip_ = 0;
  TimeNs base_ = 0;       // the lowest of this window
  TimeNs last_base_ = 0;  // and of the one before
  TimeNs base_since_ = 0;

  bool muted_ = false;
  std::uint64_t swallowed_ = 0;  // frames that a muted rail pretended to send
};

}  // namespace r2ccl
