// Replays the corpus of a fuzz target, in builds without a fuzzer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "allocated.hpp"
#include "fuzz_main.hpp"

namespace r2ccl::fuzz {

// Runs the target over each input of its corpus, and returns the number of inputs.  A condition
// that does not hold ends the program; the line before in the output names the input.
inline std::size_t replay(const std::string& target) {
  const std::filesystem::path folder = std::filesystem::path(R2CCL_CORPUS) / target;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const std::filesystem::path& file : files) {
    std::fprintf(stderr, "input %s\n", file.c_str());
    std::ifstream stream(file, std::ios::binary);
    const std::string bytes(std::istreambuf_iterator<char>(stream), {});
    const std::size_t baseline = allocated_bytes();
    Input input(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
    run(input, baseline);
  }
  return files.size();
}

}  // namespace r2ccl::fuzz
