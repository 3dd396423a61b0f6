// The thread of the host that carries out what kernels post into a mailbox.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "base/errors.hpp"
#include "device/server.hpp"

namespace r2ccl::device {

struct ProxyOptions {
  // Looks at the mailbox all the time for so long after the last collective, then at intervals:
  // a kernel cannot wake a thread.
  std::chrono::microseconds spin{2000};
  std::chrono::microseconds interval{50};
  // Asked now and then while nothing is posted; what it fails with ends the proxy.  May be empty.
  std::function<Status()> watch;
  std::chrono::microseconds watch_interval{10'000};
};

// One mailbox's; several would wait for each other in orders that differ from rank to rank.
class Proxy {
 public:
  using Carry = Server::Carry;
  using Flush = Server::Flush;

  Proxy(Mailbox& mailbox, Carry carry, Flush flush, const ProxyOptions& options);
  // Ends when the collective that is being carried out has ended.  Kernels that wait are let go.
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // A collective will be posted soon: look without a pause again.
  void wake();
  // Why no more results come; ok while they do.  To be asked before results are given to anybody.
  [[nodiscard]] Status failure() const;

 private:
  void run();
  bool await_post();  // false: the proxy is to end, or has
  void give_up(Status why);

  Server server_;
  const ProxyOptions options_;

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  bool closing_ = false;
  bool woken_ = false;
  Status failure_;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace r2ccl::device
