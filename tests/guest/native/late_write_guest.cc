// The hazard prevented by fences, on real queue pairs: a device retransmits a write of an ended
// epoch, and the write lands in a slot already reused by another message.  Runs in the guest.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "connect/verbs_devices.hpp"
#include "drivers/ibverbs.hpp"
#include "link/link.hpp"
#include "rails/verbs/verbs_rail.hpp"

namespace r2ccl {
namespace {

constexpr std::uint64_t communicator = 7;
constexpr std::uint32_t message_bytes = 16U << 10;  // too large to travel with the header

TimeNs now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void rails(const std::string& words) {
  ASSERT_EQ(std::system((std::string(R2SERVE_RAILS) + " " + words).c_str()), 0);
}

// An end of a link with two verbs rails; the test drives the rails.
struct End {
  static constexpr std::size_t rail_count = 2;

  End(int node, bool connects) : number(node), link(options(connects), kinds(), 1) {
    auto driver = load_ibverbs();
    EXPECT_TRUE(driver.ok()) << driver.take_status().message();
    for (std::size_t rail = 0; rail < rail_count; ++rail) {
      auto device =
          driver.value()->open("rxe_n" + std::to_string(node) + "r" + std::to_string(rail));
      EXPECT_TRUE(device.ok()) << device.take_status().message();
      devices[rail] = std::move(device.value());
      EXPECT_TRUE(pool.add_device(devices[rail]).ok());
    }
    link.start(now());
    (void)link.in_stream(communicator);
  }
  LinkOptions options(bool connects) {
    LinkOptions made;
    made.shape = {.slot_bytes = message_bytes,
                  .chunk_bytes = message_bytes,
                  .staging_bytes = 0,  // a retransmission sends the copy made for its attempt
                  .slots = 2,
                  .spare_slots = 0};
    made.small_message_bytes = message_bytes;
    made.memory = &pool;
    made.connects = connects;
    return made;
  }
  static std::vector<RailKind> kinds() { return {RailKind::verbs, RailKind::verbs}; }

  std::unique_ptr<VerbsSession> begin(RailId rail) {
    auto session = std::make_unique<VerbsSession>(devices[rail]->name(), pool, message_bytes);
    EXPECT_TRUE(session->prepare().ok());
    auto port = devices[rail]->port(1);
    EXPECT_TRUE(port.ok());
    const auto gid = choose_gid(port.value(), IpAddress(), -1).value();
    auto pair = devices[rail]->create_queue_pair(1, 0, VerbsSession::depth());
    EXPECT_TRUE(pair.ok());
    session->pair = std::move(pair.value());
    session->own = {.queue_pair = session->pair->number(),
                    .first_packet = 1,
                    .mtu = port.value().mtu,
                    .gid = gid.gid};
    gid_index = gid.index;
    return session;
  }
  void connect(VerbsSession& session) const {
    VerbsPath path;
    path.gid_index = gid_index;
    path.retry_count = 7;  // unlimited on Soft-RoCE: retransmits until the write passes
    ASSERT_EQ(session.pair->connect(session.own, session.peer.address, path), 0);
    ASSERT_EQ(session.pair->post_receives(request_id(VerbsRequest::receive, 0),
                                          VerbsSession::depth().receives - 1),
              0);
  }
  void carry(RailId rail, std::unique_ptr<VerbsSession> session) {
    ASSERT_TRUE(link.rail_established(rail, 1, now()));
    carriers[rail] = std::make_unique<VerbsRail>(link, rail, std::move(session), FileDescriptor(),
                                                 VerbsRail::Note());
  }
  void pump() {
    for (RailId rail = 0; rail < rail_count; ++rail) {
      VerbsRail* carrier = carriers[rail].get();
      if (carrier == nullptr || !link.connected(rail)) continue;
      carrier->acknowledge(now());
      carrier->report_path(now());
      (void)carrier->pump_in(now());
      if (link.connected(rail)) (void)carrier->pump_out(now());
    }
    link.tick(now());
    for (const LinkAction& action : std::exchange(link.actions(), {}))
      if (action.kind == LinkAction::Kind::close) closing[action.rail] = true;
    for (RailId rail = 0; rail < rail_count; ++rail) {
      if (!closing[rail] || (fences && !carriers[rail]->fence(now()))) continue;
      closing[rail] = false;
      link.rail_closed(rail, 1, now());
    }
  }

