// What the kernels of a GPU and a thread of the host (the proxy) share: a few words in pinned
// memory that both can reach.  Kernels post a collective when its input is staged, and wait until
// the proxy says that its result has arrived.  The same source is compiled for the device and, for
// tests and for a job without a GPU, for the host.
//
// A captured graph replays the same launches for ever, so nothing that changes from one replay to
// the next may be an argument: the number of the collective lives in device memory, and the place
// in the staging memory follows from it.
//
// Order, for collective s:
//   device  stages the input; fence; commands[s % ring] = {s, plan}; posted = s     (release)
//   proxy   sees posted >= s (acquire); carries it out; flush; arrived = s          (release)
//   device  sees arrived >= s (acquire); reads the result
// The device stages s + ring only after arrived >= s, so neither a command nor its staging memory
// is overwritten while the proxy may read it.
#pragma once

#include <sched.h>

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define R2CCL_SHARED __host__ __device__ inline
#define R2CCL_UNROLL _Pragma("unroll")
#else
#define R2CCL_SHARED inline
#define R2CCL_UNROLL
#endif

namespace r2ccl::device {

// Counts collectives of a mailbox from 1, and wraps.
using Sequence = std::uint32_t;

// Collectives that may be under way at once; a power of two, so that the wrap changes no place.
inline constexpr std::uint32_t ring = 2;

// Whether a counter has come to `wanted`, which is never half the range away from it.
R2CCL_SHARED bool reached(Sequence counter, Sequence wanted) {
  return static_cast<std::int32_t>(counter - wanted) >= 0;
}

struct alignas(128) Word {
  std::uint32_t value = 0;
};

struct alignas(16) Command {
  Sequence sequence = 0;
  std::uint32_t plan = 0;  // number that the host gave out when the graph was captured
};

struct Mailbox {
  Word posted;   // written by the device: the last collective whose input is staged
  Word arrived;  // written by the proxy: the last one whose result is there
  Word abort;    // written by the proxy: not 0: no more results will come (an ErrorCode); sticky
  // Written by the device, where ranks of a node exchange what they have:
  Word entered;  // the last exchange that has begun
  Word left;     // the last one that has ended
  Word lost;     // not 0: a rank of this node will get no more results; sticky
  Command commands[ring];
};

// In device memory; written by kernels alone.
struct DeviceState {
  Sequence sequence = 0;      // of the collective that was posted last
  Sequence exchange = 0;      // of the last one of these that went through the node
  std::uint32_t reports = 0;  // of the running step's blocks: ends_step() in kernel_bodies.hpp
};

// Pinned memory that the device can reach, or device memory that the NIC can.
struct Staging {
  std::byte* base = nullptr;
  std::uint64_t entry_bytes = 0;    // of each of the `ring` entries: an input and a result
  std::uint64_t result_offset = 0;  // within an entry

  [[nodiscard]] R2CCL_SHARED std::byte* input(Sequence sequence) const {
    return base + (sequence % ring) * entry_bytes;
  }
  [[nodiscard]] R2CCL_SHARED std::byte* result(Sequence sequence) const {
    return input(sequence) + result_offset;
  }
};

// ---- memory order across the bus, and across threads of the host ----

R2CCL_SHARED std::uint32_t load_acquire(const Word& word) {
#if defined(__CUDA_ARCH__)
  std::uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(&word.value) : "memory");
  return value;
#else
  return __atomic_load_n(&word.value, __ATOMIC_ACQUIRE);
#endif
}

R2CCL_SHARED void store_release(Word& word, std::uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(&word.value), "r"(value) : "memory");
#else
  __atomic_store_n(&word.value, value, __ATOMIC_RELEASE);
#endif
}

// Adds `amount` and returns the sum.  The block that sees a sum sees all that was written before
// any addition in it.
R2CCL_SHARED std::uint32_t count_up(std::uint32_t& counter, std::uint32_t amount) {
#if defined(__CUDA_ARCH__)
  __threadfence_system();
  const std::uint32_t before = atomicAdd(&counter, amount);
  __threadfence_system();
  return before + amount;
#else
  return __atomic_add_fetch(&counter, amount, __ATOMIC_ACQ_REL);
#endif
}

// Between two looks at a word of the other side: leaves the bus, or the core, to others.
R2CCL_SHARED void pause_briefly() {
#if defined(__CUDA_ARCH__)
  __nanosleep(100);
#else
  (void)::sched_yield();
#endif
}

// How a block waits: it looks, again and again.
struct SpinWait {
  // Looks at what is awaited for each look at the end: each is a trip over the bus, and the end
  // may be noticed later.
  static constexpr std::uint32_t looks_for_the_end = 8;

  // Until `ready`, true; or until it never will be, false.  The host publishes its last result
  // before it publishes the end, so `ready` counts if both have come between two looks.
  template <typename Ready, typename Over>
  [[nodiscard]] R2CCL_SHARED bool wait(const Ready& ready, const Over& over) const {
    for (std::uint32_t look = 1; !ready(); ++look) {
      if (look % looks_for_the_end == 0 && over()) return ready();
      pause_briefly();
    }
    return true;
  }
};

}  // namespace r2ccl::device
