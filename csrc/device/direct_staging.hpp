// Staging in the memory of the GPU, which NICs read and write (GPUDirect).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/errors.hpp"
#include "base/types.hpp"
#include "device/direct_memory.hpp"
#include "device/fold.hpp"
#include "device/mailbox.hpp"
#include "drivers/cuda_device.hpp"
#include "engine/communicator.hpp"

namespace r2ccl::device {

// Staging in the GPU's own memory; the same on all ranks.
struct DirectOptions {
  enum class Use : std::uint8_t { never, where_possible, always };
  Use use = Use::where_possible;
  // Of what a rank sends to another one, at least: the host reads what is small itself, and has to
  // have that copied.
  std::uint64_t from_bytes = 64U << 10U;
};

// Where entries are, as kernels and as the communicator know them; the same memory.
struct Buffers {
  Staging device;
  Staging host;
};

class DirectStaging {
 public:
  // Collective: whether NICs reach the memory of everybody's GPU.  `inter_node`: null, or the ranks
  // of this rank's local rank on their nodes.  An error: the ranks are of no use any more.
  Status open(Communicator& communicator, Communicator* inter_node, const cuda::Device& device,
              std::uint64_t staging_bytes, const DirectOptions& options);
  void withdraw();

  // Why nothing is staged in the GPU's own memory; ok if what is large is.
  [[nodiscard]] const Status& failure() const { return failure_; }
  [[nodiscard]] bool among_all() const { return among_all_; }
  [[nodiscard]] bool inter_node() const { return inter_node_; }
  [[nodiscard]] std::uint64_t from_bytes() const { return from_bytes_; }
  [[nodiscard]] const DirectMemory& memory() const { return memory_; }
  [[nodiscard]] Buffers& buffers() { return buffers_; }

  // Whether a transfer of `bytes` to each peer is direct, where that is possible.
  [[nodiscard]] bool goes(bool possible, std::uint64_t bytes) const {
    return possible && bytes >= from_bytes_;
  }
  // The same of a collective that adds up.
  [[nodiscard]] bool adds_up(bool possible, std::uint64_t bytes, ReduceOp op,
                             std::size_t ranks) const {
    return goes(possible, bytes) && op != ReduceOp::avg && ranks <= most_local_peers;
  }

 private:
  Status register_memory(const cuda::Device& device, std::uint64_t staging_bytes);
  // Collective: why NICs do not write there what is sent; empty: they do.  An error: the ranks are
  // of no use any more.
  Result<std::string> try_out(Communicator& ranks, std::uint64_t staging_bytes);

  Communicator* communicator_ = nullptr;
  Status failure_;
  bool among_all_ = false;
  bool inter_node_ = false;
  std::uint64_t from_bytes_ = 0;
  DirectMemory memory_;
  Buffers buffers_;
};

}  // namespace r2ccl::device
