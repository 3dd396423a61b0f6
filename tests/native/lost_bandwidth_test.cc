// Time and bytes of an all-reduce while a node has lost rails, in virtual time: production links
// and collectives over NICs shared by all peers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <memory>
#include <numeric>
#include <vector>

#include "collectives/collectives.hpp"
#include "flow/all_reduce.hpp"
#include "plan/blocks.hpp"
#include "plan/shares.hpp"
#include "sim/sim_channel.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {
namespace {

constexpr TimeNs second = 1000 * ns_per_ms;
// All rails of a node together carry a byte in this time.
constexpr TimeNs node_ns_per_byte = 25;
constexpr TimeNs latency_ns = 5'000;

struct Case {
  int nodes;
  int rails;
  int lost_rails;  // of node 0
  std::size_t bytes;
  std::uint32_t slot_bytes = 256U << 10;

  [[nodiscard]] std::vector<std::uint8_t> lost() const {
    std::vector<std::uint8_t> all(static_cast<std::size_t>(nodes));
    all[0] = static_cast<std::uint8_t>(16 * lost_rails / rails);
    return all;
  }
  // Returns the time of an all-reduce whose healthy nodes are busy all the time.
  [[nodiscard]] double ideal() const {
    return static_cast<double>(bytes * node_ns_per_byte) * 2 * (nodes - 1) / nodes;
  }
  [[nodiscard]] std::vector<std::uint32_t> weights(bool even) const {
    return even ? std::vector<std::uint32_t>{} : share_weights(lost());
  }
  // Returns the time of the closed form, for even or for optimal shares.
  [[nodiscard]] double form(bool even) const {
    return static_cast<double>(exchange_time(weights(even), lost())) / (1 << 20) *
           static_cast<double>(bytes * node_ns_per_byte);
  }
  // Returns the time of the flow model with the same blocks, for optimal shares.
  [[nodiscard]] double flow() const {
    flow::AllReduce call{
        .node_bytes_per_s =
            std::vector<double>(static_cast<std::size_t>(nodes), 1.0 / node_ns_per_byte),
        .latency_s = latency_ns,
        .bytes = static_cast<double>(bytes),
        .weights = weights(/*even=*/false),
        .blocks = overlapped_blocks(bytes, static_cast<std::size_t>(nodes), slot_bytes),
        .overlapped = true};
    call.node_bytes_per_s[0] *= static_cast<double>(rails - lost_rails) / rails;
    auto time = flow::time_of(call);  // bytes/ns in, ns out
    EXPECT_TRUE(time.ok());
    return time.ok() ? time.value() : 0;
  }
  // Returns the bytes that a node sends with optimal shares.
  [[nodiscard]] double sent(int node) const {
    const auto of = weights(/*even=*/false);
    const double share =
        of[static_cast<std::size_t>(node)] / std::accumulate(of.begin(), of.end(), 0.0);
    return static_cast<double>(bytes) * (1 + (nodes - 2) * share);
  }
};

class Job {
 public:
  explicit Job(const Case& of) : case_(of), world_(options(of)) {
    std::vector<int> all(static_cast<std::size_t>(of.nodes));
    std::iota(all.begin(), all.end(), 0);
    for (int rank = 0; rank < of.nodes; ++rank)
      channels_.push_back(std::make_unique<SimChannel>(world_, 7, all, rank));
    tree_ = ReductionTree::from_nodes(all);
    EXPECT_TRUE(world_.run_until([this] { return world_.all_rails_up(); }, second));
    for (int rail = 0; rail < of.lost_rails; ++rail)
      world_.cut(0, static_cast<RailId>(of.rails - 1 - rail), 1);
  }

  // Returns the time of a call in which all ranks go by the same losses.
  double run(bool even) {
    const auto weights = case_.weights(even);
    const Shares shares = weights.empty() ? Shares() : Shares(weights);
    TimeNs begin = 0, end = 0;
    EXPECT_TRUE(world_.run(
        [&](int rank) {
          for (int before = 1; before < calls; ++before) call(rank, shares);  // rates become known
          if (rank == 0) begin = world_.now();
          call(rank, shares);
          end = std::max(end, world_.now());
        },
        600 * second));
    return static_cast<double>(end - begin);
  }
  // Returns the bytes that a node has sent in a call, headers included.
  [[nodiscard]] double sent(int node) const {
    return static_cast<double>(world_.sent_bytes(node)) / calls;
  }

