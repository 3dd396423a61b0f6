// A single all-reduce in the simulated world, for tests of results: inputs in, results out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/errors.hpp"
#include "base/types.hpp"
#include "base/units.hpp"

namespace r2ccl::sim {

// A port that loses its carrier during the call.
struct PortCut {
  int rank = 0;
  int rail = 0;
  TimeNs after_ns = 0;  // from the begin of the call
};

struct PlayedAllReduce {
  std::vector<std::vector<std::byte>> inputs;  // by rank, of equal size
  std::vector<int> nodes;                      // by rank; equal labels share a node
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  Algorithm algorithm = Algorithm::two_shot;  // not automatic
  // Loss of each rank in sixteenths, for the shares of two_shot.  Empty: even shares.
  std::vector<std::uint8_t> lost;
  std::uint32_t chunk_bytes = 1024;
  std::uint32_t slot_bytes = 4096;  // a multiple of chunk_bytes and of 64
  int rails = 2;
  bool in_place = false;
  std::optional<PortCut> cut;  // needs a second rail
  std::uint64_t seed = 1;
};

// Returns the result of each rank.  invalid_argument: the sizes do not fit each other.
[[nodiscard]] Result<std::vector<std::vector<std::byte>>> play(const PlayedAllReduce& call);

}  // namespace r2ccl::sim
