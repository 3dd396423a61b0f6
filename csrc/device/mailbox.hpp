// The mailbox: a few words in pinned memory, shared by the kernels of a GPU and the proxy, a thread
// of the host.  Kernels post a collective once its input is staged, and wait until the proxy
// signals that the result has arrived.  This source is compiled for the device, and also for the
// host: the tests and the simulator run the kernel bodies on the host.
//
// A captured graph replays the same launches indefinitely, so no kernel argument may change from
// replay to replay.  The number of the collective is therefore in device memory, and determines the
// entry in the staging memory.
//
// Order, for collective s:
//   device  stages the input; fence; commands[s % ring] = {s, plan}; posted = s     (release)
//   proxy   sees posted >= s (acquire); carries out s; flush; arrived = s           (release)
//   device  sees arrived >= s (acquire); reads the result
// The device stages s + ring only after arrived >= s.  So no kernel overwrites a command or staging
// memory that the proxy may read.
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

// Number of a collective: counts the collectives of a mailbox from 1, and wraps.
using Sequence = std::uint32_t;

// Largest number of collectives in progress.  A power of two, so that consecutive collectives use
// different entries (s % ring) even when Sequence wraps.
inline constexpr std::uint32_t ring = 2;

// Returns whether a counter has reached `wanted`.  The two may differ by less than half the range
// of Sequence.
R2CCL_SHARED bool reached(Sequence counter, Sequence wanted) {
  return static_cast<std::int32_t>(counter - wanted) >= 0;
}

// A counter or flag, alone in a line of 128 bytes.
struct alignas(128) Word {
  std::uint32_t value = 0;
};

struct alignas(16) Command {
  Sequence sequence = 0;
  std::uint32_t plan = 0;  // number of the host's plan, fixed at capture
};

struct Mailbox {
  Word posted;   // by the device: last collective whose input is staged
  Word arrived;  // by the proxy: last collective whose result has arrived
  Word abort;    // by the proxy: 0, or an ErrorCode once no more results will come; sticky
  // Written by the device, for the exchange inside a node:
  Word entered;  // last exchange begun
  Word left;     // last exchange ended
  Word lost;     // 1 once a rank of this node gets no more results; sticky
  Command commands[ring];
};

// State in device memory, written by kernels alone.
struct DeviceState {
  Sequence sequence = 0;      // last collective posted
  Sequence exchange = 0;      // last exchange inside the node posted
  std::uint32_t reports = 0;  // reports of the running step's blocks; see ends_step()
};

// Staging memory: pinned host memory that the device reaches, or device memory that the NIC
// reaches.
struct Staging {
  std::byte* base = nullptr;
  std::uint64_t entry_bytes = 0;    // bytes of each of the `ring` entries: an input and a result
  std::uint64_t result_offset = 0;  // offset of the result in an entry

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

// Adds `amount` and returns the sum.  A block that sees a sum also sees everything written before
// any addition to the sum.
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

// Pauses between two polls of a word, so that other work can use the bus (device) or the core
// (host).
R2CCL_SHARED void pause_briefly() {
#if defined(__CUDA_ARCH__)
  __nanosleep(100);
#else
  (void)::sched_yield();
#endif
}

// Wait strategy of a block: polling.
struct SpinWait {
  // Polls of `ready` for each poll of `over`.  Each poll is a round trip over the bus, and late
  // detection of the end does no harm.
  static constexpr std::uint32_t looks_for_the_end = 8;

  // Waits until `ready` returns true, and returns true.  Returns false once `over` returns true and
  // `ready` does not.  The host publishes its last result before it announces the end, so `ready`
  // is checked again after `over`.
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
