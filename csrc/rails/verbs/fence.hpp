// The fence of a queue pair, on a thread of its own, since a device may take its time.
#pragma once

#include <atomic>
#include <memory>

#include "drivers/verbs.hpp"

namespace r2ccl {

// Into the error state, everything flushed, destroyed: then nothing that the queue pair was asked
// for, by us or by the peer, touches memory any more.  done(): it has come to that.  A device that
// never answers keeps the thread, and the rail is never done.
class VerbsFence {
 public:
  static std::shared_ptr<VerbsFence> begin(std::unique_ptr<VerbsQueuePair> pair);
  [[nodiscard]] bool done() const { return done_.load(std::memory_order_acquire); }

 private:
  std::atomic<bool> done_{false};
};

}  // namespace r2ccl
