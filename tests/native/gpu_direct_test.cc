// Collectives staged in GPU memory for NICs to read and write, over fake RDMA devices and a fake
// driver. Host threads cannot access the addresses of this memory; a thread that tries crashes the
// test.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "device/direct_memory.hpp"
#include "drivers/fake_verbs.hpp"
#include "eventually.hpp"
#include "sanitized.hpp"
#include "stream_ranks.hpp"

namespace r2ccl {
namespace {

using device::DirectOptions;
using device::StreamCommunicator;
using std::chrono::milliseconds;
using testing::address;
using testing::compare_all;
using testing::fake;
using testing::Job;
using testing::LiveMemory;
using testing::Nodes;
using testing::options;
using testing::Rank;
using testing::sanitized;

constexpr DirectOptions everything{DirectOptions::Use::always, 1};
constexpr std::size_t counts[] = {0, 1, 7, 1000, 4096, 4097, 10'000};

// Compares all collectives with the host's results. First all sizes are staged in GPU memory, then
// only sizes from 4000 bytes on, which mixes both kinds of staging.
void compare_over(Job& job, const std::vector<std::unique_ptr<Communicator>>& of_streams) {
  ASSERT_TRUE(job.all_up());  // a rail that fails to come up in the trial would disable GPUDirect
  const LiveMemory memory;
  const int flushes = fake().call("fake_cuda_flushes");
  for (const std::uint64_t from : {1UL, 4000UL})
    job.run([&](int me, Communicator& host) {
      Rank rank(*of_streams[static_cast<std::size_t>(me)], 16384, {},
                {DirectOptions::Use::always, from});
      EXPECT_TRUE(rank.collectives->direct().ok()) << rank.collectives->direct().message();
      std::size_t turn = 0;
      for (const std::size_t count : counts) compare_all(rank, host, count, turn++);
    });
  EXPECT_GT(fake().call("fake_cuda_flushes"), flushes);
  EXPECT_EQ(memory.grown(), 0);
}

TEST(GpuDirect, EveryCollectiveOfTwoRanksGivesTheHostsBits) {
  Job job({.ranks = 2, .rails = 2, .verbs = 2, .config = {}});
  compare_over(job, job.make_communicators(77));
}

TEST(GpuDirect, EveryCollectiveOfThreeRanksGivesTheHostsBits) {
  Job job({.ranks = 3, .rails = 2, .verbs = 2, .config = {}});
  compare_over(job, job.make_communicators(77));
}

TEST(GpuDirect, WritesThatLandInAnyOrderGiveTheHostsBits) {
  Job job({.ranks = 3, .rails = 3, .verbs = 3, .config = {}});
  job.verbs->shuffle(1);
  compare_over(job, job.make_communicators(77));
}

TEST(GpuDirect, RailsOfBothKindsGiveTheHostsBits) {
  Job job({.ranks = 2, .rails = 3, .verbs = 1, .config = {}});
  compare_over(job, job.make_communicators(77));
}

// Checks that an all-reduce needs at most `most` copies on average. Data is copied to its target if
// the data arrives before the address of the target. On a busy host ranks start a call at different
// times, so the best of 10 rounds counts.
void expect_few_copies(int ranks, std::size_t count, int most) {
  Job job({.ranks = ranks, .rails = 2, .verbs = 2, .config = {}});
  ASSERT_TRUE(job.all_up());
  constexpr int calls = 20;
  constexpr int rounds = 10;
  int fewest = std::numeric_limits<int>::max();
  for (int round = 0; round < rounds && fewest > calls * most; ++round) {
    const int before = fake().call("fake_cuda_copies");
    job.run([&](int /*me*/, Communicator& communicator) {
      Rank rank(communicator, 4U << 20U);
      const std::vector<float> in(count, 1.0F);
      const std::vector<float> out(count);
      for (int i = 0; i < calls; ++i)
        EXPECT_TRUE(rank.collectives
                        ->all_reduce(rank.stream, address(in), address(out), count, DType::f32,
                                     ReduceOp::sum, Algorithm::automatic)
                        .ok());
      rank.synchronise();
      EXPECT_EQ(out, std::vector<float>(count, static_cast<float>(ranks)));
    });
    fewest = std::min(fewest, fake().call("fake_cuda_copies") - before);
  }
  EXPECT_LE(fewest, calls * most) << "late: copies in the best round";
}
TEST(GpuDirect, LargeMessagesAreWrittenToTheirTarget) {
  expect_few_copies(2, 1U << 18U, 3);  // of 16 chunks; a rail may learn the target late
  expect_few_copies(2, 1U << 14U, 1);  // of 2 chunks, the smallest size with a target
  expect_few_copies(3, 1U << 18U, 6);  // of 36 chunks; a rank's own part needs no copy
}

TEST(GpuDirect, TcpTakesOverWhenAllRdmaRailsAreDown) {
  Job job({.ranks = 2, .rails = 3, .verbs = 2, .config = {}});
  ASSERT_TRUE(job.all_up());
  const auto of_streams = job.make_communicators(77);
  job.run([&](int me, Communicator& host) {
    Rank rank(*of_streams[static_cast<std::size_t>(me)], 16384, {}, everything);
    compare_all(rank, host, 4097, 1);
    for (RailId rail = 0; rail < 2; ++rail)
      EXPECT_TRUE(
          job.engines[static_cast<std::size_t>(me)]->inject(rail, Fault::carrier_loss).ok());
    for (const std::size_t count : counts) compare_all(rank, host, count, count);
  });
}

// With 2 nodes, both reduce all data. With more nodes, each node reduces a shard.
TEST(GpuDirect, RanksOfANodeExchangeBeforeTheRails) {
  // From 4000 bytes on, both kinds of staging occur; a sanitizer needs no other run.
  const auto limits =
      sanitized() ? std::vector<std::uint64_t>{4000} : std::vector<std::uint64_t>{1, 4000};
  for (const int count_of_nodes : {2, 3}) {
    Nodes nodes({}, count_of_nodes, 2);
    for (const std::uint64_t from : limits)
      nodes.job.run([&](int me, Communicator& host) {
        const auto rank = nodes.rank(me, 32768, {DirectOptions::Use::always, from});
        EXPECT_TRUE(rank->collectives->exchange().ok()) << rank->collectives->exchange().message();
        EXPECT_TRUE(rank->collectives->direct().ok()) << rank->collectives->direct().message();
        std::size_t turn = 0;
        for (const std::size_t count : counts) compare_all(*rank, host, count, turn++);
        compare_all(*rank, host, 40'000, turn++);
      });
  }
}

TEST(GpuDirect, AGraphIsReplayedWhileRailsAreCutAndHealed) {
  Config config;
  config.rejoin_backoff_min_ms = 1;
  config.flap_half_life_s = 0.0;
  Job job({.ranks = 3, .rails = 2, .verbs = 2, .config = config});
  ASSERT_TRUE(job.all_up());
  constexpr std::size_t count = 6000;
  constexpr int replays = 150;
  std::atomic<int> begun = 0;  // a rail lost in the start-up trial would disable GPUDirect
  std::atomic<int> ended = 0;
  std::thread cutting([&] {
    EXPECT_TRUE(testing::eventually([&] { return begun == 3; }, "all ranks have begun"));
    for (unsigned turn = 0; ended < 3; ++turn) {
      const auto rail = static_cast<RailId>(turn % 2);
      EXPECT_TRUE(job.engines[0]->inject(rail, Fault::carrier_loss).ok());
      std::this_thread::sleep_for(milliseconds(5));
      EXPECT_TRUE(job.engines[0]->inject(rail, Fault::none).ok());
      std::this_thread::sleep_for(milliseconds(15));
    }
  });
  job.run([&](int me, Communicator& communicator) {
    Rank rank(communicator, 16384, {}, everything);
    ++begun;
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
      for (std::size_t i = 0; i < count; ++i)
        if (sum[i] != value(0, turn, i) + value(1, turn, i) + value(2, turn, i)) ++wrong;
      ++turn;
    };
    rank.capture([&] {
      rank.add(prepare);
      EXPECT_TRUE(rank.collectives
                      ->all_reduce(rank.stream, address(in), address(sum), count, DType::f32,
                                   ReduceOp::sum, Algorithm::automatic)
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

TEST(GpuDirect, GatheredSlotsStayInGpuMemory) {
  Job job({.ranks = 2, .rails = 2, .verbs = 2, .config = {}});
  ASSERT_TRUE(job.all_up());
  job.run([&](int me, Communicator& communicator) {
    Rank rank(communicator, 1U << 16U, {}, {DirectOptions::Use::always, 1000});
    const StreamCommunicator::Slots slots = rank.collectives->slots();
    EXPECT_EQ(slots.direct_from, 1000U);
    for (const std::size_t count : {100UL, 5000UL}) {
      const std::vector<float> in(count, static_cast<float>(me + 1));
      EXPECT_TRUE(rank.collectives->gather_slots(rank.stream, address(in), count, DType::f32).ok());
      EXPECT_TRUE(rank.collectives->barrier(rank.stream).ok());
      rank.synchronise();
      const auto* sequence = reinterpret_cast<const device::Sequence*>(slots.sequence);
      const cuda::Address base = count * sizeof(float) < 1000 ? slots.base : slots.direct_base;
      const auto* shards =
          reinterpret_cast<const float*>(base + (*sequence - 1) % device::ring * slots.entry_bytes);
      EXPECT_EQ(std::vector<float>(shards, shards + count), std::vector<float>(count, 1.0F));
      EXPECT_EQ(std::vector<float>(shards + count, shards + 2 * count),
                std::vector<float>(count, 2.0F));
    }
  });
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// Makes copies from the staging memory of rank 0 fail, over these rails. No rank may get a result,
// and all ranks must report an error.
void fail_to_copy(int rails, int verbs, std::size_t count) {
  Config config;
  config.link_timeout_s = 5.0;
  Job job({.ranks = 2, .rails = rails, .verbs = verbs, .config = config});
  ASSERT_TRUE(job.all_up());
  std::atomic<int> named = 0;
  job.run([&](int me, Communicator& communicator) {
    Rank rank(communicator, 1U << 16U, {}, everything);
    EXPECT_TRUE(communicator.barrier().ok());
    if (me == 0) {
      for (RailId rail = 0; verbs < rails && rail < static_cast<RailId>(verbs); ++rail) {
        EXPECT_TRUE(job.engines[0]->inject(rail, Fault::carrier_loss).ok());  // TCP copies all data
      }
      const cuda::Address results = rank.collectives->slots().direct_base;
      fake().call("fake_cuda_fail_copies_from", results, std::size_t{1} << 18U);
    }
    EXPECT_TRUE(communicator.barrier().ok());
    const std::vector<float> in(count, 1.0F);
    const std::vector<float> out(2 * count, 7.0F);
    const std::vector<std::size_t> even{count, count};
    EXPECT_TRUE(
        rank.collectives->all_gatherv(rank.stream, address(in), address(out), even, DType::f32)
            .ok());
    rank.synchronise();
    const Status status = rank.collectives->failure();
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(out, std::vector<float>(2 * count, 7.0F)) << "rank " << me;
    if (has(status.message(), "cuMemcpyAsync")) ++named;
  });
  EXPECT_GE(named, 1);
  fake().call("fake_cuda_fail_copies_from", cuda::Address{0}, std::size_t{0});
}

TEST(GpuDirect, AFailedCopyFailsAllRanksAndLeavesNoResult) {
  fail_to_copy(2, 2, 10);      // small enough to travel with the header
  fail_to_copy(2, 1, 10'000);  // over TCP
}

TEST(GpuDirect, AnAbortedGroupEndsTheExchangeOfAllRanks) {
  Config config;
  config.link_timeout_s = 10.0;  // a pause of an engine is no loss
  Nodes nodes(config, 3, 2);
  std::array<std::unique_ptr<Rank>, 6> ranks;
  nodes.job.run([&](int me, Communicator& host) {
    auto& rank = ranks[static_cast<std::size_t>(me)];
    rank = nodes.rank(me, 32768, everything);
    const std::vector<float> in(1000, 1.0F);
    const std::vector<float> out(1000, 9.0F);
    const auto reduce = [&] {
      return rank->collectives->all_reduce(rank->stream, address(in), address(out), in.size(),
                                           DType::f32, ReduceOp::sum, Algorithm::automatic);
    };
    EXPECT_TRUE(reduce().ok());
    rank->synchronise();
    EXPECT_EQ(out, std::vector<float>(1000, 6.0F));
    EXPECT_TRUE(host.barrier().ok());
    // Aborts the first inter-node group alone. Ranks of the second group learn of the abort from
    // their local peers.
    if (me == 0) nodes.inter_node[0]->abort("injected by the test");
    for (int i = 0; i < 3; ++i)
      if (!reduce().ok()) break;
    rank->synchronise();
    EXPECT_FALSE(rank->collectives->failure().ok()) << "rank " << me;
  });
  nodes.job.run([&](int me, Communicator& /*host*/) {
    ranks[static_cast<std::size_t>(me)]->collectives->close();
  });
}

// A failed start must not leave memory registered with a NIC, because the memory gets another owner
// later.
TEST(GpuDirect, AFailedStartReleasesTheMemory) {
  Job job({.ranks = 2, .rails = 2, .verbs = 2, .config = {}});
  ASSERT_TRUE(job.all_up());  // a rail that comes up has memory of its own
  const LiveMemory memory;
  const std::size_t before = job.verbs->shared_regions();
  job.run([&](int me, Communicator& host) {
    if (me == 1) return host.abort("injected by the test");
    auto made = StreamCommunicator::create(host, options());
    EXPECT_FALSE(made.ok());
  });
  EXPECT_EQ(memory.grown(), 0);
  EXPECT_EQ(job.verbs->shared_regions(), before);
}

TEST(GpuDirect, EveryTypeAndOperatorGivesTheHostsBits) {
  Job job({.ranks = 3, .rails = 2, .verbs = 2, .config = {}});
  ASSERT_TRUE(job.all_up());
  const auto of_streams = job.make_communicators(77);
  job.run([&](int me, Communicator& host) {
    Rank rank(*of_streams[static_cast<std::size_t>(me)], 16384, {}, everything);
    std::minstd_rand random(static_cast<unsigned>(me) + 1);
    for (const DType dtype : {DType::f16, DType::bf16, DType::f64, DType::i8, DType::u8, DType::i32,
                              DType::i64, DType::boolean})
      for (const ReduceOp op :
           {ReduceOp::sum, ReduceOp::prod, ReduceOp::min, ReduceOp::max, ReduceOp::avg}) {
        if (op == ReduceOp::avg && dtype == DType::boolean) continue;
        for (const std::size_t count : {1UL, 333UL, 5000UL}) {
          std::vector<std::byte> in(count * size_of(dtype));
          std::ranges::generate(in, [&] { return static_cast<std::byte>(random()); });
          std::vector<std::byte> got(in.size());
          std::vector<std::byte> wanted(in.size());
          EXPECT_TRUE(rank.collectives
                          ->all_reduce(rank.stream, address(in), address(got), count, dtype, op,
                                       Algorithm::automatic)
                          .ok());
          rank.synchronise();
          EXPECT_TRUE(
              host.all_reduce(in.data(), wanted.data(), count, dtype, op, Algorithm::automatic)
                  .ok());
          EXPECT_EQ(got, wanted) << name_of(dtype) << ' ' << name_of(op) << ' ' << count;
        }
      }
  });
}

// ---- the start-up probe of GPUDirect ----

// Returns the reason against GPUDirect after `prepare`: the longer message of the two ranks; "none"
// if GPUDirect is on. Checks an all-reduce in either case.
std::string refusal(const Job::Options& options, const std::function<void(Job&)>& prepare = {},
                    DirectOptions direct = {}) {
  Job job(options);
  const LiveMemory memory;
  EXPECT_TRUE(job.all_up());
  if (prepare) prepare(job);
  std::array<std::string, 2> said;
  job.run([&](int me, Communicator& host) {
    Rank rank(host, 4U << 20U, {}, direct);
    const Status& why = rank.collectives->direct();
    said[static_cast<std::size_t>(me)] = why.ok() ? "none" : why.message();
    const std::vector<float> in(30'000, 1.0F);
    const std::vector<float> out(30'000);
    EXPECT_TRUE(rank.collectives
                    ->all_reduce(rank.stream, address(in), address(out), in.size(), DType::f32,
                                 ReduceOp::sum, Algorithm::automatic)
                    .ok());
    rank.synchronise();
    EXPECT_EQ(out, std::vector<float>(30'000, 2.0F));
  });
  EXPECT_EQ(memory.grown(), 0);
  return said[0].size() > said[1].size() ? said[0] : said[1];
}

constexpr int dma_buf_supported = 124;
constexpr int flush_options = 117;
constexpr int writes_ordering = 118;

class Probe : public ::testing::Test {
 protected:
  void TearDown() override {
    set(dma_buf_supported, 1);
    set(flush_options, 1);
    set(writes_ordering, 0);
  }
  static void set(int attribute, int value) {
    fake().call("fake_cuda_set_attribute", attribute, value);
  }
  static Job::Options rdma() { return {.ranks = 2, .rails = 2, .verbs = 2, .config = {}}; }
};

TEST_F(Probe, EnablesGpuDirectWhereSupported) { EXPECT_EQ(refusal(rdma()), "none"); }

TEST_F(Probe, NeedsRdma) {
  EXPECT_EQ(refusal({.ranks = 2, .rails = 2, .config = {}}), "no rail to rank 0 is RDMA");
}

TEST_F(Probe, NeedsChecksumsOff) {
  Job::Options checked = rdma();
  checked.config.checksum = true;
  EXPECT_EQ(refusal(checked), "checksums are on (R2CCL_CHECKSUM): the CPU computes them");
}

TEST_F(Probe, NeedsDmaBufExport) {
  set(dma_buf_supported, 0);
  EXPECT_PRED2(has, refusal(rdma()), "gives no memory out as a dma-buf");
}

TEST_F(Probe, ReportsBothErrorsOfAnExport) {
  fake().call("fake_cuda_fail", "cuMemGetHandleForAddressRange", 2);
  const std::string said = refusal(rdma());
  EXPECT_PRED2(has, said, "(801)");  // with the PCIe flag
  EXPECT_PRED2(has, said, "without the PCIe flag: cuMemGetHandleForAddressRange");
  EXPECT_PRED2(has, said, "(2) out of memory");
}

TEST_F(Probe, NeedsAFlushOrOrderedWritesOfNics) {
  set(flush_options, 0);
  EXPECT_PRED2(has, refusal(rdma()), "neither orders nor flushes NIC writes");
  set(writes_ordering, 100);
  const int flushes = fake().call("fake_cuda_flushes");
  EXPECT_EQ(refusal(rdma()), "none");
  EXPECT_EQ(fake().call("fake_cuda_flushes"), flushes);  // no flush is needed
}

TEST_F(Probe, NeedsEveryRank) {
  fake().call("fake_cuda_fail", "cuStreamCreate", 2);
  EXPECT_EQ(refusal(rdma()), "cuStreamCreate: CUDA_ERROR_OUT_OF_MEMORY (2) out of memory");
}

TEST_F(Probe, NeedsEveryNic) {
  const auto refuse = [](Job& job) { job.verbs->refuse_dma_bufs("rdma1_1", EOPNOTSUPP); };
  EXPECT_PRED2(has, refusal(rdma(), refuse), "rdma1_1");
}

TEST_F(Probe, NeedsNicsThatReachGpuMemory) {
  const auto deceive = [](Job& job) {
    for (const char* nic : {"rdma0_0", "rdma0_1", "rdma1_0", "rdma1_1"})
      job.verbs->break_dma_bufs(nic);
  };
  Job::Options quick = rdma();
  quick.config.rejoin_backoff_min_ms = 1;
  EXPECT_PRED2(has, refusal(quick, deceive), "in a trial, rails were lost");
}

TEST_F(Probe, RunsWithoutAPeer) {
  const auto verbs = std::make_shared<FakeVerbs>();
  const std::vector<std::string> nics{"first", "second"};
  for (const std::string& nic : nics) verbs->add_device(nic);
  const LiveMemory memory;
  const auto said = [&](std::span<const std::string> rdma) {
    const device::StreamOptions with = options();
    const Status status = device::probe_direct(with.library, 0, with.image, verbs.get(), rdma);
    EXPECT_EQ(memory.grown(), 0);
    return status.ok() ? std::string("none") : status.message();
  };
  EXPECT_EQ(said({}), "none");
  EXPECT_EQ(said(nics), "none");
  verbs->refuse_dma_bufs("second", EOPNOTSUPP);
  EXPECT_PRED2(has, said(nics), "second");
  fake().call("fake_cuda_fail", "cuMemcpyAsync", 719);
  EXPECT_PRED2(has, said({}), "cuMemcpyAsync");
}

TEST_F(Probe, DisablesGpuDirectByOption) {
  EXPECT_EQ(refusal(rdma(), {}, {DirectOptions::Use::never, 1}), "R2CCL_GPU_DIRECT is off");
}

TEST_F(Probe, FailsTheStartIfRequiredButUnsupported) {
  Job job({.ranks = 2, .rails = 2, .config = {}});
  const LiveMemory memory;
  job.run([&](int me, Communicator& host) {
    device::StreamOptions wanted = options();
    wanted.direct.use = DirectOptions::Use::always;
    auto made = StreamCommunicator::create(host, wanted);
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.take_status().message(),
              "gpu_direct: is on, but cannot be used: no rail to rank " + std::to_string(1 - me) +
                  " is RDMA");
  });
  EXPECT_EQ(memory.grown(), 0);
}

}  // namespace
}  // namespace r2ccl
