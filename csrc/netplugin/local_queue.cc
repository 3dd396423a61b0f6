#include "netplugin/local_queue.hpp"

#include <algorithm>
namespace r2ccl::net {

Status LocalQueue::failure() const {
  if (!too_large_.empty()) return {ErrorCode::invalid_argument, too_large_};
  if (closed_) return {ErrorCode::peer_closed, "the other rank has closed the connection"};
  return {};
}

Result<std::optional<std::uint64_t>> LocalQueue::send(std::span<const std::byte> source) {
  using Number = std::optional<std::uint64_t>;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return Number();
  R2CCL_TRY(failure());
  if (copied_ == posted_ || sends_unfinished_ == most_posted) return Number();
  Slot& to = slot(copied_);
  if (source.size() > to.into.size()) {
    too_large_ = "a message of " + std::to_string(source.size()) +
                 " bytes is larger than its receive of " + std::to_string(to.into.size());
    return failure();
  }
  std::ranges::copy(source, to.into.begin());
  to.bytes = static_cast<std::uint32_t>(source.size());
  ++sends_unfinished_;
  return Number(copied_++);
}

bool LocalQueue::finish_send() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  --sends_unfinished_;
  return true;
}

Result<std::optional<std::uint64_t>> LocalQueue::receive(std::span<std::byte> into) {
  using Number = std::optional<std::uint64_t>;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return Number();
  R2CCL_TRY(failure());
  if (posted_ - first_ == most_posted) return Number();
  slot(posted_) = {.into = into};
  return Number(posted_++);
}

Result<std::optional<std::uint32_t>> LocalQueue::received(std::uint64_t number) {
  using Bytes = std::optional<std::uint32_t>;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return Bytes();
  if (number >= copied_) {
    R2CCL_TRY(failure());
    return Bytes();
  }
  slot(number).taken = true;
  while (first_ < copied_ && slot(first_).taken) ++first_;
  return Bytes(slot(number).bytes);
}

bool LocalQueue::uses(std::span<const std::byte> memory) {
  const std::lock_guard guard(mutex_);
  for (std::uint64_t number = copied_; number < posted_; ++number) {
    const std::byte* const begin = slot(number).into.data();
    if (begin >= memory.data() && begin < memory.data() + memory.size()) return true;
  }
  return false;
}

void LocalQueue::close() {
  const std::lock_guard guard(mutex_);
  closed_ = true;
}

}  // namespace r2ccl::net
