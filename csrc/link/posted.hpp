// Posted receives: messages straight into memory of callers, without slots.  The protocol is that
// of docs/adr/029-posted-receives.md.  The rules:
// - The receiver permits every attempt (ROOM) on one epoch of one rail.  The next attempt is
//   permitted only after no write of the last attempt can land any more.
// - A receive is done once all bytes have landed by the permitted attempt.
// - A send is done once the peer reports the delivery and no rail reads the source any more.
//
// Part of a link, and sans-IO like the link.  Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/units.hpp"
#include "link/frame.hpp"
#include "link/link_types.hpp"
#include "link/rail_state.hpp"
#include "link/ring.hpp"
#include "link/shape.hpp"

namespace r2ccl {

class Link;

using MemoryId = std::uint32_t;
// Identifies a connection, one direction of messages.  Equal at both ends, unique within the link.
using ConnectionId = std::uint64_t;

// Memory of a posted receive.
struct PostedMemory {
  MemoryId memory = 0;
  std::uint64_t offset = 0;
  std::uint32_t bytes = 0;
  RailId home = 0;  // rail of the first attempt while UP
};

// sending: the peer may lack the message, or an RDMA rail may read the source.  detach: a byte
// stream may still read the source; Rail::detach() ends this access.
enum class SendState : std::uint8_t { sending, detach, done };

class Posted {
 public:
  explicit Posted(Link& link);

  // ---- memory of receives ----
  // Announces the memory to the peer, on RDMA rails.  The memory must be registered.
  MemoryId add_memory(std::span<std::byte> memory);
  void remove_memory(MemoryId id);  // requires that no receive uses the memory

  // ---- receiving end ----
  void open_receives(ConnectionId connection);
  // Posts the next receive and returns its number.  Empty: most_posted receives are not taken.
  std::optional<std::uint64_t> receive(ConnectionId connection, const PostedMemory& into);
  // Returns the size of the message once the receive is done.
  [[nodiscard]] std::optional<std::uint32_t> received(ConnectionId connection,
                                                      std::uint64_t number) const;
  void take_received(ConnectionId connection, std::uint64_t number);  // requires received()
  // Returns true if a message has arrived and is not taken.
  [[nodiscard]] bool holds_message(ConnectionId connection) const;
  // Returns true if a receive that is not done uses the memory.
  [[nodiscard]] bool uses(ConnectionId connection, MemoryId id) const;
  // Ends the connection.  On false, rails may still write its memory and are being fenced: call
  // again.  The peer still learns of the messages received.
  [[nodiscard]] bool close_receives(ConnectionId connection, TimeNs now);

  // ---- sending end ----
  void open_sends(ConnectionId connection);
  // Returns the size of the next message's receive.  Empty: no ROOM is known.
  [[nodiscard]] std::optional<std::uint32_t> room(ConnectionId connection) const;
  // Sends the next message and returns its number.  Empty: no ROOM is known, the source is larger
  // than room(), or most_posted sends are not taken; call again.  The source must stay valid until
  // send_state() is `done`.
  std::optional<std::uint64_t> send(ConnectionId connection, std::span<const std::byte> source,
                                    TimeNs now);
  [[nodiscard]] SendState send_state(ConnectionId connection, std::uint64_t number) const;
  void take_sent(ConnectionId connection, std::uint64_t number);  // requires `done`
  // Returns true if a send that is not taken has its source in the memory.
  [[nodiscard]] bool uses(ConnectionId connection, std::span<const std::byte> memory) const;
  // Ends the connection.  On false, RDMA rails may still read sources and are being fenced: call
  // again.  Byte streams may read sources until LinkOfRails::detach() has returned true, too.
  [[nodiscard]] bool close_sends(ConnectionId connection, TimeNs now);

