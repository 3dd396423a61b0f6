// Entry point of a fuzz target; main.cc calls run().
#pragma once

#include <cstddef>

#include "input.hpp"

namespace r2ccl::fuzz {

// `baseline`: bytes allocated before the target reads its input.
void run(Input& input, std::size_t baseline);

}  // namespace r2ccl::fuzz
