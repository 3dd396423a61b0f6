#include "device/proxy.hpp"

#include <exception>
#include <string>
#include <utility>

#include "base/threads.hpp"

namespace r2ccl::device {
namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned looks_per_clock = 64;  // reading the clock costs as much as several polls

}  // namespace

Proxy::Proxy(Mailbox& mailbox, Carry carry, Flush flush, const ProxyOptions& options)
    : server_(mailbox, std::move(carry), std::move(flush)), options_(options) {}

Status Proxy::start() {
  return start_thread(thread_, "r2ccl-proxy", "the proxy of a stream", [this] { run(); });
}

Proxy::~Proxy() {
  {
    const std::lock_guard guard(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
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
  try {
    while (await_post())
      if (Status status = server_.serve(); !status.ok()) return give_up(std::move(status));
  } catch (const std::exception& error) {
    give_up_after(error);
  }
}

// An exception out of the thread would end the process.  The spare error needs no memory.
void Proxy::give_up_after(const std::exception& error) {
  try {
    give_up({ErrorCode::internal, std::string("exception in the proxy: ") + error.what()});
  } catch (const std::exception&) {
    give_up(std::move(out_of_memory_));
  }
  if (options_.on_exception) tell_other_ranks();
}

// The notice needs memory.
void Proxy::tell_other_ranks() {
  for (;;) {
    try {
      return options_.on_exception(failure());
    } catch (const std::exception&) {
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, options_.watch_interval, [this] { return closing_; })) return;
    }
  }
}

bool Proxy::await_post() {
  auto began = Clock::now();
  auto watched = began;
  for (unsigned look = 0;; ++look) {
    if (server_.due()) return true;
    pause_briefly();
    if (look % looks_per_clock != 0) continue;
    const auto now = Clock::now();
    if (options_.watch && now - watched >= options_.watch_interval) {
      watched = now;
      if (Status status = options_.watch(); !status.ok()) {
        give_up(std::move(status));
        return false;
      }
    }
    std::unique_lock lock(mutex_);
    if (std::exchange(woken_, false)) began = now;
    if (now - began >= options_.spin)
      changed_.wait_for(lock, options_.interval, [this] { return closing_ || woken_; });
    if (closing_) return false;
  }
}

void Proxy::give_up(Status why) {
  const std::lock_guard guard(mutex_);
  if (!failure_.ok()) return;
  server_.give_up(why.code());
  failure_ = std::move(why);
}

}  // namespace r2ccl::device
