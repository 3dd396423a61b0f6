// Bodies of the kernels of the exchange inside a node.  The GPUs of a node split the data of a
// collective into shards before the rails carry the shards, and merge the results afterwards.  GPUs
// read each other's memory (NVLink, PCIe).  Each rank sends only its own shard, to the ranks with
// the same local rank on other nodes.
//
//   publish_input         copies the input to memory that local peers read
//   local_reduce_scatter  reduces the own shard of all inputs, stages the sum, and posts it
//   stage_in_place        replaces the two above if nothing is reduced: stages and posts the input
//   publish_result        copies the result of the own shard to memory that local peers read
//   local_all_gather      copies the shards of all ranks to the target
//   deliver_shard         replaces the two above if this rank gets only its own shard
//   quiesce               runs last, before the memory is freed
//
// An all-reduce is publish_input, local_reduce_scatter, publish_result, local_all_gather.  A
// reduce-scatter is publish_input, local_reduce_scatter, deliver_shard.  An all-gather is
// stage_in_place, publish_result, local_all_gather.  Each of these collectives counts as a single
// exchange and signals all four words of an exchange.  If collectives skipped a word, the word
// could fall behind by half the range of Sequence, and reached() would fail.
//
// Entries form a ring, like the entries of the mailbox.  The ring has a separate counter, since
// other collectives do not use these entries.  A rank rewrites an entry only after its local peers
// have signalled the end of their reads.  A rank whose host announces the end of results signals
// the loss to its local peers, and the local peers notify their hosts.  So the loss of a peer on
// another node ends the collectives of all ranks of this node.
#pragma once

#include "device/fold.hpp"

namespace r2ccl::device {

// Words in a rank's GPU memory, written by its local peers.  The index is the writer's local rank.
struct Inbox {
  Word input_ready[most_local_peers];   // the writer's input is published
  Word inputs_read[most_local_peers];   // the writer has read all inputs
  Word result_ready[most_local_peers];  // the writer's shard of the result is published
  Word results_read[most_local_peers];  // the writer has read all shards
  Word lost;                            // not 0: some rank gets no more results; sticky
};

// The ranks of a node as seen by a rank's kernels; the rank itself is included.
struct LocalPeers {
  std::uint32_t ranks = 0;
  std::uint32_t own = 0;                  // own local rank, in the order of the canonical tree
  Inbox* inboxes[most_local_peers]{};     // by local rank
  std::byte* memory[most_local_peers]{};  // by local rank: `ring` entries of input and result
  std::uint64_t entry_bytes = 0;
  std::uint64_t result_offset = 0;

  [[nodiscard]] R2CCL_SHARED std::byte* input(std::uint32_t rank, Sequence sequence) const {
    return memory[rank] + (sequence % ring) * entry_bytes;
  }
  [[nodiscard]] R2CCL_SHARED std::byte* result(std::uint32_t rank, Sequence sequence) const {
    return input(rank, sequence) + result_offset;
  }
};

// Even split of elements among the ranks of a node.  Each shard begins on a line of 128 bytes.
struct EvenShards {
  std::uint64_t count = 0;    // elements of all shards
  std::uint64_t each = 0;     // elements per shard; the last shards may have fewer
  std::uint64_t element = 0;  // bytes per element

  [[nodiscard]] static R2CCL_SHARED EvenShards of(std::uint64_t count, std::uint64_t element,
                                                  std::uint32_t ranks) {
    constexpr std::uint64_t unit = 128;  // bytes of a line
    const std::uint64_t lanes = unit / element;
    const std::uint64_t even = (count + ranks - 1) / ranks;
    return {count, (even + lanes - 1) / lanes * lanes, element};
  }
  [[nodiscard]] R2CCL_SHARED std::uint64_t first(std::uint32_t rank) const {
    return rank * each < count ? rank * each : count;
  }
  [[nodiscard]] R2CCL_SHARED std::uint64_t size(std::uint32_t rank) const {
    return first(rank + 1) - first(rank);
  }
};

// Place in the caller's buffer of the data published by each rank, by local rank.
struct OutputRows {
  Rows of[most_local_peers];
};

// Common arguments of all exchange kernels of a rank.
struct Exchange {
  Mailbox* mailbox;
  DeviceState* state;
  Staging staging;
  LocalPeers node;

  [[nodiscard]] R2CCL_SHARED const Inbox& own() const { return *node.inboxes[node.own]; }

  // Returns whether a rank of the node gets no more results.
  [[nodiscard]] R2CCL_SHARED bool lost() const { return load_acquire(own().lost) != 0; }
  // Returns whether no more results will come.
  [[nodiscard]] R2CCL_SHARED bool over() const {
    return load_acquire(mailbox->abort) != 0 || lost();
  }

