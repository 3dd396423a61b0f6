// The simulated world: its checks detect violations, its waits end, and ranks get errors.
#include "sim/world.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "collectives/collectives.hpp"
#include "sim/fiber.hpp"
#include "sim/sim_channel.hpp"

namespace r2ccl::sim {
namespace {

constexpr TimeNs second = 1000 * ns_per_ms;

TEST(Fiber, RunsUntilItYieldsAndKeepsItsStack) {
  std::vector<int> order;
  Fiber* self = nullptr;
  Fiber fiber([&] {
    for (int i = 0; i < 3; ++i) {
      order.push_back(i);
      self->yield();
    }
  });
  self = &fiber;
  for (int i = 10; !fiber.done(); ++i) {
    fiber.resume();
    order.push_back(i);
  }
  EXPECT_EQ(order, (std::vector<int>{0, 10, 1, 11, 2, 12, 13}));
}

TEST(Shadow, DetectsForbiddenChangesOfASlot) {
  const Shadow::Stream stream{.from = 0, .to = 1, .communicator = 7};
  FrameHeader header{};
  header.message_bytes = header.payload_bytes = 4;
  std::array<std::byte, 4> data{};
  Shadow shadow;
  shadow.chunk_sent(stream, header, data.data());
  shadow.chunk_sent(stream, header, data.data());
  shadow.message_read(stream, 0, data);
  EXPECT_TRUE(shadow.violations().empty());
  data[3] = std::byte{1};
  shadow.message_read(stream, 0, data);
  EXPECT_EQ(shadow.violations().size(), 1U);
  shadow.message_released(stream, 0, data);
  EXPECT_EQ(shadow.violations().size(), 2U);
  shadow.chunk_sent(stream, header, data.data());
  EXPECT_EQ(shadow.violations().size(), 3U);
  shadow.message_read(stream, 1, data);
  EXPECT_EQ(shadow.violations().size(), 4U);
}

// A path with an event counter at each end.
struct Wire {
  struct Counter final : EventSink {
    void on_event() override { ++events; }
    int events = 0;
  };

  EventQueue events;
  Random random{1};
  Delays delays;
  Path path;
  std::array<Counter, 2> ends;

