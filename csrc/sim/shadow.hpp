// What the world knows about messages and checks against what the links do with them: every attempt
// of a chunk carries the same bytes, what is received is what was sent, and a message does not
// change while it is read.  A slot written for another message shows in one of these.
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
  struct Stream {
    int from = 0;
    int to = 0;
    std::uint64_t communicator = 0;
    friend auto operator<=>(const Stream&, const Stream&) = default;
  };

  void chunk_sent(const Stream& stream, const FrameHeader& header, const std::byte* payload);
  void message_read(const Stream& stream, std::uint64_t number, std::span<const std::byte> view);
  // At the end of reading.  What lies far behind is forgotten.
  void message_released(const Stream& stream, std::uint64_t number,
                        std::span<const std::byte> view);
  void report(std::string violation);

  // Empty: all is well.
  [[nodiscard]] const std::vector<std::string>& violations() const { return violations_; }

 private:
  struct Message {
    std::vector<std::byte> bytes;
    std::set<std::uint32_t> chunks;  // that were sent, by their offset
  };

  void compare(const std::string& invariant, const char* how, const Stream& stream,
               std::uint64_t number, std::span<const std::byte> view);

  std::map<Stream, std::map<std::uint64_t, Message>> streams_;
  std::map<Stream, std::uint64_t> next_;  // to be consumed
  std::vector<std::string> violations_;
};

}  // namespace r2ccl::sim