  // Waits until the words of all ranks of the node reach `wanted`.  Returns false if no more
  // results will come.
  template <typename Block>
  [[nodiscard]] R2CCL_SHARED bool await(const Block& block, const Word (&words)[most_local_peers],
                                        Sequence wanted) const {
    for (std::uint32_t rank = 0; rank < node.ranks; ++rank)
      if (!block.wait([&] { return reached(load_acquire(words[rank]), wanted); },
                      [&] { return over(); }))
        return false;
    return true;
  }
  // Waits until the host has carried out collective `wanted`.  Returns false if no more results
  // will come.
  template <typename Block>
  [[nodiscard]] R2CCL_SHARED bool await_host(const Block& block, Sequence wanted) const {
    return block.wait([&] { return reached(load_acquire(mailbox->arrived), wanted); },
                      [&] { return over(); });
  }

  // Ends a step that has read memory of local peers.  A closing local peer signals `lost` before
  // freeing its memory.  So the data read is valid if no rank is lost by now.
  [[nodiscard]] R2CCL_SHARED bool ends_read(const ThreadPosition& at, Shared& shared,
                                            bool closes) const {
    if (!ends_step(at, shared, *state, closes)) return false;
    shared.go = shared.go && !lost();
    return true;
  }
  // If the step succeeded (`has`), stores `what`, the number of the exchange, in the own word of
  // every inbox of the node.  Otherwise signals the loss to all ranks of the node and to the own
  // host.
  R2CCL_SHARED void signal(bool has, Word (Inbox::*words)[most_local_peers], Sequence what) const {
    for (std::uint32_t rank = 0; rank < node.ranks; ++rank) {
      Inbox& inbox = *node.inboxes[rank];
      if (has)
        store_release((inbox.*words)[node.own], what);
      else
        store_release(inbox.lost, 1);
    }
    if (!has) store_release(mailbox->lost, 1);
  }