  const int number;
  bool fences = true;  // false: an epoch counts as fenced while its queue pair lives on
  MemoryPool pool;
  Link link;
  std::array<std::shared_ptr<VerbsDevice>, rail_count> devices;
  std::array<std::unique_ptr<VerbsRail>, rail_count> carriers;
  std::array<bool, rail_count> closing{};
  std::uint8_t gid_index = 0;
};

struct Pair {
  End a{0, /*connects=*/false};
  End b{1, /*connects=*/true};

  void open(RailId rail) {
    auto from = a.begin(rail);
    auto to = b.begin(rail);
    from->peer = to->endpoint(to->own);
    to->peer = from->endpoint(from->own);
    a.connect(*from);
    b.connect(*to);
    a.carry(rail, std::move(from));
    b.carry(rail, std::move(to));
  }
  bool eventually(const std::function<bool()>& done) {
    for (const TimeNs limit = now() + 20'000 * ns_per_ms; now() < limit;) {
      a.pump();
      b.pump();
      if (done()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }
  void post(std::byte value) {
    messages.emplace_back(message_bytes, value);
    a.link.post(a.link.out_stream(communicator), messages.back(), {}, now());
  }
  bool arrives() {
    return eventually([this] { return b.link.in_stream(communicator).front() != nullptr; });
  }
  std::byte byte_of_front() {
    const std::byte* data = b.link.in_stream(communicator).front_data();
    return data[message_bytes - 1];
  }
  void consume() { b.link.consume(b.link.in_stream(communicator), now()); }

  std::deque<std::vector<std::byte>> messages;
};

// Returns the last byte of slot 0 after a late write.  The late write belongs to message 1 (all
// bytes 1); message 3 (all bytes 3) has reused the slot.
std::byte after_a_late_write(bool fences) {
  Pair pair;
  pair.a.fences = pair.b.fences = fences;
  pair.open(0);
  const auto up = [&pair](RailId rail) {
    return pair.eventually([&] {
      return pair.a.link.state(rail) == RailState::up && pair.b.link.state(rail) == RailState::up;
    });
  };
  EXPECT_TRUE(up(0));
  pair.post(std::byte{9});  // also announces the peer's slots
  EXPECT_TRUE(pair.arrives());
  pair.consume();
  pair.post(std::byte{9});
  EXPECT_TRUE(pair.arrives());
  pair.consume();
  EXPECT_TRUE(pair.eventually([&] { return pair.a.link.all_delivered(); }));

  rails("mute n0r0");
  pair.post(std::byte{1});  // into slot 0, over the only open rail
  pair.a.pump();
  pair.open(1);
  EXPECT_TRUE(up(1));
  EXPECT_TRUE(pair.arrives()) << "hedged over the other rail";
  EXPECT_EQ(pair.byte_of_front(), std::byte{1});
  pair.consume();
  for (End* end : {&pair.a, &pair.b}) end->link.rail_failed(0, 1, RailCause::injected, now());
  EXPECT_TRUE(pair.eventually([&] { return pair.a.link.state(0) == RailState::connecting; }));
  pair.post(std::byte{2});  // slot 1
  EXPECT_TRUE(pair.arrives());
  pair.consume();
  pair.post(std::byte{3});  // slot 0 again
  EXPECT_TRUE(pair.arrives());
  EXPECT_EQ(pair.byte_of_front(), std::byte{3});

  rails("unmute n0r0");
  for (int i = 0; i < 2000 && pair.byte_of_front() == std::byte{3}; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return pair.byte_of_front();
}

TEST(LateWrite, LandsInAReusedSlotWithoutAFence) {
  EXPECT_EQ(after_a_late_write(/*fences=*/false), std::byte{1});
}

TEST(LateWrite, DoesNotLandOnceItsEpochIsFenced) {
  EXPECT_EQ(after_a_late_write(/*fences=*/true), std::byte{3});
}

}  // namespace
}  // namespace r2ccl
