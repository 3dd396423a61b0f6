// The host's side of a mailbox: what kernels post is carried out, one after another, and published.
// Without a thread of its own; the proxy has one, and the simulator a fiber.
#pragma once

#include <cstdint>
#include <functional>

#include "base/errors.hpp"
#include "device/mailbox.hpp"

namespace r2ccl::device {

class Server {
 public:
  // Carries out one collective on the staging entry of that number; returns when the result lies
  // there and nothing reads the input any more.
  using Carry = std::function<Status(std::uint32_t plan, Sequence sequence)>;
  // Makes what NICs wrote visible to kernels; may be empty where the platform orders it.
  using Flush = std::function<Status()>;

  Server(Mailbox& mailbox, Carry carry, Flush flush);

  // Whether a collective has been posted that is not carried out.
  [[nodiscard]] bool due() const { return reached(load_acquire(mailbox_.posted), next_); }
  // The next one, which is due.  After an error nothing more is served.
  Status serve();
  // Kernels that wait end, now and from now on.  Why has to be known to whoever asks before.
  void give_up(ErrorCode why);

 private:
  Mailbox& mailbox_;
  const Carry carry_;
  const Flush flush_;
  Sequence next_;
};

}  // namespace r2ccl::device
