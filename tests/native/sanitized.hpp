// Whether this build has a sanitizer. A sanitizer slows a test down up to 20 times, and finds the
// same errors in fewer repetitions.
#pragma once

namespace r2ccl::testing {

constexpr bool sanitized() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return true;
#elif defined(__has_feature)
  return __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
  return false;
#endif
}

}  // namespace r2ccl::testing
