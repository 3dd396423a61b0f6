// A seed run: a random job, random faults, and checks of the invariants I1 to I9 of
// docs/failover.md.  The result depends only on the seed and the options.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/units.hpp"
#include "sim/fault_kinds.hpp"

namespace r2ccl::sim {

struct SeedResult {
  std::uint64_t seed = 0;
  std::string job;                      // a single line
  std::vector<std::string> violations;  // each begins with the name of its invariant
  std::uint64_t steps = 0;
  std::uint64_t calls = 0;           // calls returned on a rank
  std::uint64_t gpu_calls = 0;       // subset posted by GPUs
  std::uint64_t exchange_calls = 0;  // subset posted by GPUs with exchanges inside their node
  std::uint64_t streams = 0;         // halves of byte streams that ended
  std::uint64_t stream_bytes = 0;    // bytes read from streams
  std::uint64_t posted = 0;          // posted messages received
  std::uint64_t compared = 0;        // steps that ended on a rank after a comparison of positions
  std::uint64_t parted = 0;          // communicators with a rank that leaves out a call
  std::uint64_t errors = 0;
  std::uint64_t replays = 0;
  std::uint64_t hedges = 0;
  std::uint64_t fences = 0;
  std::uint64_t downs = 0;
  TimeNs virtual_ns = 0;
  std::array<std::uint64_t, fault_kinds> faults{};
};

using TraceLine = std::function<void(const std::string&)>;
// Runs a seed.  `trace` gets a readable line per event; may be empty.
[[nodiscard]] SeedResult run_seed(std::uint64_t seed, const FaultOptions& options = {},
                                  const TraceLine& trace = {});

}  // namespace r2ccl::sim
