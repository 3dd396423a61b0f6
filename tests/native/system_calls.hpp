// Counts the system calls of a thread, by number and result.  The kernel raises SIGSYS before it
// executes a call (Syscall User Dispatch, Linux 5.11, x86-64).
#pragma once

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <string>

namespace r2ccl::testing {

struct SystemCalls {
  static constexpr std::size_t kinds = 512;
  std::array<std::uint64_t, kinds> done{};
  std::array<std::uint64_t, kinds> again{};  // EAGAIN: no data, or no room
  std::array<std::uint64_t, kinds> bytes{};  // sums of results, e.g. of IO calls

  [[nodiscard]] std::uint64_t of(long number) const { return done[index(number)]; }
  [[nodiscard]] std::uint64_t empty(long number) const { return again[index(number)]; }
  // Returns the number of all calls except `known`.
  [[nodiscard]] std::uint64_t others(std::initializer_list<long> known) const {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < kinds; ++i) sum += done[i] + again[i];
    for (const long number : known) sum -= of(number) + empty(number);
    return sum;
  }
  [[nodiscard]] std::string text() const {
    std::string text;
    for (std::size_t i = 0; i < kinds; ++i)
      if (done[i] + again[i] > 0)
        text += " " + std::to_string(i) + ": " + std::to_string(done[i]) + "+" +
                std::to_string(again[i]);
    return text;
  }
  static std::size_t index(long number) { return static_cast<std::size_t>(number) % kinds; }
};

}  // namespace r2ccl::testing

#if defined(__x86_64__) && defined(PR_SET_SYSCALL_USER_DISPATCH)

// Code between the two labels is exempt from dispatch.  It executes the intercepted call and
// returns from the SIGSYS handler.
extern "C" {
long r2ccl_test_call(long number, const long long* arguments);
void r2ccl_test_return();
extern const char r2ccl_test_gate[];
extern const char r2ccl_test_gate_end[];
}
asm(R"(
.pushsection .text
.globl r2ccl_test_gate, r2ccl_test_gate_end, r2ccl_test_call, r2ccl_test_return
r2ccl_test_gate:
r2ccl_test_call:
  mov %rdi, %rax
  mov %rsi, %r11
  mov 0(%r11), %rdi
  mov 8(%r11), %rsi
  mov 16(%r11), %rdx
  mov 24(%r11), %r10
  mov 32(%r11), %r8
  mov 40(%r11), %r9
  syscall
  ret
r2ccl_test_return:
  mov $15, %eax
  syscall
  ud2
r2ccl_test_gate_end:
.popsection
)");

namespace r2ccl::testing {

inline thread_local volatile char syscall_selector = 0;  // 0: to the kernel; 1: SIGSYS
inline thread_local SystemCalls* counted = nullptr;

inline void on_system_call(int /*signal*/, siginfo_t* info, void* context) {
  syscall_selector = 0;
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const std::array<long long, 6> arguments{registers[REG_RDI], registers[REG_RSI],
                                           registers[REG_RDX], registers[REG_R10],
                                           registers[REG_R8],  registers[REG_R9]};
  const long result = r2ccl_test_call(info->si_syscall, arguments.data());
  registers[REG_RAX] = result;
  const std::size_t index = SystemCalls::index(info->si_syscall);
  ++(result == -EAGAIN ? counted->again : counted->done)[index];
  if (result > 0) counted->bytes[index] += static_cast<std::uint64_t>(result);
  syscall_selector = 1;
}

// Counts the calling thread's system calls during the object's lifetime.
class CountSystemCalls {
 public:
  explicit CountSystemCalls(SystemCalls& into) {
    counted = &into;
    struct {
      void (*handler)(int, siginfo_t*, void*);
      unsigned long flags;
      void (*restorer)();
      unsigned long mask;
    } const action{on_system_call, SA_SIGINFO | 0x04000000UL /* SA_RESTORER */, r2ccl_test_return,
                   0};
    if (::syscall(SYS_rt_sigaction, SIGSYS, &action, nullptr, 8) != 0) return;
    on_ = ::prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON, r2ccl_test_gate,
                  r2ccl_test_gate_end - r2ccl_test_gate, &syscall_selector) == 0;
    syscall_selector = on_ ? 1 : 0;
  }
  ~CountSystemCalls() {
    syscall_selector = 0;
    if (on_) ::prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_OFF, 0, 0, 0);
  }
  CountSystemCalls(const CountSystemCalls&) = delete;
  CountSystemCalls& operator=(const CountSystemCalls&) = delete;

  [[nodiscard]] bool on() const { return on_; }  // false: not supported here

 private:
  bool on_ = false;
};

}  // namespace r2ccl::testing

#else

namespace r2ccl::testing {

class CountSystemCalls {
 public:
  explicit CountSystemCalls(SystemCalls& /*into*/) {}
  [[nodiscard]] bool on() const { return false; }
};

}  // namespace r2ccl::testing

#endif
