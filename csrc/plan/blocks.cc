#include "plan/blocks.hpp"

#include <algorithm>

#include "plan/shares.hpp"

namespace r2ccl {
namespace {

// In the flow model, one slow node costs up to a block more than the closed form.  With fewer
// blocks, little gain over even shares is left.
constexpr std::size_t least_blocks = 4;
constexpr std::size_t most_blocks = 32;

}  // namespace

std::size_t even_block_bytes(std::size_t ranks, std::size_t segment_bytes) {
  const std::size_t share = std::max(2 * segment_bytes / ranks, segment_bytes / 4);
  return (share + Shares::border - 1) / Shares::border * Shares::border * ranks;
}

// Shares of a block have at least half a segment on average: more blocks of smaller messages were
// slower.
std::size_t overlapped_blocks(std::size_t bytes, std::size_t ranks, std::size_t segment_bytes) {
  const std::size_t share = std::max(segment_bytes / 2, Shares::border);
  const std::size_t blocks = std::min(most_blocks, bytes / (share * ranks));
  return blocks < least_blocks ? 0 : blocks;
}

}  // namespace r2ccl
