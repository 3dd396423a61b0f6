// RDMA verbs by libibverbs, which is loaded when it is first wanted: a machine without it runs
// everything but verbs rails.
#pragma once

#include <memory>

#include "drivers/verbs.hpp"

namespace r2ccl {

// An error says what is missing: the library, a symbol of it, or the kernel's side of it.
[[nodiscard]] Result<std::shared_ptr<VerbsDriver>> load_ibverbs();

}  // namespace r2ccl
