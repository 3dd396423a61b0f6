// Which all-reduce algorithm is faster for a size, by an alpha-beta-gamma model: a time per message
// step, per message, per byte on the wire and per byte folded.
//
// Every rank must come to the same answer by itself.  So the arithmetic is on integers (no compiler
// or processor rounds them differently), and constants, where measured ones replace the defaults,
// must be agreed on by the ranks first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.hpp"

namespace r2ccl {

// All in picoseconds, so that a byte's share of a fast rail is still a whole number.
struct CostConstants {
  std::uint64_t step_ps;        // alpha: from posting a message until the peer has it, empty
  std::uint64_t message_ps;     // processor time to post one message and take one in
  std::uint64_t wire_byte_ps;   // beta between nodes, both directions busy
  std::uint64_t local_byte_ps;  // beta inside a node
  std::uint64_t fold_byte_ps;   // gamma: per byte that a fold reads or that is copied from a slot
};

// Measured on a virtual machine with two AMD EPYC (Zen 5) cores, Linux, one process on each core.
//   Exchange of a message each way over loopback TCP, non-blocking polled sockets, medians:
//     64 B 4.3 us, 64 KiB 12 us, 256 KiB 37 us, 1 MiB 280 us, 4 MiB 1300 us.
//   wire is the slope of the line 4.3 us + 200 ps/B, within a factor of 1.6 of each of these.
//   message is what send() and recv() of 64 B keep the processor busy, about 3 of those 4.3 us
//   (loopback delivers inside send); step is the rest.
//   local is two copies of 1 MiB buffers (into shared memory and out), 17 us each.
//   fold is a two-input f32 sum of 1 MiB, in place, AVX-512: 18.4 us for 2 MiB read.
inline constexpr CostConstants loopback_costs{
    .step_ps = 1'300'000,
    .message_ps = 3'000'000,
    .wire_byte_ps = 200,
    .local_byte_ps = 34,
    .fold_byte_ps = 9,
};

// Modelled time of one all-reduce of `bytes` bytes; node_sizes says how many ranks each node has.
// Inputs beyond 4 GiB count as 4 GiB, where no constant term matters any more.
[[nodiscard]] std::uint64_t one_shot_ps(std::size_t bytes,
                                        std::span<const std::uint16_t> node_sizes,
                                        const CostConstants& costs);
[[nodiscard]] std::uint64_t two_shot_ps(std::size_t bytes,
                                        std::span<const std::uint16_t> node_sizes,
                                        const CostConstants& costs);

// one_shot or two_shot, never automatic; one_shot where they are equal.
[[nodiscard]] Algorithm choose_all_reduce(std::size_t bytes,
                                          std::span<const std::uint16_t> node_sizes,
                                          const CostConstants& costs = loopback_costs);

}  // namespace r2ccl
