// A link with the fuzz input as its peer: production rails over pipes controlled by the input, two
// communicators with data in flight, a third without data, and the invariants for any input.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "link/link.hpp"
#include "rails/framed_rail.hpp"
#include "rails/link_of_rails.hpp"

namespace r2ccl::fuzz {

// Rail 1 is a verbs rail: the link announces memory to the peer, but bytes arrive as on other
// rails.
inline constexpr std::array world_kinds{RailKind::tcp, RailKind::verbs, RailKind::control};
inline constexpr std::size_t world_rails = world_kinds.size();
inline constexpr std::array<std::uint64_t, 3> world_communicators{5, 6, 7};
// Connections of posted receives, in modes that have them.
inline constexpr std::uint64_t world_receives = 20;
inline constexpr std::uint64_t world_sends = 21;

// Returns `bytes` bytes of a message of an honest sender, from `position` on.  `ours`: the sender
// is the link under test.
[[nodiscard]] std::vector<std::byte> content(bool ours, std::uint64_t communicator,
                                             std::uint64_t number, std::uint64_t position,
                                             std::size_t bytes);

// Both directions of a connection, under control of the fuzzer.
struct Path {
  std::vector<std::byte> coming;  // composed by the peer
  std::size_t taken = 0;          // bytes of `coming` already let through
  std::size_t grant = 0;          // bytes allowed to be read now
  std::size_t room = 0;           // bytes allowed to be written
  std::vector<std::byte> emitted;
  PathReport report;
  bool broken = false;

  [[nodiscard]] std::span<const std::byte> left() const { return std::span(coming).subspan(taken); }
  void take(std::size_t bytes) {
    taken += bytes;
    if (taken < coming.size()) return;
    coming.clear();
    taken = 0;
  }
};

// Memory for one-sided rails, without a limit.
class WorldMemory final : public StreamMemory {
 public:
  std::byte* allocate(std::size_t bytes) override { return new std::byte[bytes]; }
  void release(std::byte* memory) override { delete[] memory; }
  [[nodiscard]] bool is_registered(std::span<const std::byte> /*memory*/) const override {
    return true;
  }
  void revoke(std::span<const std::byte> /*memory*/) override {}
};

// Parses the peer's bytes in parallel with the link, and detects frames no correct peer sends.
struct Witness {
  FrameHeader header{};
  std::size_t header_bytes = 0;
  std::size_t payload_left = 0;
  bool poisoned = false;  // the rail must not stay connected
};

class FrameWorld {
 public:
  // `rails_up`: number of rails brought UP.  `baseline`: bytes allocated before; see fuzz_main.hpp.
  FrameWorld(const LinkOptions& options, unsigned rails_up, std::size_t baseline);
  FrameWorld(const FrameWorld&) = delete;
  FrameWorld& operator=(const FrameWorld&) = delete;

  // Adds bytes of the peer; deliver() lets them through.
  void send(RailId rail, std::span<const std::byte> bytes);
  // Adds a frame with `payload_bytes` bytes of payload, at most header.payload_bytes.  `honest`:
  // the payload is content(); otherwise every bit of the payload differs.
  void send(RailId rail, const FrameHeader& header, bool honest, std::size_t payload_bytes);
  [[nodiscard]] std::size_t coming(RailId rail) const { return paths_[rail].left().size(); }
  void deliver(RailId rail, std::size_t bytes);

  void pump_out(RailId rail, std::size_t room);
  void pass(TimeNs time);
  void report(RailId rail, const PathReport& report) { paths_[rail].report = report; }
  void break_pipe(RailId rail);
  void reconnect(RailId rail, std::size_t leftover);

  void post(std::size_t which, std::size_t bytes);
  void consume(std::size_t which);
  // Offers `bytes` bytes as a target for the next messages of a communicator.  If there is a
  // target, reclaims the target once its messages are complete.
  void expect(std::size_t which, std::size_t bytes);
  void close(std::size_t which);
  void abort(std::size_t which, std::size_t text_bytes);
  void announce(RailId rail, std::uint16_t port);
  void send_close();

  // Checks the invariants between two events.
  void check();

  static constexpr std::size_t posted_bytes = 1000;  // of each receive, and largest message
  // Number of the oldest posted receive not done, and of posted sends.
  [[nodiscard]] std::uint64_t posted_receives() const { return received_; }
  [[nodiscard]] std::uint64_t posted_sends() const { return sent_; }

  [[nodiscard]] const StreamShape& shape() const { return options_.shape; }
  [[nodiscard]] const Link& link() const { return carried_.link; }
  [[nodiscard]] std::uint64_t consumed(std::uint64_t communicator) const;
  [[nodiscard]] std::uint64_t posted_messages(std::uint64_t communicator) const;

 private:
  struct Post {
    std::unique_ptr<std::byte[]> data;
    std::uint64_t begin;
    std::uint64_t end;
  };
  struct Calls {  // per communicator
    bool open = true;
    std::uint64_t posted = 0;  // messages
    std::uint64_t position = 0;
    std::uint64_t consumed = 0;
    std::uint64_t delivered = 0;  // claimed by the peer
    std::deque<Post> posts;
    std::vector<std::byte> target;
    std::uint64_t target_end = 0;  // the first message beyond the target
  };

  void open(RailId rail, Epoch epoch, std::span<const std::byte> leftover);
  void settle();
  void settle_posted();
  void witness(RailId rail, std::size_t bytes);
  void witness_payload(Witness& seen, std::span<const std::byte> payload);
  [[nodiscard]] bool incorrect(RailId rail, const FrameHeader& header) const;
  [[nodiscard]] bool posted_incorrect(RailId rail, const FrameHeader& header) const;
  void reclaim(std::uint64_t communicator, bool received);
  void check_emitted(RailId rail);
  void check_memory() const;
  [[nodiscard]] std::size_t own_bytes() const;

  WorldMemory memory_;
  LinkOptions options_;
  const std::size_t baseline_;
  TimeNs now_ = 1000 * ns_per_ms;
  LinkOfRails carried_;
  std::array<Path, world_rails> paths_;
  std::array<Witness, world_rails> witnesses_;
  static constexpr std::uint64_t posted_at_once = 3;
  std::vector<std::byte> posted_memory_;  // of receives
  std::uint64_t receives_posted_ = 0;
  std::uint64_t received_ = 0;
  std::map<std::uint64_t, std::unique_ptr<std::byte[]>> posted_sources_;  // by message
  std::uint64_t sent_ = 0;
  std::map<std::uint64_t, Calls> calls_;
  std::set<std::uint64_t> strange_;                            // communicators never created here
  std::set<std::pair<std::uint64_t, std::uint64_t>> changed_;  // messages with dishonest bytes
  std::size_t chunks_posted_ = 0;
  std::size_t opened_ = 0;
};

}  // namespace r2ccl::fuzz
