// The arithmetic of the canonical reduction tree.  Bits depend on the inputs and the tree alone:
// not on the instruction set, the block size, the algorithm or the path the bytes took.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/types.hpp"

namespace r2ccl {

// Ranks of a node in rank order, then nodes in node order (order of their lowest rank).
struct ReductionTree {
  std::vector<std::uint16_t> order;       // ranks in fold order
  std::vector<std::uint16_t> node_sizes;  // how many consecutive entries of `order` form a node

  // node_of_rank[r] is any label; equal labels share a node.
  static ReductionTree from_nodes(std::span<const int> node_of_rank);
};

enum class Simd : std::uint8_t { portable, avx2, avx512 };
[[nodiscard]] Simd best_simd();  // what this processor can run
[[nodiscard]] std::string_view name_of(Simd simd);

// inputs[rank] holds `count` elements (any alignment); out may be exactly one of the inputs.
// f16/bf16 accumulate in fp32, rounded (nearest even) where a node of several ranks ends and at the
// end; f32/f64 accumulate in themselves; integers wrap; avg divides once at the end; boolean: sum
// and max are OR, prod and min are AND.  No FMA, no FTZ/DAZ (MXCSR is set and restored), one
// canonical quiet NaN, min/max propagate NaN and order -0 < +0.
void reduce(DType dtype, ReduceOp op, void* out, std::span<const void* const> inputs,
            const ReductionTree& tree, std::size_t count, Simd simd = best_simd());

}  // namespace r2ccl
