// The host's side of a mailbox: carries out posted collectives in order, and publishes their
// results.  The server has no thread: the proxy runs it on a thread, the simulator on a fiber.
#pragma once

#include <cstdint>
#include <functional>

#include "base/errors.hpp"
#include "device/mailbox.hpp"

namespace r2ccl::device {

class Server {
 public:
  // Carries out a collective on the staging entry of `sequence`.  Returns when the result is in the
  // entry and nothing reads the input any more.
  using Carry = std::function<Status(std::uint32_t plan, Sequence sequence)>;
  // Makes NIC writes visible to kernels; may be empty if the platform orders the writes.
  using Flush = std::function<Status()>;

  Server(Mailbox& mailbox, Carry carry, Flush flush);

  // Returns whether a posted collective has not been carried out.
  [[nodiscard]] bool due() const { return reached(load_acquire(mailbox_.posted), next_); }
  // Carries out the next collective; requires due().  After an error nothing more is served.
  Status serve();
  // Sets the sticky abort word: waiting and future kernels end.  Host code reads the reason once
  // its kernels have ended.  So the caller records the reason before this call, or under a lock
  // held during this call.
  void give_up(ErrorCode why);

 private:
  Mailbox& mailbox_;
  const Carry carry_;
  const Flush flush_;
  Sequence next_;
};

}  // namespace r2ccl::device
