// A record of all messages, to check three rules.  Every attempt of a chunk carries the same bytes;
// a receiver gets the bytes sent; and a message does not change while it is read.  A slot
// overwritten for another message violates one of these rules.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "link/frame.hpp"

namespace r2ccl::sim {

class Shadow {
 public:
  // `first`: number of each stream's first message.
  explicit Shadow(std::uint64_t first = 0) : first_(first) {}
  struct Stream {
    int from = 0;
    int to = 0;
    std::uint64_t communicator = 0;
    friend auto operator<=>(const Stream&, const Stream&) = default;
  };

  void chunk_sent(const Stream& stream, const FrameHeader& header, const std::byte* payload);
  void message_read(const Stream& stream, std::uint64_t number, std::span<const std::byte> view);
  // Called at the end of reading.  Records of much older messages are dropped.
  void message_released(const Stream& stream, std::uint64_t number,
                        std::span<const std::byte> view);
  void report(std::string violation);

  // Empty if no check has failed.
  [[nodiscard]] const std::vector<std::string>& violations() const { return violations_; }

 private:
  struct Message {
    std::vector<std::byte> bytes;
    std::set<std::uint32_t> chunks;  // offsets of the chunks sent
  };

  void compare(const std::string& invariant, const char* how, const Stream& stream,
               std::uint64_t number, std::span<const std::byte> view);

  std::map<Stream, std::map<std::uint64_t, Message>> streams_;
  const std::uint64_t first_;
  std::map<Stream, std::uint64_t> next_;  // next message to consume
  std::vector<std::string> violations_;
};

}  // namespace r2ccl::sim
