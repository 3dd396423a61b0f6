// The entry point of all fuzz targets.
#include "allocated.hpp"
#include "fuzz_main.hpp"

// Limits ASan's quarantine to 8 MB: long enough to detect late accesses, small enough for memory.
extern "C" const char* __asan_default_options() { return "quarantine_size_mb=8"; }

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::size_t baseline = r2ccl::fuzz::allocated_bytes();
  r2ccl::fuzz::Input input(data, size);
  r2ccl::fuzz::run(input, baseline);
  return 0;
}
