// Bodies of the kernels that reduce the data of all ranks in GPU memory (GPUDirect).  NICs write
// this data into GPU memory, where only kernels can reduce the data.  All data in host memory is
// reduced by the host.
//
//   reduce_and_deliver  reduces into the target
//   reduce_and_post     reduces the own shard, and posts the sum as input of the next collective
#pragma once

#include "device/exchange_bodies.hpp"

namespace r2ccl::device {

// Like deliver(), but writes the reduction of the arrived data.
template <typename Block>
R2CCL_SHARED void reduce_and_deliver(const ThreadPosition& at, const Block& block, Shared& shared,
                                     const Mailbox& mailbox, const DeviceState& state,
                                     const Staging& staging, std::byte* target, std::uint64_t bytes,
                                     const Reduction& reduction, std::uint32_t lag) {
  if (at.thread == 0) {
    shared.sequence = state.sequence - lag;
    shared.go = await(block, mailbox, mailbox.arrived, shared.sequence);
  }
  block.sync();
  if (shared.go) reduce_or_copy(at, target, staging.result(shared.sequence), bytes, reduction);
}

// Reduces the result of the last posted collective, and posts `plan`, the next collective.  The sum
// becomes the own shard of the next result, at `offset`.  `inbox`: inbox of a rank in an exchange;
// null without exchange.
template <typename Block>
R2CCL_SHARED void reduce_and_post(const ThreadPosition& at, const Block& block, Shared& shared,
                                  Mailbox& mailbox, DeviceState& state, const Staging& staging,
                                  const Inbox* inbox, std::uint64_t bytes, std::uint64_t offset,
                                  const Reduction& reduction, std::uint32_t plan) {
  if (at.thread == 0) {
    shared.sequence = state.sequence;
    shared.go = block.wait([&] { return reached(load_acquire(mailbox.arrived), shared.sequence); },
                           [&] {
                             return load_acquire(mailbox.abort) != 0 ||
                                    (inbox != nullptr && load_acquire(inbox->lost) != 0);
                           });
  }
  block.sync();
  const Sequence next = shared.sequence + 1;
  if (shared.go)
    reduce_or_copy(at, staging.result(next) + offset, staging.result(shared.sequence), bytes,
                   reduction);
  block.sync();
  if (!ends_step(at, shared, state, /*closes=*/true)) return;
  state.sequence = next;
  if (!shared.go) return;
  mailbox.commands[next % ring] = {next, plan};
  store_release(mailbox.posted, next);
}

}  // namespace r2ccl::device
