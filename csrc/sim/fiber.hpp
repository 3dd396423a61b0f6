// A fiber: code with a stack of its own that runs until it yields.  Ranks of the simulated world
// are fibers, so that collectives wait in the middle of a call, on one thread, in a fixed order.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <functional>

namespace r2ccl::sim {

class Fiber {
 public:
  explicit Fiber(std::function<void()> body);
  // The body has returned, or never began: a suspended one would leave what is on its stack behind.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs the body until it yields or returns.  Not from inside a fiber.
  void resume();
  // Back to where resume() was called.  From inside the body.
  void yield();

  [[nodiscard]] bool done() const { return done_; }

 private:
  static void enter();
  void run();
  void leave(bool for_good);

  static thread_local Fiber* beginning_;
  std::function<void()> body_;
  std::byte* memory_ = nullptr;  // a guard page, then the stack
  ucontext_t own_{};
  ucontext_t caller_{};
  bool started_ = false;
  bool done_ = false;

  // For the sanitizers, which follow stacks; unused without them.
  [[maybe_unused]] void* own_fake_stack_ = nullptr;
  [[maybe_unused]] void* caller_fake_stack_ = nullptr;
  [[maybe_unused]] const void* caller_stack_ = nullptr;
  [[maybe_unused]] std::size_t caller_stack_bytes_ = 0;
  [[maybe_unused]] void* own_shadow_ = nullptr;
  [[maybe_unused]] void* caller_shadow_ = nullptr;
};

}  // namespace r2ccl::sim
