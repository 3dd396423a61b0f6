#include "rails/verbs/session.hpp"

namespace r2ccl {

VerbsSession::~VerbsSession() {
  pair.reset();
  if (memory_ != nullptr) pool_.release(memory_);
}

Status VerbsSession::prepare() {
  memory_ = pool_.allocate(std::size_t{2} * ring_frames * ring_stride +
                           std::size_t{bounce_chunks} * chunk_bytes_);
  if (memory_ == nullptr) return {ErrorCode::internal, pool_.last_error()};
  const auto keys = pool_.find(device_, memory_, ring_stride);
  if (!keys.has_value())
    return {ErrorCode::internal, "memory is not registered with RDMA device " + device_};
  keys_ = *keys;
  return {};
}

// A frame is two writes at most.  A receive is taken by each frame and by each message that brings
// nothing but credit, of which there are never more than frames.
VerbsDepth VerbsSession::depth() {
  return {.sends = 2 * ring_frames + 2, .receives = 2 * ring_frames + 1, .inline_bytes = 256};
}

VerbsEndpoint VerbsSession::endpoint(const VerbsAddress& address) const {
  return {address, reinterpret_cast<std::uintptr_t>(memory_), keys_.remote};
}

}  // namespace r2ccl
