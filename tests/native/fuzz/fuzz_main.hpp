// What a fuzz target has for itself; main.cc calls it.
#pragma once

#include <cstddef>

#include "input.hpp"

namespace r2ccl::fuzz {

// `baseline`: bytes that were allocated before the input was looked at.
void run(Input& input, std::size_t baseline);

}  // namespace r2ccl::fuzz
