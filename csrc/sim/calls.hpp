// Collectives of a simulated job: generated from the seed, equal on every rank unless a rank leaves
// out a call, and checked against the expected result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collectives/collectives.hpp"
#include "sim/random.hpp"
#include "sim/sim_channel.hpp"

namespace r2ccl::sim {

struct Call {
  std::uint64_t seed = 0;  // seed of the inputs
  std::uint32_t number = 0;
  Collective collective = Collective::barrier;
  Algorithm algorithm = Algorithm::one_shot;
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  // elements per rank; all_reduce and broadcast use only counts[0]
  std::vector<std::size_t> counts;
  bool in_place = false;
  bool registered = false;       // rails may write into the result buffer
  std::uint32_t step = 0;        // 0: outside of steps
  std::uint16_t call = 0;        // number within the step; end of a step: number of its calls
  TagKind kind = TagKind::call;  // call, or end_of_step: ranks compare their positions
};

// Returns a random call.  `bytes` is about the largest shard of a rank.
[[nodiscard]] Call random_call(Random& random, std::uint32_t number, int ranks, std::size_t bytes);
[[nodiscard]] std::string describe(const Call& call);

// A rank's part in a call: the memory and the expected result.
class RankCall {
 public:
  using Bytes = std::vector<std::byte>;

  RankCall(SimChannel& channel, const Call& call, const ReductionTree& tree);

  // Runs the call on this rank.  A wrong result is described in `wrong`; an empty text means
  // success.
  Status run(std::string& wrong);

  // The input of this rank and the expected result.
  [[nodiscard]] const Bytes& input() const { return in_; }
  [[nodiscard]] const Bytes& expected() const { return expected_; }
  // Runs the call on other memory: `in` holds input(), `out` has room for expected().
  Status carry(const std::byte* in, std::byte* out);

 private:
  [[nodiscard]] CallTag tag() const;
  [[nodiscard]] std::vector<Bytes> inputs(std::size_t count) const;
  [[nodiscard]] Bytes gathered() const;
  void prepare();
  Status compare_positions();
  Status algorithm(const std::byte* in, std::byte* out);
  Status all_reduce(const std::byte* in, std::byte* out, const Reducer& reducer);
  Status ring(const std::byte* in, std::byte* out);

  SimChannel& channel_;
  const Call& call_;
  const ReductionTree& tree_;
  const int rank_;
  const int ranks_;
  const std::size_t own_;
  Bytes in_;
  Bytes out_;
  Bytes expected_;
};

}  // namespace r2ccl::sim
