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

#include "collectives/channel.hpp"
#include "collectives/reduce.hpp"
#include "engine/engine.hpp"
#include "r2ccl/errors.hpp"
#include "r2ccl/types.hpp"

namespace r2ccl {

class Communicator final : public Channel {
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

  // --- collectives; counts in elements, buffers may be equal where collectives.hpp says so
  // --------
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

  // Waits until what was sent is delivered, at most linger_s, and leaves.
  void close(double linger_s);

  // Sticky: this and every later call ends with the error; all other ranks are told.  With the
  // engine's lock held.
  void fail(ErrorCode code, const std::string& text, TimeNs now);

  [[nodiscard]] std::uint64_t id() const { return id_; }
  [[nodiscard]] const std::string& name() const { return name_; }

  // --- Channel -----------------------------------------------------------------------------------
  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return static_cast<int>(members_.size()); }
  [[nodiscard]] std::size_t segment_bytes() const override { return segment_bytes_; }
  Status send(int peer, std::span<const std::byte> data) override;
  Result<std::span<const std::byte>> receive(int peer, std::size_t bytes) override;
  Status release(int peer) override;
  Status settle(int peer, std::size_t bytes) override;
  Status finish() override;

 private:
  struct Endpoint {
    Peer* peer = nullptr;  // null: ourselves
    OutStream* out = nullptr;
    InStream* in = nullptr;
    std::uint64_t call_position = 0;  // of the out stream when the call began
    std::uint32_t sends = 0;          // point-to-point calls with this peer
    std::uint32_t receives = 0;
  };

  Communicator(std::shared_ptr<Engine> engine, std::uint64_t id, std::string name, int rank,
               Simd simd);

  // Runs one call: `body` is the algorithm, `bytes` the size of this rank's larger buffer.
  template <typename Body>
  Status run(const CallTag& tag, std::size_t bytes, Body body);
  [[nodiscard]] CallTag collective_tag(Collective collective, DType dtype, ReduceOp op,
                                       std::size_t count, int root);
  Status conclude(Status status);
  template <typename Done>
  Status wait(Endpoint& endpoint, Engine::Lock& lock, Done done);
  Status check_liveness(const Peer& awaited, TimeNs waiting_since, TimeNs now);
  [[nodiscard]] Status failure() const;
  [[nodiscard]] Status mismatch(int peer, const CallTag& theirs, std::size_t their_bytes,
                                std::size_t bytes);
  [[nodiscard]] Status check_rank(const char* field, int value) const;
  [[nodiscard]] Status check_counts(const char* field, std::span<const std::size_t> counts) const;
  [[nodiscard]] std::string label(int rank) const;

  const std::shared_ptr<Engine> engine_;
  const std::uint64_t id_;
  const std::string name_;
  const int rank_;
  const Simd simd_;
  std::size_t segment_bytes_ = 0;
  ReductionTree tree_;
  std::vector<Endpoint> members_;
  std::vector<Peer*> peers_;  // of the members

  std::mutex call_mutex_;  // held for a call
  CallTag tag_;
  std::uint32_t calls_ = 0;
  std::size_t call_bytes_ = 0;
  bool bulk_ = false;  // the call is large: all rails of all members need attention
  TimeNs stalled_ = 0;

  ErrorCode failed_ = ErrorCode::ok;  // engine's lock
  std::string failure_text_;
  bool closed_ = false;
};

}  // namespace r2ccl
