#include "device/proxy.hpp"

#include <string>
#include <utility>

namespace r2ccl::device {
namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned looks_per_clock = 64;  // reading the clock costs as much as some looks

}  // namespace

Proxy::Proxy(Mailbox& mailbox, Carry carry, Flush flush, const ProxyOptions& options)
    : mailbox_(mailbox),
      carry_(std::move(carry)),
      flush_(std::move(flush)),
      options_(options),
      thread_([this] { run(); }) {}

Proxy::~Proxy() {
  {
    const std::lock_guard guard(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
  give_up({ErrorCode::peer_closed, "the proxy of this mailbox has been closed"});
}

void Proxy::wake() {
  {
    const std::lock_guard guard(mutex_);
    woken_ = true;
  }
  changed_.notify_all();
}

Status Proxy::failure() const {
  const std::lock_guard guard(mutex_);
  return failure_.ok() ? Status() : Status(failure_.code(), failure_.message());
}

void Proxy::run() {
  for (Sequence next = load_acquire(mailbox_.arrived) + 1; await_post(next); ++next) {
    Status status = carry_out(next);
    if (!status.ok()) return give_up(std::move(status));
    store_release(mailbox_.arrived, next);
  }
}

bool Proxy::await_post(Sequence next) {
  auto began = Clock::now();
  for (unsigned look = 0;; ++look) {
    if (reached(load_acquire(mailbox_.posted), next)) return true;
    pause_briefly();
    if (look % looks_per_clock != 0) continue;
    std::unique_lock lock(mutex_);
    if (std::exchange(woken_, false)) began = Clock::now();
    if (Clock::now() - began >= options_.spin)
      changed_.wait_for(lock, options_.interval, [this] { return closing_ || woken_; });
    if (closing_) return false;
  }
}

Status Proxy::carry_out(Sequence sequence) {
  const Command command = mailbox_.commands[sequence % ring];
  if (command.sequence != sequence)
    return {ErrorCode::internal, "collective " + std::to_string(sequence) +
                                     " was posted, but its command is that of " +
                                     std::to_string(command.sequence)};
  R2CCL_TRY(carry_(command.plan, sequence));
  return flush_ ? flush_() : Status();
}

void Proxy::give_up(Status why) {
  const std::lock_guard guard(mutex_);
  if (!failure_.ok()) return;
  store_release(mailbox_.abort, static_cast<std::uint32_t>(why.code()));
  failure_ = std::move(why);
}

}  // namespace r2ccl::device
