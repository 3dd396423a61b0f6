// Kills a rail at every step of the state machine in an all-reduce, and checks the bits of the
// result. The steps come from the trace of an undisturbed run with the same seed, not from a list.
//
// The kills at a step are a carrier loss, a black hole, a reset, and 1 of 3 further kills in turn.
// The quick test takes every 4th step, sanitized builds every 64th; the first step differs between
// configurations. R2SERVE_SWEEP=N takes every Nth step in any build, and all kills if N is 1.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "collectives/collectives.hpp"
#include "sanitized.hpp"
#include "sim/sim_channel.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {
namespace {

constexpr TimeNs heal_after = 30 * ns_per_ms;
constexpr TimeNs time_limit = 20'000 * ns_per_ms;

constexpr TimeNs blink_time = 4 * ns_per_ms;  // causes suspicion, but not DOWN

enum class Kill : std::uint8_t { carrier, black_hole, one_way, blink, reset, reset_later };
constexpr std::array always{Kill::carrier, Kill::black_hole, Kill::reset};
constexpr std::array in_turn{Kill::one_way, Kill::blink, Kill::reset_later};

const char* name_of(Kill kill) {
  switch (kill) {
    case Kill::carrier: return "carrier";
    case Kill::black_hole: return "black hole";
    case Kill::one_way: return "black hole one way";
    case Kill::blink: return "short black hole";
    case Kill::reset: return "reset";
    case Kill::reset_later: return "reset in the middle of a frame";
  }
  return "";
}

struct Case {
  int ranks;
  std::size_t rails;
  Algorithm algorithm;
  std::size_t count;  // float32
  const char* size = "";
};

std::size_t stride() {
  if (const char* wanted = std::getenv("R2SERVE_SWEEP"); wanted != nullptr && *wanted != '\0') {
    const unsigned long every = std::strtoul(wanted, nullptr, 10);
    EXPECT_GE(every, 1U) << "R2SERVE_SWEEP: " << wanted << "; must be a number of at least 1";
    return std::max(every, 1UL);
  }
  return testing::sanitized() ? 64 : 4;
}

std::vector<Kill> kills_at(std::size_t index) {
  std::vector<Kill> kills(always.begin(), always.end());
  if (stride() == 1)
    kills.insert(kills.end(), in_turn.begin(), in_turn.end());
  else
    kills.push_back(in_turn[index / stride() % in_turn.size()]);
  return kills;
}

World::Options options_of(const Case& which) {
  World::Options options;
  options.ranks = which.ranks;
  options.rails.assign(which.rails, RailKind::tcp);
  options.seed = 1000 * which.rails + static_cast<std::uint64_t>(which.ranks);
  options.handshake_timeout_ns = 20 * ns_per_ms;
  LinkOptions& link = options.link;
  // 3 chunks per slot and 2 slots. Small messages are copied; larger messages are sent in place.
  link.shape = {.slot_bytes = 384,
                .chunk_bytes = 128,
                .staging_bytes = 256,
                .slots = 2,
                .spare_slots = 2,
                .resilience = true};
  link.small_message_bytes = 128;
  link.ack_deadline_floor_ns = 2 * ns_per_ms;
  link.dead_deadline_ns = 10 * ns_per_ms;
  link.probe_interval_ns = 20 * ns_per_ms;
  link.probation_timeout_ns = 20 * ns_per_ms;
  link.rejoin_backoff_min_ns = 1 * ns_per_ms;
  link.rejoin_backoff_max_ns = 8 * ns_per_ms;
  link.flap_half_life_s = 0.01;
  return options;
}

std::vector<float> input_of(int rank, std::size_t count, unsigned call) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = 0.1F * static_cast<float>(
                           (i * 37 + static_cast<std::size_t>(rank) * 101 + call * 577) % 1009);
  return values;
}

// A world in which a case runs undisturbed or with a single kill.
class Run {
 public:
  explicit Run(const Case& which) : case_(which), world_(options_of(which)) {
    const std::vector<int> nodes = [&] {
      std::vector<int> labels;
      for (int rank = 0; rank < which.ranks; ++rank) labels.push_back(rank);
      return labels;
    }();
    tree_ = ReductionTree::from_nodes(nodes);
    for (int rank = 0; rank < which.ranks; ++rank)
      channels_.push_back(std::make_unique<SimChannel>(world_, 7, nodes, rank));
    EXPECT_TRUE(world_.run_until([&] { return world_.all_rails_up(); }, time_limit));
  }

