// Protocol between kernels and proxy, with host threads in place of the GPU: over real links with
// cut rails, and in isolation.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "device/proxy.hpp"
#include "eventually.hpp"
#include "host_device.hpp"
#include "job.hpp"

namespace r2ccl {
namespace {

using device::Proxy;
using device::Sequence;
using std::chrono::milliseconds;
using testing::eventually;
using testing::Graph;
using testing::HostDevice;
using testing::HostStream;
using testing::Job;

constexpr std::size_t count = 1000;
constexpr std::size_t bytes = count * sizeof(float);

// A rank whose device decodes. Each replay writes new values, reduces them over all ranks and
// checks the sum. All data stays in device memory.
struct DecodingRank {
  explicit DecodingRank(Communicator& communicator, std::uint32_t blocks = 1,
                        std::uint32_t threads = 1)
      : ranks(communicator.size()),
        proxy(device.mailbox,
              [this, &communicator](std::uint32_t plan, Sequence sequence) {
                EXPECT_EQ(plan, 7U);
                return communicator.all_reduce(device.staging.input(sequence),
                                               device.staging.result(sequence), count, DType::f32,
                                               ReduceOp::sum, Algorithm::automatic);
              },
              {}, {}) {
    EXPECT_TRUE(proxy.start().ok());
    device.blocks = blocks;
    device.threads = threads;
    graph = {
        [this, me = communicator.rank()] {
          for (std::size_t i = 0; i < count; ++i) source[i] = value(turn, i, me);
        },
        device.stage(source.data(), bytes, 7),
        [this] { source.fill(-1.0F); },  // the caller may reuse a staged source
        device.deliver(target.data(), bytes),
        [this] {
          for (std::size_t i = 0; i < count; ++i) {
            float sum = 0.0F;
            for (int rank = 0; rank < ranks; ++rank) sum += value(turn, i, rank);
            if (target[i] != sum) ++wrong;
          }
          ++turn;
        },
    };
  }

  static float value(std::uint32_t turn, std::size_t i, int rank) {
    return static_cast<float>((turn * 31 + i * 7 + static_cast<std::size_t>(rank) * 13) % 1024);
  }

  const int ranks;
  HostDevice device{bytes, bytes};
  std::array<float, count> source{};
  std::array<float, count> target{};
  std::uint32_t turn = 0;  // belongs to the stream's thread until synchronise()
  int wrong = 0;
  Graph graph;
  Proxy proxy;
  HostStream stream;
};

void replay(DecodingRank& rank, int times) {
  for (int i = 0; i < times; ++i) rank.stream.replay(rank.graph);
}

TEST(Mailbox, AGraphIsReplayedWhileRailsAreCutAndHealed) {
  Config config;
  config.rejoin_backoff_min_ms = 1;
  Job job({.ranks = 2, .rails = 2, .config = config});
  DecodingRank first(*job.communicators[0]);
  DecodingRank second(*job.communicators[1]);
  constexpr int replays = 1000;
  replay(first, replays);
  replay(second, replays);
  for (RailId cut = 0; cut < 6; ++cut) {
    std::this_thread::sleep_for(milliseconds(20));
    const RailId rail = cut % 2;
    ASSERT_TRUE(job.engines[0]->inject(rail, Fault::carrier_loss).ok());
    std::this_thread::sleep_for(milliseconds(5));
    ASSERT_TRUE(job.engines[0]->inject(rail, Fault::none).ok());
  }
  for (DecodingRank* rank : {&first, &second}) {
    rank->stream.synchronise();
    EXPECT_TRUE(rank->proxy.failure().ok()) << rank->proxy.failure().message();
    EXPECT_EQ(rank->wrong, 0);
    EXPECT_EQ(rank->turn, static_cast<std::uint32_t>(replays));
    EXPECT_EQ(rank->device.mailbox.arrived.value, static_cast<Sequence>(replays));
  }
}

TEST(Mailbox, ManyBlocksOfManyThreadsStageAndDeliver) {
  Job job({.ranks = 3, .rails = 1, .config = {}});
  std::vector<std::unique_ptr<DecodingRank>> ranks;
  for (const auto& communicator : job.communicators)
    ranks.push_back(std::make_unique<DecodingRank>(*communicator, 3, 2));
  for (const auto& rank : ranks) replay(*rank, 60);
  for (const auto& rank : ranks) {
    rank->stream.synchronise();
    EXPECT_EQ(rank->wrong, 0);
    EXPECT_EQ(rank->turn, 60U);
  }
}

TEST(Mailbox, LossOfAllRailsEndsEveryKernelWithAnError) {
  Config config;
  config.link_timeout_s = 0.3;
  Job job({.ranks = 2, .rails = 2, .config = config});
  DecodingRank first(*job.communicators[0]);
  DecodingRank second(*job.communicators[1]);
  replay(first, 20);
  replay(second, 20);
  first.stream.synchronise();
  second.stream.synchronise();
  for (RailId rail = 0; rail < 2; ++rail)
    ASSERT_TRUE(job.engines[0]->inject(rail, Fault::carrier_loss).ok());
  for (DecodingRank* rank : {&first, &second}) rank->target.fill(42.0F);
  // The checking kernel would report the untouched target as wrong.
  for (DecodingRank* rank : {&first, &second}) {
    rank->graph.pop_back();
    replay(*rank, 5);
  }
  for (DecodingRank* rank : {&first, &second}) {
    rank->stream.synchronise();
    const Status failure = rank->proxy.failure();
    EXPECT_EQ(failure.code(), ErrorCode::peer_lost) << failure.message();
    EXPECT_NE(rank->device.mailbox.abort.value, 0U);
    EXPECT_TRUE(std::ranges::all_of(rank->target, [](float value) { return value == 42.0F; }));
  }
}

// ---- the protocol in isolation ----

// A proxy whose collective doubles every byte; a test holds `gate` to block it.
struct Doubling {
  HostDevice device{bytes, bytes};
  std::mutex gate;  // while held, no collective runs
  std::atomic<int> carried = 0;
  std::vector<std::uint32_t> plans;  // belongs to the proxy's thread
  Status answer;                     // belongs to the proxy's thread
  Proxy::Flush flush;
  std::unique_ptr<Proxy> proxy;
  HostStream stream;

