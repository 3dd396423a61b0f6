// Detached threads for device calls that may take long or never return.
#pragma once

#include <system_error>
#include <thread>
#include <utility>

namespace r2ccl {

// Runs `body` on a detached thread.  Returns false if the system cannot create a thread (process
// limit); `body` is not run then.
template <typename Body>
[[nodiscard]] bool run_detached(Body body) {
  try {
    std::thread(std::move(body)).detach();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

}  // namespace r2ccl
