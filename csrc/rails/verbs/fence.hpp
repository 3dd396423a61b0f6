// The fence of a queue pair.  It runs on a detached thread, since a device may be slow.
#pragma once

#include <atomic>
#include <memory>

#include "drivers/verbs.hpp"

namespace r2ccl {

// Moves the queue pair into the error state, flushes it and destroys it.  Afterwards no request of
// either end touches memory through the queue pair.  A device that never answers blocks the thread,
// and done() stays false; VerbsSession then waits for the device's withdrawal from all memory.
class VerbsFence {
 public:
  // Starts the fence.  If the system cannot create a thread, done() tries again.
  static std::shared_ptr<VerbsFence> begin(std::unique_ptr<VerbsQueuePair> pair);
  // Returns true once the queue pair is destroyed.  Not thread-safe.
  [[nodiscard]] bool done();

 private:
  static bool start(const std::shared_ptr<VerbsFence>& fence);

  std::unique_ptr<VerbsQueuePair> pair_;  // owned by the thread once started
  std::weak_ptr<VerbsFence> self_;
  bool started_ = false;
  std::atomic<bool> done_{false};
};

}  // namespace r2ccl