  // ---- called by Link ----
  void rail_moved(RailId rail, RailState to, TimeNs now);
  void tick(TimeNs now);
  [[nodiscard]] bool next_frame(RailId rail, OutFrame& frame);
  // Checks a received header.  Returns false on a violation of the protocol.
  [[nodiscard]] bool valid(RailId rail, const FrameHeader& header) const;
  // Returns true if the attempt of a `put` is still permitted.
  [[nodiscard]] bool permits(RailId rail, const FrameHeader& header) const;
  // Returns the destination of a `put`.  Null: the attempt is not permitted any more, or the memory
  // is empty.
  [[nodiscard]] std::byte* destination(RailId rail, const FrameHeader& header) const;
  // Takes a whole frame.  Returns false on a violation of the protocol, or on a wrong checksum.
  [[nodiscard]] bool take(RailId rail, const FrameHeader& header, TimeNs now);
  // Returns true if the peer has all posted messages, and knows all deliveries.
  [[nodiscard]] bool settled() const;
  // Connections that are closed here, and at whose other end the peer waits.  The owner takes the
  // numbers and ends the connections at the peer.  At most most_orphans are kept: the peer asks
  // again.
  [[nodiscard]] std::vector<ConnectionId>& orphans() { return orphans_; }
  [[nodiscard]] std::size_t queued() const;  // frames due on all rails

 private:
  // Rails with a frame about a message in their queue, a bit each: no queue is searched.
  using RailBits = std::uint64_t;
  static_assert(max_rails_per_link <= 64);
  static constexpr RailBits bit_of(RailId rail) { return RailBits{1} << rail; }

  struct Receive {
    enum class State : std::uint8_t { free, due, permitted, done };
    State state = State::free;
    PostedMemory into;
    std::uint32_t attempt = 0;  // of the last ROOM
    RailId rail = any_rail;     // permitted rail and epoch
    Epoch epoch = 0;
    RailId room_rail = any_rail;   // rail that carried the ROOM; any_rail: not sent
    RailId wanted = any_rail;      // rail that the sender wants
    RailId asked_over = any_rail;  // rail of the last question: the answer goes the same way
    bool asked = false;            // a question about the present try waits for its answer
    std::uint32_t message_bytes = 0;
    std::uint32_t arrived = 0;  // bytes, by the permitted attempt
    RailBits queued = 0;        // ROOM
  };
  struct Receives {
    ConnectionId connection = 0;
    std::array<Receive, most_posted> ring{};
    std::uint64_t first = 0;      // oldest receive not taken
    std::uint64_t next = 0;       // number of receives posted
    std::uint64_t delivered = 0;  // messages received in order
    std::uint64_t reported = 0;   // `delivered` in the last ROOM
    RailBits queued = 0;          // ROOM without permission
    TimeNs owed_since = 0;        // 0: no report is due
    bool owed_now = false;
    bool closing = false;
    [[nodiscard]] Receive& at(std::uint64_t number) { return ring[number % most_posted]; }
    [[nodiscard]] const Receive& at(std::uint64_t number) const {
      return ring[number % most_posted];
    }
    [[nodiscard]] bool has(std::uint64_t number) const { return number >= first && number < next; }
  };
  // A posting of a message, on one epoch of one rail.
  struct Attempt {
    RailId rail;
    Epoch epoch;
    std::uint64_t position;  // end of the last frame in the epoch's byte stream
  };
  struct Asking {
    std::uint32_t attempt = 0;  // last try known, in the questions that are queued
    RailBits queued = 0;        // NEED
  };
  struct Send {
    const std::byte* source = nullptr;
    std::uint32_t bytes = 0;
    std::uint32_t used = 0;  // try of the last posting; 0: none
    std::uint32_t sent = 0;  // bytes of the last posting
    bool taken = false;
    TimeNs asked_at = 0;  // last question, or the posting
    TimeNs interval = 0;  // of questions
    Asking asking;
    std::vector<Attempt> attempts;
  };
  struct Sends {
    ConnectionId connection = 0;
    std::array<Send, most_posted> ring{};
    std::array<Room, 2 * most_posted> rooms{};  // last ROOM of each message
    std::uint64_t first = 0;                    // oldest send not taken
    std::uint64_t next = 0;                     // number of sends posted
    std::uint64_t delivered = 0;                // as reported by the peer
    bool waits = false;                         // the owner waits for the ROOM of message `next`
    TimeNs asked_at = 0;                        // last question about this ROOM
    TimeNs interval = 0;
    Asking asking;
    bool closing = false;
    [[nodiscard]] Send& at(std::uint64_t number) { return ring[number % most_posted]; }
    [[nodiscard]] const Send& at(std::uint64_t number) const { return ring[number % most_posted]; }
    // Returns the last ROOM of a message; `attempt` 0: none is known.
    [[nodiscard]] Room room(std::uint64_t number) const {
      const Room& kept = rooms[number % rooms.size()];
      return kept.number == number ? kept : Room{};
    }
    [[nodiscard]] Asking& asking_of(std::uint64_t number) {
      return number < next ? at(number).asking : asking;
    }
  };
  struct RoomDue {
    Receives* of;
    std::uint64_t number;  // any message beyond `next`: a ROOM without permission
  };
  struct NeedDue {
    Sends* of;
    std::uint64_t number;
  };
  struct PutDue {
    Sends* of;
    std::uint64_t number;
    std::uint32_t attempt;
  };
  struct LastReport {  // a ROOM without permission, of a closed connection
    ConnectionId connection;
    std::uint64_t delivered;
  };
  struct Question {  // NEED for the present try
    ConnectionId connection;
    std::uint64_t number;
    std::uint32_t attempt;
  };
  struct RemoteMemory {
    std::uint64_t address;
    std::uint64_t bytes;
    std::uint32_t key;
  };
  struct Rail {
    std::deque<MemoryId> memory;
    Ring<RoomDue> rooms;
    std::deque<LastReport> last_reports;
    Ring<NeedDue> needs;
    Ring<PutDue> puts;
    std::map<MemoryId, RemoteMemory> remote;  // of the peer, in this epoch
    TimeNs avoid_until = 0;                   // the peer's sender has suspected the rail
    [[nodiscard]] std::size_t due() const {
      return memory.size() + rooms.size() + last_reports.size() + needs.size() + puts.size();
    }
  };

