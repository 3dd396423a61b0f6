// The collective algorithms, one file each.  Every rank calls the same algorithm on its Channel
// with matching arguments.  The caller has checked the arguments: sizes, root in range, no avg of
// bool.
//
// Rules of all algorithms:
// - All sends of input, or of a block, are posted before the first wait for a peer's data.  Empty
//   input is sent as an empty message.  If ranks disagree about a call, the empty message keeps a
//   rank from taking the message of the next call for this call.
// - Messages of a stream are received in the order of posting.
// - Inputs larger than a message are processed in segments.
// - Sent memory is overwritten only after settle().  No rail reads or writes a caller's memory
//   after the return.
#pragma once

#include <cstddef>
#include <span>

#include "base/errors.hpp"
#include "base/types.hpp"
#include "collectives/channel.hpp"
#include "collectives/reduce.hpp"
#include "plan/shares.hpp"

namespace r2ccl {

// The reduction of elements.  All fields are equal on all ranks except simd; simd changes no bit of
// the result.
struct Reducer {
  DType dtype;
  ReduceOp op;
  const ReductionTree& tree;
  Simd simd;
};

// All-reduce of count elements from in to out; out may equal in.
//
// Algorithm one_shot: every rank sends the whole input to every peer and folds all inputs.  Costs 1
// message time; each of n ranks sends (n-1) x the bytes.
Status all_reduce_one_shot(Channel& channel, const std::byte* in, std::byte* out, std::size_t count,
                           const Reducer& reducer);
// Algorithm two_shot: each rank folds a shard of the elements and sends the result to every peer.
// Costs 2 message times; each of n ranks sends 2(n-1)/n x the bytes.
Status all_reduce_two_shot(Channel& channel, const std::byte* in, std::byte* out, std::size_t count,
                           const Reducer& reducer);

// Algorithm two_shot with the shares of nodes of unequal bandwidth: reduce-scatter and all-gather
// overlap across blocks.  Costs the time in plan/shares.hpp.  Even shares, and inputs too small for
// the overlap, take all_reduce_two_shot().  The result has the same bits.
Status all_reduce_two_shot_uneven(Channel& channel, const std::byte* in, std::byte* out,
                                  std::size_t count, const Reducer& reducer, const Shares& shares);

// All-reduce by a chosen algorithm; automatic counts as two_shot.
//
// Algorithm two_shot_overlap: two_shot whose blocks overlap with even shares as well.  There are no
// pauses between blocks, and more bytes are under way: faster if NICs are the bottleneck, slower if
// memory is.
Status all_reduce(Channel& channel, const std::byte* in, std::byte* out, std::size_t count,
                  const Reducer& reducer, Algorithm algorithm, const Shares& shares);

// All-gather: rank r contributes counts[r] elements.  out holds the shards of all ranks in rank
// order; in may be the own shard of out.
Status all_gatherv(Channel& channel, const std::byte* in, std::byte* out,
                   std::span<const std::size_t> counts, DType dtype);

// Reduce-scatter: in holds a shard of counts[r] elements for each rank r.  out receives the folded
// own shard and may be the own shard of in.
Status reduce_scatterv(Channel& channel, const std::byte* in, std::byte* out,
                       std::span<const std::size_t> counts, const Reducer& reducer);

// Largest communicator with a flat broadcast.  Beyond 8 ranks the port of root would be the
// bottleneck, and the ranks form a tree.
inline constexpr int largest_flat_broadcast = 8;
// Broadcast in place: data is read on root and written on all other ranks.
Status broadcast(Channel& channel, std::byte* data, std::size_t count, DType dtype, int root);

// Gather: root receives counts[r] elements of each rank r.  out is used on root only; in may be the
// own shard of out.
Status gather(Channel& channel, const std::byte* in, std::byte* out,
              std::span<const std::size_t> counts, DType dtype, int root);

// All-to-all: in holds in_counts[r] elements for rank r, out receives out_counts[r] elements of
// rank r, both in rank order.  out may equal in; different counts then cost a copy of in.
Status all_to_allv(Channel& channel, const std::byte* in, std::span<const std::size_t> in_counts,
                   std::byte* out, std::span<const std::size_t> out_counts, DType dtype);

// Point-to-point transfer of count elements to or from a peer.
Status send(Channel& channel, const std::byte* data, std::size_t count, DType dtype, int peer);
Status recv(Channel& channel, std::byte* data, std::size_t count, DType dtype, int peer);

// Returns after every rank has entered the barrier.
Status barrier(Channel& channel);

// Every rank sends an empty message to every other rank, so that each pair compares its tags:
// post_tags() sends, receive_tags() receives and compares.
Status post_tags(Channel& channel);
Status receive_tags(Channel& channel);

}  // namespace r2ccl
