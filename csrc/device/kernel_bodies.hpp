// Bodies of the kernels that hand work to the proxy and take its results, for device and host.
// Callers with the same `at.block` form a block.  `block` provides sync(), the barrier of the
// block, and wait(ready, over), see SpinWait.  `shared` is memory of the block.
//
// Every block waits, so a grid must stay far below the number of blocks that fit on a GPU at once
// (max_blocks).  A waiting block must not keep the awaited work from running.
#pragma once

#include "device/mailbox.hpp"
#if !defined(__CUDACC__)
#include "link/mutants.hpp"
#endif

namespace r2ccl::device {

inline constexpr std::uint32_t max_blocks = 16;

struct ThreadPosition {
  std::uint32_t block;
  std::uint32_t blocks;
  std::uint32_t thread;  // thread of the block
  std::uint32_t threads;
};

struct Shared {
  Sequence sequence;
  Sequence exchange;
  bool go;
};

struct alignas(16) Vector {
  std::uint64_t low, high;
};

// `count` rows of `bytes` bytes each.  Row i starts at byte first + i * pitch of the caller's
// buffer, and at byte offset + i * bytes of an entry.
struct Rows {
  std::uint64_t count = 0;
  std::uint64_t bytes = 0;
  std::uint64_t pitch = 0;
  std::uint64_t offset = 0;
  std::uint64_t first = 0;
};

// A planted bug (link/mutants.hpp): stage() does not wait for a free entry.
R2CCL_SHARED bool entry_is_taken_for_free() {
#if defined(R2CCL_MUTANTS) && !defined(__CUDACC__)
  return planted(Mutant::entry_not_awaited);
#else
  return false;
#endif
}

// A planted bug (link/mutants.hpp): the last block of a grid ignores the verdicts of other blocks.
R2CCL_SHARED bool block_decides_alone() {
#if defined(R2CCL_MUTANTS) && !defined(__CUDACC__)
  return planted(Mutant::block_decides_alone);
#else
  return false;
#endif
}

// A step is a single kernel, or several consecutive kernels for parts of the same collective.  The
// low half of DeviceState::reports counts ended blocks; the high half is not 0 once a block has
// given up.
inline constexpr std::uint32_t block_gave_up = 1U << 16;
static_assert(max_blocks < block_gave_up);

// Ends a block's part of a step.  Thread 0 adds the block to DeviceState::reports; `shared.go` is
// true if the block did its part.  Returns true in the last block of the step's last kernel
// (`closes`).  There `shared.go` becomes the verdict of the step: true only if every block of every
// kernel did its part.  Blocks check for an abort at different times, so the `go` of a block tells
// nothing about other blocks.
R2CCL_SHARED bool ends_step(const ThreadPosition& at, Shared& shared, DeviceState& state,
                            bool closes) {
  if (at.thread != 0) return false;
  const std::uint32_t reports = count_up(state.reports, shared.go ? 1U : 1U + block_gave_up);
  if (reports % block_gave_up != at.blocks) return false;
  const bool whole = reports < block_gave_up;
  state.reports = whole || closes ? 0 : block_gave_up;
  if (!block_decides_alone()) shared.go = whole;
  return closes;
}

// Waits until the counter reaches `wanted`; returns false after an abort.
template <typename Block>
R2CCL_SHARED bool await(const Block& block, const Mailbox& mailbox, const Word& counter,
                        Sequence wanted) {
  return block.wait([&] { return reached(load_acquire(counter), wanted); },
                    [&] { return load_acquire(mailbox.abort) != 0; });
}

// Loads in flight per thread.  With a single load, each iteration would wait for a round trip over
// the bus.
inline constexpr std::uint64_t loads_at_once = 4;

// Copies with all threads of all blocks, 16 bytes at a time if both addresses are aligned.
R2CCL_SHARED void copy(const ThreadPosition& at, std::byte* to, const std::byte* from,
                       std::uint64_t bytes) {
  const std::uint64_t first = std::uint64_t{at.block} * at.threads + at.thread;
  const std::uint64_t step = std::uint64_t{at.blocks} * at.threads;
  const auto misaligned =
      (reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) %
      alignof(Vector);
  const std::uint64_t vectors = misaligned != 0 ? 0 : bytes / sizeof(Vector);
  for (std::uint64_t i = first; i < vectors; i += loads_at_once * step) {
    Vector loaded[loads_at_once] = {};
    R2CCL_UNROLL
    for (std::uint64_t n = 0; n < loads_at_once; ++n)
      if (i + n * step < vectors) loaded[n] = reinterpret_cast<const Vector*>(from)[i + n * step];
    R2CCL_UNROLL
    for (std::uint64_t n = 0; n < loads_at_once; ++n)
      if (i + n * step < vectors) reinterpret_cast<Vector*>(to)[i + n * step] = loaded[n];
  }
  for (std::uint64_t i = vectors * sizeof(Vector) + first; i < bytes; i += step) to[i] = from[i];
}

// pack() copies rows from the caller's buffer into an entry; unpack() copies rows back.
R2CCL_SHARED void pack(const ThreadPosition& at, std::byte* entry, const std::byte* source,
                       const Rows& rows) {
  for (std::uint64_t row = 0; row < rows.count; ++row)
    copy(at, entry + rows.offset + row * rows.bytes, source + rows.first + row * rows.pitch,
         rows.bytes);
}
R2CCL_SHARED void unpack(const ThreadPosition& at, std::byte* target, const std::byte* entry,
                         const Rows& rows) {
  for (std::uint64_t row = 0; row < rows.count; ++row)
    copy(at, target + rows.first + row * rows.pitch, entry + rows.offset + row * rows.bytes,
         rows.bytes);
}

// Copies a part of a collective's input into the staging entry, and posts the collective with the
// last part.  The caller may change the source once the kernel has ended.  After an abort nothing
// is posted.
//
// The host code of the launch must keep all parts within an entry, and the grid within max_blocks.
template <typename Block>
R2CCL_SHARED void stage(const ThreadPosition& at, const Block& block, Shared& shared,
                        Mailbox& mailbox, DeviceState& state, const Staging& staging,
                        const std::byte* source, const Rows& rows, std::uint32_t plan, bool last) {
  if (at.thread == 0) {
    shared.sequence = state.sequence + 1;
    shared.go = load_acquire(mailbox.abort) == 0 &&
                (entry_is_taken_for_free() ||
                 await(block, mailbox, mailbox.arrived, shared.sequence - ring));
  }
  block.sync();
  if (shared.go) pack(at, staging.input(shared.sequence), source, rows);
  block.sync();
  // Only the last block continues.  All other blocks have read state.sequence by now.
  if (!ends_step(at, shared, state, last)) return;
  state.sequence = shared.sequence;
  if (!shared.go) return;
  mailbox.commands[shared.sequence % ring] = {shared.sequence, plan};
  store_release(mailbox.posted, shared.sequence);
}

// Waits for the result of a collective, and copies a part of the result into `target`.  After an
// abort the target stays unchanged.  `lag`: number of collectives posted after this collective;
// less than `ring`.
template <typename Block>
R2CCL_SHARED void deliver(const ThreadPosition& at, const Block& block, Shared& shared,
                          const Mailbox& mailbox, const DeviceState& state, const Staging& staging,
                          std::byte* target, const Rows& rows, std::uint32_t lag) {
  if (at.thread == 0) {
    shared.sequence = state.sequence - lag;
    shared.go = await(block, mailbox, mailbox.arrived, shared.sequence);
  }
  block.sync();
  if (shared.go) unpack(at, target, staging.result(shared.sequence), rows);
}

}  // namespace r2ccl::device
