// A fiber: code with a private stack that runs until it yields.  Ranks of the simulated world are
// fibers, so collectives can wait inside a call, on a single thread, in a fixed order.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <functional>

namespace r2ccl::sim {

class Fiber {
 public:
  explicit Fiber(std::function<void()> body);
  // The body must have returned or never started: objects on the stack of a suspended fiber would
  // leak.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs the body until it yields or returns.  Must not be called from a fiber.
  void resume();
  // Returns control to the caller of resume().  Must be called from the body.
  void yield();

  [[nodiscard]] bool done() const { return done_; }

 private:
  static void enter();
  void run();
  void leave(bool for_good);

  std::function<void()> body_;
  std::byte* memory_ = nullptr;  // guard page, then the stack
  ucontext_t own_{};
  ucontext_t caller_{};
  bool started_ = false;
  bool done_ = false;

  // State for the sanitizers, which track stack switches; unused in other builds.
  [[maybe_unused]] void* own_fake_stack_ = nullptr;
  [[maybe_unused]] void* caller_fake_stack_ = nullptr;
  [[maybe_unused]] const void* caller_stack_ = nullptr;
  [[maybe_unused]] std::size_t caller_stack_bytes_ = 0;
  [[maybe_unused]] void* own_shadow_ = nullptr;
  [[maybe_unused]] void* caller_shadow_ = nullptr;
};

}  // namespace r2ccl::sim
