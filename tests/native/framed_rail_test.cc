// FramedRail over a scripted byte pipe.
#include "rails/framed_rail.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <utility>
#include <vector>

#include "rails/link_of_rails.hpp"

namespace r2ccl {
namespace {

// A pipe that accepts and returns as many bytes as the test allows.
class ScriptedPipe final : public BytePipe {
 public:
  Io write(std::span<const iovec> parts, std::size_t& bytes) override {
    if (refuses) return Io::broken;
    for (const iovec& part : parts) {
      const std::size_t taken = std::min(part.iov_len, room);
      const auto* begin = static_cast<const std::byte*>(part.iov_base);
      written.insert(written.end(), begin, begin + taken);
      room -= taken;
      bytes += taken;
    }
    return bytes == 0 ? Io::again : Io::ok;
  }
  Io read(std::span<const iovec> parts, std::size_t& bytes) override {
    ++reads;
    for (const iovec& part : parts) {
      const std::size_t taken = std::min(part.iov_len, arrived.size());
      std::copy_n(arrived.begin(), taken, static_cast<std::byte*>(part.iov_base));
      arrived.erase(arrived.begin(), arrived.begin() + static_cast<std::ptrdiff_t>(taken));
      bytes += taken;
    }
    return bytes == 0 ? Io::again : Io::ok;
  }
  PathReport path() override { return {}; }
  [[nodiscard]] int fd() const override { return -1; }
  [[nodiscard]] short arm(bool for_write) override { return for_write ? POLLOUT : POLLIN; }
  void acknowledge() override { ++acknowledged; }

  std::size_t room = 1U << 20;
  std::vector<std::byte> written;
  std::vector<std::byte> arrived;
  int reads = 0;
  int acknowledged = 0;
  bool refuses = false;  // every write fails; reads return what has arrived
};

// A link on probation: its first frame is a full-size probe.
struct Fixture {
  Link link{LinkOptions{}, std::array{RailKind::tcp}, 1};
  ScriptedPipe* pipe = nullptr;
  std::unique_ptr<FramedRail> rail;

  Fixture() {
    link.start(1);
    EXPECT_TRUE(link.rail_established(0, 1, 1));
    auto owned = std::make_unique<ScriptedPipe>();
    pipe = owned.get();
    rail = std::make_unique<FramedRail>(link, 0, std::move(owned), std::span<const std::byte>());
  }
};

// Returns the answer to a probe sent at time `sent`.
FrameHeader echo_of(std::uint64_t sent) {
  FrameHeader pong{};
  pong.type = FrameType::pong;
  pong.number = sent;
  seal(pong);
  return pong;
}

void arrive(ScriptedPipe& pipe, const FrameHeader& header) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&header);
  pipe.arrived.insert(pipe.arrived.end(), bytes, bytes + sizeof(header));
}

// The time given to pump_in() may be older than the probe; the echo is valid all the same. An echo
// of a probe never sent fails the rail.
TEST(FramedRail, AnEchoIsAcceptedUnlessItsProbeWasNeverSent) {
  for (const std::uint64_t sent : {5U, 6U}) {
    Fixture fixture;
    EXPECT_TRUE(fixture.rail->pump_out(5));
    const FrameHeader pong = echo_of(sent);
    const auto bytes = std::as_bytes(std::span(&pong, 1));
    fixture.pipe->arrived.assign(bytes.begin(), bytes.end());
    EXPECT_TRUE(fixture.rail->pump_in(4));
    EXPECT_EQ(fixture.link.state(0), sent == 5 ? RailState::up : RailState::down);
  }
}

TEST(FramedRail, WantsToWriteUntilTheLastByteIsWritten) {
  Fixture fixture;
  fixture.pipe->room = 1000;
  EXPECT_TRUE(fixture.rail->pump_out(2));
  EXPECT_TRUE(fixture.rail->wants_write());
  EXPECT_FALSE(fixture.link.has_frames(0));  // nothing else shows the unsent rest
  fixture.pipe->room = 1U << 20;
  EXPECT_TRUE(fixture.rail->pump_out(3));
  EXPECT_FALSE(fixture.rail->wants_write());
  EXPECT_EQ(fixture.pipe->written.size(), sizeof(FrameHeader) + max_probe_bytes);
}

TEST(FramedRail, AnIncompleteHeaderIsNoArrival) {
  Fixture fixture;
  EXPECT_TRUE(fixture.rail->pump_out(2));
  const FrameHeader pong = echo_of(2);
  const auto bytes = std::as_bytes(std::span(&pong, 1));
  fixture.pipe->arrived.assign(bytes.begin(), bytes.begin() + 50);
  EXPECT_TRUE(fixture.rail->pump_in(2));
  EXPECT_FALSE(fixture.rail->pump_in(3));
  EXPECT_EQ(fixture.link.state(0), RailState::probation);
  fixture.pipe->arrived.assign(bytes.begin() + 50, bytes.end());
  EXPECT_TRUE(fixture.rail->pump_in(4));
  EXPECT_FALSE(fixture.rail->pump_in(5));
  EXPECT_EQ(fixture.link.state(0), RailState::up);
}

