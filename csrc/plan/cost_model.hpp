// Choice of the faster all-reduce algorithm for a size and lost bandwidths, by a model: a time
// per message step (alpha), per message, per byte on the wire (beta) and per byte folded
// (gamma).
//
// Every rank must reach the same decision without communication.  The arithmetic therefore uses
// integers only, because rounding of floats may differ between compilers and processors.  Measured
// constants may replace the defaults only after all ranks have agreed on the values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.hpp"

namespace r2ccl {

// Constants of the model in picoseconds, so that even the time of a byte on a fast rail is a whole
// number.
struct CostConstants {
  std::uint64_t step_ps;        // alpha: latency of an empty message from post to arrival
  std::uint64_t message_ps;     // processor time to post a message and to receive a message
  std::uint64_t wire_byte_ps;   // beta between nodes, both directions busy
  std::uint64_t local_byte_ps;  // beta inside a node
  std::uint64_t fold_byte_ps;   // gamma: per byte read by a fold or copied from a slot
};

// Defaults, measured on a virtual machine: Linux, two AMD EPYC (Zen 5) cores, a process per core.
//   Exchange of a message each way over loopback TCP, non-blocking polled sockets, medians:
//     64 B 4.3 us, 64 KiB 12 us, 256 KiB 37 us, 1 MiB 280 us, 4 MiB 1300 us.
//   wire is the slope of the line 4.3 us + 200 ps/B, within a factor of 1.6 of every median.
//   message is the processor time of send() and recv() of 64 B, about 3 us of the 4.3 us
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

// Return the modelled time of an all-reduce of `bytes` bytes in ps.  node_sizes has the number of
// ranks of each node.  `lost` has the loss of each node in sixteenths (plan/shares.hpp) or nothing.
// Bytes leave a node with a loss more slowly.  Shares count as even: inputs with uneven shares are
// far larger than inputs of one_shot, unless slots have a few KiB.  Inputs beyond 1 GiB count as
// 1 GiB, where constant terms are negligible.
[[nodiscard]] std::uint64_t one_shot_ps(std::size_t bytes,
                                        std::span<const std::uint16_t> node_sizes,
                                        const CostConstants& costs,
                                        std::span<const std::uint8_t> lost = {});
[[nodiscard]] std::uint64_t two_shot_ps(std::size_t bytes,
                                        std::span<const std::uint16_t> node_sizes,
                                        const CostConstants& costs,
                                        std::span<const std::uint8_t> lost = {});

// Returns one_shot or two_shot, never automatic; one_shot if both times are equal.
[[nodiscard]] Algorithm choose_all_reduce(std::size_t bytes,
                                          std::span<const std::uint16_t> node_sizes,
                                          const CostConstants& costs = loopback_costs,
                                          std::span<const std::uint8_t> lost = {});

}  // namespace r2ccl
