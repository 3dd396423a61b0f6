// Numbers that pass the end of 31 or 32 bits: same bits, and no call that waits.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/first_number.hpp"
#include "eventually.hpp"
#include "stream_ranks.hpp"

namespace r2ccl {
namespace {

using testing::compare_all;
using testing::Job;
using testing::Rank;

// Collectives and sends must pass the end.
constexpr int before_the_end = 1000;
constexpr int calls = 5000;
constexpr int calls_per_send = 4;
static_assert(calls / calls_per_send > before_the_end);

// A wait for a lost number never ends; here, its call ends with an error.
Config limited() {
  Config config;
  config.call_timeout_s = testing::patience_s;
  return config;
}

class Wrap : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  void SetUp() override { set_first_number(GetParam()); }
  void TearDown() override { set_first_number(0); }
};

// A sum of small integers has the same bits in every order.
void check_all_reduce(int rank, Communicator& communicator, std::size_t count, int call) {
  std::vector<float> data(count, static_cast<float>(rank + call % 7));
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  const Status status =
      communicator.all_reduce(bytes, bytes, count, DType::f32, ReduceOp::sum, Algorithm::automatic);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(data, std::vector<float>(count, static_cast<float>(1 + 2 * (call % 7))));
}

void check_send(int rank, Communicator& communicator, int call) {
  std::array<int, 4> data{};
  if (rank == 0) data.fill(call);
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  const Status status = rank == 0 ? communicator.send_to(bytes, 4, DType::i32, 1)
                                  : communicator.receive_from(bytes, 4, DType::i32, 0);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(data[3], call);
}

void run_past_the_end(int verbs) {
  Job job({.ranks = 2, .rails = 2, .verbs = verbs, .config = limited()});
  job.run([&](int rank, Communicator& communicator) {
    Engine& engine = *job.engines[static_cast<std::size_t>(rank)];
    for (int call = 0; call < calls && !::testing::Test::HasFatalFailure(); ++call) {
      if (rank == 0 && call % 1000 == 500) {
        ASSERT_TRUE(engine.inject(0, Fault::carrier_loss).ok());
      }
      if (rank == 0 && call % 1000 == 600) {
        ASSERT_TRUE(engine.inject(0, Fault::none).ok());
      }
      // Now and then a large call, with several messages and chunks.
      check_all_reduce(rank, communicator, call % 50 == 0 ? 400'000 : 64, call);
      if (call % calls_per_send == 0) check_send(rank, communicator, call);
    }
  });
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const std::vector<JournalRecord> records = job.records(rank);
    ASSERT_FALSE(records.empty());
    for (const JournalRecord& record : records) EXPECT_GT(record.sequence, first_number());
  }
}

TEST_P(Wrap, HostsGetTheSameBitsOverTcp) { run_past_the_end(0); }

TEST_P(Wrap, HostsGetTheSameBitsOverVerbs) { run_past_the_end(1); }

TEST_P(Wrap, PlayedGpusGetTheSameBits) {
  Job job({.ranks = 2, .rails = 2, .config = limited()});
  auto hosts = job.make_communicators(9000);
  std::vector<std::unique_ptr<Rank>> ranks(2);
  // Rank's constructor meets the other rank.
  job.run([&](int rank, Communicator& communicator) {
    ranks[static_cast<std::size_t>(rank)] = std::make_unique<Rank>(communicator);
  });
  job.run([&](int rank, Communicator&) {
    const auto own = static_cast<std::size_t>(rank);
    for (std::size_t turn = 0; turn < 450; ++turn) {  // 12 collectives each
      if (rank == 0 && turn % 100 == 50) {
        EXPECT_TRUE(job.engines[0]->inject(0, Fault::carrier_loss).ok());
        EXPECT_TRUE(job.engines[0]->inject(0, Fault::none).ok());
      }
      compare_all(*ranks[own], *hosts[own], 60, turn);
    }
  });
  job.run([&](int rank, Communicator&) { ranks[static_cast<std::size_t>(rank)].reset(); });
}

// Epochs and records grow slowly, so these begin closer to the end.  An epoch has 32 bits and does
// not wrap: 2^32 losses of a rail take 136 years at a loss each second.
class WrapOfEpochs : public ::testing::TestWithParam<int> {
 protected:
  static constexpr std::uint32_t end = 1U << 31;
  static constexpr int losses = 6;
  void SetUp() override { set_first_number(end - losses / 2); }
  void TearDown() override { set_first_number(0); }
};

TEST_P(WrapOfEpochs, ARailRejoinsPastTheEndOf31Bits) {
  Config config = limited();
  config.rejoin_backoff_min_ms = 1;
  config.rejoin_backoff_max_ms = 50;
  config.flap_half_life_s = 0;
  Job job({.ranks = 2, .rails = 2, .verbs = GetParam(), .config = config});
  ASSERT_TRUE(job.all_up());
  const auto rail = [&job](std::size_t rank) { return job.engines[rank]->rails()[0]; };
  for (int loss = 0; loss < losses; ++loss) {
    const Epoch before = rail(0).epoch;
    ASSERT_TRUE(job.engines[0]->inject(0, Fault::carrier_loss).ok());
    ASSERT_TRUE(testing::eventually([&] { return rail(0).state != RailState::up; }, "a loss"));
    ASSERT_TRUE(job.engines[0]->inject(0, Fault::none).ok());
    ASSERT_TRUE(job.all_up());
    EXPECT_GT(rail(0).epoch, before);
    EXPECT_TRUE(
        testing::eventually([&] { return rail(0).epoch == rail(1).epoch; }, "equal epochs"));
    job.run([&](int rank, Communicator& communicator) {
      check_all_reduce(rank, communicator, 400'000, loss);
      check_send(rank, communicator, loss);
    });
  }
  EXPECT_GT(rail(0).epoch, end);
  for (const std::size_t rank : {0U, 1U})
    EXPECT_TRUE(std::ranges::any_of(
        job.records(rank), [](const JournalRecord& record) { return record.sequence > end; }));
}

// The numbers of records have 64 bits.
class WrapOfRecords : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  static constexpr std::uint64_t records = 8;
  void SetUp() override { set_first_number(GetParam() - records / 2); }
  void TearDown() override { set_first_number(0); }
};

TEST_P(WrapOfRecords, TheNumbersGoOn) {
  auto journal = Journal::open("", 1);
  ASSERT_TRUE(journal.ok()) << journal.take_status().message();
  for (std::uint64_t value = 1; value <= records; ++value)
    journal.value().record({.kind = JournalKind::stall, .value = value});
  const std::vector<JournalRecord> found = testing::records_in(journal.value().copy());
  ASSERT_EQ(found.size(), records);
  for (const JournalRecord& record : found)
    EXPECT_EQ(record.sequence, first_number() + record.value);
  const auto is_past = [](const JournalRecord& record) { return record.sequence > GetParam(); };
  EXPECT_EQ(std::ranges::count_if(found, is_past), std::ptrdiff_t{records / 2});
}

// A step has 32 bits, and step 0 is none.
class WrapOfSteps : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  static constexpr int turns = 20;
  // Returns the step of a turn, half of which are past the end.
  static std::uint32_t step(int turn) {
    const std::uint64_t number = GetParam() + static_cast<std::uint64_t>(turn) - turns / 2;
    return static_cast<std::uint32_t>(number > most_steps ? number - most_steps : number);
  }
  static constexpr std::uint64_t most_steps = (std::uint64_t{1} << 32) - 1;
};