  // posted_receives.cc
  void grant(Receives& receives, std::uint64_t number);
  void grant_all();
  [[nodiscard]] RailId choose(const Receive& receive, RailId except);
  [[nodiscard]] bool carries(RailId rail) const;
  void send_room(Receives& receives, std::uint64_t number);
  void report(Receives& receives, RailId rail);
  void remember(const Receives& receives);
  void part(RailId rail, ConnectionId connection);
  void add_orphan(ConnectionId connection);
  void lose_permissions(RailId rail, bool fenced);
  void lose_rooms(RailId rail, bool lost);
  void queue_room(Receives& receives, std::uint64_t number, RailId rail);
  static void leave_queue(const RoomDue& due, RailId rail);
  [[nodiscard]] bool on_need(RailId rail, const FrameHeader& header);
  void answer(TimeNs now);
  [[nodiscard]] bool on_put(RailId rail, const FrameHeader& header, TimeNs now);
  [[nodiscard]] bool put_valid(RailId rail, const FrameHeader& header) const;
  void put_room(const RoomDue& due, FrameHeader& header);

  // posted_sends.cc
  void queue_put(Sends& sends, std::uint64_t number, TimeNs now);
  void queue_puts(TimeNs now);
  void ask(Sends& sends, std::uint64_t number, std::uint32_t attempt, TimeNs now);
  void ask_overdue(Sends& sends, TimeNs now);
  [[nodiscard]] bool has_better(RailId rail) const;
  [[nodiscard]] bool permission_ended(const Room& room) const;
  [[nodiscard]] bool under_way(const Send& send, const Room& room) const;
  [[nodiscard]] bool on_room(const FrameHeader& header, TimeNs now);
  [[nodiscard]] bool on_memory(RailId rail, const FrameHeader& header, TimeNs now);
  static void leave_queue(const NeedDue& due, RailId rail);
  [[nodiscard]] bool next_need(RailId rail, FrameHeader& header);
  [[nodiscard]] bool next_put(RailId rail, OutFrame& frame);
  [[nodiscard]] bool reads(const Attempt& attempt) const;

  void mark(RailId rail);  // tells the link how many frames are due on the rail
  [[nodiscard]] Receives* receives_of(ConnectionId connection) const;
  [[nodiscard]] Sends* sends_of(ConnectionId connection) const;

  Link& link_;
  std::vector<Rail> rails_;
  std::map<MemoryId, std::span<std::byte>> memory_;
  std::unordered_map<ConnectionId, std::unique_ptr<Receives>> receives_;
  std::unordered_map<ConnectionId, std::unique_ptr<Sends>> sends_;
  // Messages received on connections closed here: a lost last report is repeated.
  std::unordered_map<ConnectionId, std::uint64_t> closed_;
  std::deque<ConnectionId> closed_order_;  // oldest first
  std::vector<Question> questions_;
  std::vector<ConnectionId> orphans_;
  MemoryId last_memory_ = 0;
  RailId turn_ = 0;  // last rail chosen in place of a home rail
};

}  // namespace r2ccl
