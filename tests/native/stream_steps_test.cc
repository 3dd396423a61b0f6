// Calls on GPU memory whose ranks part: other graphs, skipped replays and calls of other steps are
// an error before results are used.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/positions_limit.hpp"
#include "stream_ranks.hpp"

namespace r2ccl {
namespace {

using testing::address;
using testing::fake;
using testing::Job;
using testing::Nodes;
using testing::Rank;

// Ranks that collect positions wait for the slowest rank, however late its thread runs.
[[maybe_unused]] const bool waits_for_all_positions = [] {
  set_positions_limit(static_cast<TimeNs>(testing::patience_s * 1e9));
  return true;
}();

Config comparing() {
  Config config;
  config.consensus = Consensus::step;
  config.link_timeout_s = 60.0;  // no rank is lost here
  return config;
}

constexpr std::size_t count = 64;

// A rank with two captured graphs of equal shapes and different meaning.
class Program {
 public:
  explicit Program(std::unique_ptr<Rank> rank) : rank_(std::move(rank)) {
    rank_->collectives->compare_captures();
    for (std::size_t graph = 0; graph < 2; ++graph) graphs_[graph] = capture(graph);
  }
  ~Program() {
    rank_->collectives->close();
    for (void* graph : graphs_) fake().call("cuGraphExecDestroy", graph);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void begin(std::uint32_t step) {
    keep(rank_->collectives->begin_step(rank_->stream, step, "requests of step"));
  }
  void end() { keep(rank_->collectives->end_step(rank_->stream)); }
  void call() { keep(all_reduce(0)); }
  void replay(std::size_t graph) {
    EXPECT_EQ(fake().call("cuGraphLaunch", graphs_[graph], rank_->stream), 0);
    rank_->synchronise();
  }
  // Returns the error of the first refused call, or of the results so far.
  Status outcome() {
    rank_->synchronise();
    Status found = rank_->collectives->await_steps(rank_->collectives->steps_ended());
    return found.ok() ? std::move(refused_) : std::move(found);
  }
  [[nodiscard]] device::StreamCommunicator& collectives() { return *rank_->collectives; }
  [[nodiscard]] const Rank& rank() const { return *rank_; }
  [[nodiscard]] const std::vector<float>& sum() const { return out_[0]; }

 private:
  Status all_reduce(std::size_t graph) {
    return rank_->collectives->all_reduce(rank_->stream, address(in_[graph]), address(out_[graph]),
                                          count, DType::f32, ReduceOp::sum, Algorithm::automatic);
  }
  void keep(Status status) {
    if (refused_.ok()) refused_ = std::move(status);
  }
  void* capture(std::size_t graph) {
    void* captured = nullptr;
    void* made = nullptr;
    EXPECT_EQ(fake().call("cuStreamBeginCapture_v2", rank_->stream, 0), 0);
    const Status status = all_reduce(graph);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(fake().call("cuStreamEndCapture", rank_->stream, &captured), 0);
    EXPECT_EQ(fake().call("cuGraphInstantiateWithFlags", &made, captured, 0ULL), 0);
    fake().call("cuGraphDestroy", captured);
    return made;
  }

  std::unique_ptr<Rank> rank_;
  std::array<std::vector<float>, 2> in_{std::vector<float>(count, 1.0F),
                                        std::vector<float>(count, 2.0F)};
  std::array<std::vector<float>, 2> out_{std::vector<float>(count, -1.0F),
                                         std::vector<float>(count, -1.0F)};
  std::array<void*, 2> graphs_{};
  Status refused_;
};

using Body = std::function<void(int, Program&)>;

void run_pair(const Body& body) {
  Job job({.ranks = 2, .rails = 1, .config = comparing()});
  const auto of_streams = job.make_communicators(77);
  job.run([&](int me, Communicator& host) {
    Program program(std::make_unique<Rank>(*of_streams[static_cast<std::size_t>(me)]));
    EXPECT_TRUE(host.barrier().ok());  // a capture is complete on all ranks
    body(me, program);
  });
}

void run_nodes(const Body& body) {
  Nodes nodes(comparing());
  nodes.job.run([&](int me, Communicator& host) {
    auto rank = nodes.rank(me);
    EXPECT_TRUE(rank->collectives->exchange().ok()) << rank->collectives->exchange().message();
    Program program(std::move(rank));
    EXPECT_TRUE(host.barrier().ok());
    body(me, program);
  });
}

void expect_mismatch(const Status& status, std::initializer_list<const char*> texts) {
  EXPECT_EQ(status.code(), ErrorCode::order_mismatch) << status.message();
  for (const char* text : texts)
    EXPECT_NE(status.message().find(text), std::string::npos) << text << ": " << status.message();
}

TEST(StreamSteps, AReplayOfAnotherGraphIsAnErrorAndLeavesTheTarget) {
  run_pair([](int me, Program& program) {
    program.replay(me == 0 ? 0 : 1);
    expect_mismatch(program.outcome(), {"captured call 1", "captured call 2"});
    EXPECT_EQ(program.sum(), std::vector<float>(count, -1.0F));
  });
}

TEST(StreamSteps, AReplayOfAnotherGraphWithinAStepNamesTheStep) {
  run_pair([](int me, Program& program) {
    program.begin(7);
    program.replay(me == 0 ? 0 : 1);
    expect_mismatch(program.outcome(),
                    {"step 7, captured call 1", "step 7, captured call 2", "requests of step"});
  });
}

TEST(StreamSteps, AReplayInPlaceOfACallIsAnError) {
  run_pair([](int me, Program& program) {
    program.begin(7);
    if (me == 0)
      program.replay(0);
    else
      program.call();
    expect_mismatch(program.outcome(), {"step 7, captured call 1", "step 7, call 1"});
  });
}

TEST(StreamSteps, ASkippedReplayIsFoundBeforeTheTokensOfItsStepLeave) {
  run_pair([](int me, Program& program) {
    for (std::uint32_t step = 1; step <= 3; ++step) {
      program.begin(step);
      program.replay(0);
      if (me != 0 || step != 3) program.replay(0);
      program.end();
      const Status status = program.outcome();
      if (step < 3)
        ASSERT_TRUE(status.ok()) << status.message();
      else
        expect_mismatch(status, {"step 3"});
    }
  });
}

TEST(StreamSteps, ASkippedCallOfTheStreamIsFoundBeforeTheTokensOfItsStepLeave) {
  run_pair([](int me, Program& program) {
    program.begin(4);
    program.call();
    if (me == 0) program.call();
    program.end();
    expect_mismatch(program.outcome(), {"step 4"});
  });
}

TEST(StreamSteps, ACallOfAnotherStepIsAnError) {
  run_pair([](int me, Program& program) {
    program.begin(me == 0 ? 5 : 6);
    program.call();
    expect_mismatch(program.outcome(), {"step 5, call 1", "step 6, call 1"});
  });
}

// A step of equal programs: calls, replays, and a call outside of steps.
void run_equal_steps(Program& program, std::uint32_t steps) {
  for (std::uint32_t step = 1; step <= steps; ++step) {
    program.begin(step);
    program.replay(step % 2);
    program.call();
    if (step % 3 == 0) program.replay(0);
    if (step % 4 != 0) program.end();  // else the next step ends this step
    if (step % 5 == 0) program.call();
    const Status status = program.outcome();
    ASSERT_TRUE(status.ok()) << "step " << step << ": " << status.message();
  }
}

TEST(StreamSteps, EqualProgramsNeverDiffer) {
  run_pair([](int, Program& program) {
    run_equal_steps(program, 40);
    EXPECT_EQ(program.sum(), std::vector<float>(count, 2.0F));
    EXPECT_EQ(program.collectives().steps_ended(), 39U);  // step 40 is open
  });
}

TEST(StreamSteps, EqualProgramsThatExchangeInsideNodesNeverDiffer) {
  run_nodes([](int, Program& program) {
    run_equal_steps(program, 12);
    EXPECT_EQ(program.sum(), std::vector<float>(count, 4.0F));
  });
}

// Kernels of a node exchange data without tags.  Both nodes part in the same way here, so the
// inter-node groups see no difference.
TEST(StreamSteps, LocalRanksWithAnotherGraphAreFoundAtTheEndOfTheStep) {
  run_nodes([](int me, Program& program) {
    program.begin(9);
    program.replay(static_cast<std::size_t>(me % 2));
    program.end();
    const Status status = program.outcome();
    EXPECT_TRUE(status.code() == ErrorCode::order_mismatch || status.code() == ErrorCode::aborted)
        << status.message();
    EXPECT_NE(status.message().find("the captured calls of the step differ"), std::string::npos)
        << status.message();
  });
}

// The error of a group ends the calls of the other group, where no comparison finds anything.
TEST(StreamSteps, AMismatchInOneGroupEndsAllRanks) {
  run_nodes([](int me, Program& program) {
    program.begin(me == 0 ? 1 : 2);
    program.call();
    program.end();
    EXPECT_FALSE(program.outcome().ok());
  });
}

TEST(StreamSteps, AStepInsideAGraphIsRefused) {
  run_pair([](int, Program& program) {
    EXPECT_EQ(program.collectives().begin_step(program.rank().stream, 0, "").code(),
              ErrorCode::invalid_argument);
    void* captured = nullptr;
    EXPECT_EQ(fake().call("cuStreamBeginCapture_v2", program.rank().stream, 0), 0);
    const Status status = program.collectives().begin_step(program.rank().stream, 1, "");
    EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
    EXPECT_NE(status.message().find("captured"), std::string::npos) << status.message();
    EXPECT_EQ(fake().call("cuStreamEndCapture", program.rank().stream, &captured), 0);
    fake().call("cuGraphDestroy", captured);
  });
}

TEST(StreamSteps, WithoutConsensusAStepCostsNoWork) {
  Job job({.ranks = 2, .rails = 1, .config = {}});
  job.run([&](int me, Communicator& communicator) {
    Rank rank(communicator);
    EXPECT_TRUE(
        rank.collectives->begin_step(rank.stream, static_cast<std::uint32_t>(me + 1), "").ok());
    EXPECT_TRUE(rank.collectives->end_step(rank.stream).ok());
    EXPECT_EQ(rank.collectives->steps_ended(), 0U);
    EXPECT_TRUE(rank.collectives->await_steps(0).ok());
  });
}

}  // namespace
}  // namespace r2ccl
