// RDMA verbs over libibverbs, loaded at first use.  Without the library, everything but verbs rails
// works.
#pragma once

#include <memory>

#include "drivers/verbs.hpp"

namespace r2ccl {

// Loads libibverbs.  An error names the missing part: the library, a symbol, or RDMA support in
// this build of r2serve.
[[nodiscard]] Result<std::shared_ptr<VerbsDriver>> load_ibverbs();

}  // namespace r2ccl
