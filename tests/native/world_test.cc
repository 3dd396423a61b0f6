// The simulated world itself: that its checks can fail, its waits end, and ranks are told.
#include "sim/world.hpp"

#include <gtest/gtest.h>

#include <cstring>

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

TEST(Shadow, SeesWhatASlotMustNotGoThrough) {
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

class NoEnd final : public Connection::End {
 public:
  void on_parcel(const Parcel& /*parcel*/) override { ++parcels; }
  void on_path_acked(std::uint64_t position) override { acked = position; }
  void on_broken() override { broken = true; }
  int parcels = 0;
  std::uint64_t acked = 0;
  bool broken = false;
};

struct Wire {
  EventQueue events;
  Random random{1};
  Delays delays;
  Path path;
  Connection connection{events, random, delays, path};
  std::array<NoEnd, 2> ends;

  Wire() {
    connection.attach(acceptor_side, ends[acceptor_side]);
    connection.attach(connector_side, ends[connector_side]);
  }
  void send_chunk() {
    Parcel parcel;
    parcel.kind = Parcel::Kind::header;
    parcel.header.type = FrameType::data;
    connection.send(acceptor_side, parcel);
  }
  void pass(TimeNs time) {
    const TimeNs end = events.now() + time;
    while (events.run_next(end)) {
    }
  }
};

TEST(Connection, HoldsBackWhileItsPathIsBlockedAndTellsWhatIsOnTheWay) {
  Wire wire;
  wire.path.black_hole[acceptor_side] = true;
  wire.send_chunk();
  wire.pass(second);
  EXPECT_EQ(wire.ends[connector_side].parcels, 0);
  FrameHeader next{};
  next.type = FrameType::data;
  EXPECT_FALSE(wire.connection.carries_other_message(acceptor_side, next));
  next.number = 1;
  EXPECT_TRUE(wire.connection.carries_other_message(acceptor_side, next));
  next.slot = 1;
  EXPECT_FALSE(wire.connection.carries_other_message(acceptor_side, next));
  wire.path.black_hole[acceptor_side] = false;
  wire.connection.retry();
  wire.pass(second);
  EXPECT_EQ(wire.ends[connector_side].parcels, 1);
  EXPECT_EQ(wire.ends[acceptor_side].acked, sizeof(FrameHeader));
}

TEST(Connection, WhatArrivesAtAClosedEndComesBackAsAReset) {
  Wire wire;
  wire.path.carrier[connector_side] = false;
  wire.connection.close(connector_side);  // its own reset is lost
  wire.send_chunk();
  wire.pass(second);
  EXPECT_FALSE(wire.ends[acceptor_side].broken);
  wire.path.carrier[connector_side] = true;
  wire.connection.retry();
  wire.pass(second);
  EXPECT_TRUE(wire.ends[acceptor_side].broken);
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

TEST(World, AHangEndsWithTheTimeOfTheRun) {
  World world({.ranks = 2, .rails = 1, .link = {}, .delays = {}});
  SimChannel channel(world, 0, 7);
  Status status;
  const bool in_time = world.run(
      [&](int rank) {
        if (rank == 0) status = all_reduce(world, rank, channel);
      },
      second);
  EXPECT_FALSE(in_time);
  EXPECT_EQ(status.code(), ErrorCode::timeout);
}

TEST(World, RanksThatCallDifferentlyAreTold) {
  World world({.ranks = 2, .rails = 1, .link = {}, .delays = {}});
  std::array<Status, 2> status;
  SimChannel first(world, 0, 7);
  SimChannel second_channel(world, 1, 7);
  EXPECT_TRUE(world.run(
      [&](int rank) {
        SimChannel& channel = rank == 0 ? first : second_channel;
        status[static_cast<std::size_t>(rank)] = channel.call(
            tag_of(static_cast<std::uint32_t>(rank)), [&] { return barrier(channel); });
      },
      10 * second));
  for (const Status& each : status) EXPECT_EQ(each.code(), ErrorCode::order_mismatch);
}

TEST(World, LosingAllRailsOfOneLinkForLongIsAnErrorOnEveryRank) {
  World::Options options{.ranks = 4, .rails = 2, .link = {}, .delays = {}};
  options.link_timeout_ns = 2 * second;
  World world(options);
  ASSERT_TRUE(world.run_until([&] { return world.all_rails_up(); }, second));
  std::vector<std::unique_ptr<SimChannel>> channels;
  for (int rank = 0; rank < 4; ++rank)
    channels.push_back(std::make_unique<SimChannel>(world, rank, 7));
  for (RailId rail = 0; rail < 2; ++rail) {
    world.black_hole(1, 3, rail, true);
    world.black_hole(3, 1, rail, true);
  }
  const TimeNs began = world.now();
  EXPECT_TRUE(world.run(
      [&](int rank) {
        const Status status = all_reduce(world, rank, *channels[static_cast<std::size_t>(rank)]);
        // Ranks 0 and 2 had all they needed for the first call; the next one fails.
        const Status next = all_reduce(world, rank, *channels[static_cast<std::size_t>(rank)]);
        if (rank == 1 || rank == 3) {
          EXPECT_EQ(status.code(), ErrorCode::peer_lost);
        }
        EXPECT_EQ(next.code(), ErrorCode::peer_lost) << rank << ": " << next.message();
      },
      10 * second));
  EXPECT_LT(world.now() - began, 3 * second);
}

}  // namespace
}  // namespace r2ccl::sim
