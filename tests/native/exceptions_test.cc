// Exceptions in an engine: memory or threads run out in a call, in the background thread, in the
// proxy of a stream and at the start of a detached thread, also while an exception is handled.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "device/proxy.hpp"
#include "drivers/detached.hpp"
#include "eventually.hpp"
#include "host_device.hpp"
#include "job.hpp"
#include "link/rail_state.hpp"
#include "no_threads.hpp"

namespace {

std::atomic<bool> no_memory{false};  // in threads that are not spared
std::atomic<unsigned> refused{0};
thread_local bool spared = false;
thread_local int allocations_left = -1;  // of this thread; -1: no limit
// Allocations of this thread before a single refusal, and from there before another; -1: none.
thread_local int refused_after = -1;
thread_local int refused_again_after = -1;
thread_local int refused_here = 0;  // such refusals

bool refuses_once() {
  if (refused_after != 0) {
    if (refused_after > 0) --refused_after;
    return false;
  }
  refused_after = refused_again_after;
  refused_again_after = -1;
  ++refused_here;
  return true;
}

bool refuses() {
  if (allocations_left == 0) return true;
  if (allocations_left > 0) --allocations_left;
  return refuses_once() || (no_memory && !spared);
}

}  // namespace

// Replace the functions of the C++ library.
void* operator new(std::size_t bytes) {
  if (refuses()) {
    ++refused;
    throw std::bad_alloc();
  }
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace r2ccl {
namespace {

using std::chrono::milliseconds;
using testing::eventually;
using testing::Job;

// Single allocations of this thread are refused while in scope: one after `first` others, and one
// more after `again` others; -1: none.
class Refusals {
 public:
  explicit Refusals(int first, int again = -1) {
    refused_here = 0;
    refused_after = first;
    refused_again_after = again;
  }
  ~Refusals() { refused_after = refused_again_after = -1; }
  Refusals(const Refusals&) = delete;
  Refusals& operator=(const Refusals&) = delete;

  [[nodiscard]] static bool any() { return refused_here > 0; }
};

// ---- a call ----

// The buffers of a call.  After forbid(), a system call on them fails (EFAULT), which ends a rail,
// and any other access ends the process.
class CallMemory {
 public:
  explicit CallMemory(std::size_t count)
      : count_(count),
        memory_(
            ::mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    EXPECT_NE(memory_, MAP_FAILED);
  }
  ~CallMemory() { ::munmap(memory_, bytes()); }
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;

  [[nodiscard]] std::span<float> in() const { return {static_cast<float*>(memory_), count_}; }
  [[nodiscard]] std::span<float> out() const {
    return {static_cast<float*>(memory_) + count_, count_};
  }
  void forbid() const { EXPECT_EQ(::mprotect(memory_, bytes(), PROT_NONE), 0); }

 private:
  [[nodiscard]] std::size_t bytes() const { return 2 * count_ * sizeof(float); }

  const std::size_t count_;
  void* const memory_;
};

constexpr std::size_t small_count = 64;       // copied, and the engine's lock is held
constexpr std::size_t large_count = 300'000;  // sent from the caller's memory

Status all_reduce(Communicator& communicator, const CallMemory& memory) {
  const auto* in = reinterpret_cast<const std::byte*>(memory.in().data());
  auto* out = reinterpret_cast<std::byte*>(memory.out().data());
  return communicator.all_reduce(in, out, memory.in().size(), DType::f32, ReduceOp::sum,
                                 Algorithm::two_shot);
}

// Runs an all-reduce of two ranks.  Returns its status, after which no access to `memory` is left.
Status checked_all_reduce(int rank, Communicator& communicator, const CallMemory& memory, int first,
                          int again) {
  const auto value = [](std::size_t i) { return static_cast<float>(i % 1000); };
  const std::span<float> in = memory.in();
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = value(i) + static_cast<float>(rank);
  Status status;
  try {
    const Refusals refusals(first, again);
    status = all_reduce(communicator, memory);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "an exception has left the call of rank " << rank << ": " << error.what();
  }
  std::size_t wrong = 0;
  for (std::size_t i = 0; status.ok() && i < in.size(); ++i)
    wrong += memory.out()[i] != 2.0F * value(i) + 1.0F ? 1U : 0U;
  EXPECT_EQ(wrong, 0U);
  memory.forbid();
  return status;
}

// Refuses allocations of rank 0 in a call of a new communicator.  Returns true if any was refused.
bool refuse_in_a_call(Job& job, std::size_t count, int first, int again = -1) {
  static std::uint64_t next_id = 20'000;
  const std::array<CallMemory, 2> memory{{CallMemory(count), CallMemory(count)}};
  const auto communicators = job.make_communicators(next_id++);
  std::array<Status, 2> calls;
  std::array<Status, 2> barriers;
  bool any = false;
  job.run([&](int rank, Communicator& before) {
    const auto own = static_cast<std::size_t>(rank);
    const int refused_first = rank == 0 ? first : -1;
    calls[own] = checked_all_reduce(rank, *communicators[own], memory[own], refused_first, again);
    if (rank == 0) any = Refusals::any();
    barriers[own] = communicators[own]->barrier();
    const Status other = before.barrier();  // of a communicator without refusals
    EXPECT_TRUE(other.ok()) << other.message();
  });
  // The call of rank 1 may have had all its data before the exception.
  const ErrorCode wanted = calls[0].ok() ? ErrorCode::ok : ErrorCode::internal;
  EXPECT_TRUE(calls[0].code() == wanted && (calls[1].ok() || calls[1].code() == wanted))
      << calls[0].message() << "; " << calls[1].message();
  for (const Status& barrier : barriers) EXPECT_EQ(barrier.code(), wanted) << barrier.message();
  return any;
}

TEST(Call, AnExceptionIsAnErrorOnEveryRankAndReleasesTheCallersMemory) {
  Config config;
  config.call_timeout_s = testing::patience_s;
  Job job({.ranks = 2, .rails = 1, .config = config});
  // A large call ends while most of it is not sent.
  ASSERT_TRUE(job.engines[0]->inject(0, Fault::slow, 0, 50e6).ok());
  int refusals = 0;
  for (int first = 0; first < 16; ++first)
    refusals += refuse_in_a_call(job, large_count, first) ? 1 : 0;
  EXPECT_GT(refusals, 0);
  // The end of the call needs memory, too.
  for (const int first : {2, 8})
    for (int again = 0; again < 24; ++again) refuse_in_a_call(job, large_count, first, again);
  for (int first = 0; first < 4; ++first)
    for (int again = -1; again < 3; ++again) refuse_in_a_call(job, small_count, first, again);
  for (const JournalRecord& record : job.records(0)) {
    const bool failed = record.kind == JournalKind::rail_state &&
                        record.cause == static_cast<std::uint8_t>(RailCause::socket_error);
    EXPECT_FALSE(failed) << "rail " << record.rail << " has used memory of a call after its end";
  }
}

// A call without memory for its own end, ever.
void call_for_ever_without_memory() {
  Config config;
  config.link_timeout_s = 1;
  Job job({.ranks = 2, .rails = 1, .config = config});
  const CallMemory memory(large_count);
  job.run([&](int rank, Communicator& communicator) {
    if (rank != 0) return;
    allocations_left = 0;
    (void)all_reduce(communicator, memory);
  });
}

TEST(CallDeathTest, WithoutMemoryForTheEndOfACallTheProcessEnds) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(call_for_ever_without_memory(),
               "r2ccl: an exception in a call, and one at the end of the call(.|\n)*"
               "r2ccl: no end of a call within link_timeout_s, so this process ends: "
               "std::bad_alloc");
}

// ---- the background thread ----

Status receive(Communicator& communicator, int from) {
  std::byte data{};
  return communicator.receive_from(&data, 1, DType::u8, from);
}

TEST(BackgroundThread, WithoutAThreadThereIsNoEngine) {
  const testing::NoThreads none;
  auto made = Engine::create({}, 1);
  ASSERT_FALSE(made.ok());
  const Status status = made.take_status();
  EXPECT_EQ(status.code(), ErrorCode::internal);
  EXPECT_NE(status.message().find("cannot start the background thread"), std::string::npos)
      << status.message();
}

// The background threads of both engines have no memory, and so cannot end the communicators at
// first.
TEST(BackgroundThread, AnExceptionWhileItEndsTheCommunicatorsIsNoEnd) {
  spared = true;
  Job job({.ranks = 2, .config = {}});
  std::atomic<int> running{0};
  job.run([&](int rank, Communicator& communicator) {
    spared = true;
    ASSERT_TRUE(communicator.barrier().ok());
    ++running;
    ASSERT_TRUE(eventually([&] { return running == 2; }, "both ranks have left the barrier"));
    Status status;
    if (rank == 0) {
      status = receive(communicator, 1);
    } else {
      ASSERT_TRUE(eventually([&] { return job.in_call(0); }, "rank 0 waits"));
      refused = 0;  // earlier tests refuse, too
      no_memory = true;
      // The first refusal ends a round, and the next ones the attempts to end the communicators.
      EXPECT_TRUE(eventually([] { return refused >= 8; }, "the threads have tried again"));
      no_memory = false;
      status = receive(communicator, 0);
    }
    EXPECT_EQ(status.code(), ErrorCode::internal) << status.message();
    EXPECT_NE(status.message().find("exception in the engine"), std::string::npos)
        << status.message();
  });
  for (const auto& communicator : job.make_communicators(5))
    EXPECT_TRUE(communicator->check_origin().ok());
}

TEST(BackgroundThread, LastingExceptionsDoNotUseTheCpu) {
  spared = true;
  const Job job({.ranks = 2, .config = {}});
  refused = 0;
  no_memory = true;
  const auto began = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_TRUE(eventually([] { return refused > 0; }, "the threads have tried"));
  const unsigned rounds = refused;
  const std::chrono::duration<double> lasted = std::chrono::steady_clock::now() - began;
  no_memory = false;
  EXPECT_LT(rounds, 6000 * lasted.count());  // without a pause: tens of thousands in 0.3 s
}

// Memory runs out at each allocation of an abort in turn.
TEST(BackgroundThread, AnAbortThatRunsOutOfMemoryReachesEveryRank) {
  spared = true;
  Config config;
  config.call_timeout_s = testing::patience_s;
  Job job({.ranks = 3, .rails = 1, .config = config});
  const std::string text = "a reason that is too long for a string without memory of its own";
  bool thrown = true;
  int allocations = 0;
  for (; thrown && allocations < 200; ++allocations) {
    auto communicators = job.make_communicators(10'000 + static_cast<std::uint64_t>(allocations));
    std::swap(job.communicators, communicators);
    thrown = false;
    std::atomic<int> left{0};
    job.run([&](int rank, Communicator& communicator) {
      ASSERT_TRUE(communicator.barrier().ok());
      ++left;
      if (rank == 0) {
        ASSERT_TRUE(eventually([&] { return left == 3; }, "every rank has left the barrier"));
        allocations_left = allocations;
        try {
          communicator.abort(text);
        } catch (const std::bad_alloc&) {
          thrown = true;
        }
        allocations_left = -1;
        if (communicator.check_waiting(now_ns()).ok()) communicator.abort(text);
      }
      const Status status = communicator.barrier();
      EXPECT_EQ(status.code(), ErrorCode::aborted) << status.message();
      EXPECT_NE(status.message().find(text), std::string::npos)
          << allocations << " allocations, rank " << rank << ": " << status.message();
    });
    const auto records = job.records(0);
    EXPECT_EQ(std::ranges::count_if(records,
                                    [&](const JournalRecord& record) {
                                      return record.kind == JournalKind::abort &&
                                             record.communicator ==
                                                 10'000 + static_cast<std::uint64_t>(allocations);
                                    }),
              1)
        << allocations << " allocations";
  }
  EXPECT_GT(allocations, 2);
  EXPECT_FALSE(thrown);  // at last there was memory enough
}

// ---- the proxy of a stream ----

// With `again`, the error after the exception gets no memory, nor does the notice of other ranks.
void end_a_proxy_by_an_exception(bool again, const std::string& reason) {
  testing::HostDevice gpu{64, 64};
  std::string heard;
  std::atomic<bool> told{false};
  device::ProxyOptions options;
  options.on_exception = [&](const Status& why) {
    heard = why.message();
    told = true;
  };
  const auto carry = [again](std::uint32_t, device::Sequence) -> Status {
    if (again) refused_after = refused_again_after = 0;  // on the proxy's thread, which then ends
    throw std::bad_alloc();
  };
  device::Proxy proxy(gpu.mailbox, carry, {}, options);
  ASSERT_TRUE(proxy.start().ok());
  testing::HostStream stream;
  std::array<unsigned char, 64> data{};
  data.fill(77);
  stream.launch(gpu.stage(data.data(), data.size(), 0));
  stream.launch(gpu.deliver(data.data(), data.size()));
  stream.synchronise();
  EXPECT_EQ(data[0], 77);
  EXPECT_EQ(gpu.mailbox.abort.value, static_cast<std::uint32_t>(ErrorCode::internal));
  EXPECT_EQ(proxy.failure().code(), ErrorCode::internal);
  EXPECT_EQ(proxy.failure().message(), reason);
  EXPECT_TRUE(eventually([&] { return told.load(); }, "the other ranks are told"));
  EXPECT_EQ(heard, reason);
}

TEST(Proxy, AnExceptionInACollectiveIsAnErrorOfItsKernels) {
  end_a_proxy_by_an_exception(false, "exception in the proxy: std::bad_alloc");
}

TEST(Proxy, AnExceptionWithoutMemoryForItsErrorIsAnError) {
  end_a_proxy_by_an_exception(true, "exception in the proxy: out of memory");
}

// ---- detached threads ----

TEST(Detached, WithoutMemoryTheBodyDoesNotRun) {
  const auto runs = std::make_shared<std::atomic<int>>(0);
  bool started = false;
  int allocations = 0;
  for (; !started && allocations < 100; ++allocations) {
    const Refusals refusals(allocations);
    started = run_detached("of-a-test", [runs] { ++*runs; });
  }
  EXPECT_TRUE(started);
  EXPECT_GT(allocations, 1);
  EXPECT_TRUE(eventually([&] { return *runs > 0; }, "the body runs"));
  EXPECT_EQ(*runs, 1);
}

}  // namespace
}  // namespace r2ccl
