// A peer alone, without an engine, and the descriptions of peers and rails for it.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "engine/peer.hpp"

namespace r2ccl::testing {

using Lines = std::vector<std::string>;

inline constexpr std::uint32_t accepting = 1;  // the lower number accepts
inline constexpr std::uint32_t connecting = 2;

inline RailDescription rail_of(int index, std::uint16_t port = 0) {
  const std::string address = "127.0.0." + std::to_string(index + 1);
  return {.kind = RailKind::tcp,
          .name = "rail" + std::to_string(index) + "@node1",
          .device = "",
          .local_address = address,
          .remote_address = address,
          .remote_port = port,
          .verbs = {}};
}

inline PeerDescription peer_of(std::uint32_t process, std::vector<RailDescription> rails) {
  PeerDescription peer{.process = process,
                       .label = "rank " + std::to_string(process),
                       .secret = {},
                       .rails = std::move(rails)};
  peer.secret.resize(32, std::byte{7});
  return peer;
}

inline Lines warnings(LogQueue& log, const std::string& part) {
  Lines found;
  for (const LogLine& line : log.take().value_or(std::deque<LogLine>()))
    if (line.level == LogLevel::warning && line.text.find(part) != std::string::npos)
      found.push_back(line.text);
  return found;
}

// A peer alone, without an engine.
struct Alone {
  LogQueue log;
  Journal journal = std::move(Journal::open("", 1).value());
  Peer peer;

  explicit Alone(const std::vector<RailDescription>& rails)
      : peer(peer_of(connecting, rails), options(rails), journal, log, 1) {}

  static LinkOptions options(const std::vector<RailDescription>& rails) {
    LinkOptions options;
    for (std::size_t i = 0; i < rails.size(); ++i) options.units[i] = rails[i].unit.empty() ? 0 : 1;
    return options;
  }
  void bring_up(RailId rail) { bring_up(peer, rail); }
  // Opens an epoch and answers its probe.
  static void bring_up(Peer& peer, RailId rail) {
    ASSERT_TRUE(peer.link.rail_established(rail, 1, now_ns()));
    OutFrame frame{};
    while (frame.header.type != FrameType::ping)
      ASSERT_TRUE(peer.link.next_frame(rail, frame, now_ns()));
    FrameHeader answer{};
    answer.type = FrameType::pong;
    answer.number = frame.header.number;
    seal(answer);
    ASSERT_TRUE(peer.link.frame_begin(rail, answer, now_ns()));
    ASSERT_EQ(peer.link.state(rail), RailState::up);
  }
  // Opens an epoch and ends it.
  void lose(RailId rail, RailCause cause) {
    ASSERT_TRUE(peer.link.rail_established(rail, 1, now_ns()));
    peer.link.rail_failed(rail, 1, cause, now_ns());
  }
};

}  // namespace r2ccl::testing
