// The frame: the unit of the wire protocol, a fixed header and `payload_bytes` of payload.  Fields
// are little-endian; r2ccl supports little-endian hosts only (checked at compile time).
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/limits.hpp"
#include "base/types.hpp"

namespace r2ccl {

static_assert(std::endian::native == std::endian::little, "r2ccl needs a little-endian host");

enum class FrameType : std::uint8_t {
  data = 1,     // a chunk of a message
  ack,          // cumulative delivery ack and credit of a stream
  ack_request,  // an ack is overdue: the receiver must read all its rails and repeat the ack
  ping,         // probe; full-size payload on probation
  pong,         // answer to a ping
  rail_down,    // the sender took a rail (number) down in `epoch`; flags: PortEvidence of its
                // port, and whether a fault is injected there
  fenced,       // no write of a rail (number) in epochs up to `epoch` can land any more; flags:
                // PortEvidence of the receiver's port, as the receiver has reported it
  abort,        // a communicator failed; the payload is the error text
  close,        // graceful close of the process
  address,      // new listen address (Endpoint) of the accepting end of a rail (number)
  slots,        // slot memory of a communicator, for RDMA writes
  released,     // no RDMA write of this rail to a communicator's slots is in flight any more
  target,       // memory of a caller: destination of messages from `number` on
  drill,        // a drill at the sender's end of a rail (number) begins or ends; slot: kind;
                // delivered: time left in ns, 0: the end
  drill_ack,    // the sender knows all announcements of the rail (number) up to `epoch`
  // Posted receives; only with LinkOptions::posted, otherwise a violation of the protocol.
  room,    // permission for an attempt of a message, and deliveries; see Room
  need,    // question about message `number`; offset: last try known; slot: rail wanted, or any
  memory,  // memory of a caller; `delivered`: address; `credit`: bytes (0: withdrawn)
  put,     // payload of message `number`, within the try `epoch`
};
inline constexpr auto last_frame_type = FrameType::put;

namespace frame_flag {
inline constexpr std::uint8_t replay = 1;      // a repeated attempt of the chunk
inline constexpr std::uint8_t ack_now = 2;     // request an immediate delivery ack
inline constexpr std::uint8_t in_target = 4;   // the chunk is in the target, not in the slot
inline constexpr std::uint8_t waits = 8;       // ack_request: the sender waits; see StreamWait
inline constexpr std::uint8_t for_room = 16;   // with `waits`: see StreamWait::for_room
inline constexpr std::uint8_t injected = 128;  // rail_down: a test or drill caused the fault
}  // namespace frame_flag

struct FrameHeader {
  std::uint32_t magic;
  FrameType type;
  std::uint8_t flags;
  std::uint16_t slot;           // data: the receiver's slot; address: port
  std::uint32_t payload_bytes;  // bytes after the header
  std::uint32_t offset;         // data, put: first byte within the message; address: IP version
  std::uint32_t message_bytes;  // data, put: size of the whole message
  // rail_down, fenced, room: epoch; put: try; abort: ErrorCode; address, drill, drill_ack:
  // sequence; slots, target, memory: RDMA key, set by the rail.  A data replay: 1 + the rail of the
  // first attempt if that attempt went to the target, else 0.
  std::uint32_t epoch;
  // data, ack, ack_request, abort, slots, released, target; room, need, put: connection
  std::uint64_t communicator;
  // data: message; target: first message; ping, pong: send time of the ping in ns; ack_request:
  // time of the request in ns; ack: time of the last answered request; slots: memory address;
  // memory: id; rail_down, fenced, address, drill, drill_ack: rail.
  std::uint64_t number;
  // `delivered` and `credit` of other frames.  address: the 16 address bytes; target: memory
  // address and size in bytes (0: no target).
  std::uint64_t delivered;    // data, ack: complete messages of the reverse stream
  std::uint64_t credit;       // data, ack: consumed messages of the reverse stream
  CallTag tag;                // data; ack_request of a rank that waits: its call
  std::uint32_t payload_crc;  // data, put: CRC32C of the payload; checksums off: 0
  std::uint32_t crc;          // CRC32C of all preceding bytes
};
static_assert(sizeof(FrameHeader) == 96);

// Version of the frame format, the wire number.  Every handshake message carries the version.
inline constexpr std::uint32_t frame_version = 7;
inline constexpr std::uint32_t frame_magic = 0x31463252;  // "R2F1"
// Reserved: communicator of a process's streams to a peer.  No other communicator has this id.
inline constexpr std::uint64_t streams_communicator = ~std::uint64_t{0};

// Returns the CRC32C (Castagnoli, RFC 3720 appendix B.4); uses SSE4.2 where available.
[[nodiscard]] std::uint32_t crc32c(const void* data, std::size_t bytes);

// A numeric IP address and port.  The header holds both fields, so the header CRC covers the
// address, and a queued frame cannot change.
struct Endpoint {
  std::uint8_t version = 0;             // IP version: 4 or 6
  std::uint16_t port = 0;               // never 0 in a frame
  std::array<std::byte, 16> address{};  // network order; IPv4: 4 bytes, then zeros

  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};
// put() stores an endpoint in the header of an `address` frame; endpoint_of() reads the endpoint.
void put(const Endpoint& endpoint, FrameHeader& header);
[[nodiscard]] std::optional<Endpoint> endpoint_of(const FrameHeader& header);  // empty: invalid

// Content of a `room` frame.  The header CRC covers the content.
struct Room {
  std::uint64_t number = 0;     // message
  std::uint32_t attempt = 0;    // try, from 1; 0: no permission, only `delivered`
  std::uint16_t rail = 0;       // the only rail of the attempt, in the only epoch
  std::uint32_t epoch = 0;      // of the rail
  std::uint32_t memory = 0;     // id of the receiver's memory
  std::uint64_t offset = 0;     // first byte within the memory
  std::uint32_t bytes = 0;      // size of the receive
  std::uint64_t delivered = 0;  // number of messages received in order

  friend bool operator==(const Room&, const Room&) = default;
};
void put(const Room& room, FrameHeader& header);
[[nodiscard]] Room room_of(const FrameHeader& header);

// Part of an `ack_request` with frame_flag::waits: the sender waits for the receiver's next
// message, or for room in the receiver's slots.
struct StreamWait {
  CallTag tag;  // call of the sender
  // Messages of the receiver that the sender has consumed.  for_room: messages of the sender that
  // the receiver has consumed, as the sender knows by its credit.
  std::uint64_t consumed = 0;
  std::uint32_t chain = 1;  // waits in a row: the sender's, and those of ranks that wait for it
  bool for_room = false;

  friend bool operator==(const StreamWait&, const StreamWait&) = default;
};
void put(const StreamWait& wait, FrameHeader& header);
[[nodiscard]] std::optional<StreamWait> wait_of(const FrameHeader& header);  // empty: not told

void seal(FrameHeader& header);                          // sets magic and crc
[[nodiscard]] bool intact(const FrameHeader& header);    // magic and crc match
[[nodiscard]] std::string_view name_of(FrameType type);  // also for unknown values

}  // namespace r2ccl
