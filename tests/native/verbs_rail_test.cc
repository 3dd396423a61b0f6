// A rail over a queue pair, with clock and wire under control of the test.
#include "rails/verbs/verbs_rail.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "drivers/fake_verbs.hpp"

namespace r2ccl {
namespace {

constexpr std::uint64_t communicator = 5;

// Both ends of a rail in state UP.
class VerbsRails : public ::testing::Test {
 protected:
  struct End {
    MemoryPool pool;
    std::unique_ptr<Link> link;
    std::unique_ptr<VerbsRail> rail;
  };

  VerbsRails() {
    for (std::size_t i = 0; i < ends.size(); ++i) {
      verbs->add_device(name(i));
      devices[i] = std::move(verbs->open(name(i)).value());
      EXPECT_TRUE(ends[i].pool.add_device(devices[i]).ok());
      LinkOptions options;
      options.memory = &ends[i].pool;
      options.connects = i == 0;
      ends[i].link = std::make_unique<Link>(options, std::array{RailKind::verbs}, i + 1);
      ends[i].link->start(now);
    }
    for (std::size_t i : {1U, 0U}) EXPECT_TRUE(ends[i].link->rail_established(0, 1, now));
    connect();
    exchange();
    EXPECT_EQ(ends[0].link->state(0), RailState::up);
    EXPECT_EQ(ends[1].link->state(0), RailState::up);
  }

  static std::string name(std::size_t end) { return "rdma" + std::to_string(end); }

  void connect() {
    std::array<std::unique_ptr<VerbsSession>, 2> sessions;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      sessions[i] =
          std::make_unique<VerbsSession>(name(i), ends[i].pool, LinkOptions{}.shape.chunk_bytes);
      EXPECT_TRUE(sessions[i]->prepare().ok());
      sessions[i]->pair =
          std::move(devices[i]->create_queue_pair(1, 0, VerbsSession::depth()).value());
      sessions[i]->own = {.queue_pair = sessions[i]->pair->number()};
    }
    for (std::size_t i = 0; i < ends.size(); ++i) {
      VerbsSession& session = *sessions[i];
      session.peer = sessions[1 - i]->endpoint(sessions[1 - i]->own);
      EXPECT_EQ(session.pair->connect(session.own, session.peer.address, {}), 0);
      EXPECT_EQ(session.pair->post_receives(request_id(VerbsRequest::receive, 0),
                                            VerbsSession::depth().receives - 1),
                0);
    }
    std::array<int, 2> sockets{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()), 0);
    process_of_0 = FileDescriptor(sockets[0]);
    for (std::size_t i = 0; i < ends.size(); ++i)
      ends[i].rail = std::make_unique<VerbsRail>(
          *ends[i].link, 0, std::move(sessions[i]),
          i == 1 ? FileDescriptor(sockets[1]) : FileDescriptor(), [this](const std::string& why) {
            if (process_of_0.valid()) ADD_FAILURE() << why;
          });
  }

  // Pumps both ends until nothing moves.
  void exchange() {
    for (bool moved = true; moved;) {
      moved = false;
      for (End& end : ends) {
        const bool out = end.rail->pump_out(now);
        moved = end.rail->pump_in(now) || out || moved;
      }
    }
  }

  // Sends `memory` from end 0 and holds the frames on the wire, while the device reads the memory.
  void send_from(std::vector<std::byte>& memory) {
    for (End& end : ends) (void)end.link->in_stream(communicator);
    exchange();
    ASSERT_TRUE(ends[0].pool.register_buffer(memory).ok());
    verbs->hold();
    Link& link = *ends[0].link;
    link.post(link.out_stream(communicator), memory, {}, now);
    ASSERT_TRUE(ends[0].rail->pump_out(now));
    ASSERT_FALSE(ends[0].rail->detached({communicator, {}}));
  }
  // Requests the caller's memory back at time now + `later`. Returns true if the rail is done with
  // it.
  bool detach(TimeNs later) { return ends[0].rail->detach({communicator, {}}, now + later); }
  RailState state() { return ends[0].link->state(0); }

  std::shared_ptr<FakeVerbs> verbs = std::make_shared<FakeVerbs>();
  std::array<std::shared_ptr<VerbsDevice>, 2> devices;
  std::array<End, 2> ends;
  FileDescriptor process_of_0;  // the other end of end 1's liveness socket
  TimeNs now = 1000 * ns_per_ms;
};

TEST_F(VerbsRails, HaveTwentyMillisecondsToReleaseACallersMemory) {
  std::vector<std::byte> memory(LinkOptions{}.shape.slot_bytes);
  send_from(memory);
  EXPECT_FALSE(detach(0));
  EXPECT_FALSE(detach(20 * ns_per_ms));
  EXPECT_EQ(state(), RailState::up);
  EXPECT_FALSE(detach(21 * ns_per_ms));
  EXPECT_EQ(state(), RailState::down);
}

// The last frames of a process that has ended tell why, and they do not come again.
TEST_F(VerbsRails, ReadWhatArrivedBeforeThePeersProcessEnded) {
  ends[0].link->send_abort({communicator, ErrorCode::aborted, "interrupted"});
  ends[0].link->send_close();
  while (ends[0].rail->pump_out(now)) continue;
  process_of_0 = FileDescriptor();
  ends[1].rail->report_path(now);
  EXPECT_EQ(ends[1].link->state(0), RailState::down);
  EXPECT_TRUE(ends[1].link->peer_closed());
  ASSERT_EQ(ends[1].link->received_aborts().size(), 1U);
  EXPECT_EQ(ends[1].link->received_aborts()[0].text, "interrupted");
}

TEST_F(VerbsRails, StayUpIfTheyReleaseMemoryInTime) {
  std::vector<std::byte> memory(LinkOptions{}.shape.slot_bytes);
  send_from(memory);
  EXPECT_FALSE(detach(0));
  verbs->let_go();
  EXPECT_TRUE(detach(20 * ns_per_ms));
  EXPECT_EQ(state(), RailState::up);
  // The next request has the same time limit.
  send_from(memory);
  EXPECT_FALSE(detach(30 * ns_per_ms));
  EXPECT_EQ(state(), RailState::up);
}

TEST_F(VerbsRails, GoDownAtOnceForACallersMemoryIfSuspect) {
  std::vector<std::byte> memory(LinkOptions{}.shape.slot_bytes);
  send_from(memory);
  for (int i = 0; i < 300 && state() == RailState::up; ++i) {
    now += ns_per_ms;
    ends[0].rail->report_path(now);
    ends[0].link->tick(now);
  }
  ASSERT_EQ(state(), RailState::suspect);
  EXPECT_FALSE(detach(0));
  EXPECT_EQ(state(), RailState::down);
}

}  // namespace
}  // namespace r2ccl
