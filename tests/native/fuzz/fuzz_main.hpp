// Entry point of a fuzz target.  main.cc calls run() with inputs of libFuzzer, and replay.hpp with
// the inputs of the corpus.
#pragma once

#include <cstddef>

#include "input.hpp"

namespace r2ccl::fuzz {

// `baseline`: bytes allocated before the target reads its input.
void run(Input& input, std::size_t baseline);

}  // namespace r2ccl::fuzz
