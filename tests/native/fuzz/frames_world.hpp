// A link whose peer is the fuzz input: production rails over pipes that give what the input says,
// two communicators with data under way and a third one, and the checks that hold whatever arrives.
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
#include "rails/carried_link.hpp"
#include "rails/framed_rail.hpp"

namespace r2ccl::fuzz {

// The second one's peer is told of memory, though its bytes come as any other rail's do.
inline constexpr std::array world_kinds{RailKind::tcp, RailKind::verbs, RailKind::control};
inline constexpr std::size_t world_rails = world_kinds.size();
inline constexpr std::array<std::uint64_t, 3> world_communicators{5, 6, 7};

// The bytes from `position` on of a message of an honest sender; `ours`: of the link under test.
[[nodiscard]] std::vector<std::byte> content(bool ours, std::uint64_t communicator,
                                             std::uint64_t number, std::uint64_t position,
                                             std::size_t bytes);

// One direction each of a connection, in the hand of the fuzzer.
struct Path {
  std::vector<std::byte> coming;  // composed by the peer
  std::size_t taken = 0;          // of these, how many were let through
  std::size_t grant = 0;          // how many more may be read now
  std::size_t room = 0;           // how many bytes may be written
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

// What rails of one-sided writes may reach: as much as is asked for.
class WorldMemory final : public StreamMemory {
 public:
  std::byte* allocate(std::size_t bytes) override { return new std::byte[bytes]; }
  void release(std::byte* memory) override { delete[] memory; }
  [[nodiscard]] bool is_registered(std::span<const std::byte> /*memory*/) const override {
    return true;
  }
  void revoke(std::span<const std::byte> /*memory*/) override {}
};

// Reads along with the link, and knows what no correct peer sends.
struct Witness {
  FrameHeader header{};
  std::size_t header_bytes = 0;
  std::size_t payload_left = 0;
  bool poisoned = false;  // the rail may not stay connected
};

class FrameWorld {
 public:
  FrameWorld(const LinkOptions& options, unsigned rails_up, std::size_t baseline);
  FrameWorld(const FrameWorld&) = delete;
  FrameWorld& operator=(const FrameWorld&) = delete;

  // Bytes of the peer, which deliver() lets through.
  void send(RailId rail, std::span<const std::byte> bytes);
  // A frame of `header.payload_bytes`, or of fewer bytes.
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
  // The next messages of a communicator are to land in `bytes` bytes, or once they have, are not.
  void expect(std::size_t which, std::size_t bytes);
  void close(std::size_t which);
  void abort(std::size_t which, std::size_t text_bytes);
  void announce(RailId rail, std::uint16_t port);
  void send_close();

  // Everything that holds between two events.
  void check();

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
  struct Calls {  // of one communicator
    bool open = true;
    std::uint64_t posted = 0;  // messages
    std::uint64_t position = 0;
    std::uint64_t consumed = 0;
    std::uint64_t delivered = 0;  // what the peer claimed
    std::deque<Post> posts;
    std::vector<std::byte> target;
    std::uint64_t target_end = 0;  // the first message that does not land there
  };

  void open(RailId rail, Epoch epoch, std::span<const std::byte> leftover);
  void settle();
  void witness(RailId rail, std::size_t bytes);
  void witness_payload(Witness& seen, std::span<const std::byte> payload);
  [[nodiscard]] bool incorrect(RailId rail, const FrameHeader& header) const;
  void reclaim(std::uint64_t communicator, bool received);
  void check_emitted(RailId rail);
  void check_memory() const;
  [[nodiscard]] std::size_t own_bytes() const;

  WorldMemory memory_;
  LinkOptions options_;
  const std::size_t baseline_;
  TimeNs now_ = 1000 * ns_per_ms;
  CarriedLink carried_;
  std::array<Path, world_rails> paths_;
  std::array<Witness, world_rails> witnesses_;
  std::map<std::uint64_t, Calls> calls_;
  std::set<std::uint64_t> strange_;                            // communicators that we never made
  std::set<std::pair<std::uint64_t, std::uint64_t>> changed_;  // messages with dishonest bytes
  std::size_t chunks_posted_ = 0;
  std::size_t opened_ = 0;
};

}  // namespace r2ccl::fuzz
