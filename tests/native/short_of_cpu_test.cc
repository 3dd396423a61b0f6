// A pause of the waiting thread is not charged to a rail event.
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "eventually.hpp"
#include "job.hpp"
#include "sanitized.hpp"

namespace r2ccl {
namespace {

using std::chrono::milliseconds;
using testing::eventually;
using testing::Job;

constexpr long pause_ms = 400;
std::atomic<bool> pausing{false};
std::atomic<bool> has_paused{false};

// Runs on the thread that gets the signal, in place of the wait.
void sleep_here(int) {
  pausing = true;
  const timespec pause{.tv_sec = 0, .tv_nsec = pause_ms * ns_per_ms};
  (void)::nanosleep(&pause, nullptr);
  has_paused = true;
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

// Rank 0 waits for rank 1.  A rail goes down meanwhile, during a pause of rank 0 if it `pauses`.
// Returns the wait of rank 0.
Wait wait_of_rank_0(bool pauses) {
  Wait wait;
  pausing = has_paused = false;
  Job job({.ranks = 2, .rails = 2, .config = {}});
  EXPECT_TRUE(job.all_up());  // only a rail in use can be lost
  std::atomic<pthread_t> waiting{};
  job.run([&](int rank, Communicator& communicator) {
    ASSERT_TRUE(all_reduce(communicator).ok());
    if (rank == 0) {
      waiting = ::pthread_self();
      const auto began = std::chrono::steady_clock::now();
      ASSERT_TRUE(all_reduce(communicator).ok());
      wait.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began)
                    .count();
      return;
    }
    EXPECT_TRUE(eventually([&] { return waiting != pthread_t{} && job.in_call(0); },
                           "rank 0 waits for rank 1"));
    std::this_thread::sleep_for(milliseconds(100));
    if (pauses) {
      EXPECT_EQ(::pthread_kill(waiting, SIGUSR1), 0);
      EXPECT_TRUE(eventually([&] { return pausing.load(); }, "the pause has begun"));
    }
    EXPECT_TRUE(job.engines[1]->inject(0, Fault::carrier_loss).ok());
    const auto lost = [&] {
      return (has_paused || !pauses) && job.engines[0]->rails()[0].state != RailState::up;
    };
    EXPECT_TRUE(eventually(lost, "rank 0 has lost the rail, and has paused"));
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_TRUE(all_reduce(communicator).ok());
  });
  wait.stall_ms = static_cast<double>(job.engines[0]->stalled_ns()) * 1e-6;
  return wait;
}

TEST(ShortOfCpu, WaitsOfTestsGrowWithTheFactorOfTheGate) {
  const double usual_s = testing::sanitized() ? 120.0 : 60.0;
  EXPECT_DOUBLE_EQ(testing::patience_s, usual_s * testing::patience());
  const auto with = [](const char* factor) {
    EXPECT_EQ(::setenv("R2SERVE_TEST_PATIENCE", factor, 1), 0);
    return testing::patience();
  };
  EXPECT_DOUBLE_EQ(with("2.50"), 2.5);
  EXPECT_DOUBLE_EQ(with("0.5"), 1.0);
  EXPECT_DOUBLE_EQ(with(""), 1.0);
  EXPECT_EQ(::unsetenv("R2SERVE_TEST_PATIENCE"), 0);  // patience_s keeps its value
  EXPECT_DOUBLE_EQ(testing::patience(), 1.0);
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
