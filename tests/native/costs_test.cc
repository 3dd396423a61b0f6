// Cost of a healthy all_reduce and of posted messages: system calls, wake-ups, payload copies and
// allocations. The limits are the minimum of the protocol; a change that raises a limit has to
// state the reason here.
// Builds with sanitizers leave this test out, because sanitizers add calls and allocations.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "engine/posted_channel.hpp"
#include "eventually.hpp"
#include "job.hpp"
#include "system_calls.hpp"

namespace {

constexpr std::size_t payload_bytes = 1024;  // a smaller copy is not counted as payload

thread_local std::uint64_t allocations = 0;
thread_local std::uint64_t copied_bytes = 0;

void* copy(void* to, const void* from, std::size_t bytes) {
  if (bytes >= payload_bytes) copied_bytes += bytes;
  auto* const out = static_cast<volatile char*>(to);
  const auto* const in = static_cast<const volatile char*>(from);
  if (reinterpret_cast<std::uintptr_t>(to) <= reinterpret_cast<std::uintptr_t>(from))
    for (std::size_t i = 0; i < bytes; ++i) out[i] = in[i];
  else
    for (std::size_t i = bytes; i > 0; --i) out[i - 1] = in[i - 1];
  return to;
}

}  // namespace

// The linker binds the core's calls of these functions to this program first.
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* memory, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);

void* malloc(std::size_t bytes) {
  ++allocations;
  return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) {
  ++allocations;
  return __libc_calloc(count, bytes);
}
void* realloc(void* memory, std::size_t bytes) {
  ++allocations;
  return __libc_realloc(memory, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  ++allocations;
  return __libc_memalign(alignment, bytes);
}
void* memcpy(void* to, const void* from, std::size_t bytes) { return copy(to, from, bytes); }
void* memmove(void* to, const void* from, std::size_t bytes) { return copy(to, from, bytes); }
}

