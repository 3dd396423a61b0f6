// The end of a communicator: release without a close, reuse of its name, and the limit of open
// communicators.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "base/interrupt.hpp"
#include "eventually.hpp"
#include "job.hpp"
#include "link/link.hpp"
#include "link_pair.hpp"

namespace r2ccl {
namespace {

using testing::bytes_of;
using testing::eventually;
using testing::Frame;
using testing::Job;
using testing::LinkPair;

Status all_reduce(Communicator& communicator, std::vector<float>& data) {
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  return communicator.all_reduce(bytes, bytes, data.size(), DType::f32, ReduceOp::sum,
                                 Algorithm::automatic);
}

// A function-local group ends while its peers still receive its last data.
TEST(CommunicatorEnds, AReleasedCommunicatorFailsNoPeer) {
  for (const std::size_t count : {1000UL, 100'000UL}) {
    Job job({.ranks = 2, .config = {}});
    job.run([&](int rank, Communicator&) {
      for (std::uint64_t id = 1U << 20; id < (1U << 20) + 300; ++id) {
        const auto part = job.make_part(id, {0, 1}, rank);
        std::vector<float> data(count, 1.0F);
        const Status status = all_reduce(*part, data);
        ASSERT_TRUE(status.ok()) << "communicator " << id << ": " << status.message();
        ASSERT_EQ(data.back(), 2.0F);
      }
    });
  }
}

// The copy of a small message may be lost with its rails after the send and the release.
TEST(CommunicatorEnds, AMessageIsSentAgainAfterTheReleaseOfItsCommunicator) {
  Config config;
  config.rejoin_backoff_min_ms = 1;
  // An engine keeps a released communicator for 5 s at most.  A turn that takes longer, on a busy
  // machine, proves nothing.
  constexpr std::chrono::seconds kept{5};
  int turns = 0;
  for (int attempt = 0; attempt < 12 && turns < 3; ++attempt) {
    Job job({.ranks = 2, .config = config});
    auto from = job.make_part(7, {0, 1}, 0);
    const auto to = job.make_part(7, {0, 1}, 1);
    const auto inject_all = [&job](Fault fault) {
      for (RailId rail = 0; rail < 2; ++rail) ASSERT_TRUE(job.engines[0]->inject(rail, fault).ok());
    };
    inject_all(Fault::black_hole);
    const std::vector<float> sent(1000, 3.0F);
    const auto* bytes = reinterpret_cast<const std::byte*>(sent.data());
    ASSERT_TRUE(from->send_to(bytes, sent.size(), DType::f32, 1).ok());
    const auto released = std::chrono::steady_clock::now();
    from.reset();
    inject_all(Fault::carrier_loss);
    inject_all(Fault::none);
    std::vector<float> got(sent.size());
    auto* into = reinterpret_cast<std::byte*>(got.data());
    const Status status = to->receive_from(into, got.size(), DType::f32, 0);
    if (!status.ok() && std::chrono::steady_clock::now() - released >= kept) continue;
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(got, sent);
    ++turns;
  }
  EXPECT_EQ(turns, 3) << "late: too many turns took longer than the communicator is kept";
}

// The last data and the notice of a failure arrive together: the result of the waiting call counts.
TEST(CommunicatorEnds, AResultIsNotLostToAnAbortBehindIt) {
  Job job({.ranks = 2, .config = {}});
  for (std::uint64_t id = 1U << 20; id < (1U << 20) + 20; ++id) {
    const auto from = job.make_part(id, {0, 1}, 0);
    const auto to = job.make_part(id, {0, 1}, 1);
    std::thread receiver([&] {
      std::vector<float> data(1000, 4.0F);
      const Status status = all_reduce(*to, data);
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(data, std::vector<float>(1000, 7.0F));
      EXPECT_EQ(to->barrier().code(), ErrorCode::aborted);  // the next call reports the failure
    });
    EXPECT_TRUE(eventually([&] { return job.in_call(1, id); }, "the receiver is in its call"));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    // The data of the receiver is there by now, so this call sends its data and ends at once.
    std::vector<float> data(1000, 3.0F);
    EXPECT_TRUE(all_reduce(*from, data).ok());
    from->abort("rank 0 is done");
    receiver.join();
  }
}

// The hook asks on behalf of the program's signal handlers.
TEST(CommunicatorEnds, AnInterruptEndsAWaitingCallOnAllRanks) {
  Config config;
  config.call_timeout_s = testing::patience_s;  // ends the test if no question is asked
  Job job({.ranks = 2, .config = config});
  const auto members = job.make_communicators(7);
  static thread_local bool handles_signals = false;
  static std::atomic<bool> raised{false};
  interrupt_hook = [] { return handles_signals && raised.load(); };
  std::thread caller([&] {
    handles_signals = true;
    std::vector<float> data(100, 1.0F);
    const Status status = all_reduce(*members[0], data);
    EXPECT_EQ(status.code(), ErrorCode::aborted);
    EXPECT_NE(status.message().find("interrupted by a signal"), std::string::npos)
        << status.message();
  });
  EXPECT_TRUE(eventually([&] { return job.in_call(0, 7); }, "rank 0 is in its call"));
  raised = true;
  caller.join();
  interrupt_hook = nullptr;
  // All data of the first call may have arrived before the failure.
  std::vector<float> data(100, 1.0F);
  (void)all_reduce(*members[1], data);
  EXPECT_EQ(members[1]->barrier().code(), ErrorCode::aborted);
}

TEST(CommunicatorEnds, AUsedNameIsRefused) {
  Job job({.ranks = 2, .config = {}});
  const auto open = job.make_communicators(7);
  const auto again = [&] {
    return Communicator::create(job.engines[0], 7, "again", 0,
                                {{job.engines[0]->process(), 0}, {job.engines[1]->process(), 1}},
                                best_simd());
  };
  EXPECT_EQ(again().take_status().code(), ErrorCode::invalid_argument);
  open[0]->close(0.0);
  const Status status = again().take_status();
  EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
  EXPECT_NE(status.message().find("'again' was used"), std::string::npos) << status.message();
}

TEST(CommunicatorEnds, TheLimitOfOpenCommunicatorsIsNamed) {
  Job job({.ranks = 2, .config = {}});
  std::vector<std::unique_ptr<Communicator>> open;
  for (std::uint64_t id = 1; id < most_communicators; ++id)
    open.push_back(job.make_part((1U << 20) + id, {0, 1}, 0));
  const std::vector<Communicator::Member> members{{job.engines[0]->process(), 0},
                                                  {job.engines[1]->process(), 1}};
  const auto one_more = [&] {
    return Communicator::create(job.engines[0], most_communicators + 1, "one more", 0, members,
                                best_simd());
  };
  const Status status = one_more().take_status();
  EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
  EXPECT_NE(status.message().find("4096 open communicators"), std::string::npos)
      << status.message();
  open.pop_back();
  EXPECT_TRUE(one_more().ok());
}

// The peer has made more communicators than this process accepts messages of.
TEST(CommunicatorEnds, ThePeersExcessIsNotChargedToARail) {
  LinkOptions options = LinkPair::default_options();
  options.most_communicators = 2;
  LinkPair pair(2, options);
  pair.post(pair.a, bytes_of(100, 1));
  const std::vector<Frame> frames = pair.pull(pair.a, 0, FrameType::data);
  ASSERT_EQ(frames.size(), 1U);
  for (int turn = 0; turn < 2; ++turn)
    for (std::uint64_t id = 100; id < 110; ++id) {
      Frame frame = frames[0];
      frame.header.communicator = id;
      seal(frame.header);
      pair.deliver(pair.b, 0, frame);
    }
  EXPECT_EQ(pair.b.state(0), RailState::up);
  EXPECT_EQ(pair.b.queue_depths().streams, 4U);
  // The peer gets an error for each communicator without room, once.
  std::size_t told = 0;
  for (const Frame& abort : pair.pull(pair.b, 0, FrameType::abort)) {
    EXPECT_GE(abort.header.communicator, 104U);
    pair.deliver(pair.a, 0, abort);
    ++told;
  }
  EXPECT_EQ(told, 6U);
  ASSERT_EQ(pair.a.received_aborts().size(), 6U);
  EXPECT_EQ(pair.a.received_aborts()[0].code, ErrorCode::aborted);
  EXPECT_NE(pair.a.received_aborts()[0].text.find("limit"), std::string::npos);
  // A communicator within the limit still works.
  Frame frame = frames[0];
  frame.header.communicator = 101;
  seal(frame.header);
  pair.deliver(pair.b, 0, frame);
  EXPECT_EQ(pair.b.in_stream(101).delivered(), 1U);
}

TEST(CommunicatorEnds, EveryCommunicatorWithoutRoomGetsAnError) {
  LinkOptions options = LinkPair::default_options();
  options.most_communicators = 2;
  LinkPair pair(1, options);
  pair.post(pair.a, bytes_of(100, 1));
  Frame frame = pair.pull(pair.a, 0, FrameType::data).at(0);
  constexpr std::uint64_t excess = 1000;
  for (int turn = 0; turn < 3; ++turn)  // frames under way
    for (std::uint64_t id = 1; id <= 4 + excess; ++id) {
      frame.header.communicator = id;
      seal(frame.header);
      pair.deliver(pair.b, 0, frame);
    }
  EXPECT_EQ(pair.pull(pair.b, 0, FrameType::abort).size(), excess);
}

// The peer decides how many communicators are refused.  What is kept of them is limited, and so is
// what a rail sends again when it rejoins.
TEST(CommunicatorEnds, RefusedCommunicatorsTakeLimitedMemory) {
  LinkOptions options = LinkPair::default_options();
  options.most_communicators = 2;
  LinkPair pair(2, options);
  pair.post(pair.a, bytes_of(100, 1));
  Frame frame = pair.pull(pair.a, 0, FrameType::data).at(0);
  constexpr std::uint64_t most = most_communicators;
  for (std::uint64_t id = 1; id <= 4 + 20 * most; ++id) {
    frame.header.communicator = id;
    seal(frame.header);
    pair.deliver(pair.b, 0, frame);
    pair.b.received_aborts().clear();  // as the engine does
  }
  EXPECT_EQ(pair.b.queue_depths().refusals, most);
  const std::vector<Frame> told = pair.pull(pair.b, 0, FrameType::abort);
  EXPECT_EQ(told.size(), most);
  EXPECT_EQ(told.back().header.communicator, 4 + 20 * most);
  EXPECT_TRUE(pair.pull(pair.b, 0, FrameType::abort).empty());
  // A forgotten communicator is refused again.
  frame.header.communicator = 5;
  seal(frame.header);
  pair.deliver(pair.b, 0, frame);
  const std::vector<Frame> again = pair.pull(pair.b, 0, FrameType::abort);
  ASSERT_EQ(again.size(), 1U);
  EXPECT_EQ(again[0].header.communicator, 5U);
  EXPECT_EQ(pair.pull(pair.b, 1, FrameType::abort).size(), most);
}

TEST(CommunicatorEnds, AbortedCommunicatorsTakeLimitedMemory) {
  LinkPair pair(2);
  constexpr std::uint64_t before = 100;  // a rail has not sent these when the list is full
  for (std::uint64_t id = 1; id <= most_aborts; ++id)
    pair.a.send_abort({id, ErrorCode::aborted, "why"});
  for (std::uint64_t id = 1; id <= before; ++id)
    pair.a.send_abort({most_aborts + id, ErrorCode::aborted, "why"});
  EXPECT_EQ(pair.a.queue_depths().aborts, most_aborts + before);
  for (std::uint64_t id = most_aborts + before + 1; id <= 3 * most_aborts; ++id) {
    pair.exchange(0);
    pair.exchange(1);
    pair.b.received_aborts().clear();  // as the engine does
    pair.a.send_abort({id, ErrorCode::aborted, "why"});
  }
  EXPECT_EQ(pair.a.queue_depths().aborts, most_aborts);
  for (RailId rail = 0; rail < 2; ++rail) {
    const std::vector<Frame> told = pair.pull(pair.a, rail, FrameType::abort);
    ASSERT_EQ(told.size(), 1U);
    EXPECT_EQ(told[0].header.communicator, 3 * most_aborts);
  }
}

TEST(CommunicatorEnds, AnUnknownErrorOfThePeerIsAnInternalError) {
  for (const Epoch number : {Epoch{0}, Epoch{8}, Epoch{200}, Epoch{1'000'000}}) {
    LinkPair pair(1);
    pair.a.send_abort({5, ErrorCode::aborted, "why"});
    std::vector<Frame> frames = pair.pull(pair.a, 0, FrameType::abort);
    ASSERT_EQ(frames.size(), 1U);
    frames[0].header.epoch = number;
    seal(frames[0].header);
    pair.deliver(pair.b, 0, frames[0]);
    ASSERT_EQ(pair.b.received_aborts().size(), 1U);
    EXPECT_EQ(pair.b.received_aborts()[0].code, ErrorCode::internal);
  }
}

}  // namespace
}  // namespace r2ccl