 private:
  static constexpr int calls = 3;

  static World::Options options(const Case& of) {
    World::Options options;
    options.ranks = of.nodes;
    options.rails.assign(static_cast<std::size_t>(of.rails), RailKind::tcp);
    options.nic_ns_per_byte = node_ns_per_byte * of.rails;
    options.delays.latency_ns = latency_ns;
    options.delays.jitter_ns = 1'000;
    options.link.shape.slot_bytes = of.slot_bytes;
    return options;
  }

  void call(int rank, const Shares& shares) {
    const auto own = static_cast<std::size_t>(rank);
    const std::size_t count = case_.bytes / sizeof(std::int32_t);
    std::vector<std::int32_t> data(count);
    for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<std::int32_t>(i) * (rank + 1);
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    const Reducer reducer{DType::i32, ReduceOp::sum, tree_, best_simd()};
    const CallTag tag{.count = count,
                      .number = calls_[own]++,
                      .collective = Collective::all_reduce,
                      .dtype = DType::i32};
    const Status status = channels_[own]->call(tag, [&] {
      return all_reduce_two_shot_uneven(*channels_[own], bytes, bytes, count, reducer, shares);
    });
    EXPECT_TRUE(status.ok()) << status.message();
    const std::int32_t ranks = case_.nodes * (case_.nodes + 1) / 2;
    for (std::size_t i = 0; i < count; i += 997)
      ASSERT_EQ(data[i], static_cast<std::int32_t>(i) * ranks);
  }

  const Case case_;
  World world_;
  ReductionTree tree_;
  std::vector<std::unique_ptr<SimChannel>> channels_;
  std::vector<std::uint32_t> calls_ = std::vector<std::uint32_t>(16);
};

class LostBandwidth : public ::testing::TestWithParam<Case> {};

TEST_P(LostBandwidth, CostsLessWithUnevenShares) {
  const Case& of = GetParam();
  const double even = Job(of).run(/*even=*/true);
  Job job(of);
  const double uneven = job.run(/*even=*/false);
  std::cout << of.nodes << " nodes, " << of.lost_rails << '/' << of.rails << " rails lost, "
            << (of.bytes >> 20) << " MiB: even " << even / of.ideal() << " (form "
            << of.form(true) / of.ideal() << "), uneven " << uneven / of.ideal() << " (form "
            << of.form(false) / of.ideal() << ", flows " << of.flow() / of.ideal() << ")\n";
  for (int node = 0; node < of.nodes; ++node)
    EXPECT_NEAR(job.sent(node), of.sent(node), 0.02 * of.sent(node)) << "node " << node;
  EXPECT_LE(uneven, 1.01 * even);
  EXPECT_LE(uneven, 1.2 * of.form(false));
  EXPECT_NEAR(uneven, of.flow(), 0.1 * of.flow());
  // The gain is at least half of what the form promises from a quarter on.
  if (4 * of.lost_rails >= of.rails) {
    EXPECT_LE(uneven, even - (of.form(true) - of.form(false)) / 2);
  }
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& of) {
  return std::to_string(of.param.nodes) + "nodes" + std::to_string(of.param.lost_rails) + "of" +
         std::to_string(of.param.rails) + "rails" + std::to_string(of.param.bytes >> 20) + "MiB";
}

INSTANTIATE_TEST_SUITE_P(Small, LostBandwidth,
                         ::testing::Values(Case{3, 2, 1, 4U << 20}, Case{4, 2, 1, 4U << 20}),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(GridLong, LostBandwidth,
                         ::testing::Values(Case{3, 8, 1, 8U << 20}, Case{3, 4, 1, 8U << 20},
                                           Case{3, 2, 1, 16U << 20}, Case{4, 8, 1, 8U << 20},
                                           Case{4, 4, 1, 8U << 20}, Case{4, 2, 1, 16U << 20},
                                           Case{6, 4, 1, 8U << 20}, Case{6, 2, 1, 8U << 20},
                                           Case{8, 4, 1, 16U << 20}, Case{8, 2, 1, 16U << 20}),
                         name_of_case);

}  // namespace
}  // namespace r2ccl::sim
