// Records: the messages of the communicator of streams.  A record is a fixed header, and for DATA
// the bytes of a stream.  Fields are little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "link/frame.hpp"

namespace r2ccl {

enum class RecordType : std::uint8_t {
  open = 1,   // a new stream to the receiver's listener at `port`
  data,       // bytes of a stream
  fin,        // the sender's bytes of a stream end here
  reset,      // the stream ends at once, in both directions
  credit,     // `value` further bytes of a stream may be sent
  listens,    // a process of the sender's node listens at `port`
  unlistens,  // the listener at `port` is gone
  no_mirror,  // answer to `listens`: `port` is taken on the sender's node
  sync,       // asks for `synced` once all earlier records have taken effect; `value`: a token
  synced,     // answer to `sync` with the same token
};

struct RecordHeader {
  RecordType type;
  std::uint8_t reserved;  // 0
  std::uint16_t port;
  std::uint32_t stream;
  std::uint32_t value;
  std::uint32_t payload_bytes;  // data: 1 or more; else 0
};
static_assert(sizeof(RecordHeader) == 16);

[[nodiscard]] constexpr std::string_view name_of(RecordType type) {
  switch (type) {
    case RecordType::open: return "open";
    case RecordType::data: return "data";
    case RecordType::fin: return "fin";
    case RecordType::reset: return "reset";
    case RecordType::credit: return "credit";
    case RecordType::listens: return "listens";
    case RecordType::unlistens: return "unlistens";
    case RecordType::no_mirror: return "no_mirror";
    case RecordType::sync: return "sync";
    case RecordType::synced: return "synced";
  }
  return "unknown";
}

}  // namespace r2ccl
