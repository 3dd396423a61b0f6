// The bodies of the kernels by which the GPUs of one node take a collective apart before the rails,
// and put it together again behind them, over memory that they give each other to read (NVLink,
// PCIe): each rank adds up and sends its own share alone.
//
//   share    copies the input where neighbours read it
//   sum_up   adds up the own share of everybody's inputs, stages it, and posts the collective,
//            which goes from this rank to those of the same place on other nodes
//   spread   copies the result of the own share where neighbours read it
//   collect  copies everybody's shares to the target
//   depart   comes last
//
// Entries are a ring, as those of the mailbox, with a count of their own, since other collectives
// do not use them.  A rank that writes an entry again waits until its neighbours have said that
// they have read it.  A rank whose host says that no results will come tells its neighbours, which
// tell their hosts: who has lost a peer on another node ends all ranks of this one, and no target
// is written without all shares.
#pragma once

#include "device/fold.hpp"

namespace r2ccl::device {

// In the memory of a rank's GPU, written by its neighbours: where they are, by their place.
struct Inbox {
  Word shared[most_neighbours];     // whose input lies there
  Word summed[most_neighbours];     // who has read all inputs
  Word spread[most_neighbours];     // whose share of the result lies there
  Word collected[most_neighbours];  // who has read all shares
  Word lost;                        // not 0: some rank will get no more results; sticky
};

// How a rank's kernels know the ranks of its node, itself among them.
struct Neighbours {
  std::uint32_t ranks = 0;
  std::uint32_t own = 0;                 // place; in the order of the canonical tree
  Inbox* inboxes[most_neighbours]{};     // of each
  std::byte* memory[most_neighbours]{};  // of each: `ring` entries, an input and a result
  std::uint64_t entry_bytes = 0;
  std::uint64_t result_offset = 0;

  [[nodiscard]] R2CCL_SHARED std::byte* input(std::uint32_t rank, Sequence sequence) const {
    return memory[rank] + (sequence % ring) * entry_bytes;
  }
  [[nodiscard]] R2CCL_SHARED std::byte* result(std::uint32_t rank, Sequence sequence) const {
    return input(rank, sequence) + result_offset;
  }
};

// Which elements each rank of a node adds up: even shares, each on a Vector's boundary.
struct Shares {
  std::uint64_t count = 0;    // elements of all
  std::uint64_t share = 0;    // of each but the last ones
  std::uint64_t element = 0;  // bytes

  [[nodiscard]] static R2CCL_SHARED Shares of(std::uint64_t count, std::uint64_t element,
                                              std::uint32_t ranks) {
    constexpr std::uint64_t unit = 128;  // bytes; a line
    const std::uint64_t lanes = unit / element;
    const std::uint64_t even = (count + ranks - 1) / ranks;
    return {count, (even + lanes - 1) / lanes * lanes, element};
  }
  [[nodiscard]] R2CCL_SHARED std::uint64_t first(std::uint32_t rank) const {
    return rank * share < count ? rank * share : count;
  }
  [[nodiscard]] R2CCL_SHARED std::uint64_t size(std::uint32_t rank) const {
    return first(rank + 1) - first(rank);
  }
};

// What the kernels of a rank work with.
struct Exchange {
  Mailbox* mailbox;
  DeviceState* state;
  Staging staging;
  Neighbours node;

  [[nodiscard]] R2CCL_SHARED const Inbox& own() const { return *node.inboxes[node.own]; }

  // Whether no more results will come.
  [[nodiscard]] R2CCL_SHARED bool over() const {
    return load_acquire(mailbox->abort) != 0 || load_acquire(own().lost) != 0;
  }

