// A thread that runs work in order, like a stream of a GPU emulated on the host.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace r2ccl::testing {

class WorkQueue {
 public:
  using Work = std::function<void()>;

  WorkQueue() : thread_([this] { run(); }) {}
  // Runs all queued work before it ends the thread.
  ~WorkQueue() {
    {
      const std::lock_guard guard(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  void add(Work work) {
    {
      const std::lock_guard guard(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }
  [[nodiscard]] bool idle() {
    const std::lock_guard guard(mutex_);
    return queue_.empty() && !running_;
  }
  void synchronise() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !running_; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const Work work = std::move(queue_.front());
      queue_.pop_front();
      running_ = true;
      lock.unlock();
      work();
      lock.lock();
      running_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool running_ = false;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace r2ccl::testing
