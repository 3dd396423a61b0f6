// The proxy: the host thread that carries out collectives posted into a mailbox by kernels.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "base/errors.hpp"
#include "device/server.hpp"

namespace r2ccl::device {

struct ProxyOptions {
  // The proxy polls without a pause for `spin` after the last collective, then in short bursts
  // `interval` apart.  A kernel cannot wake a thread, so the proxy must poll.
  std::chrono::microseconds spin{2000};
  std::chrono::microseconds interval{50};
  // Called every `watch_interval` while nothing is posted; an error ends the proxy.  May be empty.
  std::function<Status()> watch;
  std::chrono::microseconds watch_interval{10'000};
  // Called with the error after an exception has ended the proxy: other ranks wait for collectives
  // that this proxy does not carry out.  If the call throws, it is repeated every `watch_interval`.
  // May be empty.
  std::function<void(const Status&)> on_exception;
};

// Serves a single mailbox.  A thread for several mailboxes could serve them in orders that differ
// between ranks, and the ranks would wait for each other.
class Proxy {
 public:
  using Carry = Server::Carry;
  using Flush = Server::Flush;

  Proxy(Mailbox& mailbox, Carry carry, Flush flush, const ProxyOptions& options);
  // Starts the thread.  Returns an error if the system cannot create a thread.
  Status start();
  // Waits for the collective in progress, ends the thread, and sets the abort word, so that waiting
  // kernels end.
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // Announces a collective: the proxy polls without a pause again.
  void wake();
  // Returns the error that has ended the proxy; ok before.  Callers check failure() before they
  // pass results on.  Thread-safe, like wake().
  [[nodiscard]] Status failure() const;

 private:
  void run();
  bool await_post();  // false: the proxy must end, or has ended
  void give_up(Status why);
  void give_up_after(const std::exception& error);
  void tell_other_ranks();

  Server server_;
  const ProxyOptions options_;

  mutable std::mutex mutex_;  // protects the members below
  std::condition_variable changed_;
  bool closing_ = false;
  bool woken_ = false;
  Status failure_;
  Status out_of_memory_{ErrorCode::internal, "exception in the proxy: out of memory"};

  std::thread thread_;
};

}  // namespace r2ccl::device
