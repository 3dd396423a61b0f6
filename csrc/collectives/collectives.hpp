// The collective algorithms, one a file.  Each is one call on a Channel: every rank calls the same
// one with matching arguments, and the caller has checked them (sizes, root in range, no avg of
// bool).
//
// They share a discipline.  Every send is posted before the first wait, empty ones too: an empty
// message keeps ranks that disagree about a call from mistaking the next one for it.  Messages of a
// stream are received in the order in which they were posted.  Inputs larger than a message are
// worked on a segment at a time.  Memory that was sent is overwritten only after settle(), and
// nothing is read after return.
#pragma once

#include <cstddef>
#include <span>

#include "base/errors.hpp"
#include "base/types.hpp"
#include "collectives/channel.hpp"
#include "collectives/reduce.hpp"

namespace r2ccl {

// How elements are combined; equal on all ranks, except simd, which changes no bit.
struct Reducer {
  DType dtype;
  ReduceOp op;
  const ReductionTree& tree;
  Simd simd;
};

// in and out hold count elements; out may be in.
//
// One-shot: everybody sends everything to everybody and folds it all.  One message time, (n-1) x
// the bytes on the wire.
Status all_reduce_one_shot(Channel& channel, const std::byte* in, std::byte* out, std::size_t count,
                           const Reducer& reducer);
// Two-shot: each rank folds its share of the elements and sends the result to everybody.  Two
// message times, 2(n-1)/n x the bytes.
Status all_reduce_two_shot(Channel& channel, const std::byte* in, std::byte* out, std::size_t count,
                           const Reducer& reducer);

// counts[r] elements of rank r.  out holds the shards of all ranks in rank order; in may be the own
// shard of out.
Status all_gatherv(Channel& channel, const std::byte* in, std::byte* out,
                   std::span<const std::size_t> counts, DType dtype);

// in holds a shard for each rank, counts[r] elements for rank r; out gets the own shard, folded,
// and may be the own shard of in.
Status reduce_scatterv(Channel& channel, const std::byte* in, std::byte* out,
                       std::span<const std::size_t> counts, const Reducer& reducer);

// In place: data is read on root and written elsewhere.
// Of more ranks root's own port becomes the bottleneck of a flat broadcast: they make a tree.
inline constexpr int largest_flat_broadcast = 8;
Status broadcast(Channel& channel, std::byte* data, std::size_t count, DType dtype, int root);

// out is used on root only; in may be root's own shard of it.
Status gather(Channel& channel, const std::byte* in, std::byte* out,
              std::span<const std::size_t> counts, DType dtype, int root);

// in holds in_counts[r] elements for rank r, out gets out_counts[r] elements of rank r, both in
// rank order; out may be in (which costs a copy of in where the counts differ).
Status all_to_allv(Channel& channel, const std::byte* in, std::span<const std::size_t> in_counts,
                   std::byte* out, std::span<const std::size_t> out_counts, DType dtype);

Status send(Channel& channel, const std::byte* data, std::size_t count, DType dtype, int peer);
Status recv(Channel& channel, std::byte* data, std::size_t count, DType dtype, int peer);

Status barrier(Channel& channel);

}  // namespace r2ccl
