// The bodies of the kernels that add up what came from all ranks as it was sent, where NICs put it
// into the device's memory: the host, which adds up otherwise, does not reach it there.
//
//   reduce_and_deliver  adds up to the target
//   reduce_and_post     adds up the own shard, and posts it as the input of the next collective
#pragma once

#include "device/exchange_bodies.hpp"

namespace r2ccl::device {

// As deliver(), of the sum of what arrived.
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

// Of the collective that was posted last; where the next one, posted as `plan`, has its result, the
// own shard of it begins at `offset`.  `inbox`: of a rank that exchanges; null: of one that does
// not.
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