  // Begins an exchange and returns its number.  Called by one thread of each block.
  [[nodiscard]] R2CCL_SHARED Sequence enter(const ThreadPosition& at) const {
    const Sequence number = state->exchange + 1;
    if (at.block == 0) store_release(mailbox->entered, number);
    return number;
  }
  // Posts the staged data, and signals that all inputs have been read.  Called by a single thread.
  R2CCL_SHARED void post(const Shared& shared, std::uint32_t plan) const {
    state->exchange = shared.exchange;
    state->sequence = shared.sequence;
    signal(shared.go, &Inbox::inputs_read, shared.exchange);
    if (!shared.go) return;
    mailbox->commands[shared.sequence % ring] = {shared.sequence, plan};
    store_release(mailbox->posted, shared.sequence);
  }
  // Ends an exchange, and signals that all shards have been read.  Called by a single thread.
  R2CCL_SHARED void leave(const Shared& shared) const {
    signal(shared.go, &Inbox::results_read, shared.exchange);
    store_release(mailbox->left, shared.exchange);
  }
};

// Copies a part of this rank's input to memory that local peers read.  The caller may change the
// source once the kernel has ended.  `last`: this kernel publishes the last part of the input.
template <typename Block>
R2CCL_SHARED void publish_input(const ThreadPosition& at, const Block& block, Shared& shared,
                                const Exchange& exchange, const std::byte* source, const Rows& rows,
                                bool last) {
  const LocalPeers& node = exchange.node;
  if (at.thread == 0) {
    shared.exchange = exchange.enter(at);
    shared.go = !exchange.over() &&
                exchange.await(block, exchange.own().inputs_read, shared.exchange - ring);
  }
  block.sync();
  if (shared.go) pack(at, node.input(node.own, shared.exchange), source, rows);
  block.sync();
  if (ends_step(at, shared, *exchange.state, last))
    exchange.signal(shared.go, &Inbox::input_ready, shared.exchange);
}

// Reduces this rank's shard of all inputs, a part per kernel (`rows`).  The last kernel posts the
// sum as `plan`, a collective of the inter-node group.
template <typename Block>
R2CCL_SHARED void local_reduce_scatter(const ThreadPosition& at, const Block& block, Shared& shared,
                                       const Exchange& exchange, const Rows& rows, DType dtype,
                                       ReduceOp op, std::uint32_t plan, bool last) {
  const LocalPeers& node = exchange.node;
  if (at.thread == 0) {
    shared.exchange = exchange.state->exchange + 1;
    shared.sequence = exchange.state->sequence + 1;
    shared.go = !exchange.over() &&
                exchange.await(block, exchange.own().input_ready, shared.exchange) &&
                exchange.await_host(block, shared.sequence - ring);
  }
  block.sync();
  for (std::uint64_t row = 0; shared.go && row < rows.count; ++row) {
    Operands operands{};
    operands.ranks = node.ranks;
    for (std::uint32_t rank = 0; rank < node.ranks; ++rank)
      operands.of[rank] = node.input(rank, shared.exchange) + rows.first + row * rows.pitch;
    fold(at, exchange.staging.input(shared.sequence) + rows.offset + row * rows.bytes, operands,
         rows.bytes, dtype, op);
  }
  block.sync();
  if (exchange.ends_read(at, shared, last)) exchange.post(shared, plan);
}

// Stages the own shard of a collective without reduction, and posts `plan`, a collective of the
// inter-node group.  The shard goes straight to its place in the result, at `offset`.
template <typename Block>
R2CCL_SHARED void stage_in_place(const ThreadPosition& at, const Block& block, Shared& shared,
                                 const Exchange& exchange, const std::byte* source,
                                 std::uint64_t bytes, std::uint64_t offset, std::uint32_t plan) {
  if (at.thread == 0) {
    shared.exchange = exchange.enter(at);
    shared.sequence = exchange.state->sequence + 1;
    shared.go = !exchange.over() && exchange.await_host(block, shared.sequence - ring);
  }
  block.sync();
  if (shared.go) copy(at, exchange.staging.result(shared.sequence) + offset, source, bytes);
  block.sync();
  if (!ends_step(at, shared, *exchange.state, /*closes=*/true)) return;
  exchange.signal(shared.go, &Inbox::input_ready, shared.exchange);
  exchange.post(shared, plan);
}

// Copies the data from the rails, or the reduction of the data, to memory that local peers gather.
// `lag`: number of collectives posted after this collective, all by kernels of this file; less than
// `ring`.
template <typename Block>
R2CCL_SHARED void publish_result(const ThreadPosition& at, const Block& block, Shared& shared,
                                 const Exchange& exchange, std::uint64_t bytes,
                                 const Reduction& reduction, std::uint32_t lag) {
  const LocalPeers& node = exchange.node;
  if (at.thread == 0) {
    shared.exchange = exchange.state->exchange - lag;
    shared.sequence = exchange.state->sequence - lag;
    shared.go = exchange.await_host(block, shared.sequence) &&
                exchange.await(block, exchange.own().results_read, shared.exchange - ring);
  }
  block.sync();
  if (shared.go)
    reduce_or_copy(at, node.result(node.own, shared.exchange),
                   exchange.staging.result(shared.sequence), bytes, reduction);
  block.sync();
  if (ends_step(at, shared, *exchange.state, /*closes=*/true))
    exchange.signal(shared.go, &Inbox::result_ready, shared.exchange);
}

// Copies the published shards of all ranks to the target.  If a rank of the node is lost, the
// target is void: unchanged, or written in part.  `last`: this kernel gathers the last part of the
// result.
template <typename Block>
R2CCL_SHARED void local_all_gather(const ThreadPosition& at, const Block& block, Shared& shared,
                                   const Exchange& exchange, const OutputRows& outputs,
                                   std::byte* target, std::uint32_t lag, bool last) {
  const LocalPeers& node = exchange.node;
  if (at.thread == 0) {
    shared.exchange = exchange.state->exchange - lag;
    shared.go =
        exchange.await(block, exchange.own().result_ready, shared.exchange) && !exchange.lost();
  }
  block.sync();
  for (std::uint32_t rank = 0; shared.go && rank < node.ranks; ++rank)
    unpack(at, target, node.result(rank, shared.exchange), outputs.of[rank]);
  block.sync();
  if (exchange.ends_read(at, shared, last)) exchange.leave(shared);
}

// Copies the data from the rails, or the reduction of the data, to this rank's target.  A loss
// makes the target void, as in local_all_gather(): the ranks of a node fail in the same call.
template <typename Block>
R2CCL_SHARED void deliver_shard(const ThreadPosition& at, const Block& block, Shared& shared,
                                const Exchange& exchange, std::byte* target, std::uint64_t bytes,
                                const Reduction& reduction, std::uint32_t lag) {
  if (at.thread == 0) {
    shared.exchange = exchange.state->exchange - lag;
    shared.sequence = exchange.state->sequence - lag;
    shared.go = exchange.await_host(block, shared.sequence) && !exchange.lost();
  }
  block.sync();
  if (shared.go)
    reduce_or_copy(at, target, exchange.staging.result(shared.sequence), bytes, reduction);
  block.sync();
  if (!ends_step(at, shared, *exchange.state, /*closes=*/true)) return;
  exchange.signal(shared.go, &Inbox::result_ready, shared.exchange);
  exchange.leave(shared);
}

// Waits until local peers have read all data in this rank's memory, before the memory is freed.  If
// no more results come, signals the loss to local peers instead.  Called by a single thread.
template <typename Block>
R2CCL_SHARED void quiesce(const Block& block, const Exchange& exchange) {
  const Sequence last = exchange.state->exchange;
  store_release(exchange.mailbox->entered, last + 1);
  if (!exchange.await(block, exchange.own().results_read, last))
    exchange.signal(false, &Inbox::results_read, last);
  store_release(exchange.mailbox->left, last + 1);
}

}  // namespace r2ccl::device
