// The arithmetic of the canonical reduction tree.  The bits of a result depend on the inputs and
// the tree only, not on the instruction set, block size, algorithm or path of the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/types.hpp"

namespace r2ccl {

// Order of the reduction: first the ranks of a node in rank order, then the nodes, ordered by the
// lowest rank of each node.
struct ReductionTree {
  std::vector<std::uint16_t> order;       // ranks in fold order
  std::vector<std::uint16_t> node_sizes;  // number of consecutive entries of `order` in each node

  // Builds the tree from node labels: ranks with equal labels share a node.
  static ReductionTree from_nodes(std::span<const int> node_of_rank);
  // Returns the index of each rank's node in node_sizes.
  [[nodiscard]] std::vector<std::uint16_t> node_of_rank() const;
};

enum class Simd : std::uint8_t { portable, avx2, avx512 };
// Returns the best instruction set supported by this processor.
[[nodiscard]] Simd best_simd();
[[nodiscard]] std::string_view name_of(Simd simd);

// Reduces `count` elements of each inputs[rank] into out.  Any alignment works; out may equal an
// input exactly.  An unsupported `simd` falls back to best_simd().  avg of boolean is not defined.
// - f16 and bf16 accumulate in fp32.  Values are rounded to nearest even at the end, and after each
//   node that has several ranks.  f32 and f64 accumulate in their own type.
// - Integers wrap.  avg divides once, at the end.
// - boolean: sum and max are OR, prod and min are AND.
// - No FMA and no FTZ/DAZ (MXCSR is set and restored).  NaN results are the canonical quiet NaN.
//   min and max propagate NaN and order -0 < +0.
void reduce(DType dtype, ReduceOp op, void* out, std::span<const void* const> inputs,
            const ReductionTree& tree, std::size_t count, Simd simd = best_simd());

}  // namespace r2ccl
