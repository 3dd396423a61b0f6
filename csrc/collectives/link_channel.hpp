// A Channel over links: the streams of a communicator to each peer, the current call, and the
// failure, which is the same on all ranks.  Derived classes wait and send frames: EngineChannel of
// the engine and SimChannel of the simulator.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "base/types.hpp"
#include "collectives/channel.hpp"
#include "link/link.hpp"
#include "plan/bandwidths.hpp"
#include "rails/rail.hpp"

namespace r2ccl {

class LinkChannel : public Channel {
 public:
  [[nodiscard]] std::uint64_t id() const { return id_; }
  [[nodiscard]] const std::string& name() const { return name_; }

  // Marks the communicator as failed and notifies all ranks.  This call and every later call return
  // the error.  If memory for the notices runs out, an exception leaves fail(), and a repeated call
  // or check_slots() notifies the remaining ranks.
  void fail(ErrorCode code, const std::string& text);
  // Fails the communicator by the notice of a peer, unless it has failed already.  The notice of an
  // order mismatch also contains the peer's position, which every rank adds to its error.
  void on_abort(const AbortNotice& notice);
  // Sets the comparison of positions, and the open step with a text for errors, such as the ids of
  // its requests.  Step 0: none is open.
  void set_consensus(Consensus consensus) { consensus_ = consensus; }
  void set_step(std::uint32_t step, std::string about);
  // Notifies ranks that do not know of a failure yet.
  // Fails the communicator if posted bytes have waited for a slot for link_timeout because a fence
  // does not complete.  The call may have returned already: copied bytes still wait, and only the
  // peer notices.
  void check_slots();
  // Returns ok while every member is present; needs no call.  peer_lost: a member had no rail for
  // link_timeout.  Other codes: a member has closed its links, or the communicator failed.
  [[nodiscard]] Status check_members() const;

  // Returns the shares for the bandwidths of the nodes, the same on all ranks within a call.
  [[nodiscard]] const Shares& shares() const { return bandwidths_.shares(); }
  // Returns the losses of the nodes by which a call goes, the same on all ranks within the call.
  // Empty: nodes announce none.
  [[nodiscard]] std::span<const std::uint8_t> lost_in_use() const { return bandwidths_.lost(); }
  // Sets the algorithm of the call in progress, before its first message.  Ranks with different
  // algorithms get an order mismatch.
  void set_algorithm(Algorithm algorithm);
  // Returns the losses of the nodes that the last call has announced and the next call goes by.
  // Call between two calls.
  [[nodiscard]] std::vector<std::uint8_t> lost_bandwidths();

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return static_cast<int>(members_.size()); }
  [[nodiscard]] std::size_t segment_bytes() const override { return segment_bytes_; }
  Status send(int peer, std::span<const std::byte> data) override;
  Status expect(int peer, std::size_t skip, std::span<std::byte> memory) override;
  Result<std::span<const std::byte>> receive(int peer, std::size_t bytes) override;
  Status release(int peer) override;
  Status settle(int peer, std::size_t bytes) override;
  Status finish() override;

 protected:
  LinkChannel(std::uint64_t id, std::string name, int rank, std::size_t segment_bytes,
              TimeNs link_timeout)
      : id_(id),
        name_(std::move(name)),
        rank_(rank),
        segment_bytes_(segment_bytes),
        link_timeout_(link_timeout) {}

  // Guard for a step of a call.  Holds the lock of the links if several threads use the links.
  class StepLock {
   public:
    explicit StepLock(LinkChannel& channel) : channel_(channel) { channel_.lock_step(); }
    ~StepLock() { channel_.unlock_step(); }
    StepLock(const StepLock&) = delete;
    StepLock& operator=(const StepLock&) = delete;

   private:
    LinkChannel& channel_;
  };
  virtual void lock_step() {}
  virtual void unlock_step() {}

  void add_member(Link* link);  // in rank order; null: this rank
  // Sets the index of each rank's node, counted from 0.  Without nodes, shares stay even.
  void set_nodes(std::vector<std::uint16_t> node_of_rank);
  [[nodiscard]] const NodeBandwidths& bandwidths() const { return bandwidths_; }
  // Returns the loss to announce in a full exchange that begins now, in sixteenths.
  [[nodiscard]] virtual std::uint8_t loss_to_announce(const CallTag& tag) {
    return tag.lost_bandwidth;
  }

  // begin_call() starts a collective call.  end_call() finishes the call with its outcome `status`;
  // an error fails the communicator and releases the caller's memory.
  Status begin_call(const CallTag& tag);
  Status end_call(Status status);
  // Takes the losses announced in the call before into use, and announces the own loss.  Call after
  // begin_call(), before the first message.
  void exchange_bandwidths();
  // Marks the end of a call that needs no end_call().  Needs no lock.
  void note_call_ended() { in_call_.store(false, std::memory_order_relaxed); }

