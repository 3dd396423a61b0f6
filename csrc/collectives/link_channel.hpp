// The Channel over links: one communicator's streams to each of its peers, its calls, and its
// failure, which is everybody's.  Classes derived from it wait and send the frames: the engine's
// channel and the simulator's.
#pragma once

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
#include "rails/rail.hpp"

namespace r2ccl {

class LinkChannel : public Channel {
 public:
  [[nodiscard]] std::uint64_t id() const { return id_; }
  [[nodiscard]] const std::string& name() const { return name_; }

  // Sticky: this and every later call ends with the error; all other ranks are told.
  void fail(ErrorCode code, const std::string& text);
  // Fails if what was posted has waited for a slot for too long because a fence does not complete:
  // the caller may have returned, and only the peer still waits.
  void check_slots();

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

  // Held for one step of a call: the lock of the links, where several threads use them.
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

  void add_member(Link* link);  // in rank order; null: ourselves

  // A call is what lies between begin_call() and end_call().
  Status begin_call(const CallTag& tag);
  Status end_call(Status status);

  // Until come(), which grows by what the peer sends, reaches `goal`, failed(), or check_liveness()
  // has something to say.
  virtual Status wait(int peer, const std::function<std::uint64_t()>& come, std::uint64_t goal) = 0;
  // Until done(), whatever has failed, but at most for so long.
  virtual void linger(TimeNs limit, const std::function<bool()>& done) = 0;
  [[nodiscard]] virtual TimeNs clock() const = 0;
  // The same, or a moment ago: near enough for deadlines of milliseconds.
  [[nodiscard]] virtual TimeNs recently() const { return clock(); }
  // The link has something to send.
  virtual void flush(int peer, TimeNs now) = 0;
  // As Rail::detach, of all rails to the peer.
  [[nodiscard]] virtual bool detach(int peer, const DetachScope& scope) = 0;
  // "rank 1" and "rail0@node1 DOWN (carrier_loss), …"
  [[nodiscard]] virtual std::string describe_peer(int peer) const = 0;
  [[nodiscard]] virtual std::string describe_rails(int peer) const = 0;
  virtual void on_failed(ErrorCode code, const std::string& text) = 0;

  [[nodiscard]] Status check_liveness(int awaited, TimeNs waiting_since) const;
  [[nodiscard]] Status lost(int peer, const char* what) const;
  [[nodiscard]] bool failed() const { return failed_ != ErrorCode::ok; }
  [[nodiscard]] Status failure() const { return {failed_, failure_text_}; }
  // Everything sent is acknowledged, and every acknowledgement that we owe is sent.
  [[nodiscard]] bool all_delivered() const;
  // Whoever waits for what is not delivered yet will wait in vain, and is told so.
  void leave();
  // Nothing of this communicator is kept or sent any more.
  void drop_streams();
  [[nodiscard]] const CallTag& tag() const { return tag_; }
  // Memory of the call that begins; a device's is one that copies may fail of.
  void works_on(const std::byte* in, const std::byte* out);

 private:
  struct Member {
    Link* link = nullptr;      // null: ourselves
    OutStream* out = nullptr;  // null: dropped
    InStream* in = nullptr;
    std::uint64_t call_position = 0;  // of the out stream when the call began
  };
  [[nodiscard]] Member& member(int peer) { return members_[static_cast<std::size_t>(peer)]; }
  Status detach_settled(int peer);
  // Until rails have let go of a caller's memory, though the peer may have gone meanwhile; not for
  // a fence that never completes.
  Status await_release(int peer, const char* what, const std::function<bool()>& released);
  [[nodiscard]] bool let_go();
  [[nodiscard]] bool delivered(const Member& peer) const;
  [[nodiscard]] Status mismatch(int peer, const InMessage& message, std::size_t bytes) const;

  const std::uint64_t id_;
  const std::string name_;
  const int rank_;
  const std::size_t segment_bytes_;
  const TimeNs link_timeout_;
  std::vector<Member> members_;
  CallTag tag_;
  const std::byte* of_device_ = nullptr;  // of the call's memory; null: all is the host's
  ErrorCode failed_ = ErrorCode::ok;
  std::string failure_text_;
};

}  // namespace r2ccl