  void start() {
    proxy = std::make_unique<Proxy>(
        device.mailbox,
        [this](std::uint32_t plan, Sequence sequence) {
          const std::lock_guard guard(gate);
          plans.push_back(plan);
          for (std::size_t i = 0; i < bytes; ++i)
            device.staging.result(sequence)[i] = device.staging.input(sequence)[i] << 1;
          ++carried;
          return std::exchange(answer, {});
        },
        flush, device::ProxyOptions{});
    EXPECT_TRUE(proxy->start().ok());
  }
};

TEST(Mailbox, SequenceNumbersWrapAndKeepTheirPlans) {
  Doubling doubling;
  doubling.device.begin_after(0xFFFFFFF0);
  doubling.start();
  std::array<unsigned char, bytes> source{};
  std::array<unsigned char, bytes> target{};
  std::vector<std::uint32_t> plans(64);
  std::iota(plans.begin(), plans.end(), 100U);
  int wrong = 0;
  for (const std::uint32_t plan : plans) {
    doubling.stream.launch([&source, plan] { source.fill(static_cast<unsigned char>(plan)); });
    doubling.stream.launch(doubling.device.stage(source.data(), bytes, plan));
    doubling.stream.launch(doubling.device.deliver(target.data(), bytes));
    doubling.stream.launch([&target, &wrong, plan] {
      const auto expected = static_cast<unsigned char>(plan << 1);
      for (const unsigned char byte : target) wrong += byte != expected;
    });
  }
  doubling.stream.synchronise();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(doubling.device.mailbox.arrived.value, 0xFFFFFFF0 + 64);
  doubling.proxy.reset();
  EXPECT_EQ(doubling.plans, plans);
}

TEST(Mailbox, PartsOfAResultAreDeliveredFromAnyOffsetToAnyAddress) {
  Doubling doubling;
  doubling.device.blocks = 2;
  doubling.device.threads = 2;
  doubling.start();
  std::array<unsigned char, bytes> source{};
  for (std::size_t i = 0; i < bytes; ++i) source[i] = static_cast<unsigned char>(i % 100);
  std::array<unsigned char, 64> target{};
  for (const std::size_t offset : {0UL, 1UL, 16UL, 33UL}) {
    for (const std::size_t size : {0UL, 1UL, 15UL, 16UL, 50UL}) {
      target.fill(255);
      doubling.stream.launch(doubling.device.stage(source.data(), bytes, 1));
      doubling.stream.launch(doubling.device.deliver(target.data() + 3, size, offset));
      doubling.stream.synchronise();
      for (std::size_t i = 0; i < target.size(); ++i) {
        const bool written = i >= 3 && i < 3 + size;
        EXPECT_EQ(target[i], written ? source[offset + i - 3] << 1 : 255) << offset << ' ' << i;
      }
    }
  }
}

TEST(Mailbox, TheDeviceRunsAheadByAtMostTheRing) {
  Doubling doubling;
  doubling.start();
  std::array<std::array<unsigned char, bytes>, 4> sources{};
  std::atomic<int> staged = 0;
  std::unique_lock held(doubling.gate);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    sources[i].fill(static_cast<unsigned char>(i + 1));
    doubling.stream.launch(doubling.device.stage(sources[i].data(), bytes, 0));
    doubling.stream.launch([&staged] { ++staged; });
  }
  ASSERT_TRUE(
      eventually([&] { return staged >= static_cast<int>(device::ring); }, "the ring is full"));
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(staged, static_cast<int>(device::ring));
  EXPECT_EQ(doubling.carried, 0);
  held.unlock();
  std::array<unsigned char, bytes> target{};
  doubling.stream.launch(doubling.device.deliver(target.data(), bytes));
  doubling.stream.synchronise();
  EXPECT_EQ(target[0], 8);
  EXPECT_EQ(target[bytes - 1], 8);
}

TEST(Mailbox, AResultArrivesAfterTheFlush) {
  Doubling doubling;
  std::atomic<Sequence> arrived_at_flush = 0;
  std::atomic<int> flushes = 0;
  doubling.flush = [&] {
    std::this_thread::sleep_for(milliseconds(5));
    arrived_at_flush = load_acquire(doubling.device.mailbox.arrived);
    ++flushes;
    return Status();
  };
  doubling.start();
  std::array<unsigned char, bytes> data{};
  for (int turn = 1; turn <= 3; ++turn) {
    doubling.stream.launch(doubling.device.stage(data.data(), bytes, 0));
    doubling.stream.launch(doubling.device.deliver(data.data(), bytes));
    doubling.stream.synchronise();
    EXPECT_EQ(flushes, turn);
    EXPECT_EQ(arrived_at_flush, static_cast<Sequence>(turn - 1));
  }
}

TEST(Mailbox, AnErrorIsStickyAndLeavesTargetsUnchanged) {
  Doubling doubling;
  doubling.answer = {ErrorCode::peer_lost, "rank 3 is gone"};
  doubling.start();
  std::array<unsigned char, bytes> source{};
  std::array<unsigned char, bytes> target{};
  source.fill(1);
  target.fill(77);
  for (int turn = 0; turn < 5; ++turn) {
    doubling.stream.launch(doubling.device.stage(source.data(), bytes, 0));
    doubling.stream.launch(doubling.device.deliver(target.data(), bytes));
  }
  doubling.stream.synchronise();
  EXPECT_EQ(target[0], 77);
  EXPECT_EQ(doubling.proxy->failure().message(), "rank 3 is gone");
  EXPECT_EQ(doubling.device.mailbox.abort.value, static_cast<std::uint32_t>(ErrorCode::peer_lost));
  EXPECT_EQ(doubling.carried, 1);
}

TEST(Mailbox, TheEndOfAProxyReleasesWaitingKernels) {
  Doubling doubling;
  doubling.start();
  std::array<unsigned char, bytes> target{};
  target.fill(77);
  {
    const std::lock_guard held(doubling.gate);
    for (int turn = 0; turn < 4; ++turn)
      doubling.stream.launch(doubling.device.stage(target.data(), bytes, 0));
    doubling.stream.launch(doubling.device.deliver(target.data(), bytes));
    std::this_thread::sleep_for(milliseconds(10));
  }
  doubling.proxy.reset();
  doubling.stream.synchronise();  // does not hang
  EXPECT_TRUE(target[0] == 77 || target[0] == 77 * 2);
}

TEST(Mailbox, AnIdleProxyFindsWorkAndEnds) {
  Doubling doubling;
  doubling.start();
  std::array<unsigned char, bytes> data{};
  for (const int pause_ms : {0, 10, 30}) {
    std::this_thread::sleep_for(milliseconds(pause_ms));
    doubling.proxy->wake();
    doubling.stream.launch(doubling.device.stage(data.data(), bytes, 0));
    doubling.stream.launch(doubling.device.deliver(data.data(), bytes));
    doubling.stream.synchronise();
  }
  EXPECT_EQ(doubling.carried, 3);
  std::atomic<bool> ended{false};
  std::thread ending([&] {
    doubling.proxy.reset();
    ended = true;
  });
  EXPECT_TRUE(eventually([&] { return ended.load(); }, "the proxy has ended"));
  ending.join();
}

TEST(Mailbox, ACommandWithAWrongNumberIsAnInternalError) {
  Doubling doubling;
  doubling.start();
  doubling.device.mailbox.commands[1 % device::ring] = {9, 0};
  store_release(doubling.device.mailbox.posted, 1);
  ASSERT_TRUE(eventually([&] { return load_acquire(doubling.device.mailbox.abort) != 0; },
                         "the proxy has failed"));
  EXPECT_EQ(doubling.proxy->failure().code(), ErrorCode::internal);
}

}  // namespace
}  // namespace r2ccl