  // Runs a call on all ranks until all data is delivered.
  void call(unsigned number) {
    const bool in_time = world_.run(
        [&](int rank) {
          const Status status = one_call(rank, number);
          EXPECT_TRUE(status.ok()) << status.message();
        },
        time_limit);
    EXPECT_TRUE(in_time) << "hangs";
    EXPECT_TRUE(world_.run_until([&] { return world_.all_delivered(); }, time_limit))
        << "not everything is delivered";
    for (const std::string& violation : world_.shadow().violations()) ADD_FAILURE() << violation;
  }

  void rejoin() {
    EXPECT_TRUE(world_.run_until([&] { return world_.all_rails_up(); }, time_limit))
        << "a rail did not rejoin";
  }

  // Schedules the kill at step `index` of the trace; the step must equal `step`.
  void kill_at(std::size_t index, const TraceStep& step, Kill kill) {
    world_.observe_step = [this, index, step, kill](const TraceStep& taken) {
      if (taken_++ != index) return;
      EXPECT_EQ(taken, step) << "the run is not the same as the undisturbed one";
      world_.strike_next([this, step, kill] { strike(step, kill); });
    };
  }

  World& world() { return world_; }

 private:
  Status one_call(int rank, unsigned call) {
    SimChannel& channel = *channels_[static_cast<std::size_t>(rank)];
    std::vector<float> data = input_of(rank, case_.count, call);
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    // Alternates between in place and out of place.
    std::vector<float> result = call % 2 == 0 ? std::vector<float>() : std::vector<float>(data);
    auto* out = call % 2 == 0 ? bytes : reinterpret_cast<std::byte*>(result.data());
    const Reducer reducer{DType::f32, ReduceOp::sum, tree_, Simd::portable};
    const CallTag tag{.count = case_.count,
                      .number = call,
                      .collective = Collective::all_reduce,
                      .dtype = DType::f32,
                      .op = ReduceOp::sum,
                      .algorithm = case_.algorithm};
    Status status = channel.call(tag, [&] {
      return case_.algorithm == Algorithm::one_shot
                 ? all_reduce_one_shot(channel, bytes, out, case_.count, reducer)
                 : all_reduce_two_shot(channel, bytes, out, case_.count, reducer);
    });
    if (status.ok()) check_bits(out, call);
    return status;
  }

  void check_bits(const std::byte* out, unsigned call) {
    std::vector<float> expected(case_.count, 0.0F);
    for (int rank = 0; rank < case_.ranks; ++rank) {
      const auto input = input_of(rank, case_.count, call);
      for (std::size_t i = 0; i < case_.count; ++i) expected[i] += input[i];
    }
    EXPECT_EQ(std::memcmp(out, expected.data(), case_.count * sizeof(float)), 0) << "wrong bits";
  }

  void strike(const TraceStep& step, Kill kill) {
    const auto [rank, peer, what, rail] = step;
    EventQueue& events = world_.events();
    switch (kill) {
      case Kill::carrier:
        world_.cut(rank, rail);
        events.after(heal_after, [this, rank = rank, rail = rail] { world_.restore(rank, rail); });
        break;
      case Kill::black_hole:
      case Kill::one_way:
      case Kill::blink:
        world_.black_hole(rank, peer, rail, true);
        if (kill != Kill::one_way) world_.black_hole(peer, rank, rail, true);
        events.after(kill == Kill::blink ? blink_time : heal_after,
                     [this, rank = rank, peer = peer, rail = rail] {
                       world_.black_hole(rank, peer, rail, false);
                       world_.black_hole(peer, rank, rail, false);
                     });
        break;
      case Kill::reset: world_.reset(rank, peer, rail); break;
      case Kill::reset_later: {
        // A full chunk takes `span` from the first byte sent to the last byte read; the reset falls
        // within.
        const Delays& delays = world_.options().delays;
        const auto chunk = static_cast<TimeNs>(world_.options().link.shape.chunk_bytes);
        const auto span = delays.latency_ns + delays.jitter_ns + chunk * delays.ns_per_byte;
        const auto delay = static_cast<TimeNs>(taken_ * 7919) % span;
        events.after(delay, [this, rank = rank, peer = peer, rail = rail] {
          world_.reset(rank, peer, rail);
        });
        break;
      }
    }
  }

