// Collectives on GPU memory over real links, with a fake driver: on a stream, in slices, and as
// graphs replayed while rails are cut.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "eventually.hpp"
#include "no_threads.hpp"
#include "stream_ranks.hpp"

namespace r2ccl {
namespace {

using device::StreamCommunicator;
using device::StreamOptions;
using std::chrono::milliseconds;
using testing::address;
using testing::compare_all;
using testing::eventually;
using testing::fake;
using testing::Job;
using testing::LiveMemory;
using testing::Nodes;
using testing::options;
using testing::Rank;

TEST(StreamCommunicator, EveryCollectiveGivesTheHostsBitsInOneOrManySlices) {
  Job job({.ranks = 3, .rails = 2, .config = {}});
  const auto of_streams = job.make_communicators(77);
  job.run([&](int me, Communicator& host) {
    Rank rank(*of_streams[static_cast<std::size_t>(me)], 16384);  // slices of 1,365 elements
    std::size_t turn = 0;
    for (const std::size_t count : {0UL, 1UL, 7UL, 1000UL, 4096UL, 4097UL, 10'000UL})
      compare_all(rank, host, count, turn++);
  });
}

TEST(StreamCommunicator, AGraphIsReplayedWhileRailsAreCutAndHealed) {
  Config config;
  config.rejoin_backoff_min_ms = 1;
  config.flap_half_life_s = 0.0;  // no penalty: under a sanitizer rails are cut in most replays
  Job job({.ranks = 2, .rails = 2, .config = config});
  constexpr std::size_t count = 6000;  // 2 slices
  constexpr int replays = 400;
  std::atomic<int> ended = 0;
  std::thread cutting([&] {
    for (unsigned turn = 0; ended < 2; ++turn) {
      const auto rail = static_cast<RailId>(turn % 2);
      EXPECT_TRUE(job.engines[0]->inject(rail, Fault::carrier_loss).ok());
      std::this_thread::sleep_for(milliseconds(5));
      EXPECT_TRUE(job.engines[0]->inject(rail, Fault::none).ok());
      std::this_thread::sleep_for(milliseconds(15));
    }
  });
  job.run([&](int me, Communicator& communicator) {
    Rank rank(communicator, 16384);
    std::vector<float> in(count);
    std::vector<float> sum(count);
    std::vector<float> all(2 * count);
    int turn = 0;
    int wrong = 0;
    const auto value = [](int of, int at, std::size_t i) {
      return static_cast<float>((at * 31 + static_cast<int>(i) * 7 + of * 13) % 1024);
    };
    std::function<void()> prepare = [&] {
      for (std::size_t i = 0; i < count; ++i) in[i] = value(me, turn, i);
    };
    std::function<void()> check = [&] {
      for (std::size_t i = 0; i < count; ++i) {
        const float first = value(0, turn, i);
        const float second = value(1, turn, i);
        if (sum[i] != first + second || all[i] != first || all[count + i] != second) ++wrong;
      }
      ++turn;
    };
    const std::vector<std::size_t> counts{count, count};
    rank.capture([&] {
      rank.add(prepare);
      EXPECT_TRUE(rank.collectives
                      ->all_reduce(rank.stream, address(in), address(sum), count, DType::f32,
                                   ReduceOp::sum, Algorithm::automatic)
                      .ok());
      EXPECT_TRUE(
          rank.collectives->all_gatherv(rank.stream, address(in), address(all), counts, DType::f32)
              .ok());
      rank.add(check);
    });
    for (int i = 0; i < replays; ++i) rank.replay();
    rank.synchronise();
    const Status status = rank.collectives->failure();
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(turn, replays);
    EXPECT_EQ(wrong, 0);
    ++ended;
  });
  cutting.join();
}

TEST(StreamCommunicator, RanksOfANodeReduceFirstAndGiveTheHostsBits) {
  Nodes nodes;
  nodes.job.run([&](int me, Communicator& host) {
    const std::unique_ptr<Rank> rank = nodes.rank(me, 16384);
    EXPECT_TRUE(rank->collectives->exchange().ok()) << rank->collectives->exchange().message();
    std::size_t turn = 0;
    for (const std::size_t count : {0UL, 1UL, 7UL, 1000UL, 4096UL, 4097UL, 10'000UL})
      compare_all(*rank, host, count, turn++);
  });
}

TEST(StreamCommunicator, AnExchangeInAGraphIsReplayedWhileRailsAreCutAndHealed) {
  Config config;
  config.rejoin_backoff_min_ms = 1;
  config.flap_half_life_s = 0.0;
  Nodes nodes(config);
  constexpr std::size_t count = 6000;  // 2 slices
  constexpr int replays = 100;
  std::atomic<int> ended = 0;
  std::thread cutting([&] {
    for (unsigned turn = 0; ended < 4; ++turn) {
      const auto rail = static_cast<RailId>(turn % 2);
      EXPECT_TRUE(nodes.job.engines[0]->inject(rail, Fault::carrier_loss).ok());
      std::this_thread::sleep_for(milliseconds(5));
      EXPECT_TRUE(nodes.job.engines[0]->inject(rail, Fault::none).ok());
      std::this_thread::sleep_for(milliseconds(15));
    }
  });
  nodes.job.run([&](int me, Communicator& /*host*/) {
    const std::unique_ptr<Rank> rank = nodes.rank(me, 16384);
    std::vector<float> in(count);
    std::vector<float> sum(count);
    int turn = 0;
    int wrong = 0;
    const auto value = [](int of, int at, std::size_t i) {
      return static_cast<float>((at * 31 + static_cast<int>(i) * 7 + of * 13) % 1024);
    };
    std::function<void()> prepare = [&] {
      for (std::size_t i = 0; i < count; ++i) in[i] = value(me, turn, i);
    };
    std::function<void()> check = [&] {
      for (std::size_t i = 0; i < count; ++i) {
        float wanted = 0;
        for (int of = 0; of < 4; ++of) wanted += value(of, turn, i);
        if (sum[i] != wanted) ++wrong;
      }
      ++turn;
    };
    rank->capture([&] {
      rank->add(prepare);
      EXPECT_TRUE(rank->collectives
                      ->all_reduce(rank->stream, address(in), address(sum), count, DType::f32,
                                   ReduceOp::sum, Algorithm::automatic)
                      .ok());
      rank->add(check);
    });
    for (int i = 0; i < replays; ++i) rank->replay();
    rank->synchronise();
    const Status status = rank->collectives->failure();
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(turn, replays);
    EXPECT_EQ(wrong, 0);
    ++ended;
  });
  cutting.join();
}

// Closes the engine of rank 1 after `before` collectives. All other ranks must end with an error.
void leave_in_an_exchange(int before) {
  Config config;
  config.link_timeout_s = 10.0;  // a pause of an engine is no loss
  Nodes nodes(config);
  std::array<std::unique_ptr<Rank>, 4> ranks;  // memory stays after a rank's close
  std::atomic<int> ready = 0;
  nodes.job.run([&](int me, Communicator& /*host*/) {
    std::unique_ptr<Rank>& rank = ranks[static_cast<std::size_t>(me)];
    rank = nodes.rank(me);
    const std::vector<float> in(1000, 1.0F);
    const std::vector<float> out(1000, 4.0F);
    const auto reduce = [&] {
      return rank->collectives->all_reduce(rank->stream, address(in), address(out), in.size(),
                                           DType::f32, ReduceOp::sum, Algorithm::automatic);
    };
    for (int i = 0; i < before; ++i) EXPECT_TRUE(reduce().ok());
    rank->synchronise();
    ++ready;
    if (me == 1) {
      EXPECT_TRUE(eventually([&] { return ready == 4; }, "the other ranks need rank 1 no more"));
      return nodes.job.engines[1]->close(0.0);
    }
    (void)reduce();  // queued in the stream, or refused if the loss is known already
    rank->synchronise();
    EXPECT_FALSE(rank->collectives->failure().ok());
    EXPECT_EQ(out, std::vector<float>(1000, 4.0F));
    EXPECT_FALSE(reduce().ok());
  });
  nodes.job.run([&](int me, Communicator& /*host*/) {
    ranks[static_cast<std::size_t>(me)]->collectives->close();
  });
}

TEST(StreamCommunicator, ALostRankEndsTheExchangeOfAllOthers) { leave_in_an_exchange(1); }

TEST(StreamCommunicator, ALostRankEndsTheFirstExchange) { leave_in_an_exchange(0); }

TEST(StreamCommunicator, CallTimeoutSEndsAnExchangeWithoutARankOfTheNode) {
  Config config;
  config.call_timeout_s = 10.0;  // the start has calls, too, with ranks that may come late
  Nodes nodes(config);
  std::array<std::unique_ptr<Rank>, 4> ranks;  // memory stays after a rank's close
  std::atomic<bool> ended = false;
  nodes.job.run([&](int me, Communicator& /*host*/) {
    std::unique_ptr<Rank>& rank = ranks[static_cast<std::size_t>(me)];
    rank = nodes.rank(me);
    const std::vector<float> in(1000, 1.0F);
    const std::vector<float> out(1000, 4.0F);
    if (me != 0) {
      EXPECT_TRUE(eventually([&] { return ended.load(); }, "rank 0 has given up"));
    }
    (void)rank->collectives->all_reduce(rank->stream, address(in), address(out), in.size(),
                                        DType::f32, ReduceOp::sum, Algorithm::automatic);
    rank->synchronise();
    const Status failure = rank->collectives->failure();
    EXPECT_EQ(failure.code(), ErrorCode::aborted) << failure.message();
    if (me == 0) {
      for (const char* words : {"rank 0 has waited for call_timeout_s = 1", "inside the node"})
        EXPECT_NE(failure.message().find(words), std::string::npos) << failure.message();
      ended = true;
    }
    EXPECT_EQ(out, std::vector<float>(1000, 4.0F));
  });
  nodes.job.run([&](int me, Communicator& /*host*/) {
    ranks[static_cast<std::size_t>(me)]->collectives->close();
  });
}

TEST(PlanRunner, CallTimeoutSIsTheWaitOfOneExchange) {
  Config config;
  config.call_timeout_s = 1.0;
  Job job({.ranks = 2, .rails = 1, .config = config});
  const auto inter_node = job.make_part(80, {0, 1}, 0);
  const StreamOptions with = options();
  auto gpu = cuda::Device::open(with.library, with.device, with.image);
  ASSERT_TRUE(gpu.ok());
  device::Mailbox mailbox;
  const device::DirectMemory direct{};
  device::PlanRunner runner({.mailbox = mailbox,
                             .communicator = *job.communicators[0],
                             .inter_node = inter_node.get(),
                             .pinned = {},
                             .direct = {},
                             .direct_memory = direct,
                             .device = *gpu.value()});
  // An exchange is open at every look, and each is another one.
  for (int look = 0; look < 30; ++look) {
    ++mailbox.entered.value;
    const Status status = runner.watch();
    ASSERT_TRUE(status.ok()) << status.message();
    std::this_thread::sleep_for(milliseconds(50));
    mailbox.left.value = mailbox.entered.value;
  }
  ++mailbox.entered.value;
  Status status;
  EXPECT_TRUE(eventually([&] { return !(status = runner.watch()).ok(); }, "the wait has ended"));
  EXPECT_EQ(status.code(), ErrorCode::aborted) << status.message();
  EXPECT_EQ(job.communicators[1]->barrier().code(), ErrorCode::aborted);
}

TEST(StreamCommunicator, ARankWithoutIpcMemoryDisablesTheExchange) {
  Nodes nodes;
  fake().call("fake_cuda_fail", "cuIpcOpenMemHandle", 1);
  nodes.job.run([&](int me, Communicator& host) {
    const std::unique_ptr<Rank> rank = nodes.rank(me);
    EXPECT_FALSE(rank->collectives->exchange().ok());
    compare_all(*rank, host, 1000, 1);
  });
}

TEST(StreamCommunicator, LostRailsAreAnErrorAndLeaveTheTargetUnchanged) {
  Config config;
  config.link_timeout_s = 2.0;
  Job job({.ranks = 2, .rails = 2, .config = config});
  ASSERT_TRUE(job.all_up());
  std::atomic<int> begun = 0;
  job.run([&](int me, Communicator& communicator) {
    Rank rank(communicator);
    ++begun;  // a loss would fail the start of the other rank
    EXPECT_TRUE(eventually([&] { return begun == 2; }, "both ranks have begun"));
    for (RailId rail = 0; rail < 2; ++rail)
      EXPECT_TRUE(
          job.engines[static_cast<std::size_t>(me)]->inject(rail, Fault::carrier_loss).ok());
    const std::vector<float> in(100, 1.0F);
    const std::vector<float> out(100, 7.0F);
    const auto reduce = [&] {
      return rank.collectives->all_reduce(rank.stream, address(in), address(out), in.size(),
                                          DType::f32, ReduceOp::sum, Algorithm::automatic);
    };
    (void)reduce();  // queued in the stream, or refused if the loss is known already
    rank.synchronise();
    const ErrorCode code = rank.collectives->failure().code();
    EXPECT_TRUE(code == ErrorCode::peer_lost || code == ErrorCode::aborted);
    EXPECT_EQ(out, std::vector<float>(100, 7.0F));
    EXPECT_EQ(reduce().code(), code);
    rank.collectives->close();
    EXPECT_EQ(rank.collectives->failure().code(), code);
  });
}

TEST(StreamCommunicator, WrongArgumentsAreRefusedAndChangeNothing) {
  Job job({.ranks = 2, .rails = 1, .config = {}});
  job.run([&](int me, Communicator& communicator) {
    Rank rank(communicator);
    StreamCommunicator& gpu = *rank.collectives;
    const std::vector<std::size_t> three{1, 1, 1};
    for (const Status& status :
         {gpu.broadcast(rank.stream, 0, 1, DType::f32, 2),
          gpu.send_to(rank.stream, 0, 1, DType::f32, me),
          gpu.receive_from(rank.stream, 0, 1, DType::f32, -1),
          gpu.all_gatherv(rank.stream, 0, 0, three, DType::f32),
          gpu.reduce_scatterv(rank.stream, 0, 0, three, DType::f32, ReduceOp::sum),
          gpu.all_reduce(rank.stream, 0, 0, 1, DType::boolean, ReduceOp::avg,
                         Algorithm::automatic)})
      EXPECT_EQ(status.code(), ErrorCode::invalid_argument) << status.message();
    const std::vector<float> in(10, 2.0F);
    const std::vector<float> out(10);
    EXPECT_TRUE(gpu.all_reduce(rank.stream, address(in), address(out), 10, DType::f32,
                               ReduceOp::sum, Algorithm::automatic)
                    .ok());
    rank.synchronise();
    EXPECT_EQ(out[9], 4.0F);
    gpu.close();
    EXPECT_EQ(gpu.barrier(rank.stream).code(), ErrorCode::invalid_argument);  // closed
  });
}

TEST(StreamCommunicator, ADriverErrorIsReportedAndLeavesNoMemory) {
  Job job({.ranks = 2, .rails = 1, .config = {}});
  const LiveMemory memory;
  const auto failure_of = [&](StreamOptions with) {
    with.direct.use = device::DirectOptions::Use::never;  // needs no agreement between ranks
    auto made = StreamCommunicator::create(*job.communicators[0], with);
    return made.ok() ? std::string("none") : made.take_status().message();
  };
  for (const char* entry : {"cuMemAlloc", "cuMemHostAlloc", "cuModuleLoadData"}) {
    fake().call("fake_cuda_fail", entry, 2);
    EXPECT_EQ(failure_of(options()),
              std::string(entry) + ": CUDA_ERROR_OUT_OF_MEMORY (2) out of memory");
    EXPECT_EQ(memory.grown(), 0);
  }
  StreamOptions wrong = options();
  wrong.device = 1;
  EXPECT_EQ(failure_of(wrong), "device: 1; the number of GPUs is 1, counted from 0");
  wrong = options(100);
  EXPECT_EQ(failure_of(wrong), "staging_bytes: 100; 2 ranks need 8192");
  wrong = options();
  wrong.image = {};
  EXPECT_NE(failure_of(wrong).find("no kernels"), std::string::npos);
  wrong = options();
  wrong.library = "libcuda_that_is_not.so";
  EXPECT_NE(failure_of(wrong).find("libcuda_that_is_not.so"), std::string::npos);
  wrong.library = "libc.so.6";
  EXPECT_NE(failure_of(wrong).find("missing symbol cuInit"), std::string::npos);
  EXPECT_EQ(failure_of(options()), "none");
  EXPECT_EQ(memory.grown(), 0);

  job.run([&](int me, Communicator& communicator) {
    Rank rank(communicator);
    if (me != 0) return;
    fake().call("fake_cuda_fail", "cuLaunchKernel", 719);
    EXPECT_NE(rank.collectives->barrier(rank.stream).message().find("cuLaunchKernel"),
              std::string::npos);
  });
}

// Rank 0 stays open until the other rank, which waits for it in a collective, knows.
TEST(StreamCommunicator, AnExceptionInAProxyIsAnErrorOnEveryRank) {
  Config config;
  config.call_timeout_s = testing::patience_s;
  Job job({.ranks = 2, .rails = 1, .config = config});
  std::atomic<int> made = 0;
  std::atomic<bool> knows = false;
  job.run([&](int me, Communicator& communicator) {
    StreamOptions with = options();
    if (me == 0)
      with.proxy.watch = [&made]() -> Status {
        if (made == 2) throw std::bad_alloc();
        return {};
      };
    auto created = StreamCommunicator::create(communicator, with);
    ASSERT_TRUE(created.ok()) << created.take_status().message();
    ++made;
    if (me == 0) {
      EXPECT_TRUE(eventually([&] { return knows.load(); }, "rank 1 knows"));
      EXPECT_EQ(created.value()->failure().code(), ErrorCode::internal);
    } else {
      const Status status = communicator.barrier();
      EXPECT_EQ(status.code(), ErrorCode::aborted);
      EXPECT_NE(status.message().find("exception in the proxy"), std::string::npos)
          << status.message();
      knows = true;
    }
  });
}

TEST(StreamCommunicator, WithoutAThreadForTheProxyThereIsNoCommunicator) {
  Job job({.ranks = 2, .rails = 1, .config = {}});
  std::atomic<int> running = 0;
  job.run([&](int, Communicator& communicator) {
    ++running;
    EXPECT_TRUE(eventually([&] { return running == 2; }, "both ranks run"));
    ASSERT_TRUE(communicator.barrier().ok());
    const testing::NoThreads no_threads;
    auto made = StreamCommunicator::create(communicator, options());
    const Status status = made.take_status();
    EXPECT_EQ(status.code(), ErrorCode::internal);
    EXPECT_NE(status.message().find("cannot start the proxy"), std::string::npos)
        << status.message();
  });
}

}  // namespace
}  // namespace r2ccl
