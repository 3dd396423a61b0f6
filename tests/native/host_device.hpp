// A GPU emulated by host threads.  Streams run their kernels in order, concurrently with other
// threads.  A graph replays captured kernels with the arguments of the capture.
#pragma once

#include <barrier>
#include <cstdint>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "device/kernel_bodies.hpp"
#include "work_queue.hpp"

namespace r2ccl::testing {

using Kernel = WorkQueue::Work;
using Graph = std::vector<Kernel>;

class HostStream {
 public:
  void launch(Kernel kernel) { queue_.add(std::move(kernel)); }
  void replay(const Graph& graph) {
    for (const Kernel& kernel : graph) launch(kernel);
  }
  void synchronise() { queue_.synchronise(); }

 private:
  WorkQueue queue_;
};

struct ThreadBlock : device::SpinWait {
  std::barrier<>& barrier;
  void sync() const { barrier.arrive_and_wait(); }
};

// The kernels of a single mailbox.
struct HostDevice {
  device::Mailbox mailbox;
  device::DeviceState state;
  std::vector<std::byte> memory;
  device::Staging staging;
  std::uint32_t blocks = 1;   // per launch
  std::uint32_t threads = 1;  // per block

  HostDevice(std::size_t input_bytes, std::size_t result_bytes)
      : memory(device::ring * (input_bytes + result_bytes)),
        staging{memory.data(), input_bytes + result_bytes, input_bytes} {}
  HostDevice(const HostDevice&) = delete;
  HostDevice& operator=(const HostDevice&) = delete;

  // Starts as if `sequence` collectives had run before.
  void begin_after(device::Sequence sequence) {
    state.sequence = mailbox.posted.value = mailbox.arrived.value = sequence;
  }

  // Runs body(position, block, shared) in a host thread per device thread.
  template <typename Body>
  void launch(Body body) const {
    std::vector<device::Shared> shared(blocks);
    std::deque<std::barrier<>> barriers;
    for (std::uint32_t block = 0; block < blocks; ++block) barriers.emplace_back(threads);
    std::vector<std::thread> running;
    const auto thread_of = [&](std::uint32_t block, std::uint32_t thread) {
      body(device::ThreadPosition{block, blocks, thread, threads}, ThreadBlock{{}, barriers[block]},
           shared[block]);
    };
    for (std::uint32_t i = 1; i < blocks * threads; ++i)
      running.emplace_back(thread_of, i / threads, i % threads);
    thread_of(0, 0);
    for (std::thread& thread : running) thread.join();
  }

  [[nodiscard]] Kernel stage(const void* source, std::size_t bytes, std::uint32_t plan) {
    return [=, this] {
      launch(
          [&](const device::ThreadPosition& at, const ThreadBlock& block, device::Shared& shared) {
            device::stage(at, block, shared, mailbox, state, staging,
                          static_cast<const std::byte*>(source), {1, bytes, bytes, 0}, plan,
                          /*last=*/true);
          });
    };
  }
  [[nodiscard]] Kernel deliver(void* target, std::size_t bytes, std::size_t offset = 0) {
    return [=, this] {
      launch(
          [&](const device::ThreadPosition& at, const ThreadBlock& block, device::Shared& shared) {
            device::deliver(at, block, shared, mailbox, state, staging,
                            static_cast<std::byte*>(target), {1, bytes, bytes, offset}, /*lag=*/0);
          });
    };
  }
};

}  // namespace r2ccl::testing