TEST(FramedRail, WaitsForRoomOnlyWhileThereIsNone) {
  Fixture fixture;
  EXPECT_EQ(fixture.rail->arm()->events, POLLIN);
  fixture.pipe->room = 0;
  EXPECT_FALSE(fixture.rail->pump_out(2));
  EXPECT_EQ(fixture.rail->arm()->events, POLLOUT);
}

TEST(FramedRail, DetachCopiesEachZeroCopyPayloadOnce) {
  Fixture fixture;
  EXPECT_TRUE(fixture.rail->pump_out(2));
  FrameHeader pong{};
  pong.type = FrameType::pong;
  pong.number = 2;
  seal(pong);
  const auto bytes = std::as_bytes(std::span(&pong, 1));
  fixture.pipe->arrived.assign(bytes.begin(), bytes.end());
  EXPECT_TRUE(fixture.rail->pump_in(3));
  const std::size_t probe = fixture.pipe->written.size();

  std::vector<std::byte> large(1U << 20, std::byte{1});  // exceeds the staging size
  OutStream& stream = fixture.link.out_stream(7);
  fixture.link.post(stream, large, {}, 4);
  fixture.pipe->room = 100;  // the header and a part of the first payload
  EXPECT_TRUE(fixture.rail->pump_out(5));
  EXPECT_TRUE(fixture.rail->detach({.communicator = 8, .before = {}}, 6));  // another communicator
  EXPECT_TRUE(fixture.rail->detach({.communicator = 7, .before = 0}, 6));   // earlier messages
  for (int again = 0; again < 3; ++again)
    EXPECT_TRUE(fixture.rail->detach({.communicator = 7, .before = 1}, 6));
  std::fill(large.begin(), large.end(), std::byte{2});
  fixture.pipe->room = 4U << 20;
  while (fixture.rail->wants_write()) EXPECT_TRUE(fixture.rail->pump_out(7));
  const auto payload = std::span(fixture.pipe->written).subspan(probe);
  const std::size_t chunk = LinkOptions{}.shape.chunk_bytes;
  for (std::size_t i = sizeof(FrameHeader); i < sizeof(FrameHeader) + chunk; ++i)
    ASSERT_EQ(payload[i], std::byte{1}) << i;
}

// Two links; the test carries the bytes of the first rail to the second.
struct Ends {
  Fixture from;
  Fixture to;

  Ends() {
    for (Fixture* each : {&from, &to}) {
      EXPECT_TRUE(each->rail->pump_out(2));
      arrive(*each, echo());
      EXPECT_TRUE(each->rail->pump_in(3));
      EXPECT_EQ(each->link.state(0), RailState::up);
      each->pipe->written.clear();
      each->pipe->room = 1U << 30;
    }
  }

  static std::vector<std::byte> echo() {
    const FrameHeader pong = echo_of(2);
    const auto bytes = std::as_bytes(std::span(&pong, 1));
    return {bytes.begin(), bytes.end()};
  }
  static void arrive(Fixture& at, std::span<const std::byte> bytes) {
    at.pipe->arrived.insert(at.pipe->arrived.end(), bytes.begin(), bytes.end());
  }
  // Posts messages of these sizes, in this order, and returns their bytes on the rail.
  std::vector<std::byte> post(std::initializer_list<std::size_t> sizes) {
    for (const std::size_t bytes : sizes) {
      messages.push_back(std::vector<std::byte>(bytes, std::byte(++seed % 250 + 1)));
      from.link.post(from.link.out_stream(7), messages.back(), {}, 4);
    }
    return sent();
  }
  std::vector<std::byte> sent() {
    while (from.rail->pump_out(5)) continue;
    return std::exchange(from.pipe->written, {});
  }
  // Checks that exactly the next `count` posted messages have arrived, each of them whole.
  void check(std::size_t count) {
    while (to.rail->pump_in(6)) continue;
    InStream& stream = to.link.in_stream(7);
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_NE(stream.front(), nullptr);
      const auto& expected = messages.front();
      ASSERT_EQ(stream.front()->bytes, expected.size());
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), stream.front_data()));
      messages.pop_front();
      (void)to.link.consume(stream, 6);
    }
    EXPECT_EQ(stream.front(), nullptr);
    EXPECT_EQ(to.link.state(0), RailState::up);
    (void)to.rail->pump_out(7);
    arrive(from, std::exchange(to.pipe->written, {}));
    (void)from.rail->pump_in(8);
  }

  std::deque<std::vector<std::byte>> messages;
  int seed = 0;
};

