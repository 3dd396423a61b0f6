#include "rails/verbs/session.hpp"

namespace r2ccl {

namespace {

// Time limit of a device for ending or making a queue pair.  After the limit all memory is
// withdrawn from the device, and the device is opened again.
constexpr TimeNs fence_patience_ns = 2000 * ns_per_ms;

}  // namespace

VerbsSession::~VerbsSession() {
  pair.reset();
  if (memory_ != nullptr) pool_.release(memory_);
}

std::size_t VerbsSession::bytes() const {
  return std::size_t{2} * verbs_ring_frames * ring_stride +
         std::size_t{bounce_chunks} * chunk_bytes_;
}

Status VerbsSession::prepare() {
  memory_ = pool_.allocate(bytes());
  if (memory_ == nullptr) return {ErrorCode::internal, pool_.last_error()};
  return take_keys();
}

Status VerbsSession::reserve() {
  withdrawal_ = pool_.withdrawal_of(device_);
  memory_ = pool_.allocate_for(device_, bytes());
  if (memory_ == nullptr) return {ErrorCode::internal, pool_.last_error()};
  return {};
}

std::span<std::byte> VerbsSession::to_register() const {
  if (pool_.find(device_, memory_, 1).has_value()) return {};
  return {memory_, pool_.bytes_of(memory_)};
}

Status VerbsSession::attach(const VerbsDevice& device, std::unique_ptr<VerbsMemory> with) {
  if (with != nullptr) pool_.attach(memory_, device, std::move(with));
  return take_keys();
}

void VerbsSession::begin_fence(TimeNs now) {
  if (fence_ != nullptr || pair == nullptr) return;
  fence_ = VerbsFence::begin(std::move(pair));
  fence_begun_ = now;
}

void VerbsSession::judge_device(TimeNs since, TimeNs now) {
  // Distrust only the device opened for this session: a device opened again has a new withdrawal
  // flag.
  if (now - since >= fence_patience_ns && withdrawal_ == pool_.withdrawal_of(device_))
    pool_.distrust(device_);
}

Status VerbsSession::take_keys() {
  const auto keys = pool_.find(device_, memory_, ring_stride);
  if (!keys.has_value())
    return {ErrorCode::internal, "memory is not registered with RDMA device " + device_};
  keys_ = *keys;
  return {};
}

// A frame takes at most 2 writes, and 1 receive at the peer.  A message with credit only takes 1
// receive; these messages never outnumber the frames.
VerbsDepth VerbsSession::depth() {
  return {.sends = 2 * verbs_ring_frames + 2,
          .receives = 2 * verbs_ring_frames + 1,
          .inline_bytes = 256};
}

VerbsEndpoint VerbsSession::endpoint(const VerbsAddress& address) const {
  return {address, reinterpret_cast<std::uintptr_t>(memory_), keys_.remote};
}

}  // namespace r2ccl
