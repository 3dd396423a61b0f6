// Frames over a pipe that takes and gives what it likes.
#include "rails/framed_rail.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

namespace r2ccl {
namespace {

// What the test lets through, byte by byte.
class ScriptedPipe final : public BytePipe {
 public:
  Io write(std::span<const iovec> parts, std::size_t& bytes) override {
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

  std::size_t room = 1U << 20;
  std::vector<std::byte> written;
  std::vector<std::byte> arrived;
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

// Of a probe that was sent at that time.
FrameHeader echo_of(std::uint64_t sent) {
  FrameHeader pong{};
  pong.type = FrameType::pong;
  pong.number = sent;
  seal(pong);
  return pong;
}

// Its probe may have been sent after the time was taken with which the echo is read.
TEST(FramedRail, AnEchoMayComeWithAnOlderTimeButNotOfAProbeThatWasNeverSent) {
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

TEST(FramedRail, WantsToWriteUntilTheLastByteIsHandedOn) {
  Fixture fixture;
  fixture.pipe->room = 1000;
  EXPECT_TRUE(fixture.rail->pump_out(2));
  EXPECT_TRUE(fixture.rail->wants_write());
  EXPECT_FALSE(fixture.link.has_frames(0));  // so nothing else would remind anybody of the rest
  fixture.pipe->room = 1U << 20;
  EXPECT_TRUE(fixture.rail->pump_out(3));
  EXPECT_FALSE(fixture.rail->wants_write());
  EXPECT_EQ(fixture.pipe->written.size(), sizeof(FrameHeader) + max_probe_bytes);
}

TEST(FramedRail, AHeaderThatIsNotCompleteIsNoArrival) {
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

TEST(FramedRail, SleepsForRoomOnlyWhileThereIsNone) {
  Fixture fixture;
  EXPECT_EQ(fixture.rail->arm()->events, POLLIN);
  fixture.pipe->room = 0;
  EXPECT_FALSE(fixture.rail->pump_out(2));
  EXPECT_EQ(fixture.rail->arm()->events, POLLOUT);
}

TEST(FramedRail, DetachCopiesEachLentPayloadOnceAndOnlyThose) {
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

  std::vector<std::byte> large(1U << 20, std::byte{1});  // more than is staged
  OutStream& stream = fixture.link.out_stream(7);
  fixture.link.post(stream, large, {}, 4);
  fixture.pipe->room = 100;  // the header and a bit of the first payload
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

}  // namespace
}  // namespace r2ccl