  void pass(TimeNs time) {
    const TimeNs end = events.now() + time;
    while (events.run_next(end)) {
    }
  }
};

TEST(Connection, DelaysBytesWhileItsPathIsBlocked) {
  Wire wire;
  Connection connection{wire.events, wire.random, wire.delays, wire.path};
  connection.attach(acceptor_side, wire.ends[acceptor_side]);
  connection.attach(connector_side, wire.ends[connector_side]);
  wire.path.ports[acceptor_side].black_hole = true;
  const std::array<std::byte, 100> sent{std::byte{1}, std::byte{2}};
  std::array<std::byte, 200> read{};
  EXPECT_EQ(connection.write(acceptor_side, sent), sent.size());
  wire.pass(second);
  EXPECT_EQ(connection.read(connector_side, read), 0U);
  EXPECT_EQ(connection.path(acceptor_side).unacknowledged, sent.size());
  wire.path.ports[acceptor_side].black_hole = false;
  connection.retry();
  wire.pass(second);
  EXPECT_EQ(connection.read(connector_side, read), sent.size());
  EXPECT_TRUE(std::equal(sent.begin(), sent.end(), read.begin()));
  EXPECT_EQ(connection.path(acceptor_side).unacknowledged, 0U);
}

TEST(Connection, BytesToAClosedEndCauseAReset) {
  Wire wire;
  Connection connection{wire.events, wire.random, wire.delays, wire.path};
  connection.attach(acceptor_side, wire.ends[acceptor_side]);
  connection.attach(connector_side, wire.ends[connector_side]);
  wire.path.ports[connector_side].carrier = false;
  connection.close(connector_side);  // the reset of this end is lost
  const std::array<std::byte, 1> sent{};
  EXPECT_EQ(connection.write(acceptor_side, sent), 1U);
  wire.pass(second);
  EXPECT_FALSE(connection.broken(acceptor_side));
  wire.path.ports[connector_side].carrier = true;
  connection.retry();
  wire.pass(second);
  EXPECT_TRUE(connection.broken(acceptor_side));
}

TEST(Connection, AcceptsNoMoreThanItsBuffersAndReportsPeerLimited) {
  Wire wire;
  Connection connection{wire.events, wire.random, wire.delays, wire.path};
  connection.attach(acceptor_side, wire.ends[acceptor_side]);
  connection.attach(connector_side, wire.ends[connector_side]);
  const std::vector<std::byte> much(1U << 20);
  std::size_t taken = 0;
  for (int i = 0; i < 100; ++i) {
    taken += connection.write(acceptor_side, much);
    wire.pass(ns_per_ms);
  }
  EXPECT_LT(taken, much.size() / 8);
  EXPECT_TRUE(connection.path(acceptor_side).peer_limited);
}

TEST(Connection, AcknowledgesLateDuringABacklog) {
  Wire wire;
  Connection connection{wire.events, wire.random, wire.delays, wire.path};
  connection.attach(acceptor_side, wire.ends[acceptor_side]);
  connection.attach(connector_side, wire.ends[connector_side]);
  const std::array<std::byte, 100> sent{};
  std::array<std::byte, 200> read{};
  for (const TimeNs late : {5 * ns_per_ms, TimeNs{0}}) {
    wire.path.ports[connector_side].ack_ns = late;
    ASSERT_EQ(connection.write(acceptor_side, sent), sent.size());
    wire.pass(ns_per_ms);
    EXPECT_EQ(connection.read(connector_side, read), sent.size());
    EXPECT_EQ(connection.path(acceptor_side).unacknowledged, late == 0 ? 0 : sent.size());
    wire.pass(10 * ns_per_ms);
    EXPECT_EQ(connection.path(acceptor_side).unacknowledged, 0U);
  }
}

TEST(Connection, AMiddleboxAcknowledgesAndDeliversOrLosesTheBytes) {
  for (const bool loses : {false, true}) {
    Wire wire;
    Connection connection{wire.events, wire.random, wire.delays, wire.path};
    connection.attach(acceptor_side, wire.ends[acceptor_side]);
    connection.attach(connector_side, wire.ends[connector_side]);
    wire.path.ports[acceptor_side].boxed = true;
    const std::array<std::byte, 3> sent{std::byte{1}, std::byte{2}, std::byte{3}};
    std::array<std::byte, 8> read{};
    for (const std::byte& one : sent) {
      ASSERT_EQ(connection.write(acceptor_side, std::span(&one, 1)), 1U);
      wire.pass(ns_per_ms);
      EXPECT_EQ(connection.path(acceptor_side).unacknowledged, 0U);
    }
    ASSERT_EQ(connection.write(connector_side, sent), sent.size());
    wire.pass(ns_per_ms);
    EXPECT_EQ(connection.read(connector_side, read), 0U);
    EXPECT_EQ(connection.read(acceptor_side, read), sent.size());
    if (loses) connection.reset(acceptor_side);
    wire.path.ports[acceptor_side].boxed = false;
    connection.retry();
    std::array<std::byte, 3> delivered{};
    EXPECT_EQ(connection.read(connector_side, delivered), loses ? 0U : sent.size());
    EXPECT_EQ(delivered == sent, !loses);
  }
}

// A queue pair on each side of a wire, each with a separate link.
struct Pair {
  Wire& wire;
  Memory sender_memory;
  Memory receiver_memory;
  Link sender;
  Link receiver;
  QueuePairs pairs;
  std::unique_ptr<QueuePair> from;
  std::unique_ptr<QueuePair> to;

