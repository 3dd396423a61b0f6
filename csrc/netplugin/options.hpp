// The options of the core, from environment variables.  r2serve/config.py documents every option;
// a plugin has no Python around it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/config.hpp"
#include "base/errors.hpp"

namespace r2ccl::net {

struct Options {
  Config core;
  std::string rails = "auto";  // R2CCL_RAILS
  std::string node;            // R2CCL_NODE
  std::string management;      // R2CCL_MANAGEMENT
  std::vector<std::byte> key;  // content of R2CCL_SECRET_FILE; empty: none
  double exit_s = 30;          // R2CCL_NCCL_EXIT_S; 0: never
};

// Returns invalid_argument with the name of the variable, its value and what would be right.
Result<Options> options_from_environment();

}  // namespace r2ccl::net