  // Until all ranks of the node have come to `wanted`; false: not all will.
  template <typename Block>
  [[nodiscard]] R2CCL_SHARED bool await(const Block& block, const Word (&words)[most_neighbours],
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

  // By one thread of the last block alone: all others have done their part.
  [[nodiscard]] R2CCL_SHARED bool is_last(const Place& at) const {
    if (at.thread != 0 || count_up(state->staged_blocks) != at.blocks) return false;
    state->staged_blocks = 0;
    return true;
  }
  // All ranks of the node, that this one has come to `what`, if it has; else that it never will,
  // and the own host, too, which may not know.
  R2CCL_SHARED void tell(bool has, Word (Inbox::*words)[most_neighbours], Sequence what) const {
    for (std::uint32_t rank = 0; rank < node.ranks; ++rank) {
      Inbox& inbox = *node.inboxes[rank];
      if (has)
        store_release((inbox.*words)[node.own], what);
      else
        store_release(inbox.lost, 1);
    }
    if (!has) store_release(mailbox->lost, 1);
  }
};

// The input of the next collective.  The caller may change it when the kernel has ended.
template <typename Block>
R2CCL_SHARED void share(const Place& at, const Block& block, Shared& shared,
                        const Exchange& exchange, const std::byte* source, std::uint64_t bytes) {
  const Neighbours& node = exchange.node;
  if (at.thread == 0) {
    shared.exchange = exchange.state->exchange + 1;
    shared.go =
        !exchange.over() && exchange.await(block, exchange.own().summed, shared.exchange - ring);
  }
  block.sync();
  if (shared.go) copy(at, node.input(node.own, shared.exchange), source, bytes);
  block.sync();
  if (exchange.is_last(at)) exchange.tell(shared.go, &Inbox::shared, shared.exchange);
}

// The own share of all inputs, posted as `plan`: the collective of the ranks that have this place
// on their nodes, of shares.size(own) elements.
template <typename Block>
R2CCL_SHARED void sum_up(const Place& at, const Block& block, Shared& shared,
                         const Exchange& exchange, const Shares& shares, DType dtype, ReduceOp op,
                         std::uint32_t plan) {
  const Neighbours& node = exchange.node;
  if (at.thread == 0) {
    shared.exchange = exchange.state->exchange + 1;
    shared.sequence = exchange.state->sequence + 1;
    shared.go = !exchange.over() && exchange.await(block, exchange.own().shared, shared.exchange) &&
                exchange.await_host(block, shared.sequence - ring);
  }
  block.sync();
  if (shared.go) {
    Terms terms{};
    terms.ranks = node.ranks;
    for (std::uint32_t rank = 0; rank < node.ranks; ++rank)
      terms.of[rank] = node.input(rank, shared.exchange) + shares.first(node.own) * shares.element;
    fold(at, exchange.staging.input(shared.sequence), terms, shares.size(node.own), dtype, op);
  }
  block.sync();
  if (!exchange.is_last(at)) return;
  exchange.state->exchange = shared.exchange;
  exchange.state->sequence = shared.sequence;
  exchange.tell(shared.go, &Inbox::summed, shared.exchange);
  if (!shared.go) return;
  exchange.mailbox->commands[shared.sequence % ring] = {shared.sequence, plan};
  store_release(exchange.mailbox->posted, shared.sequence);
}

// The result of the own share.  `lag`: how many have been posted since, less than the ring, all of
// them by sum_up().
template <typename Block>
R2CCL_SHARED void spread(const Place& at, const Block& block, Shared& shared,
                         const Exchange& exchange, const Shares& shares, std::uint32_t lag) {
  const Neighbours& node = exchange.node;
  if (at.thread == 0) {
    shared.exchange = exchange.state->exchange - lag;
    shared.sequence = exchange.state->sequence - lag;
    shared.go = exchange.await_host(block, shared.sequence) &&
                exchange.await(block, exchange.own().collected, shared.exchange - ring);
  }
  block.sync();
  if (shared.go)
    copy(at, node.result(node.own, shared.exchange), exchange.staging.result(shared.sequence),
         shares.size(node.own) * shares.element);
  block.sync();
  if (exchange.is_last(at)) exchange.tell(shared.go, &Inbox::spread, shared.exchange);
}

// All shares of the result; where not all come the target is left as it is.
template <typename Block>
R2CCL_SHARED void collect(const Place& at, const Block& block, Shared& shared,
                          const Exchange& exchange, const Shares& shares, std::byte* target,
                          std::uint32_t lag) {
  const Neighbours& node = exchange.node;
  if (at.thread == 0) {
    shared.exchange = exchange.state->exchange - lag;
    shared.go = exchange.await(block, exchange.own().spread, shared.exchange);
  }
  block.sync();
  if (shared.go) {
    for (std::uint32_t rank = 0; rank < node.ranks; ++rank)
      copy(at, target + shares.first(rank) * shares.element, node.result(rank, shared.exchange),
           shares.size(rank) * shares.element);
  }
  block.sync();
  if (!exchange.is_last(at)) return;
  exchange.tell(shared.go, &Inbox::collected, shared.exchange);
  store_release(exchange.mailbox->left, shared.exchange);
}

// Until the neighbours have read all that lies in this rank's memory, which is then its own again.
// By one thread.
template <typename Block>
R2CCL_SHARED void depart(const Block& block, const Exchange& exchange) {
  const Sequence last = exchange.state->exchange;
  store_release(exchange.mailbox->entered, last + 1);
  (void)exchange.await(block, exchange.own().collected, last);
  store_release(exchange.mailbox->left, last + 1);
}

}  // namespace r2ccl::device
