// The blocks of a simulated GPU: fibers of a rank.  All blocks begin and end each kernel of a
// stream together.
#pragma once

#include <cstdint>
#include <functional>

#include "sim/memory.hpp"
#include "sim/random.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {

class Grid {
 public:
  Grid(World& world, int rank, std::uint32_t blocks, std::uint64_t seed)
      : world_(world), rank_(rank), blocks_(blocks), random_(seed) {}

  [[nodiscard]] std::uint32_t blocks() const { return blocks_; }
  // True once the run is over; results of kernels are not judged from then on.
  [[nodiscard]] bool stopped() const { return stopped_; }
  // Waits until `ready`, in any fiber of the GPU or its host.  Returns false once the run is over.
  bool wait(const std::function<bool()>& ready);
  // Barrier of all blocks.  The last block to arrive calls `then`.  Returns false once the run is
  // over.
  bool meet(const std::function<void()>& then);
  // Waits for a random time: a read across the bus, or a time slice of another user of the GPU or
  // the host's core.  Returns false once the run is over.
  bool pause();

  // A block as seen by kernels: a single thread that waits by yielding to the world.  Even sync()
  // may yield, so other blocks and the world may run between a block's poll, its work and its
  // report.
  struct Block {
    Grid& grid;
    void sync() const {
      if (grid.random_.below(4) == 0) (void)grid.pause();
    }
    template <typename Ready, typename Over>
    [[nodiscard]] bool wait(const Ready& ready, const Over& over) const {
      return grid.wait([&] { return ready() || over(); }) && ready();
    }
  };

 private:
  World& world_;
  const int rank_;
  const std::uint32_t blocks_;
  Random random_;
  bool stopped_ = false;
  std::uint32_t come_ = 0;
  std::uint64_t meetings_ = 0;
};

}  // namespace r2ccl::sim
