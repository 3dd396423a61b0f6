// Detached threads for device calls that may take long or never return.
#pragma once

#include <cstddef>
#include <exception>
#include <utility>

#include "base/threads.hpp"

namespace r2ccl {

// Runs `body` on a detached thread.  Returns false if the system cannot create a thread (limit of
// processes, or memory); `body` is not run then.
template <std::size_t bytes, typename Body>
[[nodiscard]] bool run_detached(const char (&name)[bytes], Body body) {
  try {
    make_thread(name, std::move(body)).detach();
    return true;
  } catch (const std::exception&) {  // system_error or bad_alloc
    return false;
  }
}

}  // namespace r2ccl
