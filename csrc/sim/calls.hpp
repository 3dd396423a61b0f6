// The collectives that a simulated job runs: made from the seed, the same on every rank, and
// checked against what they must return.
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
  std::uint64_t seed = 0;  // of the inputs
  std::uint32_t number = 0;
  Collective collective = Collective::barrier;
  Algorithm algorithm = Algorithm::one_shot;
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  std::vector<std::size_t> counts;  // elements, by rank; all_reduce and broadcast: the first alone
  bool in_place = false;
  bool registered = false;  // ports may write the result where it belongs
};

// `bytes`: about the largest size of a rank's shard.
[[nodiscard]] Call random_call(Random& random, std::uint32_t number, int ranks, std::size_t bytes);
[[nodiscard]] std::string describe(const Call& call);

// One rank's part in a call: its memory, and what must be in it afterwards.
class RankCall {
 public:
  using Bytes = std::vector<std::byte>;

  RankCall(SimChannel& channel, const Call& call, const ReductionTree& tree);

  // Runs it on this rank.  What is wrong with the result goes to `wrong`; empty: nothing.
  Status run(std::string& wrong);

  // What this rank brings, and what it must get.
  [[nodiscard]] const Bytes& input() const { return in_; }
  [[nodiscard]] const Bytes& expected() const { return expected_; }
  // The call on other memory: `in` has input(), `out` is for what is expected().
  Status carry(const std::byte* in, std::byte* out);

 private:
  [[nodiscard]] CallTag tag() const;
  [[nodiscard]] std::vector<Bytes> inputs(std::size_t count) const;
  [[nodiscard]] Bytes gathered() const;
  void prepare();
  Status algorithm(const std::byte* in, std::byte* out);
  Status ring(const std::byte* in, std::byte* out);

  SimChannel& channel_;
  const Call& call_;
  const ReductionTree& tree_;
  const int rank_;
  const int ranks_;
  const Algorithm all_reduce_;
  const std::size_t own_;
  Bytes in_;
  Bytes out_;
  Bytes expected_;
};

}  // namespace r2ccl::sim
