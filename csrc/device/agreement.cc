#include "device/agreement.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace r2ccl::device {

Result<bool> agree(Communicator& communicator, const Status& own) {
  const std::vector<std::size_t> one(static_cast<std::size_t>(communicator.size()), 1);
  const auto mine = static_cast<std::byte>(own.ok());
  std::vector<std::byte> all(one.size());
  if (Status status = communicator.all_gatherv(&mine, all.data(), one, DType::u8); !status.ok())
    return status;
  return std::ranges::all_of(all, [](std::byte each) { return each == std::byte{1}; });
}

}  // namespace r2ccl::device
