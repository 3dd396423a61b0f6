// All-reduce, algorithm one_shot: all ranks exchange whole inputs, and every rank folds all inputs.
#include "collectives/segments.hpp"

namespace r2ccl {

Status all_reduce_one_shot(Channel& channel, const std::byte* in, std::byte* out, std::size_t count,
                           const Reducer& reducer) {
  const std::size_t bytes = count * size_of(reducer.dtype);
  const std::span input(in, bytes);
  R2CCL_TRY(for_each_peer(channel, [&](int peer) { return channel.send(peer, input); }));

  const Segments segments(bytes, channel.segment_bytes());
  SegmentFold fold(channel, reducer);
  for (std::size_t s = 0; s < segments.count(); ++s) {
    R2CCL_TRY(fold.receive(segments.size(s)));
    if (in == out) {
      // The result overwrites input bytes.  Wait until no rail can still send these bytes.
      R2CCL_TRY(
          for_each_peer(channel, [&](int peer) { return channel.settle(peer, segments.end(s)); }));
    }
    R2CCL_TRY(fold.fold(in + segments.begin(s), out + segments.begin(s), segments.size(s)));
  }
  return channel.finish();
}

}  // namespace r2ccl
