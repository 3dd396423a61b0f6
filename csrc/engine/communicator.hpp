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
#include "collectives/reduce.hpp"
#include "engine/engine.hpp"
#include "engine/engine_channel.hpp"

namespace r2ccl {

class Communicator {
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
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] std::uint64_t id() const { return channel_.id(); }
  [[nodiscard]] const std::string& name() const { return channel_.name(); }
  [[nodiscard]] int rank() const { return channel_.rank(); }
  [[nodiscard]] int size() const { return channel_.size(); }

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

  // Validates an argument of a call: the error that the call would return.
  [[nodiscard]] Status check_rank(const char* field, int value) const;
  [[nodiscard]] Status check_counts(const char* field, std::span<const std::size_t> counts) const;

  // Whether collectives may work on memory that NICs reach and the CPU does not: each rank is a
  // node of its own, and has rails to all others that write memory by themselves.
  [[nodiscard]] Status check_direct() const;
  // Of the RDMA rails to all ranks, in an order that stays; 0 of one that is not connected.
  [[nodiscard]] std::vector<Epoch> rdma_epochs() const;
  // Shared by all communicators of the engine; see Engine::register_dma_buf().
  Status register_dma_buf(std::span<std::byte> addresses, FileDescriptor dma_buf) {
    return engine_->register_dma_buf(addresses, std::move(dma_buf));
  }
  Status deregister_buffer(const std::byte* buffer) { return engine_->deregister_buffer(buffer); }

  // The error of a call that has waited for all members since then (of now_ns()); ok while it would
  // wait.
  [[nodiscard]] Status check_waiting(TimeNs since) const;

  // Ends the call in progress, also that of another thread, and all later ones, on every rank.
  void abort(const std::string& text);
  // Waits until what was sent is delivered, at most linger_s, and leaves.
  void close(double linger_s);

 private:
  Communicator(std::shared_ptr<Engine> engine, std::uint64_t id, std::string name, int rank,
               Simd simd);

  // One call of channel_, of a communicator that is open.
  template <typename Body>
  Status run(Collective noted, const CallTag& tag, std::size_t bytes, const Body& body);
  [[nodiscard]] CallTag collective_tag(Collective collective, DType dtype, ReduceOp op,
                                       std::size_t count, int root);

  const std::shared_ptr<Engine> engine_;
  const Simd simd_;
  ReductionTree tree_;
  std::vector<std::uint32_t> sends_;  // point-to-point calls, by peer
  std::vector<std::uint32_t> receives_;

  std::mutex call_mutex_;  // held for a call
  std::uint32_t calls_ = 0;
  EngineChannel channel_;
  bool closed_ = false;  // set with both locks held, so either protects it
};

}  // namespace r2ccl
