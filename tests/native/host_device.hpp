// A device of the host's threads: streams that run in order beside everything else, and graphs of
// kernels that are captured once and replayed with the arguments of that time.
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

// The kernels of one mailbox.
struct HostDevice {
  device::Mailbox mailbox;
  device::DeviceState state;
  std::vector<std::byte> memory;
  device::Staging staging;
  std::uint32_t blocks = 1;   // of a launch
  std::uint32_t threads = 1;  // of a block

  HostDevice(std::size_t input_bytes, std::size_t result_bytes)
      : memory(device::ring * (input_bytes + result_bytes)),
        staging{memory.data(), input_bytes + result_bytes, input_bytes} {}
  HostDevice(const HostDevice&) = delete;
  HostDevice& operator=(const HostDevice&) = delete;

  // As if so many collectives had been there before.
  void begin_after(device::Sequence sequence) {
    state.sequence = mailbox.posted.value = mailbox.arrived.value = sequence;
  }

  // body(at, block, shared) in a thread for each of the device's.
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
