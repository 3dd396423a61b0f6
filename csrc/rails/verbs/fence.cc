#include "rails/verbs/fence.hpp"

#include <array>
#include <chrono>
#include <thread>
#include <utility>

#include "drivers/detached.hpp"
#include "rails/verbs/session.hpp"

namespace r2ccl {
namespace {

// Time limit for a queue pair to flush.  Destroying the queue pair fences it in any case.
constexpr std::chrono::seconds flush_time{1};
// Delay before destroying a queue pair is tried again.
constexpr std::chrono::milliseconds retry_time{100};

// Posts a marker to each queue and waits for both completions: all requests posted earlier are
// complete by then.
void drain(VerbsQueuePair& pair) {
  const VerbsWrite marker{
      .id = request_id(VerbsRequest::marker, 0), .source = {}, .immediate = {}, .signaled = true};
  int left = 0;
  if (pair.post({&marker, 1}) == 0) ++left;
  if (pair.post_receives(request_id(VerbsRequest::marker, 1), 1) == 0) ++left;
  const auto deadline = std::chrono::steady_clock::now() + flush_time;
  std::array<VerbsCompletion, 16> completions;
  while (left > 0 && std::chrono::steady_clock::now() < deadline) {
    const int got = pair.poll(completions);
    if (got < 0) return;
    for (std::size_t i = 0; i < static_cast<std::size_t>(got); ++i)
      if ((completions[i].id & 3U) == static_cast<std::uint64_t>(VerbsRequest::marker)) --left;
    if (got == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace

std::shared_ptr<VerbsFence> VerbsFence::begin(std::unique_ptr<VerbsQueuePair> pair) {
  auto fence = std::make_shared<VerbsFence>();
  fence->pair_ = std::move(pair);
  fence->self_ = fence;
  fence->started_ = start(fence);
  return fence;
}

bool VerbsFence::done() {
  if (!started_) started_ = start(self_.lock());
  return done_.load(std::memory_order_acquire);
}

bool VerbsFence::start(const std::shared_ptr<VerbsFence>& fence) {
  return run_detached("r2ccl-fence", [fence] {
    VerbsQueuePair& pair = *fence->pair_;
    if (pair.fail() == 0) drain(pair);
    while (pair.destroy() != 0) std::this_thread::sleep_for(retry_time);
    fence->pair_.reset();
    fence->done_.store(true, std::memory_order_release);
  });
}

}  // namespace r2ccl
