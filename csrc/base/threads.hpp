// Start of a thread with an error in place of an exception.
#pragma once

#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "base/errors.hpp"

namespace r2ccl {

// Starts a thread that runs `body`.  Returns `internal` if the system cannot create a thread: the
// limit of processes is reached, or memory for the stack is short.  `what` names the thread.
template <typename Body>
[[nodiscard]] Status start_thread(std::thread& thread, const char* what, Body body) {
  try {
    thread = std::thread(std::move(body));
    return {};
  } catch (const std::exception& error) {  // system_error or bad_alloc
    return {ErrorCode::internal,
            std::string("cannot start ") + what + ": " + error.what() +
                "; check the limits of processes (ulimit -u, pids.max) and memory"};
  }
}

}  // namespace r2ccl
