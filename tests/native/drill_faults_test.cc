// Drill faults on the traffic of an open rail: a rate limit (`slow`) and wrong checksums
// (`corrupt`).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "job.hpp"

namespace r2ccl {
namespace {

using std::chrono::steady_clock;
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
    // A rate limit would delay every try; a busy machine delays only some.
    double fastest = seconds_of(job, 4);
    for (int more = 0; more < 4 && fastest >= 3e6 / bytes_per_s; ++more)
      fastest = std::min(fastest, seconds_of(job, 4));
    EXPECT_LT(fastest, 3e6 / bytes_per_s);
    EXPECT_EQ(injected(job, 0), (std::vector{4, 0}));
  }
}

TEST(DrillFaults, ThePeersJournalSaysThatADrillTookTheRailDown) {
  Job job({.ranks = 2, .rails = 2, .config = {}});
  ASSERT_TRUE(job.engines[0]->inject(1, Fault::carrier_loss).ok());
  const auto told = [&] {
    return std::ranges::any_of(job.records(1), [](const JournalRecord& record) {
      return record.kind == JournalKind::injected && record.from == 1 && record.to == 0;
    });
  };
  const auto began = steady_clock::now();
  while (!told() && steady_clock::now() - began < std::chrono::seconds(10))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(told());
}

TEST(DrillFaults, ARealLossAfterADrillIsNoDrill) {
  Config config;
  config.rejoin_backoff_min_ms = 1;
  Job job({.ranks = 2, .rails = 2, .devices = true, .config = config});
  const auto told = [&] {
    return std::ranges::count_if(job.records(1), [](const JournalRecord& record) {
      return record.kind == JournalKind::injected && record.from == 1;
    });
  };
  const auto wait_until = [](auto&& done) {
    const auto began = steady_clock::now();
    while (!done() && steady_clock::now() - began < std::chrono::seconds(10))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return done();
  };
  const auto state = [&](int rank) {
    return job.engines[static_cast<std::size_t>(rank)]->rails()[1].state;
  };
  const auto epoch = [&] { return job.engines[0]->rails()[1].epoch; };
  ASSERT_TRUE(job.engines[0]->inject(1, Fault::reset).ok());
  ASSERT_TRUE(wait_until([&] { return epoch() == 2 && state(0) == RailState::up; }));
  ASSERT_TRUE(wait_until([&] { return state(1) == RailState::up; }));
  const auto after_drill = told();
  job.monitors[0]->set_link(Job::ifindex(1), "no-port1", /*carrier_up=*/false);
  ASSERT_TRUE(wait_until([&] { return state(1) != RailState::up; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // repeated notices
  EXPECT_EQ(told(), after_drill);
}

TEST(DrillFaults, ACorruptRailIsLostAndEveryBitIsRight) {
  for (const int verbs : {0, 2}) {
    Config config;
    config.checksum = true;
    config.rejoin_backoff_min_ms = 1;
    Job job({.ranks = 2, .rails = 2, .verbs = verbs, .config = config});
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
  Job job({.ranks = 2, .rails = 1, .config = config});
  (void)seconds_of(job, 1);
  EXPECT_EQ(job.engines[0]->stalled_ns(), 0U);
  ASSERT_TRUE(job.engines[0]->inject(0, Fault::carrier_loss).ok());
  std::atomic<bool> calling = false;
  std::thread healing([&] {
    calling.wait(false);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    EXPECT_TRUE(job.engines[0]->inject(0, Fault::none).ok());
  });
  const auto began = steady_clock::now();
  job.run([&](int rank, Communicator& communicator) {
    if (rank == 0) {
      calling = true;
      calling.notify_one();
    }
    all_reduce_checked(communicator);
  });
  const auto lasted = steady_clock::now() - began;
  healing.join();
  const std::chrono::nanoseconds stalled(job.engines[0]->stalled_ns());
  // On a busy machine the call begins late, so the stall may be shorter than 500 ms.
  EXPECT_GT(stalled, std::chrono::milliseconds(150));
  EXPECT_LT(stalled, lasted);
}

}  // namespace
}  // namespace r2ccl
