// The background thread of an engine: a process without threads, and memory that runs out in the
// thread itself, also while it ends the communicators.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "eventually.hpp"
#include "job.hpp"
#include "no_threads.hpp"

namespace {

std::atomic<bool> no_memory{false};  // in threads that are not spared
std::atomic<unsigned> refused{0};
thread_local bool spared = false;
thread_local int allocations_left = -1;  // of this thread; -1: no limit

bool refuses() {
  if (allocations_left == 0) return true;
  if (allocations_left > 0) --allocations_left;
  return no_memory && !spared;
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

}  // namespace
}  // namespace r2ccl
