// The frame: what a rail carries.  A fixed header, then `payload_bytes` of payload.
// Fields are little-endian; r2ccl runs on little-endian hosts only (checked at compile time).
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/types.hpp"

namespace r2ccl {

static_assert(std::endian::native == std::endian::little, "r2ccl needs a little-endian host");

enum class FrameType : std::uint8_t {
  data = 1,     // one chunk of a message
  ack,          // cumulative delivery ack and credit of one stream
  ack_request,  // the sender misses an ack: repeat it
  ping,         // probe; a full-size payload while on probation
  pong,
  rail_down,  // number = rail, epoch: the sender of this frame gave the rail up; flags: what it
              // knows of its own port (PortEvidence)
  fenced,     // number = rail, epoch: nothing of that epoch can be written any more
  abort,      // a communicator met a fatal verdict; the payload is its text
  close,      // orderly close of the process
  address,    // number = rail, epoch = sequence, Endpoint: where the accepting end now listens
  slots,      // number = address, epoch = key: where this rail may write a communicator's messages
  released,   // nothing that was written over this rail into a communicator's slots is under way
  target,     // number = message, delivered = address, credit = bytes, epoch = key: memory of a
              // caller, where this rail may put that message and those after it
};

namespace frame_flag {
inline constexpr std::uint8_t replay = 1;     // not the chunk's first attempt
inline constexpr std::uint8_t ack_now = 2;    // the sender waits for this message's delivery ack
inline constexpr std::uint8_t in_target = 4;  // the chunk was put into the target, not the slot
}  // namespace frame_flag

struct FrameHeader {
  std::uint32_t magic;
  FrameType type;
  std::uint8_t flags;
  std::uint16_t slot;           // data: the receiver's slot; address: port
  std::uint32_t payload_bytes;  // bytes that follow the header
  std::uint32_t offset;         // data: the chunk's first byte within the message; address: 4 or 6
  std::uint32_t message_bytes;  // data: size of the whole message
  // rail_down, fenced: theirs; abort: error code; address: sequence; slots, target: key; data, of a
  // replay: 1 + the rail by which the first attempt went to the target, 0: it did not
  std::uint32_t epoch;
  std::uint64_t communicator;  // data, ack, ack_request, abort
  std::uint64_t number;  // data, target: message; ping, pong: probe; slots: address; else: rail
  // address: its 16 bytes are those of the next two fields; target: its memory
  std::uint64_t delivered;    // data, ack: messages of the reverse stream that arrived in full
  std::uint64_t credit;       // data, ack: messages of the reverse stream that were consumed
  CallTag tag;                // data
  std::uint32_t payload_crc;  // data: CRC32C of the payload, where checksums are on; else 0
  std::uint32_t crc;          // CRC32C of all bytes before it
};
static_assert(sizeof(FrameHeader) == 80);

// Peers must agree on what frames there are and mean, so it is part of their fingerprint.
inline constexpr std::uint32_t frame_version = 5;
inline constexpr std::uint32_t frame_magic = 0x31463252;  // "R2F1"
// Room for the text of an ABORT and for a full-size probe.
inline constexpr std::uint32_t max_abort_bytes = 480;
inline constexpr std::uint32_t max_probe_bytes = 16384;
// Rails of one-sided writes carry so much payload together with its header, and no larger probe.
inline constexpr std::uint32_t max_eager_bytes = 4096;

// CRC32C (Castagnoli, RFC 3720 appendix B.4), by the SSE4.2 instruction where there is one.
[[nodiscard]] std::uint32_t crc32c(const void* data, std::size_t bytes);

// A numeric address and port.  In the header itself, so that its checksum covers them and a frame
// that waits somewhere cannot change.
struct Endpoint {
  std::uint8_t version = 0;             // of IP: 4 or 6
  std::uint16_t port = 0;               // never 0 in a frame
  std::array<std::byte, 16> address{};  // network order; IPv4: the first four, and zeros

  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};
void put(const Endpoint& endpoint, FrameHeader& header);
[[nodiscard]] std::optional<Endpoint> endpoint_of(const FrameHeader& header);  // empty: not valid

void seal(FrameHeader& header);                          // sets magic and crc
[[nodiscard]] bool intact(const FrameHeader& header);    // magic and crc are right
[[nodiscard]] std::string_view name_of(FrameType type);  // also for unknown values

}  // namespace r2ccl
