// A pause of the waiting thread is not charged to a rail event.
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "job.hpp"

namespace r2ccl {
namespace {

using std::chrono::milliseconds;
using testing::Job;

constexpr long pause_ms = 400;

// Runs on the thread that gets the signal, in place of the wait.
void sleep_here(int) {
  const timespec pause{.tv_sec = 0, .tv_nsec = pause_ms * ns_per_ms};
  (void)::nanosleep(&pause, nullptr);
}

Status all_reduce(Communicator& communicator) {
  std::array<float, 64> data{};
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  return communicator.all_reduce(bytes, bytes, data.size(), DType::f32, ReduceOp::sum,
                                 Algorithm::automatic);
}

struct Wait {
  double ms = 0;
  double stall_ms = 0;
};

// Rank 0 waits for rank 1, which comes after 700 ms.  A rail goes down meanwhile.  Returns the wait
// of rank 0.
Wait wait_of_rank_0(bool pauses) {
  Wait wait;
  Job job({.ranks = 2, .rails = 2, .config = {}});
  std::atomic<pthread_t> waiting{};
  std::atomic<bool> waits{false};
  job.run([&](int rank, Communicator& communicator) {
    ASSERT_TRUE(all_reduce(communicator).ok());
    if (rank == 0) {
      waiting = ::pthread_self();
      const auto began = std::chrono::steady_clock::now();
      waits = true;
      ASSERT_TRUE(all_reduce(communicator).ok());
      wait.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began)
                    .count();
      return;
    }
    while (!waits) std::this_thread::yield();
    std::this_thread::sleep_for(milliseconds(100));
    if (pauses) {
      ASSERT_EQ(::pthread_kill(waiting, SIGUSR1), 0);
    }
    std::this_thread::sleep_for(milliseconds(50));
    ASSERT_TRUE(job.engines[1]->inject(0, Fault::carrier_loss).ok());
    std::this_thread::sleep_for(milliseconds(550));
    ASSERT_TRUE(all_reduce(communicator).ok());
  });
  wait.stall_ms = static_cast<double>(job.engines[0]->stalled_ns()) * 1e-6;
  return wait;
}

TEST(ShortOfCpu, APauseOfTheWaitingThreadIsNoStall) {
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = sleep_here;
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &before), 0);
  const Wait without = wait_of_rank_0(false);
  const Wait with = wait_of_rank_0(true);
  ::sigaction(SIGUSR1, &before, nullptr);
  EXPECT_GT(without.stall_ms, 0.0);
  EXPECT_LT(with.stall_ms, with.ms - 0.75 * pause_ms);
}

}  // namespace
}  // namespace r2ccl
