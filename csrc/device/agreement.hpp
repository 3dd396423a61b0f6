// What all ranks of a communicator agree on before they go on together.
#pragma once

#include "base/errors.hpp"
#include "engine/communicator.hpp"

namespace r2ccl::device {

// Collective: whether all ranks say ok.  An error: the ranks cannot talk.
Result<bool> agree(Communicator& communicator, const Status& own);

}  // namespace r2ccl::device
