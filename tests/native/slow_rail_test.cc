// A slow but live rail: its measured rate, and the data left to the other rails.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <vector>

#include "collectives/collectives.hpp"
#include "link/rate_meter.hpp"
#include "sim/sim_channel.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {
namespace {

constexpr TimeNs tick_ns = 2 * ns_per_ms;
constexpr TimeNs second = 1000 * ns_per_ms;

// A path and its meter. saturated() keeps a backlog on a path of `rate` bytes/s.
struct Path {
  RateMeter meter;
  std::uint64_t sent = 0;
  std::uint64_t acked = 0;

  bool saturated(double rate, int ticks) {
    bool measured = false;
    for (int i = 0; i < ticks; ++i) {
      acked += static_cast<std::uint64_t>(rate * 1e-9 * static_cast<double>(tick_ns));
      sent = acked + 1'000'000;
      measured |= meter.observe(tick_ns, sent, acked, 0);
    }
    return measured;
  }
  bool idle(int ticks) {
    bool measured = false;
    sent = acked;
    for (int i = 0; i < ticks; ++i) measured |= meter.observe(tick_ns, sent, acked, 0);
    return measured;
  }
};

TEST(RateMeter, MeasuresWhileThePathHasABacklog) {
  Path path;
  EXPECT_FALSE(path.saturated(1e8, 25));
  EXPECT_EQ(path.meter.measured(), 0);
  EXPECT_TRUE(path.saturated(1e8, 1));
  EXPECT_NEAR(path.meter.measured(), 1e8, 1e6);
  path.saturated(1e7, 150);
  EXPECT_NEAR(path.meter.measured(), 1e7, 2e6);
}

TEST(RateMeter, WithoutABacklogThereIsNoRateButALowerBound) {
  Path path;
  for (int i = 0; i < 1000; ++i) {
    path.acked += 200'000;
    EXPECT_FALSE(path.idle(1));
  }
  EXPECT_EQ(path.meter.measured(), 0);
  EXPECT_EQ(path.meter.believed(), 0);
  EXPECT_NEAR(path.meter.at_least(), 1e8, 1e6);
  Path probes;
  for (int i = 0; i < 1000; ++i) {
    probes.acked += 80;
    EXPECT_FALSE(probes.idle(1));
  }
  EXPECT_EQ(probes.meter.at_least(), 0);
}

// Small messages: the meter observes right after each send, and the acknowledgement follows soon.
TEST(RateMeter, BytesJustSentAreNoBacklog) {
  RateMeter meter;
  std::uint64_t sent = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t acked = sent;
    sent += 16'000;
    EXPECT_FALSE(meter.observe(tick_ns, sent, acked, 1448));
  }
  EXPECT_EQ(meter.measured(), 0);
}

TEST(RateMeter, AHigherThroughputReplacesTheMeasuredRate) {
  Path path;
  path.saturated(1e7, 30);
  bool measured = false;
  for (int i = 0; i < 50; ++i) {
    path.acked += 1'000'000;
    measured |= path.idle(1);
  }
  EXPECT_TRUE(measured);
  EXPECT_GT(path.meter.measured(), 1e8);
}

TEST(RateMeter, TheBelievedRateGrowsWithoutMeasurements) {
  Path path;
  path.saturated(1e7, 26);
  EXPECT_FALSE(path.idle(1000));  // 2 seconds
  EXPECT_NEAR(path.meter.believed() / path.meter.measured(), 4, 0.2);
}

TEST(RateMeter, BytesCoveredByADelayedAcknowledgementAreNoBacklog) {
  RateMeter meter;
  for (int i = 0; i < 100; ++i)
    EXPECT_FALSE(meter.observe(tick_ns, 1448, 0, 1448)) << "at tick " << i;
}

