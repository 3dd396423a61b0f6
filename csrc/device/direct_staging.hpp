// Staging in GPU memory that NICs read and write (GPUDirect).
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

// Use of staging in GPU memory; the same on all ranks.
struct DirectOptions {
  enum class Use : std::uint8_t { never, where_possible, always };
  Use use = Use::where_possible;
  // Smallest transfer per peer that uses GPUDirect, in bytes.  Rails copy small payloads on the
  // host; each copy from GPU memory would need the GPU's copy engine.
  std::uint64_t from_bytes = 64U << 10U;
};

// The staging entries, by device address for kernels and by host address for the communicator.
struct Buffers {
  Staging device;
  Staging host;
};

class DirectStaging {
 public:
  // Collective: finds out whether NICs reach the GPU memory of all ranks.  `inter_node`: inter-node
  // group of this rank, or null.  After an error the ranks are unusable.
  Status open(Communicator& communicator, Communicator* inter_node, const cuda::Device& device,
              std::uint64_t staging_bytes, const DirectOptions& options);
  // Deregisters and frees the staging memory.
  void withdraw();

  // Returns why GPUDirect is unused; ok if large transfers use GPUDirect.
  [[nodiscard]] const Status& failure() const { return failure_; }
  // Return whether all ranks, or all ranks of the inter-node group, support GPUDirect.
  [[nodiscard]] bool among_all() const { return among_all_; }
  [[nodiscard]] bool inter_node() const { return inter_node_; }
  [[nodiscard]] std::uint64_t from_bytes() const { return from_bytes_; }
  [[nodiscard]] const DirectMemory& memory() const { return memory_; }
  [[nodiscard]] Buffers& buffers() { return buffers_; }

  // Returns whether a transfer of `bytes` per peer uses GPUDirect.  `possible`: among_all() or
  // inter_node(), for the ranks of the transfer.
  [[nodiscard]] bool goes(bool possible, std::uint64_t bytes) const {
    return possible && bytes >= from_bytes_;
  }
  // Returns whether a reducing collective uses GPUDirect.  Averages and collectives of more than
  // most_local_peers ranks never do.
  [[nodiscard]] bool adds_up(bool possible, std::uint64_t bytes, ReduceOp op,
                             std::size_t ranks) const {
    return goes(possible, bytes) && op != ReduceOp::avg && ranks <= most_local_peers;
  }

 private:
  Status register_memory(const cuda::Device& device, std::uint64_t staging_bytes);
  // Collective: tries a transfer.  Returns why NICs do not write correct data into GPU memory, or
  // an empty string if the data is correct.  After an error the ranks are unusable.
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
