// The stream multiplexer: byte streams to a peer process over one communicator of the link, each
// with its own flow control.  StreamMux is sans-IO like the link: the owner passes bytes in and
// takes events out.  Not thread-safe.
//
// The rules:
// - A record never overtakes an earlier record of its stream.
// - A sender has credit for `window` bytes of each stream.  A reader that stops holds up its own
//   stream only.
// - Streams take turns.  Few bytes of bulk streams are in the link at a time, so that a small
//   record does not wait behind them.
// - Small records go to every rail at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "link/link.hpp"
#include "streams/byte_queue.hpp"
#include "streams/record.hpp"

namespace r2ccl {

using StreamId = std::uint32_t;

struct StreamEvent {
  enum class Kind : std::uint8_t {
    opened,     // the peer opened the stream, to our listener at `port`
    readable,   // bytes of the stream wait; see read()
    finished,   // no further bytes follow those that wait
    reset,      // the peer has ended the stream, which is gone
    writable,   // write() accepts bytes again
    listens,    // a process of the peer's node listens at `port`
    unlistens,  // the peer's listener at `port` is gone
    no_mirror,  // the peer cannot mirror our listener at `port`
    sync,       // answer with synced() after all earlier events; `token`
    synced,     // the peer has handled all records before our sync(); `token`
  };
  Kind kind;
  StreamId stream = 0;
  std::uint16_t port = 0;
  std::uint32_t token = 0;
};

class StreamMux {
 public:
  struct Options {
    bool even = false;  // own streams have even ids; the peer's have odd ids
    std::uint32_t window = stream_window_bytes;
    std::uint32_t queue_bytes = 256U << 10;  // bytes of a stream queued here, not in the link
    std::uint32_t bulk_bytes = 256U << 10;   // bytes of bulk records in the link; at least a record
    std::uint32_t copied_bytes = 16U << 10;  // largest record that goes to every rail
    std::size_t most_streams = most_open_streams;
  };

  explicit StreamMux(const Options& options) : options_(options), next_id_(options.even ? 2 : 1) {}

  // ---- the owner's streams ----
  // Opens a stream to the peer's listener at `port`.
  StreamId open(std::uint16_t port);
  // Queues bytes and returns their number, at most `bytes.size()`.  An event `writable` follows
  // once the queue of the stream is full no more.
  std::size_t write(StreamId stream, std::span<const std::byte> bytes);
  // Returns the number of bytes that write() accepts now.
  [[nodiscard]] std::size_t room(StreamId stream) const;
  void finish(StreamId stream);  // no further bytes follow
  void reset(StreamId stream);   // ends the stream at once; no event follows
  // Returns the bytes of the stream that wait, valid until the next call.  consumed() removes bytes
  // from the front and grants the peer new credit.
  [[nodiscard]] std::span<const std::byte> read(StreamId stream) const;
  void consumed(StreamId stream, std::size_t bytes);
  // finished(): no further bytes follow those that wait.  at_end(): all bytes are consumed, too.
  [[nodiscard]] bool finished(StreamId stream) const;
  [[nodiscard]] bool at_end(StreamId stream) const;
  [[nodiscard]] bool has(StreamId stream) const { return streams_.contains(stream); }
  [[nodiscard]] std::size_t stream_count() const { return streams_.size(); }

  // ---- listeners ----
  void listens(std::uint16_t port) { queue({RecordType::listens, 0, port, 0, 0, 0}); }
  void unlistens(std::uint16_t port) { queue({RecordType::unlistens, 0, port, 0, 0, 0}); }
  void no_mirror(std::uint16_t port) { queue({RecordType::no_mirror, 0, port, 0, 0, 0}); }
  void sync(std::uint32_t token);
  void synced(std::uint32_t token) { queue({RecordType::synced, 0, 0, 0, token, 0}); }

  // Returns true while many control records wait: the owner should open no further streams.
  [[nodiscard]] bool congested() const { return control_.size() >= most_control_records; }
  [[nodiscard]] std::vector<StreamEvent> take_events() { return std::exchange(events_, {}); }
  [[nodiscard]] bool has_events() const { return !events_.empty(); }

  // ---- records ----
  // Posts records to the link while it has room.  Returns true if a record was posted.
  bool pump(Link& link, TimeNs now);
  // Takes records from the link.  Returns false after a violation of the protocol; see violation().
  [[nodiscard]] bool take(Link& link, TimeNs now);
  // Returns why the peer counts as lost after `timeout` without a rail, without a frame (ten
  // timeouts), or without a slot.  Empty: the peer is there.
  [[nodiscard]] std::string_view why_lost(const Link& link, TimeNs now, TimeNs timeout) const;
  // Returns true if a record waits for the link.
  [[nodiscard]] bool has_records() const { return !control_.empty() || !turns_.empty(); }
  // Returns true if bytes of a stream wait, for the link or for credit of the peer.
  [[nodiscard]] bool has_bytes() const;
  // Handles a record of the peer; take() calls on_record().  `replayed`: for planted bugs.
  [[nodiscard]] bool on_record(std::span<const std::byte> record, bool replayed = false);
  // Stores the next record in `room`, at least as large as a header and a byte, and returns its
  // size.  0: none.  `bulk`: records above copied_bytes are allowed.
  [[nodiscard]] std::size_t next_record(std::span<std::byte> room, bool bulk);
  // Returns the first violation of the protocol by the peer; empty: none.
  [[nodiscard]] const std::string& violation() const { return violation_; }

 private:
  struct Stream {
    ByteQueue out;
    ByteQueue in;
    std::uint64_t credit = 0;   // bytes that may be sent
    std::uint64_t granted = 0;  // bytes that the peer may send
    std::uint64_t eaten = 0;    // consumed bytes not granted again yet
    bool queued = false;        // in turns_
    bool fin_due = false;       // finish() was called
    bool fin_sent = false;
    bool fin_received = false;
    bool full = false;  // write() was refused
  };

  void queue(const RecordHeader& record) { control_.push_back(record); }
  Stream& add(StreamId id);
  void take_turn(StreamId id, Stream& stream);
  [[nodiscard]] bool has_turn(const Stream& stream) const;
  void drop_if_over(StreamId id);
  [[nodiscard]] bool violate(const std::string& text);
  [[nodiscard]] bool on_stream_record(const RecordHeader& header,
                                      std::span<const std::byte> payload, bool replayed);
  [[nodiscard]] bool on_open(const RecordHeader& header);
  [[nodiscard]] bool is_own(StreamId id) const { return id % 2 == (options_.even ? 0U : 1U); }
  [[nodiscard]] bool known(StreamId id) const;

  const Options options_;
  StreamId next_id_;
  StreamId last_of_peer_ = 0;  // highest id that the peer has opened
  StreamId closed_ = 0;        // last own stream that ended
  std::unordered_map<StreamId, Stream> streams_;
  std::deque<RecordHeader> control_;  // records without payload, sent before data
  std::deque<StreamId> turns_;        // streams with bytes and credit, or a FIN to send
  std::deque<std::pair<std::uint64_t, std::uint32_t>> bulk_;  // bulk messages in the link, bytes
  std::uint64_t bulk_bytes_ = 0;                              // sum of bulk_
  TimeNs without_slot_since_ = 0;  // all free slots are in quarantine; 0: not so
  std::vector<StreamEvent> events_;
  std::vector<std::byte> scratch_;
  std::string violation_;
};

}  // namespace r2ccl
