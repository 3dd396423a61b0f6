// A communicator: ranks, their canonical reduction tree, and collectives over the links of the
// engine.  Calls of one communicator are one after another; different communicators are
// independent, also from different threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "base/types.hpp"
#include "collectives/link_channel.hpp"
#include "collectives/reduce.hpp"
#include "engine/engine.hpp"

namespace r2ccl {

class Communicator final : public LinkChannel {
 public:
  struct Member {
    std::uint32_t process = 0;
    int node = 0;
  };

  // `id` is the same on all ranks and used by no other communicator of the job.  The engine must
  // have all members but ourselves as peers.
  static Result<std::unique_ptr<Communicator>> create(std::shared_ptr<Engine> engine,
                                                      std::uint64_t id, std::string name, int rank,
                                                      const std::vector<Member>& members,
                                                      Simd simd);
  ~Communicator() override;

  // ---- collectives; counts in elements, buffers may be equal where collectives.hpp says so ----
  Status all_reduce(const std::byte* in, std::byte* out, std::size_t count, DType dtype,
                    ReduceOp op, Algorithm algorithm);
  Status all_gatherv(const std::byte* in, std::byte* out, std::span<const std::size_t> counts,
                     DType dtype);
  Status reduce_scatterv(const std::byte* in, std::byte* out, std::span<const std::size_t> counts,
                         DType dtype, ReduceOp op);
  Status broadcast(std::byte* data, std::size_t count, DType dtype, int root);
  Status gather(const std::byte* in, std::byte* out, std::span<const std::size_t> counts,
                DType dtype, int root);
  Status all_to_allv(const std::byte* in, std::span<const std::size_t> in_counts, std::byte* out,
                     std::span<const std::size_t> out_counts, DType dtype);
  Status send_to(const std::byte* data, std::size_t count, DType dtype, int peer);
  Status receive_from(std::byte* data, std::size_t count, DType dtype, int peer);
  Status barrier();

  // What a call with such a parameter would answer, before anything is sent.
  [[nodiscard]] Status check_rank(const char* field, int value) const;
  [[nodiscard]] Status check_counts(const char* field, std::span<const std::size_t> counts) const;

  // Whether collectives may work on memory that NICs reach and the CPU does not: each rank is a
  // node of its own, and has rails to all others that write memory by themselves.
  [[nodiscard]] Status check_direct() const;
  // Of the RDMA rails to all ranks, in an order that stays; 0 of one that is not connected.
  [[nodiscard]] std::vector<Epoch> rdma_epochs() const;
  // Of all communicators of the engine: as the engine's.
  Status register_dma_buf(std::span<std::byte> addresses, FileDescriptor dma_buf) {
    return engine_->register_dma_buf(addresses, std::move(dma_buf));
  }
  Status deregister_buffer(const std::byte* buffer) { return engine_->deregister_buffer(buffer); }

  // What a call that has waited for all members since then (of now_ns()) would be told, if there is
  // one: ok while it would wait.
  [[nodiscard]] Status check_waiting(TimeNs since) const;

  // Ends the call in progress, also that of another thread, and all later ones, on every rank.
  void abort(const std::string& text);
  // Waits until what was sent is delivered, at most linger_s, and leaves.
  void close(double linger_s);

  // ---- Channel, with the engine's lock taken ----
  Status send(int peer, std::span<const std::byte> data) override;
  Status expect(int peer, std::size_t skip, std::span<std::byte> memory) override;
  Result<std::span<const std::byte>> receive(int peer, std::size_t bytes) override;
  Status release(int peer) override;
  Status settle(int peer, std::size_t bytes) override;
  Status finish() override;
  [[nodiscard]] bool rendezvous() const override { return rendezvous_; }

 private:
  Communicator(std::shared_ptr<Engine> engine, std::uint64_t id, std::string name, int rank,
               Simd simd);

  // Runs one call: `body` is the algorithm, `bytes` the size of this rank's larger buffer.
  template <typename Body>
  Status run(const CallTag& tag, std::size_t bytes, Body body);
  // The journal knows the call as `noted`.
  template <typename Body>
  Status run_as(Collective noted, const CallTag& tag, std::size_t bytes, Body body);
  template <typename Body>
  Status carry_out_in_turn(const CallTag& tag, Body& body);
  template <typename Body>
  Status carry_out(const CallTag& tag, Body& body);
  // The engine's lock: a small call has it from beginning to end, but for its waits; of a large one
  // each step takes it, as others are not to wait while megabytes are added up.
  class Turn {
   public:
    explicit Turn(const Communicator& caller)
        : engine_(caller.in_turn_ ? nullptr : caller.engine_.get()) {
      if (engine_ != nullptr) engine_->lock();
    }
    ~Turn() {
      if (engine_ != nullptr) engine_->unlock();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Engine* const engine_;
  };
  // Until it ends, however that comes.
  class InTurn {
   public:
    explicit InTurn(bool& flag) : flag_(flag) { flag_ = true; }
    ~InTurn() { flag_ = false; }
    InTurn(const InTurn&) = delete;
    InTurn& operator=(const InTurn&) = delete;

   private:
    bool& flag_;
  };
  [[nodiscard]] CallTag collective_tag(Collective collective, DType dtype, ReduceOp op,
                                       std::size_t count, int root);
  Status begin(const CallTag& tag);
  Status conclude(Status status);
  [[nodiscard]] Peer* peer_of(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }

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

  const std::shared_ptr<Engine> engine_;
  const Simd simd_;
  ReductionTree tree_;
  std::vector<Peer*> peers_;  // by rank; null: ourselves
  std::vector<Peer*> others_;
  std::vector<std::uint32_t> sends_;  // point-to-point calls, by peer
  std::vector<std::uint32_t> receives_;

  std::mutex call_mutex_;  // held for a call
  std::uint32_t calls_ = 0;
  Collective noted_ = Collective::barrier;
  std::size_t call_bytes_ = 0;
  bool rendezvous_ = false;
  bool bulk_ = false;     // the call is large: all rails of all members need attention
  bool in_turn_ = false;  // the call has the engine's lock
  TimeNs looked_ = 0;     // at the clock, in this call
  unsigned rounds_per_yield_ = 1;
  TimeNs stalled_ = 0;
  JournalGroup* group_ = nullptr;
  bool closed_ = false;  // set with both locks held, so either protects it
};

}  // namespace r2ccl
