// Sets of CPUs, and the CPUs of background threads.  A new thread inherits the CPUs of its creator.
// An engine may pin the creator to the CPU on which it computes, so background threads are moved.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace r2ccl {

class CpuSet {
 public:
  // Parses a list as in "0-3,8".  Returns nullopt for any other text, the empty text included.
  [[nodiscard]] static std::optional<CpuSet> parse(std::string_view text);
  // Returns the CPUs of a thread; an empty set if the kernel does not tell.
  [[nodiscard]] static CpuSet of(pthread_t thread);
  // The same for the calling thread; async-signal-safe.
  [[nodiscard]] static CpuSet of_this_thread();

  [[nodiscard]] bool empty() const { return *this == CpuSet(); }
  // Returns the set as parse() takes it.
  [[nodiscard]] std::string text() const;
  // Moves a thread to these CPUs.  Returns 0, or an error number.
  [[nodiscard]] int move(pthread_t thread) const;

  friend bool operator==(const CpuSet& one, const CpuSet& other);

 private:
  static constexpr std::size_t most = std::size_t{8} * CPU_SETSIZE;

  [[nodiscard]] bool has(std::size_t cpu) const;

  std::array<cpu_set_t, 8> masks_{};
};

// Sets the CPUs of background threads that start later.  An empty set: the CPUs that this process
// had at its start, which is the default.
void set_background_cpus(const CpuSet& cpus);
[[nodiscard]] CpuSet background_cpus();

// Moves a thread to the CPUs of background threads.  Returns 0, or an error number; the thread then
// stays on the CPUs of its creator.
[[nodiscard]] int move_to_background_cpus(pthread_t thread) noexcept;

}  // namespace r2ccl
