// Test fixture of 2 links under manual control of clock and frames.  A test pulls the frames of an
// end and then delivers, drops or acknowledges each of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "link/link.hpp"

namespace r2ccl::testing {

struct Frame {
  FrameHeader header;
  std::vector<std::byte> payload;
};

class LinkPair {
 public:
  static constexpr std::uint64_t communicator = 5;

  static LinkOptions default_options() {
    LinkOptions options;
    options.shape = {.slot_bytes = 384,
                     .chunk_bytes = 128,
                     .staging_bytes = 128,
                     .slots = 2,
                     .spare_slots = 1,
                     .resilience = true};
    options.small_message_bytes = 128;
    // Fixed times, because tests depend on them and the defaults may change.
    options.ack_deadline_floor_ns = 10 * ns_per_ms;
    options.dead_deadline_ns = 200 * ns_per_ms;
    options.probe_interval_ns = 200 * ns_per_ms;
    options.probation_timeout_ns = 3000 * ns_per_ms;
    return options;
  }

  explicit LinkPair(std::size_t rails, const LinkOptions& options = default_options())
      : LinkPair(std::vector<RailKind>(rails, RailKind::sim), options) {}
  LinkPair(std::vector<RailKind> kinds, const LinkOptions& options)
      : kinds_(std::move(kinds)),
        a(with_role(options, true), kinds_, 1),
        b(with_role(options, false), kinds_, 2) {
    a.start(now);
    b.start(now);
    for (RailId rail = 0; rail < kinds_.size(); ++rail) open(rail, 1);
    a.actions().clear();
  }

  // Opens an epoch at both ends and exchanges the probes.
  void open(RailId rail, Epoch epoch) {
    pulled_.erase({&a, rail});
    pulled_.erase({&b, rail});
    ASSERT_TRUE(b.rail_established(rail, epoch, now));
    ASSERT_TRUE(a.rail_established(rail, epoch, now));
    exchange(rail);
    ASSERT_EQ(a.state(rail), RailState::up);
    ASSERT_EQ(b.state(rail), RailState::up);
  }

  // Returns all frames ready for the rail.
  std::vector<Frame> pull(Link& from, RailId rail) {
    std::vector<Frame> frames;
    OutFrame out;
    while (from.next_frame(rail, out, now)) frames.push_back(taken(from, rail, out));
    return frames;
  }

  // Returns the next frame only.
  Frame pull_one(Link& from, RailId rail) {
    OutFrame out;
    if (!from.next_frame(rail, out, now)) {
      ADD_FAILURE() << "no frame is ready";
      return {};
    }
    return taken(from, rail, out);
  }

  std::vector<Frame> pull(Link& from, RailId rail, FrameType type) {
    auto frames = pull(from, rail);
    std::erase_if(frames, [type](const Frame& frame) { return frame.header.type != type; });
    return frames;
  }

  // Returns false if the receiver failed the rail.
  bool deliver(Link& to, RailId rail, const Frame& frame) {
    if (!to.frame_begin(rail, frame.header, now)) return false;
    fill(to, rail, frame, 0, frame.payload.size());
    return true;
  }

  void deliver(Link& to, RailId rail, const std::vector<Frame>& frames) {
    for (const Frame& frame : frames) EXPECT_TRUE(deliver(to, rail, frame));
  }

  // Fills bytes `begin` to `end` of the payload of the current frame.
  void fill(Link& to, RailId rail, const Frame& frame, std::size_t begin, std::size_t end) {
    while (begin < end) {
      const auto room = to.payload_room(rail);
      const std::size_t bytes = std::min(room.size(), end - begin);
      if (bytes == 0) {
        ADD_FAILURE() << "the frame has no room for its payload";
        return;
      }
      std::memcpy(room.data(), frame.payload.data() + begin, bytes);
      to.payload_filled(rail, bytes, now);
      begin += bytes;
    }
  }

  // Acknowledges all pulled frames on the path.
  void acknowledge(Link& of, RailId rail) {
    of.path_acked(rail, of.epoch(rail), pulled_[{&of, rail}], /*peer_limited=*/false, now);
  }

  // Delivers all frames in both directions until none is left, as a healthy rail does.
  void exchange(RailId rail) {
    for (bool moved = true; moved;) {
      moved = false;
      for (auto [from, to] : {std::pair{&a, &b}, std::pair{&b, &a}}) {
        const auto frames = pull(*from, rail);
        moved = moved || !frames.empty();
        deliver(*to, rail, frames);
        acknowledge(*from, rail);
      }
    }
  }

  // Carries out the close actions of an end at once; keeps all other actions.
  void close_rails(Link& of) {
    const auto actions = std::exchange(of.actions(), {});
    for (const LinkAction& action : actions)
      if (action.kind == LinkAction::Kind::close)
        of.rail_closed(action.rail, action.epoch, now);
      else
        of.actions().push_back(action);
  }

  // Advances the clock in steps of 1 ms; calls `each` and then tick() of both ends in every step.
  template <typename Each>
  void pass(TimeNs time, Each each) {
    for (const TimeNs end = now + time; now < end;) {
      now += ns_per_ms;
      each();
      a.tick(now);
      b.tick(now);
    }
  }
  void pass(TimeNs time) {
    pass(time, [] {});
  }

  // The caller's memory must outlive its delivery, so temporaries are kept in `kept_`.
  void post(Link& from, const std::vector<std::byte>& data) {
    from.post(from.out_stream(communicator), data, {}, now);
  }
  void post(Link& from, std::vector<std::byte>&& data) {
    post(from, kept_.emplace_back(std::move(data)));
  }

  [[nodiscard]] OutStream& out(Link& of) { return of.out_stream(communicator); }
  [[nodiscard]] InStream& in(Link& of) { return of.in_stream(communicator); }

 private:
  Frame taken(Link& from, RailId rail, const OutFrame& out) {
    pulled_[{&from, rail}] += sizeof(FrameHeader) + out.header.payload_bytes;
    Frame frame{out.header, {}};
    if (out.header.payload_bytes > 0)
      frame.payload.assign(out.payload, out.payload + out.header.payload_bytes);
    from.frame_written(out.header);
    return frame;
  }

  static LinkOptions with_role(LinkOptions options, bool connects) {
    options.connects = connects;
    return options;
  }

  const std::vector<RailKind> kinds_;
  std::deque<std::vector<std::byte>> kept_;
  std::map<std::pair<const Link*, RailId>, std::uint64_t> pulled_;  // bytes pulled in this epoch

 public:
  TimeNs now = 1000 * ns_per_ms;
  Link a;  // the connecting end
  Link b;
};

inline std::vector<std::byte> bytes_of(std::size_t count, int seed) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i)
    bytes[i] = static_cast<std::byte>(i * 31 + static_cast<std::size_t>(seed) * 57 + 1);
  return bytes;
}

}  // namespace r2ccl::testing
