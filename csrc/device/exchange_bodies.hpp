// The bodies of the kernels by which the GPUs of one node take a collective apart before the rails,
// and put it together again behind them, over memory that they give each other to read (NVLink,
// PCIe): each rank sends its own shard alone, to the ranks that have its local rank on other nodes.
//
//   publish_input         copies the input where local peers read it
//   local_reduce_scatter  adds up the own shard of everybody's inputs, stages it, and posts the
//                         collective
//   stage_in_place        instead of both where nothing is added up: stages the input, and posts
//   publish_result        copies the result of the own shard where local peers read it
//   local_all_gather      copies everybody's shards to the target
//   deliver_shard         instead of both where the own shard is all that this rank gets
//   quiesce               comes last
//
// An all-reduce is publish_input, local_reduce_scatter, publish_result, local_all_gather; a
// reduce-scatter publish_input, local_reduce_scatter, deliver_shard; an all-gather stage_in_place,
// publish_result, local_all_gather.  Each of them counts as one exchange, and signals all four
// words of it, so that none falls behind by half the range.
//
// Entries are a ring, as those of the mailbox, with a count of their own, since other collectives
// do not use them.  A rank that writes an entry again waits until its local peers have signalled
// that they have read it.  A rank whose host says that no results will come signals its local
// peers, which tell their hosts: who has lost a peer on another node ends all ranks of this one,
// and no target is written without all shards.
#pragma once

#include "device/fold.hpp"

namespace r2ccl::device {

// In the memory of a rank's GPU, written by its local peers: where they are, by their local rank.
struct Inbox {
  Word input_ready[most_local_peers];   // whose input lies there
  Word inputs_read[most_local_peers];   // who has read all inputs
  Word result_ready[most_local_peers];  // whose shard of the result lies there
  Word results_read[most_local_peers];  // who has read all shards
  Word lost;                            // not 0: some rank will get no more results; sticky
};

// How a rank's kernels know the ranks of its node, itself among them.
struct LocalPeers {
  std::uint32_t ranks = 0;
  std::uint32_t own = 0;                  // local rank; in the order of the canonical tree
  Inbox* inboxes[most_local_peers]{};     // of each
  std::byte* memory[most_local_peers]{};  // of each: `ring` entries, an input and a result
  std::uint64_t entry_bytes = 0;
  std::uint64_t result_offset = 0;

  [[nodiscard]] R2CCL_SHARED std::byte* input(std::uint32_t rank, Sequence sequence) const {
    return memory[rank] + (sequence % ring) * entry_bytes;
  }
  [[nodiscard]] R2CCL_SHARED std::byte* result(std::uint32_t rank, Sequence sequence) const {
    return input(rank, sequence) + result_offset;
  }
};

// Which elements each rank of a node adds up: even shards, each on a Vector's boundary.
struct EvenShards {
  std::uint64_t count = 0;    // elements of all
  std::uint64_t each = 0;     // of each shard but the last ones
  std::uint64_t element = 0;  // bytes

  [[nodiscard]] static R2CCL_SHARED EvenShards of(std::uint64_t count, std::uint64_t element,
                                                  std::uint32_t ranks) {
    constexpr std::uint64_t unit = 128;  // bytes; a line
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

// Where in the caller's buffer lies what each rank of the node has published.
struct OutputRows {
  Rows of[most_local_peers];
};

// What the kernels of a rank work with.
struct Exchange {
  Mailbox* mailbox;
  DeviceState* state;
  Staging staging;
  LocalPeers node;

  [[nodiscard]] R2CCL_SHARED const Inbox& own() const { return *node.inboxes[node.own]; }

  // Whether a rank of the node gets no more results.
  [[nodiscard]] R2CCL_SHARED bool lost() const { return load_acquire(own().lost) != 0; }
  // Whether no more results will come.
  [[nodiscard]] R2CCL_SHARED bool over() const {
    return load_acquire(mailbox->abort) != 0 || lost();
  }

  // Until all ranks of the node have come to `wanted`; false: not all will.
  template <typename Block>
  [[nodiscard]] R2CCL_SHARED bool await(const Block& block, const Word (&words)[most_local_peers],
                                        Sequence wanted) const {
    for (std::uint32_t rank = 0; rank < node.ranks; ++rank)
      if (!block.wait([&] { return reached(load_acquire(words[rank]), wanted); },
                      [&] { return over(); }))
        return false;
    return true;
  }
  // Until the host has, with what was posted.
  template <typename Block>
  [[nodiscard]] R2CCL_SHARED bool await_host(const Block& block, Sequence wanted) const {
    return block.wait([&] { return reached(load_acquire(mailbox->arrived), wanted); },
                      [&] { return over(); });
  }

  // Ends a step that has read memory of local peers.  A local peer that goes signals `lost` before
  // its memory goes, so what was read is good if nothing is lost by now.
  [[nodiscard]] R2CCL_SHARED bool ends_read(const ThreadPosition& at, Shared& shared,
                                            bool closes) const {
    if (!ends_step(at, shared, *state, closes)) return false;
    shared.go = shared.go && !lost();
    return true;
  }
  // To all ranks of the node, that this one has come to `what`, if it has; else that it never will,
  // and to the own host, too, which may not know.
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

  // By one thread of each block: the number of the collective that begins.
  [[nodiscard]] R2CCL_SHARED Sequence enter(const ThreadPosition& at) const {
    const Sequence number = state->exchange + 1;
    if (at.block == 0) store_release(mailbox->entered, number);
    return number;
  }
  // By one thread alone: the inputs have been read, and what is to go over the rails is staged.
  R2CCL_SHARED void post(const Shared& shared, std::uint32_t plan) const {
    state->exchange = shared.exchange;
    state->sequence = shared.sequence;
    signal(shared.go, &Inbox::inputs_read, shared.exchange);
    if (!shared.go) return;
    mailbox->commands[shared.sequence % ring] = {shared.sequence, plan};
    store_release(mailbox->posted, shared.sequence);
  }
  R2CCL_SHARED void leave(const Shared& shared) const {
    signal(shared.go, &Inbox::results_read, shared.exchange);
    store_release(mailbox->left, shared.exchange);
  }
};

// Inputs of the next collective, which the local peers add up.  The caller may change them when the
// kernel has ended.  `last`: of the kernels that publish this collective's.
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

// What this rank adds up of all inputs (`rows` of them) and, with the last kernel, posts as `plan`:
// a collective of the ranks that have this local rank on their nodes.
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

// The own shard of a collective in which nobody adds up anything, posted as `plan`: as above.  It
// is put into its place in the result, at `offset`.
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

// What came over the rails, or its sum, which the local peers gather.  `lag`: how many have been
// posted since, less than the ring, all of them by kernels of this file.
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

// All that was published.  Where a rank of the node is lost the target is void: it is left as it
// is, or written in part.  `last`: of the kernels that gather this.
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

// What came over the rails, or its sum, and is this rank's alone.  A loss makes the target void, as
// in local_all_gather(): the ranks of a node fail in the same call.
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

// Waits until the local peers have read all that lies in this rank's memory, which goes after that;
// or until no more results come, and then signals them.  By one thread.
template <typename Block>
R2CCL_SHARED void quiesce(const Block& block, const Exchange& exchange) {
  const Sequence last = exchange.state->exchange;
  store_release(exchange.mailbox->entered, last + 1);
  if (!exchange.await(block, exchange.own().results_read, last))
    exchange.signal(false, &Inbox::results_read, last);
  store_release(exchange.mailbox->left, last + 1);
}

}  // namespace r2ccl::device