namespace r2ccl {
namespace {

using testing::CountSystemCalls;
using testing::Job;
using testing::SystemCalls;

constexpr std::size_t segment_bytes = 65483;  // on loopback
constexpr int warm_calls = 40;                // enough to use every slot once
constexpr int calls = 100;
// Allocations allowed in total. On a busy machine a queue may outgrow its capacity, once per queue.
constexpr std::uint64_t lengthened = 8;
// System calls allowed in total for disturbances, for example by the engine's own thread. An
// additional system call in each all_reduce still exceeds this limit.
constexpr std::uint64_t disturbed = 40;
constexpr std::chrono::milliseconds tick_interval{150};
// Begin of the message of each limit that a busy machine may exceed (see tests/gate.py).
constexpr const char* late = "late: ";

struct Costs {
  SystemCalls system;
  std::uint64_t allocations = 0;
  std::uint64_t copied = 0;
  std::chrono::nanoseconds wall{0};
  std::uint64_t waited = 0;  // calls that tried to read data before its arrival
  std::uint64_t slept = 0;   // voluntary context switches of the calling thread
  bool counted = false;      // whether the system calls were counted
};

// Returns the costs of `calls` all_reduces, per rank. Rank 1 calls first. Rank 0 calls 1 ms later,
// when the data of rank 1 has arrived: rank 0 never waits, and rank 1 waits for each result.
std::array<Costs, 2> measure(std::size_t bytes) {
  Config config;
  config.spin_us = 10'000'000;  // prevents sleep on a busy machine
  config.background_interval_ms = 2 * tick_interval.count();
  config.handshake_timeout_ms = 10'000;
  config.probe_interval_ms = 60'000;
  Job job({.ranks = 2, .rails = 2, .config = config});
  std::array<Costs, 2> costs;
  std::atomic<int> begun = 0;
  std::atomic<int> finished = 0;
  job.run([&](int rank, Communicator& communicator) {
    std::vector<float> data(bytes / sizeof(float), 1.0F);
    auto* const memory = reinterpret_cast<std::byte*>(data.data());
    Costs& own = costs[static_cast<std::size_t>(rank)];
    std::chrono::steady_clock::time_point began;
    for (int call = 0; call < warm_calls + calls; ++call) {
      if (call == warm_calls) began = std::chrono::steady_clock::now();
      const auto turn = [&] { return rank == 0 ? begun > call : finished >= call; };
      const auto waited = testing::eventually(turn, "the other rank", testing::patience_s, {});
      if (!waited) {
        ADD_FAILURE() << "call " << call << " of rank " << rank << ": " << waited.message();
        communicator.abort("the other rank is late");
        return;
      }
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (rank == 1) ++begun;
      SystemCalls warm;
      rusage before{};
      rusage after{};
      ::getrusage(RUSAGE_THREAD, &before);
      const std::uint64_t allocated = allocations;
      const std::uint64_t copied = copied_bytes;
      const std::uint64_t empty = own.system.empty(SYS_recvfrom);
      bool ok = false;
      {
        const CountSystemCalls count(call < warm_calls ? warm : own.system);
        ok = communicator
                 .all_reduce(memory, memory, data.size(), DType::f32, ReduceOp::sum,
                             Algorithm::automatic)
                 .ok();
        own.counted = count.on();
      }
      ::getrusage(RUSAGE_THREAD, &after);
      if (call >= warm_calls) {
        own.allocations += allocations - allocated;
        own.copied += copied_bytes - copied;
        if (own.system.empty(SYS_recvfrom) != empty) ++own.waited;
        own.slept += static_cast<std::uint64_t>(after.ru_nvcsw - before.ru_nvcsw);
      }
      EXPECT_TRUE(ok);
      if (rank == 0) ++finished;
    }
    own.wall = std::chrono::steady_clock::now() - began;
  });
  return costs;
}

// Number of engine ticks in the measured time, rounded up. A tick adds calls: it sends due
// acknowledgements separately, so that the next read finds 2 frames and reads again. A tick also
// yields to threads that wait for the engine's lock.
std::uint64_t ticks_of(const Costs& own) {
  return static_cast<std::uint64_t>(own.wall / tick_interval) + 1;
}

// Checks all system calls except send and receive. A waiting rank queries both rails at clock
// intervals, with 3 calls per rail. An all_reduce makes no other calls and wakes no thread (no
// futex, no eventfd).
void check_others(const Costs& own) {
  std::uint64_t asked = 0;
  for (const long number : {SYS_ioctl, SYS_getsockopt, SYS_setsockopt})
    asked += own.system.of(number);
  EXPECT_LE(asked, disturbed + 6 * ticks_of(own)) << late << own.system.text();
  const std::uint64_t others =
      own.system.others({SYS_sendto, SYS_sendmsg, SYS_recvfrom, SYS_readv, SYS_sched_yield,
                         SYS_ioctl, SYS_getsockopt, SYS_setsockopt});
  EXPECT_LE(others, disturbed) << late << own.system.text();
}

class SmallAllReduce : public ::testing::TestWithParam<std::size_t> {};

// A message leaves in 1 system call and arrives in 1; its acknowledgement travels with the next
// message. The sender copies the payload once: a replay may need the bytes after the call, and an
// in-place result overwrites the input. The receiver reads the payload directly into the slot, and
// the fold reads the slot.
TEST_P(SmallAllReduce, CostsOneSendOneReceiveAndOneCopy) {
  const std::size_t bytes = GetParam();
  const auto costs = measure(bytes);
  for (std::size_t rank = 0; rank < costs.size(); ++rank) {
    const Costs& own = costs[rank];
    const std::uint64_t few = 10 + 2 * ticks_of(own);
    EXPECT_LE(own.allocations, lengthened) << late << rank;
    EXPECT_GE(own.copied, calls * bytes) << rank;
    EXPECT_LE(own.copied, (calls + few) * bytes) << late << rank;
    EXPECT_LE(own.slept, few) << late << rank;
    if (!own.counted) GTEST_SKIP() << "this kernel does not hand over system calls";
    const std::string all = own.system.text();
    EXPECT_GE(own.system.of(SYS_sendto) + few, calls) << late << rank << all;
    EXPECT_LE(own.system.of(SYS_sendto), calls + few) << late << rank << all;
    EXPECT_EQ(own.system.of(SYS_sendmsg), 0U) << late << rank << all;
    EXPECT_GE(own.system.of(SYS_recvfrom) + few, calls) << late << rank << all;
    EXPECT_LE(own.system.of(SYS_recvfrom), calls + few) << late << rank << all;
    // Loopback splits a larger message into 2 segments, which may need 2 reads.
    const bool cut = rank == 1 && bytes + sizeof(FrameHeader) > segment_bytes;
    EXPECT_LE(own.system.of(SYS_readv), cut ? calls : few) << late << rank << all;
    check_others(own);
  }
  if (!costs[0].counted) return;
  // Rank 0 reads no empty rail while its message is ready on the other rail. On a busy machine, the
  // message of some calls arrives late; with the defect, each call reads an empty rail.
  EXPECT_LE(costs[0].waited, std::uint64_t{calls} / 2) << late << costs[0].system.text();
}

INSTANTIATE_TEST_SUITE_P(Sizes, SmallAllReduce, ::testing::Values(4096, 16384, 65536));

// Half of the input goes out for the peer to fold, and half a result comes back. Both are sent from
// the caller's memory; half a result is copied out of its slot. 2 chunks of 128 KiB are a single
// send, which the socket buffer may split, and arrive in segments. If a chunk arrives on another
// rail than the first chunk of its message, its first part goes through a buffer.
TEST(LargeAllReduce, SendsFromTheCallersMemoryAndCopiesHalfAResult) {
  constexpr std::size_t bytes = 1U << 20;
  constexpr std::uint64_t chunks = 8;
  for (const Costs& own : measure(bytes)) {
    EXPECT_LE(own.allocations, lengthened) << late;
    EXPECT_GE(own.copied, calls * bytes / 2);
    EXPECT_LE(own.copied, calls * (bytes / 2 + chunks * (20U << 10))) << late;
    EXPECT_LE(own.slept, 10 + 2 * ticks_of(own)) << late;
    if (!own.counted) GTEST_SKIP() << "this kernel does not hand over system calls";
    const SystemCalls& made = own.system;
    const std::string all = made.text();
    EXPECT_LE(made.of(SYS_sendto) + made.of(SYS_sendmsg), calls * 2 * chunks) << late << all;
    EXPECT_LE(made.of(SYS_recvfrom) + made.of(SYS_readv), calls * 4 * chunks) << late << all;
    check_others(own);
  }
}

// ---- posted messages ----

// Costs of an end for `calls` messages.  Both ends are called by this thread in turn, so no end
// waits for a CPU.
std::array<Costs, 2> measure_posted(std::size_t bytes) {
  Config config;
  config.background_interval_ms = 2 * tick_interval.count();
  config.handshake_timeout_ms = 10'000;
  config.probe_interval_ms = 60'000;
  Job job({.ranks = 2, .rails = 1, .posted = true, .config = config});
  constexpr ConnectionId connection = 1;
  auto sender = PostedSender::open(job.engines[0], job.engines[1]->process(), connection);
  auto receiver = PostedReceiver::open(job.engines[1], job.engines[0]->process(), connection);
  std::array<Costs, 2> costs;
  if (!sender.ok() || !receiver.ok()) {
    ADD_FAILURE() << sender.take_status().message() << receiver.take_status().message();
    return costs;
  }
  const std::vector<std::byte> source(bytes, std::byte{7});
  std::vector<std::byte> target(bytes);
  const MemoryId memory = receiver.value()->add_memory(target).value();
  const PostedMemory into{
      .memory = memory, .offset = 0, .bytes = static_cast<std::uint32_t>(bytes), .home = 0};
  int message = 0;
  // Repeats a call of an end until the call has a result.
  const auto finish = [&](std::size_t end, const auto& call) {
    SystemCalls warm;
    const bool counts = message >= warm_calls;
    const std::uint64_t allocated = allocations;
    const std::uint64_t copied = copied_bytes;
    const auto ends =
        std::chrono::steady_clock::now() + std::chrono::duration<double>(testing::patience_s);
    bool done = false;
    {
      const CountSystemCalls count(counts ? costs[end].system : warm);
      while (!done && std::chrono::steady_clock::now() < ends) done = call();
      costs[end].counted = count.on();
    }
    if (counts) {
      costs[end].allocations += allocations - allocated;
      costs[end].copied += copied_bytes - copied;
    }
    ASSERT_TRUE(done) << "message " << message;
  };
  const auto began = std::chrono::steady_clock::now();
  for (; message < warm_calls + calls && !::testing::Test::HasFatalFailure(); ++message) {
    const auto number = static_cast<std::uint64_t>(message);
    finish(1, [&] { return receiver.value()->receive(into).value().has_value(); });
    // The permission reports the delivery of the message before.
    if (message > 0) finish(0, [&] { return sender.value()->sent(number - 1).value(); });
    finish(0, [&] { return sender.value()->send(source).value().has_value(); });
    finish(1, [&] { return receiver.value()->received(number).value().has_value(); });
  }
  for (Costs& own : costs) own.wall = std::chrono::steady_clock::now() - began;
  EXPECT_EQ(target, source);
  return costs;
}

constexpr std::size_t first_bytes = 20U << 10;  // read with a header, see FramedRail

class PostedMessages : public ::testing::TestWithParam<std::size_t> {};

// The receiver sends a permission, and reads the message.  The sender reads the permission, and
// sends the message from its memory.  The report of the delivery travels with the next permission.
// The first bytes of a message come with its header, and are copied; a second read puts the rest
// into the memory of the receive.
TEST_P(PostedMessages, CostOneSendAndOneReceiveAnEnd) {
  const std::size_t bytes = GetParam();
  const std::size_t first = std::min(bytes, first_bytes);
  const auto costs = measure_posted(bytes);
  for (std::size_t end = 0; end < costs.size(); ++end) {
    const Costs& own = costs[end];
    const std::uint64_t few = 10 + 2 * ticks_of(own);
    EXPECT_LE(own.allocations, lengthened) << late << end;
    EXPECT_LE(own.copied, few * bytes + (end == 1 ? calls * first : 0)) << late << end;
    if (!own.counted) GTEST_SKIP() << "this kernel does not hand over system calls";
    const std::string all = own.system.text();
    const std::uint64_t sent = own.system.of(SYS_sendto) + own.system.of(SYS_sendmsg);
    EXPECT_LE(sent, calls + few) << late << end << all;
    const std::uint64_t received = own.system.of(SYS_recvfrom) + own.system.of(SYS_readv);
    const std::uint64_t reads = end == 1 && first < bytes ? 2 : 1;
    EXPECT_LE(received, reads * calls + few) << late << end << all;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, PostedMessages, ::testing::Values(1024, 16384, 65536));

}  // namespace
}  // namespace r2ccl
