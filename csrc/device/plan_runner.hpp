// The proxy's side of a StreamCommunicator: carries out posted collectives on communicators of the
// host.  Callers' threads add plans; everything else belongs to the proxy's thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "base/units.hpp"
#include "device/direct_memory.hpp"
#include "device/kernel_bodies.hpp"
#include "drivers/cuda_device.hpp"
#include "engine/communicator.hpp"

namespace r2ccl::device {

// What the proxy does at a command: a collective, or the begin or end of a step of the engine.
enum class Work : std::uint8_t { call, begin_step, end_step };

// The proxy's work for a posted collective, or for a step.
struct Plan {
  Work work = Work::call;
  Collective collective = Collective::barrier;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  Algorithm algorithm = Algorithm::automatic;
  int root = 0;                          // or the peer of send and recv
  std::vector<std::size_t> counts = {};  // elements: a single count, or a count per rank
  bool inter_node = false;               // runs on the inter-node group, not on all ranks
  bool unreduced = false;                // shards arrive unreduced; kernels reduce the shards
  bool direct = false;                   // staged in GPU memory (GPUDirect)
  bool captured = false;                 // part of a graph: carried out at every replay
  std::uint16_t capture = 0;             // number among captured plans, equal on all ranks; 0: none
  std::uint32_t step = 0;                // begin_step: the step, and a text for errors
  std::string about = {};
};

class PlanRunner {
 public:
  // The objects that the runner uses.  All of them outlive the runner.
  struct Context {
    const Mailbox& mailbox;
    Communicator& communicator;
    Communicator* inter_node;  // null without exchange inside the node
    Staging pinned;            // staging in pinned host memory
    Staging direct;            // staging in GPU memory
    const DirectMemory& direct_memory;
    const cuda::Device& device;
  };

  explicit PlanRunner(const Context& context) : context_(context) {}
  PlanRunner(const PlanRunner&) = delete;
  PlanRunner& operator=(const PlanRunner&) = delete;

  // Stores a plan and returns its number, by which kernels post the plan.  Thread-safe.
  std::uint32_t add(Plan plan);
  // Returns the number of steps that have ended without a mismatch.  Thread-safe.
  [[nodiscard]] std::uint64_t steps_compared() const {
    return steps_compared_.load(std::memory_order_acquire);
  }

  // ---- proxy thread only ----
  // Carries out plan `number` on the staging entry of `sequence`.
  Status run(std::uint32_t number, Sequence sequence);
  // Makes NIC writes of the last run() visible to kernels.  Returns an error if a copy of GPU
  // memory has failed.
  Status flush();
  // While an exchange is open, checks that the ranks of this node are alive, and that the exchange
  // has not waited for call_timeout_s.  Only kernels wait for these ranks, so no host call would
  // notice.  On an error also aborts the inter-node group, and after a timeout all ranks.
  Status watch();

 private:
  [[nodiscard]] Communicator& among(const Plan& plan) const {
    return plan.inter_node ? *context_.inter_node : context_.communicator;
  }
  Status carry_out(const Plan& plan, std::byte* in, std::byte* out);
  Status call(const Plan& plan, std::byte* in, std::byte* out);
  Status begin_step(const Plan& plan);
  Status end_step();

  const Context context_;

  std::mutex mutex_;  // protects the plans
  std::deque<Plan> plans_;
  std::vector<std::uint32_t> free_plans_;
  std::uint16_t captures_ = 0;  // number of the last captured plan
  std::atomic<std::uint64_t> steps_compared_ = 0;

  bool written_by_nics_ = false;  // the last run() was staged in GPU memory
  TimeNs inside_since_ = 0;       // first watch() of the open exchange; 0 = none is open
  Sequence inside_after_ = 0;     // last exchange ended before the open exchange
};

}  // namespace r2ccl::device