  Pair(Wire& over, TimeNs fence_ns)
      : wire(over),
        sender(options(sender_memory), std::array{RailKind::verbs}, 1),
        receiver(options(receiver_memory), std::array{RailKind::verbs}, 2),
        pairs(1, over.events, over.random, over.delays, over.path) {
    for (Link* link : {&sender, &receiver}) {
      link->start(wire.events.now());
      EXPECT_TRUE(link->rail_established(0, 1, wire.events.now()));
    }
    for (Link* link : {&sender, &receiver}) (void)link->in_stream(7);
    from = make(sender, sender_memory, acceptor_side, fence_ns);
    to = make(receiver, receiver_memory, connector_side, fence_ns);
    pump(20);
  }
  static LinkOptions options(Memory& memory) {
    LinkOptions made;
    made.memory = &memory;
    return made;
  }
  std::unique_ptr<QueuePair> make(Link& link, const Memory& memory, Side side, TimeNs fence_ns) {
    return std::make_unique<QueuePair>(link, 0, memory, pairs, side, wire.ends[side], wire.events,
                                       wire.random, wire.delays, fence_ns);
  }
  void pump(int times) {
    for (int i = 0; i < times; ++i) {
      for (QueuePair* pair : {from.get(), to.get()}) {
        (void)pair->pump_in(wire.events.now());
        (void)pair->pump_out(wire.events.now());
      }
      wire.pass(ns_per_ms);
    }
  }
};

TEST(QueuePair, WritesLandSilentlyUntilTheFenceCompletes) {
  for (const TimeNs fence_ns : {TimeNs{0}, 10 * ns_per_ms}) {
    Wire wire;
    Pair pair(wire, fence_ns);
    ASSERT_EQ(pair.sender.state(0), RailState::up);
    const std::array<std::byte, 4> data{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}};
    pair.sender.post(pair.sender.out_stream(7), data, {}, wire.events.now());
    ASSERT_TRUE(pair.from->pump_out(wire.events.now()));
    EXPECT_EQ(pair.to->fence(wire.events.now()), fence_ns == 0);
    if (fence_ns == 0) pair.to.reset();
    wire.pass(ns_per_ms);
    const std::byte* slot = pair.receiver.in_stream(7).slot_memory(0);
    EXPECT_EQ(std::equal(data.begin(), data.end(), slot), fence_ns != 0);
    EXPECT_EQ(pair.receiver.in_stream(7).delivered(), 0U);
    wire.pass(20 * ns_per_ms);
    if (fence_ns != 0) {
      EXPECT_TRUE(pair.to->fence(wire.events.now()));
    }
  }
}

TEST(QueuePair, ReportsWritesStillOnThePath) {
  Wire wire;
  Pair pair(wire, 0);
  wire.path.ports[acceptor_side].black_hole = true;
  const std::array<std::byte, 4> data{};
  pair.sender.post(pair.sender.out_stream(7), data, {}, wire.events.now());
  ASSERT_TRUE(pair.from->pump_out(wire.events.now()));
  wire.pass(ns_per_ms);
  FrameHeader next{};
  next.type = FrameType::data;
  next.communicator = 7;
  EXPECT_FALSE(pair.pairs.carries_other_message(acceptor_side, next));
  next.number = 1;
  EXPECT_TRUE(pair.pairs.carries_other_message(acceptor_side, next));
  next.slot = 1;
  EXPECT_FALSE(pair.pairs.carries_other_message(acceptor_side, next));
}

World::Options small(int ranks, std::size_t rails) {
  World::Options options;
  options.ranks = ranks;
  options.rails.assign(rails, RailKind::tcp);
  return options;
}

CallTag tag_of(std::uint32_t number) {
  return {.count = 4, .number = number, .collective = Collective::all_reduce, .dtype = DType::f32};
}

Status all_reduce(World& world, int rank, SimChannel& channel) {
  const std::vector<int> nodes(static_cast<std::size_t>(world.options().ranks));
  const ReductionTree tree = ReductionTree::from_nodes(nodes);
  const Reducer reducer{DType::f32, ReduceOp::sum, tree, Simd::portable};
  std::array<float, 4> data{1.0F, 2.0F, 3.0F, static_cast<float>(rank)};
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  return channel.call(
      tag_of(0), [&] { return all_reduce_one_shot(channel, bytes, bytes, data.size(), reducer); });
}

TEST(World, AHangEndsAtTheTimeLimit) {
  World world(small(2, 1));
  SimChannel channel(world, 7, {0, 1}, 0);
  Status status;
  const bool in_time = world.run(
      [&](int rank) {
        if (rank == 0) status = all_reduce(world, rank, channel);
      },
      second);
  EXPECT_FALSE(in_time);
  EXPECT_EQ(status.code(), ErrorCode::timeout);
}

TEST(World, DifferentCallsAreAnErrorOnBothRanks) {
  World world(small(2, 1));
  std::array<Status, 2> status;
  SimChannel first(world, 7, {0, 1}, 0);
  SimChannel second_channel(world, 7, {0, 1}, 1);
  EXPECT_TRUE(world.run(
      [&](int rank) {
        SimChannel& channel = rank == 0 ? first : second_channel;
        status[static_cast<std::size_t>(rank)] = channel.call(
            tag_of(static_cast<std::uint32_t>(rank)), [&] { return barrier(channel); });
      },
      10 * second));
  for (const Status& each : status) EXPECT_EQ(each.code(), ErrorCode::order_mismatch);
}

TEST(World, DifferentBandwidthsInUseAreAnErrorOnBothRanks) {
  World world(small(2, 1));
  std::array<Status, 2> status;
  SimChannel first(world, 7, {0, 1}, 0);
  SimChannel second_channel(world, 7, {0, 1}, 1);
  EXPECT_TRUE(world.run(
      [&](int rank) {
        SimChannel& channel = rank == 0 ? first : second_channel;
        CallTag tag = tag_of(0);
        // The losses announced may differ, the losses in use may not.
        tag.lost_bandwidth = static_cast<std::uint8_t>(rank);
        for (const int differs : {0, 1}) {
          tag.bandwidth_hash = static_cast<std::uint16_t>(differs * rank);
          Status& end = status[static_cast<std::size_t>(rank)];
          EXPECT_TRUE(end.ok()) << end.message();
          std::array<std::byte, 4> in{};
          std::array<std::byte, 8> out{};
          end = channel.call(tag, [&] {
            return all_gatherv(channel, in.data(), out.data(), std::array<std::size_t, 2>{1, 1},
                               DType::f32);
          });
        }
      },
      10 * second));
  for (const Status& each : status) {
    EXPECT_EQ(each.code(), ErrorCode::order_mismatch);
    EXPECT_NE(each.message().find("different bandwidths of the nodes"), std::string::npos)
        << each.message();
  }
}

// Each rank announces another loss in each call; all ranks use the losses of the call before.
TEST(World, AllRanksUseTheBandwidthsAnnouncedInTheCallBefore) {
  World::Options options = small(3, 2);
  options.link.shape.slot_bytes = 4096;
  options.link.shape.chunk_bytes = 1024;
  World world(options);
  std::vector<std::unique_ptr<SimChannel>> channels;
  for (int rank = 0; rank < 3; ++rank)
    channels.push_back(std::make_unique<SimChannel>(world, 7, std::vector{0, 1, 2}, rank));
  constexpr std::size_t count = 40'000;
  // One node is slower than both others, so shares are uneven: with a share for each node after the
  // first two calls, with an empty share after the others.
  const auto lost = [](std::uint32_t call, int rank) {
    const auto turn = call + 2 * static_cast<std::uint32_t>(rank);  // a rank is slow at 0 (mod 3)
    return static_cast<std::uint8_t>(turn % 3 == 0 ? 4 + 2 * call : turn % 3);
  };
  EXPECT_TRUE(world.run(
      [&](int rank) {
        SimChannel& channel = *channels[static_cast<std::size_t>(rank)];
        const ReductionTree tree = ReductionTree::from_nodes(std::array{0, 1, 2});
        const Reducer reducer{DType::i32, ReduceOp::sum, tree, Simd::portable};
        for (std::uint32_t call = 0; call < 6; ++call) {
          CallTag tag = tag_of(call);
          tag.lost_bandwidth = lost(call, rank);
          std::vector<std::int32_t> data(count, rank + 1);
          auto* bytes = reinterpret_cast<std::byte*>(data.data());
          const Status status = channel.call(tag, [&] {
            EXPECT_EQ(channel.shares().even(), call == 0);
            return all_reduce_two_shot_uneven(channel, bytes, bytes, data.size(), reducer,
                                              channel.shares());
          });
          EXPECT_TRUE(status.ok()) << status.message();
          EXPECT_TRUE(std::ranges::all_of(data, [](std::int32_t sum) { return sum == 6; }));
          EXPECT_EQ(channel.lost_bandwidths(),
                    (std::vector<std::uint8_t>{lost(call, 0), lost(call, 1), lost(call, 2)}));
        }
      },
      60 * second));
}

TEST(World, LosingAllRailsOfOneLinkForLongIsAnErrorOnEveryRank) {
  World::Options options = small(4, 2);
  options.link_timeout_ns = 2 * second;
  World world(options);
  ASSERT_TRUE(world.run_until([&] { return world.all_rails_up(); }, second));
  std::vector<std::unique_ptr<SimChannel>> channels;
  for (int rank = 0; rank < 4; ++rank)
    channels.push_back(std::make_unique<SimChannel>(world, 7, std::vector{0, 1, 2, 3}, rank));
  for (RailId rail = 0; rail < 2; ++rail) {
    world.black_hole(1, 3, rail, true);
    world.black_hole(3, 1, rail, true);
  }
  const TimeNs began = world.now();
  EXPECT_TRUE(world.run(
      [&](int rank) {
        const Status status = all_reduce(world, rank, *channels[static_cast<std::size_t>(rank)]);
        // Ranks 0 and 2 have all data for the first call; their next call fails.
        const Status next = all_reduce(world, rank, *channels[static_cast<std::size_t>(rank)]);
        if (rank == 1 || rank == 3) {
          EXPECT_EQ(status.code(), ErrorCode::peer_lost);
        }
        EXPECT_EQ(next.code(), ErrorCode::peer_lost) << rank << ": " << next.message();
      },
      10 * second));
  EXPECT_LT(world.now() - began, 3 * second);
}

// Rank 0 has returned from the call. Only its peer waits, and cannot know the reason.
TEST(World, AFenceThatNeverCompletesAlsoEndsThePeersWait) {
  World::Options options = small(2, 2);
  options.rails[0] = RailKind::verbs;
  options.link.shape.slots = 2;
  options.link.shape.spare_slots = 0;
  options.link_timeout_ns = second;
  World world(options);
  world.delay_fences(0, 1, -1);
  ASSERT_TRUE(world.run_until([&] { return world.all_rails_up(); }, second));
  std::vector<std::unique_ptr<SimChannel>> channels;
  for (int rank = 0; rank < 2; ++rank)
    channels.push_back(std::make_unique<SimChannel>(world, 7, std::vector{0, 1}, rank));
  (void)world.run_until([] { return false; }, 5 * ns_per_ms);  // both ends know the peer's slots
  ASSERT_EQ(world.end(0, 1).link.best_rail(), 0);
  for (const int rank : {0, 1}) world.black_hole(rank, 1 - rank, 0, true);
  std::array<Status, 2> status;
  const std::array<std::byte, 8> data{};
  EXPECT_TRUE(world.run(
      [&](int rank) {
        SimChannel& channel = *channels[static_cast<std::size_t>(rank)];
        status[static_cast<std::size_t>(rank)] = channel.call(tag_of(0), [&]() -> Status {
          for (int message = 0; message < 3; ++message) {
            if (rank == 0) {
              R2CCL_TRY(channel.send(1, data));
            } else {
              auto received = channel.receive(0, data.size());
              if (!received.ok()) return received.take_status();
              R2CCL_TRY(channel.release(0));
            }
          }
          return {};
        });
      },
      10 * second));
  EXPECT_TRUE(status[0].ok()) << status[0].message();
  EXPECT_EQ(status[1].code(), ErrorCode::peer_lost) << status[1].message();
}

}  // namespace
}  // namespace r2ccl::sim
