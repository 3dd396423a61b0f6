// The fence of a queue pair, on a thread of its own, since a device may take its time.
#pragma once

#include <atomic>
#include <memory>

#include "drivers/verbs.hpp"

namespace r2ccl {

// Into the error state, everything flushed, destroyed: then nothing that the queue pair was asked
// for, by us or by the peer, touches memory any more.  done(): it has come to that.  A device that
// never answers keeps the thread, and this is never done: VerbsSession has another way then.
class VerbsFence {
 public:
  static std::shared_ptr<VerbsFence> begin(std::unique_ptr<VerbsQueuePair> pair);
  // Not for concurrent use: without a thread it tries again to have one.
  [[nodiscard]] bool done();

 private:
  static bool start(const std::shared_ptr<VerbsFence>& fence);

  std::unique_ptr<VerbsQueuePair> pair_;  // of the thread's, once it runs
  std::weak_ptr<VerbsFence> self_;
  bool started_ = false;
  std::atomic<bool> done_{false};
};

}  // namespace r2ccl
