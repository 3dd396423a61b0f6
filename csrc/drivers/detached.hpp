// Threads for what a device may take long for, or for ever.
#pragma once

#include <system_error>
#include <thread>
#include <utility>

namespace r2ccl {

// False: there is no thread to be had now (a limit of processes), and nothing has begun.
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
