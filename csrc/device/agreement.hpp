// Agreement of all ranks of a communicator on a status.
#pragma once

#include "base/errors.hpp"
#include "engine/communicator.hpp"

namespace r2ccl::device {

// Collective: returns whether all ranks pass an ok status.  An error means that the ranks cannot
// communicate.
Result<bool> agree(Communicator& communicator, const Status& own);

}  // namespace r2ccl::device
