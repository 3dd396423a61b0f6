// Ranks whose programs part get an order mismatch in that step, with the positions of all ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "base/sites.hpp"
#include "collectives/positions_limit.hpp"
#include "eventually.hpp"
#include "job.hpp"

namespace r2ccl {
namespace {

using testing::eventually;
using testing::Job;

// Ranks that collect positions wait for the slowest rank, however late its thread runs.
[[maybe_unused]] const bool waits_for_all_positions = [] {
  set_positions_limit(static_cast<TimeNs>(testing::patience_s * 1e9));
  return true;
}();

Config comparing(Consensus consensus) {
  Config config;
  config.consensus = consensus;
  return config;
}

Status all_reduce(Communicator& communicator, float value = 1.0F) {
  std::array<float, 64> data;
  data.fill(value);
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  return communicator.all_reduce(bytes, bytes, data.size(), DType::f32, ReduceOp::sum,
                                 Algorithm::automatic);
}

bool contains(const Status& status, const std::string& text) {
  return status.message().find(text) != std::string::npos;
}

// Runs step 7 with `calls` calls on each rank, and returns the first error of each rank.  Rank 0
// leaves out the call `skipped`.
std::vector<Status> step_with_a_skip(int ranks, int calls, int skipped, Consensus consensus) {
  Job job({.ranks = ranks, .rails = 1, .config = comparing(consensus)});
  std::vector<Status> ends(static_cast<std::size_t>(ranks));
  std::atomic<int> in_step{0};  // the position of a rank outside of the step has no requests
  job.run([&](int rank, Communicator& communicator) {
    Status& end = ends[static_cast<std::size_t>(rank)];
    end = all_reduce(communicator);  // outside of steps
    if (end.ok()) end = communicator.begin_step(7, "requests request-" + std::to_string(rank));
    ++in_step;
    ASSERT_TRUE(eventually([&] { return in_step == ranks; }, "all ranks have begun the step"));
    for (int call = 0; call < calls && end.ok(); ++call)
      if (rank != 0 || call != skipped) end = all_reduce(communicator);
    if (end.ok()) end = communicator.end_step();
  });
  return ends;
}

class SkippedCall : public ::testing::TestWithParam<int> {};

TEST_P(SkippedCall, IsAnErrorInThatStepWhichNamesBothPositionsAndRequests) {
  for (const int ranks : {2, 3}) {
    for (const Status& end : step_with_a_skip(ranks, 3, GetParam(), Consensus::step)) {
      ASSERT_EQ(end.code(), ErrorCode::order_mismatch) << end.message();
      EXPECT_TRUE(contains(end, "step 7")) << end.message();
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_TRUE(contains(end, "rank " + std::to_string(rank) + " in ") ||
                    contains(end, "rank " + std::to_string(rank) + " after "))
            << end.message();
        EXPECT_TRUE(contains(end, "step 7: requests request-" + std::to_string(rank)))
            << end.message();
        EXPECT_TRUE(contains(end, "request-" + std::to_string(rank))) << end.message();
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(AtEachPlace, SkippedCall, ::testing::Values(0, 1, 2));

TEST(Consensus, APositionMayBeSentBeforeTheEndOfTheStep) {
  for (const bool skips : {false, true}) {
    Job job({.ranks = 3, .rails = 1, .config = comparing(Consensus::step)});
    job.run([&](int rank, Communicator& communicator) {
      Status status;
      for (std::uint32_t step = 1; step <= 50 && status.ok(); ++step) {
        status = communicator.begin_step(step, "");
        for (int call = 0; call < 2 && status.ok(); ++call)
          if (!skips || step != 50 || rank != 1 || call != 0) status = all_reduce(communicator);
        if (status.ok()) status = communicator.post_position();
        if (status.ok()) status = communicator.end_step();
      }
      EXPECT_EQ(status.code(), skips ? ErrorCode::order_mismatch : ErrorCode::ok)
          << status.message();
    });
  }
}

TEST(Consensus, ASkippedStepIsAnErrorAtItsFirstCall) {
  Job job({.ranks = 2, .rails = 1, .config = comparing(Consensus::step)});
  job.run([](int rank, Communicator& communicator) {
    ASSERT_TRUE(communicator.begin_step(rank == 0 ? 5 : 6, "").ok());
    const Status status = all_reduce(communicator);
    EXPECT_EQ(status.code(), ErrorCode::order_mismatch);
    EXPECT_TRUE(contains(status, "step 5")) << status.message();
    EXPECT_TRUE(contains(status, "step 6")) << status.message();
  });
}

TEST(Consensus, ARankThatComputesTellsItsPositionAndHearsThoseOfOthers) {
  Job job({.ranks = 3, .rails = 1, .config = comparing(Consensus::step)});
  std::atomic<int> past_call_0{0};
  std::atomic<int> ended{0};
  job.run([&](int rank, Communicator& communicator) {
    ASSERT_TRUE(communicator.begin_step(3, "").ok());
    ASSERT_TRUE(all_reduce(communicator).ok());
    ++past_call_0;
    ASSERT_TRUE(eventually([&] { return past_call_0 == 3; }, "all ranks have left call 0"));
    std::array<std::byte, 8> data{};
    Status status;
    if (rank == 0) status = communicator.send_to(data.data(), 8, DType::u8, 1);
    if (rank == 1) status = communicator.receive_from(data.data(), 4, DType::u8, 0);
    if (rank == 2) {
      ASSERT_TRUE(eventually([&] { return ended == 2; }, "the calls of ranks 0 and 1 have ended"));
    }
    if (status.ok()) status = communicator.barrier();
    ++ended;
    ASSERT_EQ(status.code(), ErrorCode::order_mismatch) << status.message();
    for (const char* text :
         {"rank 0 ", "rank 1 in call 0 (step 3): send or recv(", "rank 2 after call 0"})
      EXPECT_TRUE(contains(status, text)) << text << ": " << status.message();
  });
}

TEST(Consensus, LongTextsAreCutBetweenCharacters) {
  for (const std::size_t characters : {75U, 76U, 120U, 400U}) {
    Job job({.ranks = 2, .rails = 1, .config = comparing(Consensus::step)});
    job.run([&](int rank, Communicator& communicator) {
      std::string about;
      for (std::size_t i = 0; i < characters; ++i) about += "\u00e9";
      ASSERT_TRUE(communicator.begin_step(3, about).ok());
      const Status status = rank == 0 ? communicator.barrier() : all_reduce(communicator);
      ASSERT_EQ(status.code(), ErrorCode::order_mismatch);
      EXPECT_TRUE(contains(status, "rank 0 in call")) << status.message();
      EXPECT_TRUE(contains(status, "rank 1 in call")) << status.message();
      // Each character has two bytes, and no text contains one byte of the two.
      const std::string& text = status.message();
      EXPECT_EQ(std::ranges::count(text, '\xc3'), std::ranges::count(text, '\xa9'));
    });
  }
}

TEST(Consensus, RanksThatReplayOtherCapturedCallsGetAnErrorWhereGroupsAskForIt) {
  for (const bool compared : {true, false}) {
    Job job({.ranks = 2, .rails = 1, .config = comparing(Consensus::step)});
    job.run([&](int rank, Communicator& communicator) {
      if (compared) communicator.compare_captures();
      communicator.set_capture(7);
      ASSERT_TRUE(all_reduce(communicator).ok());
      communicator.set_capture(static_cast<std::uint16_t>(8 + rank));
      const Status status = all_reduce(communicator);
      ASSERT_EQ(status.code(), compared ? ErrorCode::order_mismatch : ErrorCode::ok);
      if (!compared) return;
      EXPECT_TRUE(contains(status, "captured call 8")) << status.message();
      EXPECT_TRUE(contains(status, "captured call 9")) << status.message();
    });
  }
}

TEST(Consensus, NothingIsComparedWhereItIsOff) {
  Job job({.ranks = 2, .rails = 1, .config = {}});
  job.run([](int rank, Communicator& communicator) {
    EXPECT_TRUE(communicator.begin_step(static_cast<std::uint32_t>(rank) + 1, "").ok());
    set_next_site(static_cast<std::uint32_t>(rank) + 1);
    EXPECT_TRUE(all_reduce(communicator).ok());
    EXPECT_TRUE(communicator.end_step().ok());
    (void)take_site();
  });
}

void run_equal_programs(std::uint32_t steps) {
  for (const Consensus consensus : {Consensus::step, Consensus::site_error}) {
    Job job({.ranks = 3, .rails = 2, .config = comparing(consensus)});
    job.run([steps](int rank, Communicator& communicator) {
      std::vector<float> data(3 * 64);
      auto* bytes = reinterpret_cast<std::byte*>(data.data());
      const std::vector<std::size_t> even(3, 64);
      for (std::uint32_t step = 1; step <= steps; ++step) {
        // A new step also ends the one before.
        ASSERT_TRUE(communicator.begin_step(step, "").ok());
        for (std::uint32_t call = 0; call < step % 5; ++call) {
          set_next_site(100 + call);
          ASSERT_TRUE(all_reduce(communicator).ok());
          ASSERT_TRUE(communicator.broadcast(bytes, 64, DType::f32, 1).ok());
          ASSERT_TRUE(
              communicator.gather(bytes, bytes, even, DType::f32, static_cast<int>(call % 3)).ok());
          if (rank == 0) {
            ASSERT_TRUE(communicator.send_to(bytes, 8, DType::f32, 2).ok());
          }
          if (rank == 2) {
            ASSERT_TRUE(communicator.receive_from(bytes, 8, DType::f32, 0).ok());
          }
          ASSERT_TRUE(communicator.barrier().ok());
        }
        if (step % 2 == 0) {
          ASSERT_TRUE(communicator.end_step().ok());
        }
        if (step % 3 == 0) {
          ASSERT_TRUE(all_reduce(communicator).ok());
        }
      }
    });
  }
}

TEST(Consensus, EqualProgramsNeverDiffer) { run_equal_programs(60); }

TEST(Consensus, EqualProgramsNeverDifferLong) { run_equal_programs(300); }

// Compares waits after `interval` while in scope.
class WaitsCompared {
 public:
  explicit WaitsCompared(TimeNs interval) { set_waits_interval(interval); }
  ~WaitsCompared() { set_waits_interval(before_); }
  WaitsCompared(const WaitsCompared&) = delete;
  WaitsCompared& operator=(const WaitsCompared&) = delete;

 private:
  const TimeNs before_ = waits_interval();
};

TEST(Consensus, EqualProgramsNeverDifferInTheirWaits) {
  const WaitsCompared at_once(0);
  run_equal_programs(20);
}

// Runs a program of calls on each rank that only wait for each other.  Every rank gets an error
// with the reason `why`, which names two of these calls.
void only_wait(int ranks, const char* why,
               const std::function<Status(int, Communicator&)>& program) {
  const WaitsCompared soon(20 * ns_per_ms);
  Job job({.ranks = ranks, .rails = 2, .config = comparing(Consensus::step)});
  job.run([&](int rank, Communicator& communicator) {
    ASSERT_TRUE(communicator.begin_step(9, "").ok());
    const Status status = program(rank, communicator);
    EXPECT_EQ(status.code(), ErrorCode::order_mismatch) << status.message();
    EXPECT_TRUE(contains(status, why)) << status.message();
    EXPECT_TRUE(contains(status, "which waits in")) << status.message();
    EXPECT_TRUE(contains(status, "step 9")) << status.message();
  });
}

// The root of the gather waits for a rank that has left the gather out, and that waits for a
// broadcast of the root.
TEST(Consensus, RanksThatOnlyWaitForEachOtherGetAnErrorAfterASkippedGather) {
  for (const int ranks : {2, 3})
    only_wait(ranks, "have parted", [ranks](int rank, Communicator& communicator) {
      std::array<float, 3> data{};
      auto* const bytes = reinterpret_cast<std::byte*>(data.data());
      const std::vector<std::size_t> even(static_cast<std::size_t>(ranks), 1);
      if (rank != 1) R2CCL_TRY(communicator.gather(bytes, bytes, even, DType::f32, /*root=*/0));
      return communicator.broadcast(bytes, 1, DType::f32, /*root=*/0);
    });
}

TEST(Consensus, RanksThatOnlyReceiveFromEachOtherGetAnError) {
  for (const int ranks : {2, 3, 5})
    only_wait(ranks, "only wait for each other", [ranks](int rank, Communicator& communicator) {
      std::array<std::byte, 4> data{};
      return communicator.receive_from(data.data(), data.size(), DType::u8, (rank + 1) % ranks);
    });
}

// Slots hold 8 MiB, so that the end of a large message waits for room.
Status send_large(Communicator& communicator, int to) {
  const std::vector<std::byte> data(std::size_t{16} << 20);
  return communicator.send_to(data.data(), data.size(), DType::u8, to);
}

TEST(Consensus, RanksThatOnlyWaitForRoomAtEachOtherGetAnError) {
  for (const int ranks : {2, 3, 5})
    only_wait(ranks, "only wait for each other", [ranks](int rank, Communicator& communicator) {
      return send_large(communicator, (rank + 1) % ranks);
    });
}

// Rank 0 waits for a message of rank 1, which waits for room at rank 2, which waits for a message
// of rank 0.
TEST(Consensus, ACircleOfWaitsForMessagesAndForRoomIsAnError) {
  only_wait(3, "only wait for each other", [](int rank, Communicator& communicator) {
    std::array<std::byte, 4> data{};
    if (rank == 1) return send_large(communicator, 2);
    return communicator.receive_from(data.data(), data.size(), DType::u8, (rank + 1) % 3);
  });
}

TEST(Consensus, AWaitForRoomAtALateRankIsNoError) {
  const WaitsCompared at_once(0);
  Job job({.ranks = 3, .rails = 1, .config = comparing(Consensus::step)});
  const auto both_wait = [&] { return job.in_call(0) && job.in_call(1); };
  job.run([&](int rank, Communicator& communicator) {
    std::vector<std::byte> data(std::size_t{16} << 20);
    if (rank == 2) {
      ASSERT_TRUE(eventually(both_wait, "the other ranks wait"));
    }
    // Rank 0 waits for a message of rank 1, which waits for room at rank 2.
    if (rank != 1) {
      const std::size_t bytes = rank == 2 ? data.size() : 4;
      const Status status = communicator.receive_from(data.data(), bytes, DType::u8, 1);
      ASSERT_TRUE(status.ok()) << status.message();
    } else {
      ASSERT_TRUE(communicator.send_to(data.data(), data.size(), DType::u8, 2).ok());
      ASSERT_TRUE(communicator.send_to(data.data(), 4, DType::u8, 0).ok());
    }
    const Status status = communicator.broadcast(data.data(), 4, DType::u8, 2);
    EXPECT_TRUE(status.ok()) << status.message();
  });
}

// Rank 0 comes late on purpose: other ranks wait for it in different calls, and for each other.
TEST(Consensus, AChainOfWaitsForALateRankIsNoError) {
  const WaitsCompared at_once(0);
  Job job({.ranks = 4, .rails = 1, .config = comparing(Consensus::step)});
  const auto all_wait = [&] { return job.in_call(1) && job.in_call(2) && job.in_call(3); };
  job.run([&](int rank, Communicator& communicator) {
    std::array<std::byte, 4> data{};
    if (rank == 0) {
      ASSERT_TRUE(eventually(all_wait, "the other ranks wait"));
    }
    // Rank 3 waits for rank 2, which waits for rank 1, which waits for rank 0.
    if (rank > 0) {
      const Status status = communicator.receive_from(data.data(), 4, DType::u8, rank - 1);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    if (rank < 3) {
      const Status status = communicator.send_to(data.data(), 4, DType::u8, rank + 1);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    const Status status = communicator.broadcast(data.data(), 4, DType::u8, 3);
    EXPECT_TRUE(status.ok()) << status.message();
  });
}

TEST(Consensus, AMessageOfAnotherStepIsAnErrorBetweenTwoRanks) {
  Job job({.ranks = 2, .rails = 1, .config = comparing(Consensus::step)});
  job.run([](int rank, Communicator& communicator) {
    std::array<std::byte, 8> data{};
    ASSERT_TRUE(communicator.begin_step(rank == 0 ? 3 : 4, "").ok());
    const Status status = rank == 0 ? communicator.send_to(data.data(), 8, DType::u8, 1)
                                    : communicator.receive_from(data.data(), 8, DType::u8, 0);
    if (rank == 1) {
      EXPECT_EQ(status.code(), ErrorCode::order_mismatch) << status.message();
    }
  });
}

void other_sites(Consensus consensus, const std::function<void(const Status&, Job&, int)>& judge) {
  note_site(11, "model.py:11");
  note_site(12, "draft.py:12");
  Job job({.ranks = 2, .rails = 1, .config = comparing(consensus)});
  job.run([&](int rank, Communicator& communicator) {
    set_next_site(rank == 0 ? 11 : 12);
    judge(all_reduce(communicator), job, rank);
  });
}

TEST(Consensus, CallsFromOtherPlacesAreAnErrorWithBothPlaces) {
  other_sites(Consensus::site_error, [](const Status& status, Job&, int) {
    EXPECT_EQ(status.code(), ErrorCode::order_mismatch);
    EXPECT_TRUE(contains(status, "at model.py:11")) << status.message();
    EXPECT_TRUE(contains(status, "at draft.py:12")) << status.message();
  });
}

TEST(Consensus, CallsFromOtherPlacesAreLoggedAndGoOn) {
  other_sites(Consensus::site, [](const Status& status, Job& job, int rank) {
    EXPECT_TRUE(status.ok()) << status.message();
    std::string logged;
    const auto lines = job.engines[static_cast<std::size_t>(rank)]->log().take();
    for (const LogLine& line : lines.value_or(std::deque<LogLine>{})) logged += line.text + '\n';
    EXPECT_NE(logged.find(rank == 0 ? "at model.py:11" : "at draft.py:12"), std::string::npos)
        << logged;
  });
}

TEST(Consensus, ARootsPlaceMayDiffer) {
  Job job({.ranks = 2, .rails = 1, .config = comparing(Consensus::site_error)});
  job.run([](int rank, Communicator& communicator) {
    std::array<std::byte, 8> data{};
    set_next_site(rank == 0 ? 11 : 12);
    EXPECT_TRUE(communicator.broadcast(data.data(), 8, DType::u8, 0).ok());
    (void)take_site();
  });
}

// Ranks that disagree about the nodes add in different orders, so their results differ in bits.
TEST(Consensus, ResultsWithDifferentBitsAreAnError) {
  Config config;
  config.consensus_result = 2;
  Job job({.ranks = 4, .rails = 1, .config = config});
  std::vector<std::unique_ptr<Communicator>> made;
  for (int rank = 0; rank < 4; ++rank) {
    const auto& engine = job.engines[static_cast<std::size_t>(rank)];
    std::vector<Communicator::Member> members;
    for (int each = 0; each < 4; ++each)
      members.push_back(
          {job.engines[static_cast<std::size_t>(each)]->process(), rank == 3 ? each % 2 : each});
    auto communicator = Communicator::create(engine, 77, "test:77", rank, members, best_simd());
    ASSERT_TRUE(communicator.ok());
    made.push_back(std::move(communicator.value()));
  }
  constexpr std::array<float, 4> values{1e8F, 1.0F, -1e8F, 1.0F};
  job.run([&](int rank, Communicator&) {
    Communicator& communicator = *made[static_cast<std::size_t>(rank)];
    // The first result is not compared; the second is compared, and equal.
    EXPECT_TRUE(all_reduce(communicator, values[static_cast<std::size_t>(rank)]).ok());
    EXPECT_TRUE(all_reduce(communicator).ok());
    EXPECT_TRUE(all_reduce(communicator, values[static_cast<std::size_t>(rank)]).ok());
    EXPECT_TRUE(communicator.barrier().ok());  // has no result
    const Status status = all_reduce(communicator, values[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(status.code(), ErrorCode::internal) << status.message();
    EXPECT_TRUE(contains(status, "different bits in the result of call 4")) << status.message();
  });
}

}  // namespace
}  // namespace r2ccl
