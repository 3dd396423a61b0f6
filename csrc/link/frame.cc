#include "link/frame.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace r2ccl {
namespace {

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1U) != 0 ? 0x82F63B78U : 0U);
    table[i] = value;
  }
  return table;
}

std::uint32_t crc32c_portable(const unsigned char* data, std::size_t bytes) {
  static constexpr auto table = make_table();
  std::uint32_t crc = ~0U;
  for (std::size_t i = 0; i < bytes; ++i) crc = (crc >> 8) ^ table[(crc ^ data[i]) & 0xFFU];
  return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(const unsigned char* data,
                                                             std::size_t bytes) {
  std::uint64_t crc = 0xFFFFFFFFU;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, 8);
    crc = _mm_crc32_u64(crc, word);
  }
  auto narrow = static_cast<std::uint32_t>(crc);
  for (; bytes > 0; --bytes, ++data) narrow = _mm_crc32_u8(narrow, *data);
  return ~narrow;
}
#endif

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t bytes) {
  const auto* begin = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  static const bool has_sse42 = __builtin_cpu_supports("sse4.2") != 0;
  if (has_sse42) return crc32c_sse42(begin, bytes);
#endif
  return crc32c_portable(begin, bytes);
}

void put(const Endpoint& endpoint, FrameHeader& header) {
  header.offset = endpoint.version;
  header.slot = endpoint.port;
  std::memcpy(&header.delivered, endpoint.address.data(), 8);
  std::memcpy(&header.credit, endpoint.address.data() + 8, 8);
}

std::optional<Endpoint> endpoint_of(const FrameHeader& header) {
  if ((header.offset != 4 && header.offset != 6) || header.slot == 0) return std::nullopt;
  Endpoint endpoint{.version = static_cast<std::uint8_t>(header.offset), .port = header.slot};
  std::memcpy(endpoint.address.data(), &header.delivered, 8);
  std::memcpy(endpoint.address.data() + 8, &header.credit, 8);
  const bool rest = std::any_of(endpoint.address.begin() + 4, endpoint.address.end(),
                                [](std::byte byte) { return byte != std::byte{0}; });
  if (endpoint.version == 4 && rest) return std::nullopt;
  return endpoint;
}

void put(const Room& room, FrameHeader& header) {
  header.number = room.number;
  header.offset = room.attempt;
  header.slot = room.rail;
  header.epoch = room.epoch;
  header.tag.count = room.memory;
  header.credit = room.offset;
  header.message_bytes = room.bytes;
  header.delivered = room.delivered;
}

Room room_of(const FrameHeader& header) {
  return {.number = header.number,
          .attempt = header.offset,
          .rail = header.slot,
          .epoch = header.epoch,
          .memory = static_cast<std::uint32_t>(header.tag.count),
          .offset = header.credit,
          .bytes = header.message_bytes,
          .delivered = header.delivered};
}

void put(const StreamWait& wait, FrameHeader& header) {
  header.flags |= frame_flag::waits;
  if (wait.for_room) header.flags |= frame_flag::for_room;
  header.tag = wait.tag;
  header.credit = wait.consumed;
  header.offset = wait.chain;
}

std::optional<StreamWait> wait_of(const FrameHeader& header) {
  if ((header.flags & frame_flag::waits) == 0) return std::nullopt;
  return StreamWait{.tag = header.tag,
                    .consumed = header.credit,
                    .chain = header.offset,
                    .for_room = (header.flags & frame_flag::for_room) != 0};
}

void seal(FrameHeader& header) {
  header.magic = frame_magic;
  header.crc = crc32c(&header, offsetof(FrameHeader, crc));
}

bool intact(const FrameHeader& header) {
  return header.magic == frame_magic && header.crc == crc32c(&header, offsetof(FrameHeader, crc));
}

std::string_view name_of(FrameType type) {
  switch (type) {
    case FrameType::data: return "data";
    case FrameType::ack: return "ack";
    case FrameType::ack_request: return "ack_request";
    case FrameType::ping: return "ping";
    case FrameType::pong: return "pong";
    case FrameType::rail_down: return "rail_down";
    case FrameType::fenced: return "fenced";
    case FrameType::abort: return "abort";
    case FrameType::close: return "close";
    case FrameType::address: return "address";
    case FrameType::slots: return "slots";
    case FrameType::released: return "released";
    case FrameType::target: return "target";
    case FrameType::drill: return "drill";
    case FrameType::drill_ack: return "drill_ack";
    case FrameType::room: return "room";
    case FrameType::need: return "need";
    case FrameType::memory: return "memory";
    case FrameType::put: return "put";
  }
  return "unknown";
}

}  // namespace r2ccl
