// A process that cannot create threads: their stacks would need more than the address space.
#pragma once

#include <gtest/gtest.h>
#include <pthread.h>

#include <cstddef>
#include <mutex>

namespace r2ccl::testing {

// While an object exists, threads with default attributes cannot be created.
class NoThreads {
 public:
  NoThreads() {
    const std::lock_guard guard(mutex());
    if (users++ == 0) set_stack(std::size_t{1} << 50U);
  }
  ~NoThreads() {
    const std::lock_guard guard(mutex());
    if (--users == 0) set_stack(std::size_t{8} << 20U);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex only;
    return only;
  }
  static void set_stack(std::size_t bytes) {
    pthread_attr_t attributes;
    EXPECT_EQ(::pthread_attr_init(&attributes), 0);
    EXPECT_EQ(::pthread_attr_setstacksize(&attributes, bytes), 0);
    EXPECT_EQ(::pthread_setattr_default_np(&attributes), 0);
    ::pthread_attr_destroy(&attributes);
  }

  static inline int users = 0;
};

}  // namespace r2ccl::testing
