// Observers bound their records, do not keep an engine from starting, and notice members that die
// between two calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "base/clock.hpp"
#include "engine/short_of_cpu.hpp"
#include "eventually.hpp"
#include "job.hpp"

namespace r2ccl {
namespace {

using testing::eventually;
using testing::Job;

constexpr TimeNs second_ns = 1000 * ns_per_ms;

struct Told {
  int records = 0;
  TimeNs paused = 0;
};

// Pauses of 20 ms every 30 ms for `length`, from `begin` on.
Told starve(ShortOfCpu& pauses, TimeNs begin, TimeNs length) {
  Told told;
  for (TimeNs now = begin; now < begin + length; now += 30 * ns_per_ms) {
    if (const auto joined = pauses.note(20 * ns_per_ms, now)) {
      ++told.records;
      told.paused += joined->paused;
      EXPECT_LE(joined->paused, joined->within);
    }
  }
  return told;
}

TEST(ShortOfCpu, ADayOfShortageLeavesRoomForRailEvents) {
  ShortOfCpu pauses;
  const TimeNs day = 86'400 * second_ns;
  const Told told = starve(pauses, second_ns, day);
  EXPECT_GT(told.records, 10);
  EXPECT_LT(told.records, 1000);  // the ring keeps 8192 records
  // The records have all pauses but those after the last record.
  const TimeNs left = ShortOfCpu::interval_max_ns / 3 * 2;
  EXPECT_GE(told.paused, day / 3 * 2 - left - second_ns);
}

TEST(ShortOfCpu, TheFirstPauseIsToldAtOnce) {
  ShortOfCpu pauses;
  EXPECT_FALSE(pauses.note(ShortOfCpu::recorded_from_ns - 1, 10 * second_ns).has_value());
  const auto joined = pauses.note(ShortOfCpu::recorded_from_ns, 20 * second_ns);
  ASSERT_TRUE(joined.has_value());
  EXPECT_EQ(joined->paused, ShortOfCpu::recorded_from_ns);  // without the pause 10 s before
}

TEST(ShortOfCpu, AShortageAfterAQuietTimeIsToldAtOnceAgain) {
  ShortOfCpu pauses;
  (void)starve(pauses, second_ns, 3600 * second_ns);
  const TimeNs later = 3600 * second_ns + 2 * ShortOfCpu::interval_max_ns;
  EXPECT_TRUE(pauses.note(ShortOfCpu::recorded_from_ns, later).has_value());
}

TEST(Observers, AFolderThatIsMissingCostsAWarningAndNoStart) {
  Config config;
  config.journal_dir = ::testing::TempDir() + "/no/such/folder";
  auto engine = Engine::create(config, 4711);
  ASSERT_TRUE(engine.ok()) << engine.take_status().message();
  EXPECT_NE(engine.value()->no_journal().find("/no/such/folder"), std::string::npos);
  EXPECT_TRUE(engine.value()->journal_path().empty());
  EXPECT_FALSE(engine.value()->journal_bytes().empty());
  const auto lines = engine.value()->log().take();
  ASSERT_TRUE(lines.has_value());
  EXPECT_EQ(std::ranges::count_if(
                *lines, [](const LogLine& line) { return line.level == LogLevel::warning; }),
            1);
}

Status all_reduce(Communicator& communicator) {
  float value = 1;
  auto* bytes = reinterpret_cast<std::byte*>(&value);
  return communicator.all_reduce(bytes, bytes, 1, DType::f32, ReduceOp::sum, Algorithm::automatic);
}

ErrorCode code_at(const Job& job, std::size_t rank) {
  return job.engines[rank]->check_members().code();
}

TEST(Observers, AMemberWithoutRailsIsLostWithoutACall) {
  Config config;
  config.link_timeout_s = 0.3;
  Job job({.ranks = 2, .rails = 2, .config = config});
  job.run([](int, Communicator& communicator) { ASSERT_TRUE(all_reduce(communicator).ok()); });
  EXPECT_EQ(code_at(job, 0), ErrorCode::ok);
  for (RailId rail = 0; rail < 2; ++rail)
    EXPECT_TRUE(job.engines[1]->inject(rail, Fault::carrier_loss).ok());
  EXPECT_TRUE(
      eventually([&] { return code_at(job, 0) == ErrorCode::peer_lost; }, "rank 1 is lost"));
  int told = 0;
  const auto is_told = [&] {
    const auto lines = job.engines[0]->log().take();
    if (!lines.has_value()) return false;
    for (const LogLine& line : *lines)
      if (line.text.find(" is lost: no rail") != std::string::npos) ++told;
    return told > 0;
  };
  EXPECT_TRUE(eventually(is_told, "the log tells the loss"));
  const std::string text = job.engines[0]->check_members().message();
  EXPECT_NE(text.find("rail1"), std::string::npos) << text;
  for (RailId rail = 0; rail < 2; ++rail)
    EXPECT_TRUE(job.engines[1]->inject(rail, Fault::none).ok());
  EXPECT_TRUE(eventually([&] { return code_at(job, 0) == ErrorCode::ok; }, "rank 1 is back"));
  (void)is_told();
  EXPECT_EQ(told, 1);
}

// Rank 0 has given the communicator up.  Its last message to rank 1 is not delivered when rank 2
// closes.
TEST(Observers, ACommunicatorThatIsGivenUpHasNoMembers) {
  Job job({.ranks = 3, .rails = 1, .shm = false, .config = {}});
  const auto process = [&job](std::size_t rank) { return job.engines[rank]->process(); };
  ASSERT_TRUE(job.engines[1]->inject(0, Fault::black_hole, process(0)).ok());
  const std::byte data{};
  ASSERT_TRUE(job.communicators[0]->send_to(&data, 1, DType::u8, 1).ok());
  job.communicators[0].reset();
  job.engines[2]->close(1.0);
  const auto has_closed = [&] {
    return std::ranges::any_of(job.engines[0]->rails(), [&](const Engine::RailInfo& rail) {
      return rail.peer_engine == process(2) && rail.state != RailState::up;
    });
  };
  EXPECT_TRUE(eventually(has_closed, "rank 2 has closed"));
  EXPECT_EQ(code_at(job, 0), ErrorCode::ok);
}

TEST(Observers, AMemberThatClosesIsToldWithoutACall) {
  Job job({.ranks = 2, .rails = 2, .config = {}});
  job.run([](int, Communicator& communicator) { ASSERT_TRUE(all_reduce(communicator).ok()); });
  job.engines[1]->close(1.0);
  EXPECT_TRUE(
      eventually([&] { return code_at(job, 0) == ErrorCode::peer_closed; }, "rank 1 has closed"));
}

}  // namespace
}  // namespace r2ccl
