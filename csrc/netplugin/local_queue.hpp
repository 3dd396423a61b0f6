// A connection between two ranks of a process: each message is a copy, made by the sending thread.
//
// No call waits: a call that meets another thread in the queue returns without a result, and is to
// be repeated.  Each end is used by a single thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "base/errors.hpp"
#include "link/posted.hpp"

namespace r2ccl::net {

class LocalQueue {
 public:
  // Sends a message and returns its number, counted from 0.  Empty: call again.  invalid_argument:
  // the message is larger than its receive.
  Result<std::optional<std::uint64_t>> send(std::span<const std::byte> source);
  // Finishes a send.  The source is free since send().  Returns false to be called again.
  bool finish_send();

  // Posts the receive of the next message and returns its number.  Empty: call again.
  Result<std::optional<std::uint64_t>> receive(std::span<std::byte> into);
  // Finishes a receive: returns the size of the message once the message is there.
  Result<std::optional<std::uint32_t>> received(std::uint64_t number);
  // Returns true if a receive that waits for its message uses the memory.
  [[nodiscard]] bool uses(std::span<const std::byte> memory);

  // Ends the connection.  Afterwards no call writes to the memory of receives.
  void close();

 private:
  struct Slot {
    std::span<std::byte> into;
    std::uint32_t bytes = 0;
    bool taken = false;
  };
  [[nodiscard]] Status failure() const;
  [[nodiscard]] Slot& slot(std::uint64_t number) { return slots_[number % slots_.size()]; }

  std::mutex mutex_;  // protects all below
  std::array<Slot, most_posted> slots_{};
  std::uint64_t first_ = 0;   // oldest receive not finished
  std::uint64_t posted_ = 0;  // number of receives posted
  std::uint64_t copied_ = 0;  // number of messages sent
  std::uint64_t sends_unfinished_ = 0;
  bool closed_ = false;
  std::string too_large_;  // error of a message that does not fit; empty: none
};

}  // namespace r2ccl::net
