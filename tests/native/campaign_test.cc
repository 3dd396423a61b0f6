// Simulator seeds under the sanitizers. `r2serve sim` runs the long campaigns.
#include "sim/campaign.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "collectives/positions_limit.hpp"
#include "sanitized.hpp"

namespace r2ccl::sim {
namespace {

std::vector<std::string> trace_of(std::uint64_t seed) {
  std::vector<std::string> lines;
  (void)run_seed(seed, {}, [&lines](const std::string& line) { lines.push_back(line); });
  return lines;
}

TEST(Campaign, TheSameSeedGivesTheSameRun) {
  for (const std::uint64_t seed : {3U, 29U, 57U}) {
    const auto first = trace_of(seed);
    EXPECT_FALSE(first.empty());
    EXPECT_EQ(first, trace_of(seed));
  }
}

TEST(Campaign, WithoutFaultsNothingIsReplayedAndNoRailGoesDown) {
  FaultOptions none;
  for (std::size_t kind = 0; kind < fault_kinds; ++kind) none.set(static_cast<FaultKind>(kind), 0);
  none.exchanges = 0.5;
  none.engine_ends = 0;
  none.compared = 1;
  none.parted = 0;
  std::uint64_t exchanged = 0;
  std::uint64_t compared = 0;
  for (std::uint64_t seed = 0; seed < fault_kinds; ++seed) {  // these seeds force no fault kind
    const SeedResult result = run_seed(seed, none);
    EXPECT_EQ(result.violations, std::vector<std::string>()) << seed;
    EXPECT_EQ(result.downs + result.replays + result.hedges + result.errors, 0U) << seed;
    EXPECT_GT(result.calls, 0U);
    exchanged += result.exchange_calls;
    compared += result.compared;
  }
  EXPECT_GT(exchanged, 0U);
  EXPECT_GT(compared, 0U);
}

// Faults may delay the comparison or end ranks, but let no rank pass the end of the step.
TEST(Campaign, NoRankEndsAStepInWhichARankLeavesOutACall) {
  FaultOptions options;
  options.on_gpu = options.exchanges = 0;
  options.compared = options.parted = 1;
  std::uint64_t parted = 0;
  for (std::uint64_t seed = 0; seed < (testing::sanitized() ? 20U : 100U); ++seed) {
    const SeedResult result = run_seed(seed, options);
    EXPECT_EQ(result.violations, std::vector<std::string>()) << seed << ": " << result.job;
    parted += result.parted;
  }
  EXPECT_GT(parted, 0U);
}

// Checks that the first seeds break no invariant, and meet every kind of fault.
void check_seeds(std::uint64_t count) {
  SeedResult total;
  for (std::uint64_t seed = 0; seed < count; ++seed) {
    const SeedResult result = run_seed(seed);
    EXPECT_EQ(result.violations, std::vector<std::string>()) << seed << ": " << result.job;
    total.replays += result.replays;
    total.hedges += result.hedges;
    total.fences += result.fences;
    total.gpu_calls += result.gpu_calls;
    total.exchange_calls += result.exchange_calls;
    total.compared += result.compared;
    total.parted += result.parted;
    for (std::size_t kind = 0; kind < fault_kinds; ++kind)
      total.faults[kind] += result.faults[kind];
  }
  EXPECT_GT(total.replays, 0U);
  EXPECT_GT(total.hedges, 0U);
  EXPECT_GT(total.fences, 0U);
  EXPECT_GT(total.gpu_calls, 0U);
  EXPECT_GT(total.exchange_calls, 0U);
  EXPECT_GT(total.compared, 0U);
  EXPECT_GT(total.parted, 0U);
  EXPECT_TRUE(std::none_of(total.faults.begin(), total.faults.end(),
                           [](std::uint64_t faults) { return faults == 0; }));
}

TEST(Campaign, SeedsBreakNoInvariant) { check_seeds(testing::sanitized() ? 120 : 400); }

TEST(Campaign, ManySeedsBreakNoInvariantLong) { check_seeds(1000); }

// Each wait is compared at once, so that ranks tell of many waits that end: no message is an error.
TEST(Campaign, WaitsThatAreComparedAtOnceBreakNoInvariant) {
  const TimeNs before = waits_interval();
  set_waits_interval(0);
  for (std::uint64_t seed = 0; seed < (testing::sanitized() ? 20U : 60U); ++seed) {
    const SeedResult result = run_seed(seed);
    EXPECT_EQ(result.violations, std::vector<std::string>()) << seed << ": " << result.job;
  }
  set_waits_interval(before);
}

// The ranks of these seeds only wait for each other after a call that a rank leaves out.
TEST(Campaign, RanksThatOnlyWaitForEachOtherGetAnError) {
  FaultOptions parting;
  parting.on_gpu = parting.exchanges = 0;
  parting.compared = parting.parted = 1;
  std::uint64_t parted = 0;
  for (const FaultOptions& options : {FaultOptions(), parting})
    for (const std::uint64_t seed : {92U, 177U, 191U, 218U, 266U, 297U}) {
      const SeedResult result = run_seed(seed, options);
      EXPECT_EQ(result.violations, std::vector<std::string>()) << seed << ": " << result.job;
      parted += result.parted;
    }
  EXPECT_GT(parted, 0U);
}

// Seeds of past bugs. A change of the generator changes the run of a seed, so each bug also has a
// separate test.
TEST(Campaign, SeedsOfPastBugsBreakNoInvariant) {
  FaultOptions options;
  // The jobs of the time when the bugs were found.
  options.on_gpu = options.exchanges = options.reserves = options.units = options.compared = 0;
  for (const std::uint64_t seed : {1462U, 1920U, 2021U, 2022U, 5995U, 13082U, 16284U, 21568U,
                                   24483U, 32363U, 35197U, 69164U}) {
    const SeedResult result = run_seed(seed, options);
    EXPECT_EQ(result.violations, std::vector<std::string>()) << seed << ": " << result.job;
  }
}

// Regression: the run ends while the GPU of a dead rank still works. No rank reads the result.
TEST(Campaign, ARunMayEndInTheMiddleOfAKernel) {
  FaultOptions options;
  options.compared = 0;
  for (const std::uint64_t seed : {6183U, 7355U, 12364U}) {
    const SeedResult result = run_seed(seed, options);
    EXPECT_EQ(result.violations, std::vector<std::string>()) << seed << ": " << result.job;
  }
}

}  // namespace
}  // namespace r2ccl::sim
