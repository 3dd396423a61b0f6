// Start of a background thread, with a name and with CPUs of its own.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <exception>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include "base/cpus.hpp"
#include "base/errors.hpp"

namespace r2ccl {

// Starts a thread that runs `body` with a name, for ps(1) and debuggers, on the CPUs of background
// threads.  A thread that cannot move works on the CPUs of its creator, and Engine::create() warns.
// Throws std::system_error or std::bad_alloc if the system cannot create a thread.
template <std::size_t bytes, typename Body>
[[nodiscard]] std::thread make_thread(const char (&name)[bytes], Body body) {
  static_assert(bytes <= 16, "the kernel keeps 15 characters of a name");
  // `body` begins last.  The C library would move the caller in place of a thread that has ended.
  std::promise<void> apart;
  std::thread thread([body = std::move(body), begin = apart.get_future()]() mutable {
    begin.wait();
    body();
  });
  (void)::pthread_setname_np(thread.native_handle(), name);
  (void)move_to_background_cpus(thread.native_handle());
  apart.set_value();
  return thread;
}

// Calls make_thread().  Returns `internal` if the system cannot create a thread: the limit of
// processes is reached, or memory for the stack is short.  `what` names the thread in the error.
template <std::size_t bytes, typename Body>
[[nodiscard]] Status start_thread(std::thread& thread, const char (&name)[bytes], const char* what,
                                  Body body) {
  try {
    thread = make_thread(name, std::move(body));
    return {};
  } catch (const std::exception& error) {  // system_error or bad_alloc
    return {ErrorCode::internal,
            std::string("cannot start ") + what + ": " + error.what() +
                "; check the limits of processes (ulimit -u, pids.max) and memory"};
  }
}

}  // namespace r2ccl