  // Waits until come() reaches `goal`.  come() is a counter advanced by frames of the peer.
  // Returns early if the communicator fails or check_liveness() returns an error.
  virtual Status wait(int peer, const std::function<std::uint64_t()>& come, std::uint64_t goal) = 0;
  // Waits until done() or for `limit`, regardless of failures.
  virtual void linger(TimeNs limit, const std::function<bool()>& done) = 0;
  [[nodiscard]] virtual TimeNs clock() const = 0;
  // Returns a recent reading of the clock, accurate enough for deadlines of milliseconds.
  [[nodiscard]] virtual TimeNs recently() const { return clock(); }
  // Sends the frames queued in the link to `peer`.
  virtual void flush(int peer, TimeNs now) = 0;
  // Calls Rail::detach() on all rails to the peer.  Returns true if all have detached.
  [[nodiscard]] virtual bool detach(int peer, const DetachScope& scope) = 0;
  // Return texts for errors, for example "rank 1" and "rail0@node1 DOWN (carrier_loss), …".
  [[nodiscard]] virtual std::string describe_peer(int peer) const = 0;
  [[nodiscard]] virtual std::string describe_rails(int peer) const = 0;
  virtual void on_failed(ErrorCode code, const std::string& text) = 0;
  // The call has another site at the peer than here, and sites are compared without an error.
  virtual void on_other_site(const std::string& text) = 0;

  // Returns an order mismatch if ranks that only wait for each other never end a wait that began at
  // `since`, because their programs have parted.  Compares once a wait has lasted for a second.
  [[nodiscard]] Status compare_waits(int awaited, TimeNs since, TimeNs now);
  // Returns an error if a device copy failed, the awaited peer closed, or any peer is lost.
  [[nodiscard]] Status check_liveness(int awaited, TimeNs waiting_since) const;
  // Returns peer_lost if a member has had no rail for link_timeout within a wait since
  // `waiting_since`.
  [[nodiscard]] Status check_rails(TimeNs waiting_since) const;
  // Returns peer_lost with the reason `what` and the states of the rails.
  [[nodiscard]] Status lost(int peer, const char* what) const;
  [[nodiscard]] bool failed() const { return failed_ != ErrorCode::ok; }
  [[nodiscard]] Status failure() const;
  // Returns true if each peer has confirmed all sends, and all acks due to the peer are sent.
  // Peers that have closed, or have had no rail for link_timeout, do not count.
  [[nodiscard]] bool all_delivered() const;
  // Leaves the communicator: aborts it at peers with undelivered messages, then drops all streams.
  void leave();
  // Reclaims memory from the rails and closes the streams.
  void drop_streams();
  [[nodiscard]] const CallTag& tag() const { return tag_; }
  // Sets the buffers of the next call.  A failed copy of device memory fails the call.
  void works_on(const std::byte* in, const std::byte* out);

 private:
  struct Member {
    Link* link = nullptr;      // null: this rank
    OutStream* out = nullptr;  // null: streams dropped
    InStream* in = nullptr;
    std::uint64_t call_position = 0;    // position of the out stream at begin_call()
    std::string program_position = {};  // after an order mismatch; empty: not heard of
    bool told = false;                  // of the failure
  };
  [[nodiscard]] Member& member(int peer) { return members_[static_cast<std::size_t>(peer)]; }
  Status detach_settled(int peer);
  // Waits until released() confirms that no rail uses a caller's memory; continues after the loss
  // of the peer.  Returns an error if a fence does not complete within link_timeout.
  Status await_release(int peer, const char* what, const std::function<bool()>& released);
  [[nodiscard]] bool let_go();
  [[nodiscard]] bool delivered(const Member& peer) const;
  [[nodiscard]] Status mismatch(int peer, const InMessage& message, std::size_t bytes) const;
  [[nodiscard]] bool same_site(int peer, const CallTag& tag);
  [[nodiscard]] bool heard_all() const;
  [[nodiscard]] bool has_passed(const CallTag& tag) const;
  [[nodiscard]] static const StreamWait* lasting_wait(const Member& of);
  Status settle_to(int peer, std::uint64_t position);
  [[nodiscard]] std::string position() const;
  void add_position(const std::string& text);
  void tell_all();
  void collect_positions();

  const std::uint64_t id_;
  const std::string name_;
  const int rank_;
  const std::size_t segment_bytes_;
  const TimeNs link_timeout_;
  std::vector<Member> members_;
  NodeBandwidths bandwidths_;
  std::vector<std::uint8_t> announced_;  // by rank, in the last full exchange
  bool heard_all_ = false;               // the announcements are not in use yet
  CallTag tag_;
  const std::byte* of_device_ = nullptr;  // device buffer of the call; null: host memory only
  ErrorCode failed_ = ErrorCode::ok;
  std::string failure_text_;
  std::string failure_notice_;
  bool telling_ = false;  // some ranks are not told of the failure yet
  Consensus consensus_ = Consensus::off;
  std::atomic<bool> in_call_ = false;
  bool has_called_ = false;
  std::uint32_t step_ = 0;  // the open step and its requests, for errors
  std::string about_;
  unsigned other_sites_ = 0;  // warnings about differing call sites so far
  bool collected_ = false;    // positions of all ranks, or the wait for them has ended
  bool receiving_ = false;    // the current wait is for a message
  // If not: the position of the out stream that was awaited last.
  std::uint64_t settling_ = 0;
  TimeNs told_at_ = 0;  // the last wait told to a peer: when, and of which chain
  std::uint32_t told_chain_ = 0;
};

}  // namespace r2ccl
