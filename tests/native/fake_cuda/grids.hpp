// Runs the grids of the fake driver: all blocks of a grid at the same time, with 2 threads per
// block and real barriers.
#pragma once

#include <unistd.h>

#include <barrier>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "device/kernel_bodies.hpp"

namespace fake_cuda {

using r2ccl::device::Shared;
using r2ccl::device::SpinWait;
using r2ccl::device::ThreadPosition;

// Threads for parts of kernels.  Kernels of different streams wait for each other, so a part never
// waits for a free thread: if all threads are busy, start() adds a thread.
class Processors {
 public:
  // Runs part(0) on the calling thread and the other parts concurrently.  Returns when all have
  // ended.
  void run(unsigned parts, const std::function<void(unsigned)>& part) {
    Grid grid{parts - 1, {}};
    for (unsigned other = 1; other < parts; ++other)
      start([this, &grid, &part, other] {
        part(other);
        const std::lock_guard guard(mutex_);
        if (--grid.running == 0) grid.ended.notify_all();
      });
    part(0);
    std::unique_lock lock(mutex_);
    grid.ended.wait(lock, [&] { return grid.running == 0; });
  }

 private:
  struct Grid {
    unsigned running;
    std::condition_variable ended;
  };

  void start(std::function<void()> work) {
    {
      const std::lock_guard guard(mutex_);
      waiting_.push_back(std::move(work));
      if (waiting_.size() > idle_) std::thread([this] { work_on(); }).detach();
    }
    changed_.notify_one();
  }
  void work_on() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      --idle_;
      const std::function<void()> work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  std::size_t idle_ = 0;  // threads
};

// The threads of the process; never destroyed, like the driver.  A forked child gets a new object,
// because threads do not survive fork().
inline Processors& processors() {
  static std::mutex mutex;
  static Processors* made = nullptr;
  static pid_t owner = 0;
  const std::lock_guard guard(mutex);
  if (owner != ::getpid()) {
    made = new Processors;
    owner = ::getpid();
  }
  return *made;
}

// Delays the start of blocks, like a GPU without room for more blocks.  A test sets the first block
// that must wait.
class HeldBlocks {
 public:
  void hold_from(unsigned first) {
    const std::lock_guard guard(mutex_);
    first_ = first;
    changed_.notify_all();
  }
  void wait_for_leave(unsigned block) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return block < first_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  unsigned first_ = ~0U;  // first block not allowed to begin
};

inline HeldBlocks& held_blocks() {
  static auto* made = new HeldBlocks;
  return *made;
}

struct ThreadBlock : SpinWait {
  explicit ThreadBlock(std::barrier<>* among) : barrier(among) {}
  void sync() const { barrier->arrive_and_wait(); }
  std::barrier<>* barrier;
};

// Threads per block, whatever the launch requests.  Bodies divide the work among the existing
// threads, and 2 threads are enough to expose a missing barrier.
constexpr unsigned threads_per_block = 2;

template <typename Body>
void run_grid(unsigned blocks, const Body& body) {
  struct Block {
    std::barrier<> barrier{threads_per_block};
    Shared shared{};
  };
  std::deque<Block> all(blocks);
  processors().run(blocks * threads_per_block, [&](unsigned part) {
    const unsigned block = part / threads_per_block;
    held_blocks().wait_for_leave(block);
    body(ThreadPosition{block, blocks, part % threads_per_block, threads_per_block},
         ThreadBlock(&all[block].barrier), all[block].shared);
  });
}

}  // namespace fake_cuda