  const Case case_;
  World world_;
  ReductionTree tree_;
  std::vector<std::unique_ptr<SimChannel>> channels_;
  std::size_t taken_ = 0;
};

std::vector<TraceStep> undisturbed(const Case& which) {
  std::vector<TraceStep> trace;
  Run run(which);
  run.world().observe_step = [&](const TraceStep& step) { trace.push_back(step); };
  run.call(0);
  return trace;
}

void killed(const Case& which, std::size_t index, const TraceStep& step, Kill kill) {
  SCOPED_TRACE(std::string(name_of(kill)) + " at step " + std::to_string(index) + ": rank " +
               std::to_string(step.rank) + ", peer " + std::to_string(step.peer) + ", rail " +
               std::to_string(step.rail) + ", step " + std::to_string(static_cast<int>(step.step)));
  Run run(which);
  run.kill_at(index, step, kill);
  run.call(0);
  run.call(1);  // runs on the state left by the kill
  run.rejoin();
  run.call(2);
  const bool ends_the_epoch =
      kill == Kill::carrier || kill == Kill::reset || kill == Kill::reset_later;
  if (ends_the_epoch) {
    EXPECT_GE(run.world().end(step.rank, step.peer).link.epoch(step.rail), 2U)
        << "the kill had no effect";
  }
}

TEST(SweepWorld, TheSameSeedGivesTheSameTrace) {
  const Case which{
      .ranks = 3, .rails = 2, .algorithm = Algorithm::two_shot, .count = 225, .size = ""};
  EXPECT_EQ(undisturbed(which), undisturbed(which));
}

struct Totals {
  std::size_t steps = 0;
  std::size_t kills = 0;
};

void sweep(const Case& which, Totals& totals) {
  const auto trace = undisturbed(which);
  ASSERT_FALSE(trace.empty());
  const std::size_t every = stride();
  std::size_t done = 0;
  for (std::size_t index = totals.steps % every; index < trace.size(); index += every) {
    for (const Kill kill : kills_at(index)) {
      killed(which, index, trace[index], kill);
      if (::testing::Test::HasFailure()) return;
      ++done;
    }
  }
  totals.steps += trace.size();
  totals.kills += done;
  std::cout << which.ranks << " ranks, " << which.rails << " rails, "
            << r2ccl::name_of(which.algorithm) << ", " << which.size << ": " << trace.size()
            << " steps, " << done << " kills\n";
}

// Number of rails between two ranks, and number of ranks.
class Sweep : public ::testing::TestWithParam<std::tuple<std::size_t, int>> {};

TEST_P(Sweep, ARailDiesAtEveryStep) {
  const auto [rails, ranks] = GetParam();
  Totals totals;
  for (const Algorithm algorithm : {Algorithm::one_shot, Algorithm::two_shot}) {
    // A message stream carries all elements, or the share of a rank.
    const auto shares =
        algorithm == Algorithm::one_shot ? std::size_t{1} : static_cast<std::size_t>(ranks);
    for (const auto& [count, size] : {std::pair<std::size_t, const char*>{16, "small"},
                                      {90 * shares, "multi-chunk"},
                                      {225 * shares, "multi-slot"}}) {
      sweep({ranks, rails, algorithm, count, size}, totals);
      if (HasFailure()) return;
    }
  }
  const std::string taken =
      stride() == 1 ? "every one" : "every " + std::to_string(stride()) + "th";
  std::cout << ranks << " ranks, " << rails << " rails, all: " << totals.steps << " steps, "
            << taken << " killed in " << kills_at(0).size() << " ways: " << totals.kills
            << " kills\n";
}

INSTANTIATE_TEST_SUITE_P(RailsAndRanks, Sweep,
                         ::testing::Combine(::testing::Values(1U, 2U, 3U, 4U),
                                            ::testing::Values(2, 3, 4)),
                         [](const auto& name) {
                           return std::to_string(std::get<0>(name.param)) + "_rails_" +
                                  std::to_string(std::get<1>(name.param)) + "_ranks";
                         });

}  // namespace
}  // namespace r2ccl::sim
