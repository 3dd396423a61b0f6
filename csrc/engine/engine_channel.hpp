// A communicator's Channel over the engine's links.  The channel takes the engine's lock, makes
// progress while a call waits, and records stalls and durations of calls in the journal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/errors.hpp"
#include "base/types.hpp"
#include "collectives/link_channel.hpp"
#include "engine/engine.hpp"

namespace r2ccl {

class EngineChannel final : public LinkChannel {
 public:
  // The engine must outlive the channel.
  EngineChannel(Engine& engine, std::uint64_t id, std::string name, int rank);

  // Runs a call.  `body` is the algorithm, `bytes` the size of this rank's larger buffer, `noted`
  // the collective recorded in the journal.  Calls of a channel are serialised.
  template <typename Body>
  Status call(Collective noted, const CallTag& tag, std::size_t bytes, const Body& body) {
    // A comparison is no call of the user.
    JournalGroup* const group = tag.kind == TagKind::call ? group_ : nullptr;
    begin(noted, bytes, group);
    Status status;
    if (bulk_) {
      status = run(tag, body);
    } else {
      const StepLock lock(*this);
      const LockHeld held(holds_lock_);
      looked_ = now_ns();  // another thread may have held the lock for long
      status = run(tag, body);
    }
    note_call_ends(group, bytes, now_ns(), !status.ok());
    return status;
  }
  // Notes the choice of the all-reduce in progress in the journal.
  void note_choice(const JournalChoice& choice) { r2ccl::note_choice(group_, choice); }
  // Sets the caller memory of the next call.
  using LinkChannel::works_on;
  void set_rendezvous(bool needed) { rendezvous_ = needed; }
  [[nodiscard]] bool rendezvous() const override { return rendezvous_; }
  Status expect(int peer, std::size_t skip, std::span<std::byte> memory) override;

  // ---- with the engine's lock held ----
  void add_peer(Peer* peer);  // in rank order; null: this rank
  using LinkChannel::set_nodes;
  // Registers the communicator with engine and journal; call after all add_peer() calls.
  void open();
  // Waits until everything sent is delivered, at most `limit`, and leaves the communicator.
  void close(TimeNs limit);
  // No caller waits in the channel any more: a signal concerns the call around, if any.
  void set_released() { released_ = true; }
  [[nodiscard]] bool released() const { return released_; }
  // Returns true once a close would not wait: everything is delivered, or the communicator failed.
  [[nodiscard]] bool settled() const { return failed() || all_delivered(); }
  // Returns the error of an exchange inside a node that has waited for other ranks since `since`;
  // ok while the exchange may go on waiting.
  [[nodiscard]] Status check_waiting(TimeNs since) const;
  [[nodiscard]] const std::vector<Peer*>& others() const { return others_; }

 private:
  // Marks the engine's lock as held for the whole call, except its waits, while in scope.
  class LockHeld {
   public:
    explicit LockHeld(bool& flag) : flag_(flag) { flag_ = true; }
    ~LockHeld() { flag_ = false; }
    LockHeld(const LockHeld&) = delete;
    LockHeld& operator=(const LockHeld&) = delete;

   private:
    bool& flag_;
  };

  void begin(Collective noted, std::size_t bytes, JournalGroup* group);
  // Runs a call.  An exception becomes an error, which ends the call on every rank.
  template <typename Body>
  Status run(const CallTag& tag, const Body& body) {
    R2CCL_TRY(enter(tag));
    try {
      prepare();
      return conclude(body());
    } catch (const std::exception& error) {
      return conclude_after(error);
    }
  }
  // Returns an error once the program around wants the call to end, or call_timeout_s has passed.
  Status check_patience(TimeNs now);
  // Returns whether a call that began at `since` has lasted for call_timeout_s.
  [[nodiscard]] bool has_waited_too_long(TimeNs since, TimeNs now) const;
  [[nodiscard]] Status waited_too_long(const std::string& call) const;
  [[nodiscard]] bool ask_to_end(TimeNs now);
  Status enter(const CallTag& tag);
  // Exchanges the losses of bandwidth; throws if memory runs out.
  void prepare();
  Status conclude(Status status);
  Status conclude_after(const std::exception& error);
  void await_memory();
  [[nodiscard]] Peer* peer_of(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }

  // A small call holds the engine's lock from beginning to end, except its waits.  A large call
  // takes the lock for each step, so that other threads need not wait while megabytes are reduced.
  void lock_step() override {
    if (!holds_lock_) engine_->lock();
  }
  void unlock_step() override {
    if (!holds_lock_) engine_->unlock();
  }

  // ---- LinkChannel, with the engine's lock held ----
  Status wait(int peer, const std::function<std::uint64_t()>& come, std::uint64_t goal) override;
  void linger(TimeNs limit, const std::function<bool()>& done) override;
  void give_way();
  static std::uint64_t disturbances_before(const Peer& peer);
  [[nodiscard]] TimeNs clock() const override;
  [[nodiscard]] TimeNs recently() const override;
  void flush(int peer, TimeNs now) override;
  bool detach(int peer, const DetachScope& scope) override;
  [[nodiscard]] std::string describe_peer(int peer) const override;
  [[nodiscard]] std::string describe_rails(int peer) const override;
  void on_failed(ErrorCode code, const std::string& text) override;
  void on_other_site(const std::string& text) override;
  [[nodiscard]] std::uint8_t loss_to_announce(const CallTag& tag) override;
  template <typename Visit>
  void each_rail_of_node(Visit visit) const;
  [[nodiscard]] std::uint8_t measure_loss() const;

  Engine* const engine_;
  std::vector<Peer*> peers_;  // by rank; null: this rank
  std::vector<Peer*> others_;
  Announcer announcer_;
  TimeNs loss_measured_ = 0;  // time of the last look at the states of all rails

  // State of the current call:
  Collective noted_ = Collective::barrier;
  std::size_t call_bytes_ = 0;
  bool rendezvous_ = false;
  bool bulk_ = false;        // large call: all rails of all members need attention
  bool holds_lock_ = false;  // the call holds the engine's lock
  TimeNs looked_ = 0;        // time of the last look at the clock
  TimeNs stalled_ = 0;
  TimeNs call_began_ = 0;
  TimeNs asked_ = 0;  // last call of interrupted()
  bool released_ = false;

  unsigned rounds_per_yield_ = 1;
  JournalGroup* group_ = nullptr;
};

}  // namespace r2ccl
