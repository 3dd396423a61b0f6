// The blocks of a simulated GPU: fibers of a rank, which begin and end each kernel of a stream
// together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "sim/random.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {

// Memory that nothing has written, or that must not be read any more.
inline constexpr std::byte garbage{0x5A};

class Grid {
 public:
  Grid(World& world, int rank, std::uint32_t blocks, std::uint64_t seed)
      : world_(world), rank_(rank), blocks_(blocks), random_(seed) {}

  [[nodiscard]] std::uint32_t blocks() const { return blocks_; }
  // True once the run is over: what a kernel does from then on is not to be judged.
  [[nodiscard]] bool stopped() const { return stopped_; }
  // Until `ready`; for any fiber of the GPU, also of its host.  False: the run is over.
  bool wait(const std::function<bool()>& ready);
  // All blocks have come; the last one calls `then`.  False: the run is over.
  bool meet(const std::function<void()>& then);
  // A look across the bus, or a time slice of something else that uses the GPU or the host's core.
  // False: the run is over.
  bool pause();

  // A block as kernels see it: one thread, which waits by yielding to the world.  Other blocks, and
  // the world, may go on between a block's look and its part, and before its report.
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