Status small_all_reduce(Communicator& communicator) {
  std::array<float, 16> data{};
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  return communicator.all_reduce(bytes, bytes, data.size(), DType::f32, ReduceOp::sum,
                                 Algorithm::automatic);
}

TEST_P(WrapOfSteps, RanksThatPartPastTheEndGetAnErrorAndOthersNone) {
  constexpr int parting = turns * 3 / 4;  // rank 1 leaves out the last call of this turn
  for (const bool parts : {false, true}) {
    Config config = limited();
    config.consensus = Consensus::step;
    Job job({.ranks = 2, .rails = 1, .config = config});
    job.run([&](int rank, Communicator& communicator) {
      Status status;
      int turn = 0;
      for (; turn < turns; ++turn) {
        status = communicator.begin_step(step(turn), "");
        if (status.ok()) status = small_all_reduce(communicator);
        const bool leaves_out = parts && rank == 1 && turn == parting;
        if (status.ok() && !leaves_out) status = small_all_reduce(communicator);
        if (status.ok()) status = communicator.end_step();
        if (!status.ok()) break;
      }
      EXPECT_EQ(turn, parts ? parting : turns);
      EXPECT_EQ(status.code(), parts ? ErrorCode::order_mismatch : ErrorCode::ok)
          << status.message();
      const std::string named = parts ? "step " + std::to_string(step(parting)) : "";
      EXPECT_NE(status.message().find(named), std::string::npos) << status.message();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Rails, WrapOfEpochs, ::testing::Values(0, 1), [](const auto& tested) {
  return tested.param == 0 ? "OverTcp" : "OverVerbs";
});

INSTANTIATE_TEST_SUITE_P(AtTheEnd, Wrap,
                         ::testing::Values((std::uint64_t{1} << 31) - before_the_end,
                                           (std::uint64_t{1} << 32) - before_the_end),
                         [](const auto& tested) {
                           return tested.param >> 31 == 0 ? "Of31Bits" : "Of32Bits";
                         });

constexpr std::array ends{std::uint64_t{1} << 31, std::uint64_t{1} << 32};

std::string bits_of(const ::testing::TestParamInfo<std::uint64_t>& tested) {
  return tested.param == ends[0] ? "Of31Bits" : "Of32Bits";
}

INSTANTIATE_TEST_SUITE_P(PastTheEnd, WrapOfRecords, ::testing::ValuesIn(ends), bits_of);

INSTANTIATE_TEST_SUITE_P(PastTheEnd, WrapOfSteps, ::testing::ValuesIn(ends), bits_of);

}  // namespace
}  // namespace r2ccl
