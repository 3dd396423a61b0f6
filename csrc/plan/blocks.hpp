// Blocks of a two-shot all-reduce.  Every rank must compute the same blocks.
#pragma once

#include <cstddef>

namespace r2ccl {

// Returns the size of a block of even shares in bytes: two segments, or more if a share would be
// smaller than a quarter of a segment.  All shares of a block have the same multiple of 64 bytes.
[[nodiscard]] std::size_t even_block_bytes(std::size_t ranks, std::size_t segment_bytes);

// Returns the number of blocks of uneven shares, whose reduce-scatters overlap with the all-gathers
// of the blocks before.  0: too few blocks for a gain over even shares.
[[nodiscard]] std::size_t overlapped_blocks(std::size_t bytes, std::size_t ranks,
                                            std::size_t segment_bytes);

}  // namespace r2ccl