TEST(FramedRail, AMessageOfTheLastSizeIsReadDirectlyIntoItsSlot) {
  Ends ends;
  for (const std::size_t bytes : {1000UL, 30'000UL, 60'000UL, 60'000UL, 500UL, 0UL, 500UL}) {
    for (const bool known : {false, true}) {
      Ends::arrive(ends.to, ends.post({bytes}));
      ends.to.pipe->reads = 0;
      EXPECT_TRUE(ends.to.rail->pump_in(6));
      if (known) {
        EXPECT_EQ(ends.to.pipe->reads, 1) << bytes;
      }
      ends.check(1);
    }
  }
}

// A wrong guess of the reader costs a copy: a message cut anywhere, frames before and after the
// message, and messages longer or shorter than the previous ones.
TEST(FramedRail, MessagesArriveWholeForAnySplitOfReads) {
  Ends ends;
  Ends::arrive(ends.to, ends.post({1000}));
  ends.check(1);
  const std::vector<std::byte> stray = Ends::echo();
  for (std::size_t cut = 0; cut <= 1000 + 2 * stray.size(); cut += cut < 200 ? 1 : 37) {
    for (const bool before : {false, true}) {
      auto bytes = ends.post({1000});
      bytes.insert(before ? bytes.begin() : bytes.end(), stray.begin(), stray.end());
      const std::size_t first = std::min(cut, bytes.size());
      Ends::arrive(ends.to, std::span(bytes).first(first));
      (void)ends.to.rail->pump_in(6);
      Ends::arrive(ends.to, std::span(bytes).subspan(first));
      ends.check(1);
    }
  }
  for (const std::size_t bytes : {1UL, 5000UL, 70'000UL, 10UL, 200'000UL, 131'072UL, 0UL, 64UL}) {
    Ends::arrive(ends.to, ends.post({bytes, 100, bytes}));
    ends.check(3);
  }
}

// A peer that ends says why in its last frames. A write may fail before they are read, and they do
// not come again.
TEST(FramedRail, ReadsWhatArrivedBeforeAWriteFailed) {
  Ends ends;
  std::vector<std::byte> last = ends.post({300'000});
  ends.from.link.send_abort({7, ErrorCode::aborted, "interrupted"});
  ends.from.link.send_close();
  const auto frames = ends.sent();
  last.insert(last.end(), frames.begin(), frames.end());
  Ends::arrive(ends.to, last);
  ends.to.pipe->refuses = true;
  const std::byte own{1};
  ends.to.link.post(ends.to.link.out_stream(7), {&own, 1}, {}, 6);
  EXPECT_FALSE(ends.to.rail->pump_out(6));
  EXPECT_EQ(ends.to.link.state(0), RailState::down);
  EXPECT_TRUE(ends.to.link.peer_closed());
  ASSERT_EQ(ends.to.link.received_aborts().size(), 1U);
  EXPECT_EQ(ends.to.link.received_aborts()[0].text, "interrupted");
}

// The peer judges a silent rail by answers on other rails. An answer is evidence only if everything
// that arrived before the probe is read and acknowledged first.
TEST(LinkOfRails, ReadsAndAcknowledgesAllRailsBeforeItAnswersAProbe) {
  LinkOfRails carried(LinkOptions{}, std::array{RailKind::tcp, RailKind::tcp}, 1);
  carried.link.start(1);
  std::array<ScriptedPipe*, 2> pipes{};
  for (RailId id = 0; id < 2; ++id) {
    ASSERT_TRUE(carried.begin_epoch(id, 1, 1));
    auto pipe = std::make_unique<ScriptedPipe>();
    pipes[id] = pipe.get();
    carried.carry(id,
                  std::make_unique<FramedRail>(carried.link, id, std::move(pipe),
                                               std::span<const std::byte>()),
                  1);
    arrive(*pipes[id], echo_of(1));
  }
  (void)carried.receive(2, /*all_rails=*/true);
  ASSERT_EQ(carried.link.state(0), RailState::up);
  ASSERT_EQ(carried.link.state(1), RailState::up);
  const RailId probed = carried.link.best_rail();
  const RailId silent = probed == 0 ? 1 : 0;
  carried.tick(3, /*refresh_paths=*/false);
  const int before = pipes[silent]->acknowledged;
  FrameHeader ping{};
  ping.type = FrameType::ping;
  ping.number = 7;
  seal(ping);
  constexpr std::size_t several_reads = 600U << 10;
  for (std::size_t bytes = 0; bytes < several_reads; bytes += sizeof(FrameHeader))
    arrive(*pipes[silent], echo_of(1));
  arrive(*pipes[probed], ping);
  (void)carried.receive(4, /*all_rails=*/false);
  EXPECT_TRUE(pipes[silent]->arrived.empty());
  EXPECT_EQ(pipes[silent]->acknowledged, before + 1);
}

}  // namespace
}  // namespace r2ccl
