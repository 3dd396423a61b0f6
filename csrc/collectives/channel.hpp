// The transport interface of the algorithms: an ordered, reliable message stream in each direction
// to each peer rank.  LinkChannel implements Channel over links; unit tests implement Channel in
// memory.  A channel serves a single call at a time.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/errors.hpp"

namespace r2ccl {

class Channel {
 public:
  virtual ~Channel() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;

  // Returns the largest message in bytes, a multiple of 64.  A longer send is cut into messages of
  // this size; the last message may be shorter.  Sender and receiver cut at the same offsets.
  [[nodiscard]] virtual std::size_t segment_bytes() const = 0;

  // Posts bytes to a peer without waiting for the peer.  Empty data is a single empty message.
  // Rails may read the memory until settle() or finish() returns.
  virtual Status send(int peer, std::span<const std::byte> data) = 0;

  // Offers `memory` as the target of the peer's next messages, after `skip` messages.  The messages
  // may land there back to back; receive() then returns a view of the target.  The caller must not
  // access target bytes before the receive().  A peer can have a single target until finish().
  virtual Status expect(int /*peer*/, std::size_t /*skip*/, std::span<std::byte> /*memory*/) {
    return {};
  }

  // Waits for the next message of a peer and returns a view of its bytes, in a slot or the target.
  // A size other than `bytes` is an error.  The view is valid until release(peer), which must come
  // before the next receive() from the same peer.
  virtual Result<std::span<const std::byte>> receive(int peer, std::size_t bytes) = 0;
  virtual Status release(int peer) = 0;

  // Waits until no rail can read the first `bytes` bytes sent to `peer` by this call, counted over
  // all sends to the peer.  Required before sent memory is overwritten.
  virtual Status settle(int peer, std::size_t bytes) = 0;

  // Waits until no rail can read memory passed to send() in this call or write memory passed to
  // expect().  The call may send and receive again afterwards.
  virtual Status finish() = 0;

  // Returns true if a rank must not send before its peers have announced targets with expect().
  // Calls on device memory use rendezvous, because the CPU cannot copy from a slot to the result.
  // The GPU then also copies its own shard of an all-to-all.  All ranks return the same value.
  [[nodiscard]] virtual bool rendezvous() const { return false; }

  // Returns scratch memory of the call; send() may read from it.  The memory outlives the
  // algorithm, because a rail may read sent bytes until the end of the call.
  [[nodiscard]] std::vector<std::byte>& scratch() { return scratch_; }

 private:
  std::vector<std::byte> scratch_;
};

}  // namespace r2ccl
