// What an algorithm sees of a communicator: one ordered, reliable message stream in each direction
// to each peer rank.  The engine implements it over links; unit tests over memory.
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

  // Largest message, a multiple of 64 bytes.  Longer sends are cut into messages of this size, the
  // last one shorter; sender and receiver cut alike.
  [[nodiscard]] virtual std::size_t segment_bytes() const = 0;

  // Posts bytes to a peer and returns at once; never waits for the peer.  Empty data is one empty
  // message.  The memory may be read until settle() or finish() says otherwise.
  virtual Status send(int peer, std::span<const std::byte> data) = 0;

  // The peer's next messages but `skip` may land right in this memory, one behind the other, and
  // receive() returns a view of it then.  What was not received yet is neither read nor written.
  // Once a peer, until finish().
  virtual Status expect(int /*peer*/, std::size_t /*skip*/, std::span<std::byte> /*memory*/) {
    return {};
  }

  // Waits for the next message of a peer, which must have `bytes` bytes, and returns a view of the
  // memory it lies in.  The view is valid until release(peer).  One message per peer at a time.
  virtual Result<std::span<const std::byte>> receive(int peer, std::size_t bytes) = 0;
  virtual Status release(int peer) = 0;

  // Waits until nothing can read the first `bytes` bytes that this call has sent to `peer`
  // (counted over all sends of this call to this peer).  Needed before overwriting them.
  virtual Status settle(int peer, std::size_t bytes) = 0;

  // Waits until nothing can read any memory passed to send() in this call, nor write any passed to
  // expect().  The call may go on then.
  virtual Status finish() = 0;

  // Whether nobody is to send before its peers have said where that belongs (expect()), as what
  // arrives earlier would have to be copied there by others than the CPU; which does not copy the
  // own shard of an all-to-all either.  The same on all ranks.
  [[nodiscard]] virtual bool rendezvous() const { return false; }

  // Memory of the call's own that it may send from: it outlives the algorithm, as a rail may read
  // it until the call is over.
  [[nodiscard]] std::vector<std::byte>& scratch() { return scratch_; }

 private:
  std::vector<std::byte> scratch_;
};

}  // namespace r2ccl
