// A communicator: ranks, their canonical reduction tree, and collectives over the engine's links.
// Thread-safe: calls of a communicator are serialised, and different communicators are independent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "base/fork.hpp"
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

  // Creates a communicator.  `id` is equal on all ranks and unique within the job.  The engine must
  // have all other members as peers.
  static Result<std::unique_ptr<Communicator>> create(std::shared_ptr<Engine> engine,
                                                      std::uint64_t id, std::string name, int rank,
                                                      const std::vector<Member>& members,
                                                      Simd simd);
  // Leaves the communicator without a wait.  The engine delivers what was sent.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] std::uint64_t id() const { return channel_->id(); }
  [[nodiscard]] const std::string& name() const { return channel_->name(); }
  [[nodiscard]] int rank() const { return channel_->rank(); }
  [[nodiscard]] int size() const { return channel_->size(); }

  // ---- collectives; counts in elements, buffers may be equal where collectives.hpp says so ----
  // Return ok with the result complete.  An invalid argument is reported before anything is sent.
  // Every other error is sticky: all later calls on every rank return the error.
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

  // ---- the comparison of positions (R2CCL_CONSENSUS); without effect if it is off ----
  // Ends the open step and begins step `step`, above 0.  `about` names the step's requests in
  // errors.  Without `compare` the open step ends without a comparison: stages of a pipeline must
  // not wait for each other.
  Status begin_step(std::uint32_t step, std::string about, bool compare = true);
  // Sets the number of the captured plan that the next call of all ranks carries out, from 1 to
  // most_captures.  0: no plan.  Once compare_captures() was called, ranks that replay different
  // graphs get an error.  Only groups whose ranks all replay the same graphs may call it, on all
  // ranks.
  void set_capture(std::uint16_t capture) {
    if (captures_compared_) capture_ = capture;
  }
  void compare_captures() { captures_compared_ = consensus() >= Consensus::step; }
  // Counts a call of the open step that carries out captured plan `capture` (0: none) on another
  // communicator, so that the end of the step compares this call as well.
  void count_call(std::uint16_t capture);
  // Sends the position after the last call of the step: end_step() then need not wait for a rank
  // that is busy after this call.  No rank may make a call in between.
  Status post_position();
  // Ends the open step: every rank compares the step, the number of its calls and its captured
  // calls with every other rank.  All ranks call.  Without an open step nothing happens.  Without
  // `compare` no message is sent.
  Status end_step(bool compare = true);

  // Returns invalid_argument in a forked child; every call does the same.
  [[nodiscard]] Status check_origin() const { return origin_.check("communicator"); }
  [[nodiscard]] Consensus consensus() const { return engine_->config().consensus; }

  // Validate an argument of a call; return the error that the call would return.  `field` is the
  // argument's name in the error text.
  [[nodiscard]] Status check_rank(const char* field, int value) const;
  [[nodiscard]] Status check_counts(const char* field, std::span<const std::size_t> counts) const;

  // Returns ok if collectives can use GPUDirect: every rank is alone on its node, and
  // Engine::check_reach() accepts all other ranks.  Else returns invalid_argument with the reason.
  [[nodiscard]] Status check_direct() const;
  // Returns the losses of bandwidth that the next call goes by, by node in sixteenths.  Empty:
  // shares stay even, because there are fewer than three nodes or nodes of different size.
  [[nodiscard]] std::vector<std::uint8_t> lost_bandwidths();
  // Returns the epochs of the RDMA rails to all ranks, ordered by rank and rail; 0 for a rail not
  // connected.
  [[nodiscard]] std::vector<Epoch> rdma_epochs() const;
  // Registers GPU memory for all communicators of the engine; see Engine::register_dma_buf().
  Status register_dma_buf(std::span<std::byte> addresses, FileDescriptor dma_buf) {
    return engine_->register_dma_buf(addresses, std::move(dma_buf));
  }
  // See Engine::deregister_buffer().
  Status deregister_buffer(const std::byte* buffer) { return engine_->deregister_buffer(buffer); }

  // Returns the error of an exchange inside a node that has waited for other ranks since `since`
  // (time of now_ns()); ok while the exchange may go on waiting.
  [[nodiscard]] Status check_waiting(TimeNs since) const;

  // Ends the call in progress and all later calls on every rank, with the error `aborted`.
  // Callable from any thread, also during a call.
  void abort(const std::string& text);
  // Waits until everything sent is delivered, at most linger_s seconds, and leaves the
  // communicator.  Later calls return invalid_argument.
  void close(double linger_s);

 private:
  Communicator(std::shared_ptr<Engine> engine, std::uint64_t id, std::string name, int rank,
               Simd simd);

  // Runs a call of channel_; returns an error if the communicator is closed.
  template <typename Body>
  Status run(Collective noted, const CallTag& tag, std::size_t bytes, const Body& body);
  // Returns the algorithm of the all-reduce in progress, chosen if `given` is automatic.  All ranks
  // have taken the same losses into use, and therefore choose the same.  Notes the choice.
  Algorithm choose(Algorithm given, std::size_t bytes);
  [[nodiscard]] SharesReason shares_reason(Algorithm algorithm, std::size_t bytes,
                                           bool any_lost) const;
  // Return the tag of the next call: of all ranks alike, with a root, or of a pair of ranks.
  [[nodiscard]] CallTag flat_tag(Collective collective, DType dtype, ReduceOp op,
                                 std::size_t count);
  [[nodiscard]] CallTag rooted_tag(Collective collective, DType dtype, std::size_t count, int root);
  [[nodiscard]] CallTag pair_tag(DType dtype, std::size_t count, std::uint32_t& number);
  std::uint16_t next_call(std::uint16_t capture);
  Status close_step();
  [[nodiscard]] CallTag position();
  Status post_tag(const CallTag& tag);
  Status receive_posted();
  // Compares the hash of each N-th result with all ranks (R2CCL_CONSENSUS_RESULT).
  Status compare_result(Status status, const CallTag& tag, const std::byte* result,
                        std::size_t bytes);

  const Origin origin_;
  const std::shared_ptr<Engine> engine_;
  const Simd simd_;
  ReductionTree tree_;
  std::vector<std::uint32_t> sends_;  // numbers of point-to-point calls, by peer
  std::vector<std::uint32_t> receives_;

  std::mutex call_mutex_;  // held during a call
  std::uint32_t calls_ = 0;
  std::uint32_t step_ = 0;     // open step; 0: none
  std::uint32_t results_ = 0;  // results that compare_result() could compare
  std::atomic<bool> captures_compared_ = false;
  std::optional<CallTag> posted_;    // position sent and not compared yet
  std::uint16_t capture_ = 0;        // captured plan of the next call; 0: none
  std::uint16_t step_calls_ = 0;     // calls of the open step
  std::uint64_t step_captures_ = 0;  // digest of the captured calls of the open step, in order
  std::unique_ptr<EngineChannel> channel_;
  bool closed_ = false;  // set under call_mutex_ and the engine's lock; either protects reads
};

}  // namespace r2ccl