TEST(RateMeter, APauseAndASilentPathMeasureNothing) {
  RateMeter meter;
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(meter.observe(tick_ns, 100'000, 0, 0));
  std::uint64_t acked = 0;
  for (int i = 0; i < 100; ++i) {
    acked += 1000;
    EXPECT_FALSE(meter.observe(second, acked + 100'000, acked, 0));
  }
}

// Two ranks with rails of 10 MB/s and a sequence of all-reduces.
class Stream {
 public:
  Stream(std::size_t rails, std::size_t bytes) : world_(options(rails)), bytes_(bytes) {
    EXPECT_TRUE(world_.run_until([&] { return world_.all_rails_up(); }, second));
    for (int rank = 0; rank < 2; ++rank)
      channels_.push_back(std::make_unique<SimChannel>(world_, 7, std::vector{0, 1}, rank));
  }

  void slow_down(RailId rail, TimeNs times) {
    for (const int rank : {0, 1})
      world_.disturb(rank, 1 - rank, rail, [times](Port& port) { port.slowdown = times; });
  }

  // Returns all-reduces per second, measured over at least `time`.
  double run(TimeNs time) {
    const TimeNs begin = world_.now();
    const TimeNs end = begin + time;
    std::array<std::uint32_t, 2> done{};
    const std::uint32_t before = calls_;
    EXPECT_TRUE(world_.run(
        [&](int rank) {
          for (std::uint32_t call = before;; ++call) {
            const bool last = all_reduce(rank, call, world_.now() >= end);
            ++done[static_cast<std::size_t>(rank)];
            if (last) return;
          }
        },
        time + 10 * second));
    EXPECT_EQ(done[0], done[1]);
    calls_ += done[0];
    return done[0] / (static_cast<double>(world_.now() - begin) * 1e-9);
  }

  [[nodiscard]] const Link& link(int rank) { return world_.end(rank, 1 - rank).link; }
  [[nodiscard]] std::uint64_t downs() const { return world_.counters().downs; }

 private:
  static World::Options options(std::size_t rails) {
    World::Options options;
    options.rails.assign(rails, RailKind::tcp);
    options.link.shape = {.slot_bytes = 1U << 20,
                          .chunk_bytes = 16U << 10,
                          .staging_bytes = 64U << 10,
                          .slots = 8,
                          .spare_slots = 4,
                          .resilience = true};
    options.link.small_message_bytes = 8U << 10;
    options.delays.ns_per_byte = 100;
    return options;
  }

  // Runs an all-reduce. Rank 0 sets the first element to end the sequence on both ranks. Returns
  // true for the last call.
  bool all_reduce(int rank, std::uint32_t number, bool stop) {
    const ReductionTree tree = ReductionTree::from_nodes(std::vector<int>{0, 1});
    const Reducer reducer{DType::f32, ReduceOp::sum, tree, Simd::portable};
    std::vector<float> data(bytes_ / sizeof(float), 1.0F);
    data[0] = rank == 0 && stop ? 1.0F : 0.0F;
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    const CallTag tag{.count = data.size(),
                      .number = number,
                      .collective = Collective::all_reduce,
                      .dtype = DType::f32};
    SimChannel& channel = *channels_[static_cast<std::size_t>(rank)];
    const Status status = channel.call(
        tag, [&] { return all_reduce_two_shot(channel, bytes, bytes, data.size(), reducer); });
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(data.back(), 2.0F);
    return data[0] != 0.0F || !status.ok();
  }

  World world_;
  const std::size_t bytes_;
  std::vector<std::unique_ptr<SimChannel>> channels_;
  std::uint32_t calls_ = 0;
};

class SlowRail : public ::testing::TestWithParam<std::size_t> {};

TEST_P(SlowRail, LeavesTheThroughputOfTheRemainingRails) {
  Stream one(1, GetParam());
  const double remaining = one.run(second / 4);
  Stream both(2, GetParam());
  const double before = both.run(second / 4);
  for (const RailId rail : {RailId{0}, RailId{1}}) {
    both.slow_down(rail, 10);
    (void)both.run(second);
    const double slowed = both.run(2 * second);
    // Virtual time repeats exactly.  A message of 8 chunks is at the break-even of a slow rail's
    // chunk: 0.957 without the weight of a slow rail, 0.982 with the weight.
    EXPECT_GE(slowed, (GetParam() == 256U << 10 ? 0.97 : 0.95) * remaining) << "rail " << int{rail};
    // Small messages end before the other rail has shown its rate.
    if (GetParam() > 8U << 10) {
      EXPECT_TRUE(both.link(0).slow(rail));
    }
    EXPECT_FALSE(both.link(0).slow(1 - rail));
    both.slow_down(rail, 1);
    (void)both.run(4 * second);
    EXPECT_GE(both.run(second / 4), 0.9 * before) << "rail " << int{rail};
  }
  EXPECT_EQ(both.downs(), 0U);
}

// Messages of 1, 2 and 8 chunks.
INSTANTIATE_TEST_SUITE_P(Bytes, SlowRail, ::testing::Values(8U << 10, 64U << 10, 256U << 10),
                         [](const auto& test) { return std::to_string(test.param >> 10) + "KiB"; });

}  // namespace
}  // namespace r2ccl::sim
