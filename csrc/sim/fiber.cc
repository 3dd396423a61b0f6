#include "sim/fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cassert>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define R2CCL_FIBER_ASAN
#endif
#if __has_feature(thread_sanitizer)
#define R2CCL_FIBER_TSAN
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define R2CCL_FIBER_ASAN
#endif
#if defined(__SANITIZE_THREAD__)
#define R2CCL_FIBER_TSAN
#endif

#if defined(R2CCL_FIBER_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(R2CCL_FIBER_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace r2ccl::sim {
namespace {

constexpr std::size_t stack_bytes = 256U << 10;

// The fiber being started.  makecontext(3) passes only integers, so enter() finds the fiber here.
thread_local Fiber* beginning = nullptr;

std::size_t guard_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

}  // namespace

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)) {
  void* memory = ::mmap(nullptr, guard_bytes() + stack_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED || ::mprotect(memory, guard_bytes(), PROT_NONE) != 0) {
    std::perror("a fiber's stack");
    std::abort();
  }
  memory_ = static_cast<std::byte*>(memory);
  ::getcontext(&own_);
  own_.uc_stack.ss_sp = memory_ + guard_bytes();
  own_.uc_stack.ss_size = stack_bytes;
  own_.uc_link = nullptr;
  ::makecontext(&own_, &Fiber::enter, 0);
#if defined(R2CCL_FIBER_TSAN)
  own_shadow_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
  assert(done_ || !started_);
#if defined(R2CCL_FIBER_TSAN)
  __tsan_destroy_fiber(own_shadow_);
#endif
  ::munmap(memory_, guard_bytes() + stack_bytes);
}

void Fiber::resume() {
  assert(!done_);
  if (!std::exchange(started_, true)) beginning = this;
#if defined(R2CCL_FIBER_ASAN)
  __sanitizer_start_switch_fiber(&caller_fake_stack_, memory_ + guard_bytes(), stack_bytes);
#endif
#if defined(R2CCL_FIBER_TSAN)
  caller_shadow_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(own_shadow_, 0);
#endif
  ::swapcontext(&caller_, &own_);
#if defined(R2CCL_FIBER_ASAN)
  __sanitizer_finish_switch_fiber(caller_fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::yield() { leave(/*for_good=*/false); }

void Fiber::leave([[maybe_unused]] bool for_good) {
#if defined(R2CCL_FIBER_ASAN)
  // A null pointer discards the fake stack of a finished fiber.
  __sanitizer_start_switch_fiber(for_good ? nullptr : &own_fake_stack_, caller_stack_,
                                 caller_stack_bytes_);
#endif
#if defined(R2CCL_FIBER_TSAN)
  __tsan_switch_to_fiber(caller_shadow_, 0);
#endif
  ::swapcontext(&own_, &caller_);
#if defined(R2CCL_FIBER_ASAN)
  __sanitizer_finish_switch_fiber(own_fake_stack_, &caller_stack_, &caller_stack_bytes_);
#endif
}

void Fiber::enter() { beginning->run(); }

void Fiber::run() {
#if defined(R2CCL_FIBER_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &caller_stack_, &caller_stack_bytes_);
#endif
  body_();
  done_ = true;
  leave(/*for_good=*/true);
}

}  // namespace r2ccl::sim
