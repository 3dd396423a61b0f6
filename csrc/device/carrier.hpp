// The proxy's side of a StreamCommunicator: carries out, on the host's communicators, what kernels
// post.  Plans come from the threads of callers; everything else is of the proxy's thread alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "base/units.hpp"
#include "device/direct_memory.hpp"
#include "device/kernel_bodies.hpp"
#include "drivers/cuda_device.hpp"
#include "engine/communicator.hpp"

namespace r2ccl::device {

// What the proxy is to do with an entry.
struct Plan {
  Collective collective = Collective::barrier;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  Algorithm algorithm = Algorithm::automatic;
  int root = 0;                     // or the peer
  std::vector<std::size_t> counts;  // of elements: one, or one for each rank
  bool inter_node = false;          // and not of all ranks
  bool unreduced = false;           // shards arrive as they were sent: kernels add them up
  bool direct = false;              // staged in the GPU's own memory
  bool captured = false;            // into a graph: carried out again and again
};

class Carrier {
 public:
  // All of it outlives the carrier, and does not change.
  struct Context {
    const Mailbox& mailbox;
    Communicator& communicator;
    Communicator* inter_node;  // null: no exchange inside the node
    Staging pinned;            // entries in the host's memory
    Staging direct;            // and in the GPU's own
    const DirectMemory& direct_memory;
    const cuda::Device& device;
  };

  explicit Carrier(const Context& context) : context_(context) {}
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

  // From any thread: the number by which a kernel posts the plan.
  std::uint32_t add(Plan plan);

  // ---- of the proxy's thread ----
  // Carries out plan `number` on the entry of `sequence`.
  Status carry(std::uint32_t number, Sequence sequence);
  // Makes what NICs wrote in the last carry() visible to kernels.
  Status flush();
  // No call of the host waits for the ranks of this node, so their presence is checked here.
  Status watch();

 private:
  [[nodiscard]] Communicator& among(const Plan& plan) const {
    return plan.inter_node ? *context_.inter_node : context_.communicator;
  }
  Status carry_out(const Plan& plan, std::byte* in, std::byte* out);

  const Context context_;

  std::mutex mutex_;  // of the plans
  std::deque<Plan> plans_;
  std::vector<std::uint32_t> free_plans_;

  bool written_by_nics_ = false;
  TimeNs inside_since_ = 0;  // an exchange
};

}  // namespace r2ccl::device
