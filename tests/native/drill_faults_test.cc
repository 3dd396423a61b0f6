// Drill faults on the traffic of an open rail: a rate limit (`slow`) and wrong checksums
// (`corrupt`).
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "eventually.hpp"
#include "job.hpp"

namespace r2ccl {
namespace {

using std::chrono::steady_clock;
using testing::eventually;
using testing::Job;

constexpr std::size_t count = 250'000;  // 1 MB

void all_reduce_checked(Communicator& communicator) {
  std::vector<float> data(count, static_cast<float>(communicator.rank() + 1));
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  const Status status =
      communicator.all_reduce(bytes, bytes, count, DType::f32, ReduceOp::sum, Algorithm::one_shot);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(std::ranges::all_of(data, [](float value) { return value == 3.0F; }));
}

double seconds_of(Job& job, int calls) {
  const auto began = steady_clock::now();
  job.run([&](int, Communicator& communicator) {
    for (int call = 0; call < calls; ++call) all_reduce_checked(communicator);
  });
  return std::chrono::duration<double>(steady_clock::now() - began).count();
}

bool lost_by(Job& job, std::size_t rank, RailCause cause) {
  return std::ranges::any_of(job.records(rank), [&](const JournalRecord& record) {
    return record.kind == JournalKind::rail_state && record.value == 1 &&
           record.cause == static_cast<std::uint8_t>(cause);
  });
}

std::vector<int> injected(Job& job, std::size_t rank) {
  std::vector<int> found;
  for (const JournalRecord& record : job.records(rank))
    if (record.kind == JournalKind::injected) found.push_back(record.to);
  return found;
}

TEST(DrillFaults, ASlowRailSendsNoFasterThanItsRate) {
  for (const int verbs : {0, 1}) {
    Job job({.ranks = 2, .rails = 1, .verbs = verbs, .config = {}});
    constexpr double bytes_per_s = 4e6;
    ASSERT_TRUE(job.engines[0]->inject(0, Fault::slow, 0, bytes_per_s).ok());
    // Each call sends 1 MB. The rail does not wait before its first portion or after its last.
    EXPECT_GT(seconds_of(job, 4), 3e6 / bytes_per_s);
    EXPECT_FALSE(lost_by(job, 0, RailCause::dead_deadline));
    ASSERT_TRUE(job.engines[0]->inject(0, Fault::none).ok());
    // A rate limit would delay every try. A busy machine delays some, also of a job without a
    // fault.
    constexpr double limited = 3e6 / bytes_per_s;
    double fastest = seconds_of(job, 4);
    if (fastest >= limited) {
      Job other({.ranks = 2, .rails = 1, .verbs = verbs, .config = {}});
      double unlimited = seconds_of(other, 4);
      const auto is_healed = [&] {
        if (fastest < std::max(limited, 3 * unlimited)) return true;
        fastest = std::min(fastest, seconds_of(job, 4));
        unlimited = std::min(unlimited, seconds_of(other, 4));
        return false;
      };
      EXPECT_TRUE(eventually(is_healed, "calls without the rate limit"))
          << fastest << " s, and " << unlimited << " s without a fault";
    }
    EXPECT_EQ(injected(job, 0), (std::vector{4, 0}));
  }
}

TEST(DrillFaults, ThePeersJournalSaysThatADrillTookTheRailDown) {
  Job job({.ranks = 2, .rails = 2, .config = {}});
  ASSERT_TRUE(job.all_up());
  ASSERT_TRUE(job.engines[0]->inject(1, Fault::carrier_loss).ok());
  const auto told = [&] {
    return std::ranges::any_of(job.records(1), [](const JournalRecord& record) {
      return record.kind == JournalKind::injected && record.from == 1 &&
             record.to == static_cast<std::uint8_t>(Fault::carrier_loss);
    });
  };
  EXPECT_TRUE(eventually(told, "the notice of the drill"));
}

// A drill by the system begins with a carrier loss that no engine makes.
TEST(DrillFaults, LossesInAnAnnouncedDrillAreMarkedAtBothEndsAndOthersAreNot) {
  Job job({.ranks = 2, .rails = 3, .devices = true, .config = {}});
  ASSERT_TRUE(job.all_up());
  ASSERT_TRUE(job.engines[0]->announce_drill(1, Fault::carrier_loss, 600.0).ok());
  const auto is_known = [&] {
    bool known = false;
    EXPECT_TRUE(job.engines[0]->check_drill(1, 0, known).ok());
    return known;
  };
  ASSERT_TRUE(eventually(is_known, "the peer has confirmed the drill"));
  for (const int rail : {1, 2})
    job.monitors[0]->set_link(Job::ifindex(rail), "no-port" + std::to_string(rail),
                              /*carrier_up=*/false);
  const auto losses = [&](std::size_t rank, int rail) {
    std::vector<std::uint64_t> marks;
    for (const JournalRecord& record : job.records(rank))
      if (record.kind == JournalKind::rail_state && record.value == 1 &&
          record.rail == static_cast<std::uint32_t>(rail))
        marks.push_back(record.detail);
    return marks;
  };
  for (const std::size_t rank : {0U, 1U}) {
    for (const int rail : {1, 2})
      ASSERT_TRUE(eventually([&] { return !losses(rank, rail).empty(); }, "the rail is lost"));
    EXPECT_EQ(losses(rank, 1).front(), 1U) << "rank " << rank;
    EXPECT_EQ(losses(rank, 2).front(), 0U) << "rank " << rank;
    EXPECT_EQ(job.engines[rank]->rails()[1].drill, static_cast<std::uint8_t>(Fault::carrier_loss));
    EXPECT_EQ(job.engines[rank]->rails()[2].drill, no_drill);
  }
  ASSERT_TRUE(job.engines[0]->end_drill(1).ok());
  EXPECT_EQ(job.engines[0]->announce_drill(1, Fault::none, 1.0).code(),
            ErrorCode::invalid_argument);
  EXPECT_EQ(job.engines[0]->announce_drill(7, Fault::slow, 1.0).code(),
            ErrorCode::invalid_argument);
}

// Each end sees its own port first.  The report of the other end makes the path of both.  A busy
// machine may delay the report, hence several tries.
TEST(DrillFaults, TheLocationOfAFaultIsToldOnceAndAtBothEndsAlike) {
  bool alike = false;
  for (int attempt = 0; attempt < 5 && !alike; ++attempt) {
    Config config;
    config.rejoin_backoff_min_ms = config.rejoin_backoff_max_ms = 20'000;
    Job job({.ranks = 2, .rails = 2, .devices = true, .config = config});
    ASSERT_TRUE(job.all_up());
    for (const std::size_t rank : {0U, 1U})
      job.monitors[rank]->set_link(Job::ifindex(1), "no-port1", /*carrier_up=*/false);
    const auto verdicts = [&](std::size_t rank) {
      std::vector<Verdict> found;
      for (const JournalRecord& record : job.records(rank))
        if (record.kind == JournalKind::verdict) found.push_back(static_cast<Verdict>(record.to));
      return found;
    };
    for (const std::size_t rank : {0U, 1U})
      ASSERT_TRUE(eventually([&] { return !verdicts(rank).empty(); }, "the location is told"));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    for (const std::size_t rank : {0U, 1U}) {
      ASSERT_EQ(verdicts(rank).size(), 1U) << "rank " << rank;
      EXPECT_EQ(job.engines[rank]->rails()[1].verdict, verdicts(rank).front());
    }
    alike = verdicts(0) == std::vector{Verdict::path} && verdicts(1) == verdicts(0);
  }
  EXPECT_TRUE(alike);
}

TEST(DrillFaults, ARealLossAfterADrillIsNoDrill) {
  Config config;
  config.rejoin_backoff_min_ms = 1;
  Job job({.ranks = 2, .rails = 2, .devices = true, .config = config});
  ASSERT_TRUE(job.all_up());
  const auto told = [&] {
    return std::ranges::count_if(job.records(1), [](const JournalRecord& record) {
      return record.kind == JournalKind::injected && record.from == 1;
    });
  };
  const auto state = [&](int rank) {
    return job.engines[static_cast<std::size_t>(rank)]->rails()[1].state;
  };
  const auto epoch = [&] { return job.engines[0]->rails()[1].epoch; };
  ASSERT_TRUE(job.engines[0]->inject(1, Fault::reset).ok());
  ASSERT_TRUE(eventually(
      [&] { return epoch() >= 2 && state(0) == RailState::up && state(1) == RailState::up; },
      "the rail has rejoined"));
  auto after_drill = told();
  const auto all_told = [&] {
    const auto before = std::exchange(after_drill, told());
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return after_drill > 0 && after_drill == before;
  };
  ASSERT_TRUE(eventually(all_told, "the notices of the drill"));
  job.monitors[0]->set_link(Job::ifindex(1), "no-port1", /*carrier_up=*/false);
  ASSERT_TRUE(eventually([&] { return state(1) != RailState::up; }, "the rail has gone down"));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // repeated notices
  EXPECT_EQ(told(), after_drill);
}

TEST(DrillFaults, AResetDuringAFaultThatLastsEndsNoDrill) {
  Config config;
  config.rejoin_backoff_min_ms = 1;
  Job job({.ranks = 2, .rails = 2, .config = config});
  ASSERT_TRUE(job.all_up());
  constexpr auto slow = static_cast<std::uint8_t>(Fault::slow);
  const auto rail = [&](std::size_t rank) { return job.engines[rank]->rails()[1]; };
  ASSERT_TRUE(job.engines[0]->inject(1, Fault::slow, 0, 4e6).ok());
  ASSERT_TRUE(eventually([&] { return rail(1).drill == slow; }, "the peer knows of the drill"));
  ASSERT_TRUE(job.engines[0]->inject(1, Fault::reset).ok());
  ASSERT_TRUE(eventually(
      [&] {
        return rail(0).epoch >= 2 && rail(0).state == RailState::up &&
               rail(1).state == RailState::up;
      },
      "the rail has rejoined"));
  for (const std::size_t rank : {0U, 1U}) EXPECT_EQ(rail(rank).drill, slow) << "rank " << rank;
  ASSERT_TRUE(job.engines[0]->inject(1, Fault::none).ok());
  for (const std::size_t rank : {0U, 1U})
    EXPECT_TRUE(eventually([&] { return rail(rank).drill == no_drill; }, "the end of the drill"));
}

TEST(DrillFaults, ACorruptRailIsLostAndEveryBitIsRight) {
  for (const int verbs : {0, 2}) {
    Config config;
    config.checksum = true;
    config.rejoin_backoff_min_ms = 1;
    Job job({.ranks = 2, .rails = 2, .verbs = verbs, .config = config});
    ASSERT_TRUE(job.all_up());
    ASSERT_TRUE(job.engines[0]->inject(0, Fault::corrupt).ok());
    for (int round = 0; round < 20 && !lost_by(job, 1, RailCause::checksum); ++round)
      (void)seconds_of(job, 5);
    EXPECT_TRUE(lost_by(job, 1, RailCause::checksum));
    ASSERT_TRUE(job.engines[0]->inject(0, Fault::none).ok());
    (void)seconds_of(job, 5);
  }
}

TEST(DrillFaults, UndetectableOrInvalidFaultsAreRefused) {
  Job job({.ranks = 2, .rails = 1, .config = {}});
  const Status corrupt = job.engines[0]->inject(0, Fault::corrupt);
  EXPECT_EQ(corrupt.code(), ErrorCode::invalid_argument);
  EXPECT_NE(corrupt.message().find("R2CCL_CHECKSUM"), std::string::npos);
  for (const double bytes_per_s : {0.0, 0.9e6})
    EXPECT_EQ(job.engines[0]->inject(0, Fault::slow, 0, bytes_per_s).code(),
              ErrorCode::invalid_argument);
  EXPECT_EQ(job.engines[0]->inject(0, Fault::egress_refused).code(), ErrorCode::invalid_argument);
  EXPECT_EQ(job.engines[0]->inject(7, Fault::carrier_loss).code(), ErrorCode::invalid_argument);
  EXPECT_EQ(job.engines[0]->check_fault(Fault::corrupt, 0).message(), corrupt.message());
  EXPECT_TRUE(job.engines[0]->check_fault(Fault::slow, 1e6).ok());
  EXPECT_TRUE(injected(job, 0).empty());
}

TEST(DrillFaults, EachFaultHasOneNameAndOldNamesAreAccepted) {
  for (const Fault fault : {Fault::none, Fault::carrier_loss, Fault::black_hole, Fault::reset,
                            Fault::slow, Fault::corrupt, Fault::egress_refused})
    EXPECT_EQ(fault_named(name_of(fault)), fault);
  EXPECT_EQ(name_of(Fault::none), "heal");
  EXPECT_EQ(fault_named("cut"), Fault::carrier_loss);
  EXPECT_EQ(fault_named("drop"), Fault::black_hole);
  EXPECT_EQ(fault_named("error"), Fault::reset);
  EXPECT_EQ(fault_named("carrier"), std::nullopt);
}

TEST(DrillFaults, NoteInjectedOnlyRecordsAFault) {
  Job job({.ranks = 2, .rails = 1, .config = {}});
  ASSERT_TRUE(job.engines[0]->note_injected(0, Fault::carrier_loss).ok());
  (void)seconds_of(job, 2);
  ASSERT_TRUE(job.engines[0]->note_injected(0, Fault::none).ok());
  EXPECT_EQ(injected(job, 0), (std::vector{1, 0}));
  EXPECT_EQ(job.engines[0]->rails().front().state, RailState::up);
  EXPECT_EQ(job.engines[0]->note_injected(3, Fault::carrier_loss).code(),
            ErrorCode::invalid_argument);
}

TEST(DrillFaults, TheEngineCountsTheStallTimeOfCalls) {
  Config config;
  config.rejoin_backoff_min_ms = 1;
  config.flap_half_life_s = 0;
  config.dead_deadline_ms = 600'000;  // the pauses of a busy machine make no rail suspect
  Job job({.ranks = 2, .rails = 1, .config = config});
  (void)seconds_of(job, 1);
  EXPECT_EQ(job.engines[0]->stalled_ns(), 0U);
  std::chrono::nanoseconds stalled{0};
  // A stall without the pauses of a busy machine may be shorter than the loss, so the next loss
  // lasts longer.
  for (const int loss_ms : {500, 2000, 8000}) {
    const std::uint64_t before = job.engines[0]->stalled_ns();
    ASSERT_TRUE(job.engines[0]->inject(0, Fault::carrier_loss).ok());
    std::thread healing([&] {
      EXPECT_TRUE(eventually([&] { return job.in_call(0); }, "rank 0 is in its call"));
      std::this_thread::sleep_for(std::chrono::milliseconds(loss_ms));
      EXPECT_TRUE(job.engines[0]->inject(0, Fault::none).ok());
    });
    const auto began = steady_clock::now();
    job.run([](int, Communicator& communicator) { all_reduce_checked(communicator); });
    const auto lasted = steady_clock::now() - began;
    healing.join();
    stalled = std::chrono::nanoseconds(job.engines[0]->stalled_ns() - before);
    EXPECT_LT(stalled, lasted);
    if (stalled > std::chrono::milliseconds(150)) break;
  }
  EXPECT_GT(stalled.count(), 150 * ns_per_ms) << "late: too little CPU time in every loss";
}

}  // namespace
}  // namespace r2ccl
