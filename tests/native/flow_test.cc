// Max-min fair flows against a naive reference and closed forms, and the all-reduce made of flows.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "flow/all_reduce.hpp"
#include "flow/network.hpp"
#include "plan/shares.hpp"

namespace r2ccl::flow {
namespace {

class Net {
 public:
  ResourceId resource(double bytes_per_s) { return checked(network.add_resource(bytes_per_s)); }
  FlowId flow(Flow flow) { return checked(network.add_flow(std::move(flow))); }
  FlowId flow(double bytes, std::vector<ResourceId> path, std::vector<FlowId> after = {}) {
    return flow({.bytes = bytes, .path = std::move(path), .after = std::move(after)});
  }
  Network network;

 private:
  template <typename T>
  static T checked(Result<T> added) {
    if (added.ok()) return added.value();
    ADD_FAILURE() << added.take_status().message();
    return 0;
  }
};

TEST(Flow, SharesAResourceAndSpeedsUpWhenAnotherEnds) {
  Net net;
  const ResourceId nic = net.resource(10);
  const FlowId small = net.flow(10, {nic});
  const FlowId large = net.flow(30, {nic});
  const Outcome outcome = net.network.run();
  EXPECT_DOUBLE_EQ(outcome.sent_s[small], 2);
  EXPECT_DOUBLE_EQ(outcome.sent_s[large], 4);
  EXPECT_DOUBLE_EQ(outcome.end_s, 4);
  EXPECT_DOUBLE_EQ(outcome.carried_bytes[nic], 40);
}

TEST(Flow, TakesWhatFlowsOfOtherBottlenecksLeave) {
  Net net;
  const ResourceId narrow = net.resource(2);
  const ResourceId wide = net.resource(10);
  const FlowId both = net.flow(1, {narrow, wide});
  const FlowId first = net.flow(1, {narrow});
  const FlowId second = net.flow(9, {wide});
  const Outcome outcome = net.network.run();
  EXPECT_DOUBLE_EQ(outcome.sent_s[both], 1);
  EXPECT_DOUBLE_EQ(outcome.sent_s[first], 1);
  EXPECT_DOUBLE_EQ(outcome.sent_s[second], 1);
}

TEST(Flow, BeginsAfterArrivalsAndBehindTheLastByteOfItsStream) {
  Net net;
  const ResourceId nic = net.resource(1);
  const FlowId first = net.flow({.bytes = 2, .latency_s = 5, .path = {nic}});
  const FlowId next = net.flow({.bytes = 3, .latency_s = 5, .path = {nic}, .behind = first});
  const FlowId reply = net.flow(1, {}, {first});
  const FlowId last = net.flow({.bytes = 0, .path = {nic}, .after = {reply, next}});
  const Outcome outcome = net.network.run();
  EXPECT_EQ(outcome.sent_s, (std::vector<double>{2, 5, 7, 10}));
  EXPECT_EQ(outcome.arrived_s, (std::vector<double>{7, 10, 7, 10}));
  EXPECT_EQ(outcome.arrived_s[last], outcome.end_s);
}

TEST(Flow, RefusesWrongInput) {
  constexpr double infinite = std::numeric_limits<double>::infinity();
  Network network;
  for (const double capacity : {0.0, -1.0, infinite})
    EXPECT_FALSE(network.add_resource(capacity).ok());
  ASSERT_TRUE(network.add_resource(1).ok());
  for (const Flow& wrong :
       {Flow{.bytes = -1}, Flow{.bytes = infinite}, Flow{.latency_s = -1}, Flow{.path = {1}},
        Flow{.path = {0, 0}}, Flow{.after = {0}}, Flow{.behind = 0}})
    EXPECT_FALSE(network.add_flow(wrong).ok());
  EXPECT_EQ(network.flows(), 0U);
  EXPECT_EQ(network.resources(), 1U);
  EXPECT_EQ(network.run().end_s, 0);
}

// Rates by repeated search for the fullest resource, and times by steps from event to event.
std::vector<double> naive_ends(const std::vector<double>& capacities,
                               const std::vector<Flow>& flows) {
  std::vector<double> left, ends(flows.size(), -1);
  for (const Flow& flow : flows) left.push_back(flow.bytes);
  double now = 0;
  while (true) {
    std::vector<double> rates(flows.size(), -1), room = capacities;
    std::vector<std::size_t> active;
    for (std::size_t i = 0; i < flows.size(); ++i) {
      const bool free = std::ranges::all_of(flows[i].after, [&](FlowId f) { return ends[f] >= 0; });
      if (ends[i] < 0 && free) active.push_back(i);
    }
    if (active.empty()) return ends;
    std::size_t fixed = 0;
    while (fixed < active.size()) {
      double least = std::numeric_limits<double>::infinity();
      std::size_t fullest = 0;
      std::vector<std::size_t> users(capacities.size());
      for (const std::size_t i : active)
        for (const ResourceId r : flows[i].path) users[r] += rates[i] < 0 ? 1 : 0;
      for (std::size_t r = 0; r < capacities.size(); ++r) {
        if (users[r] == 0 || room[r] / static_cast<double>(users[r]) >= least) continue;
        least = room[r] / static_cast<double>(users[r]);
        fullest = r;
      }
      for (const std::size_t i : active) {
        if (rates[i] >= 0 || std::ranges::count(flows[i].path, fullest) == 0) continue;
        rates[i] = least;
        ++fixed;
        for (const ResourceId r : flows[i].path) room[r] -= least;
      }
    }
    double step = std::numeric_limits<double>::infinity();
    for (const std::size_t i : active) step = std::min(step, left[i] / rates[i]);
    now += step;
    for (const std::size_t i : active) {
      left[i] -= step * rates[i];
      if (left[i] < 1e-9 * flows[i].bytes) ends[i] = now;
    }
  }
}

TEST(Flow, HasTheRatesOfTheNaiveReference) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 60; ++round) {
    Net net;
    std::vector<double> capacities;
    std::vector<Flow> flows;
    const std::size_t resources = 1 + random() % 8;
    for (std::size_t r = 0; r < resources; ++r) {
      capacities.push_back(static_cast<double>(1 + random() % 20));
      net.resource(capacities.back());
    }
    double total = 0;
    for (FlowId id = 0; id < 30; ++id) {
      Flow flow{.bytes = static_cast<double>(1 + random() % 50)};
      for (ResourceId r = 0; r < resources; ++r)
        if (random() % 3 == 0) flow.path.push_back(r);
      if (flow.path.empty()) flow.path.push_back(static_cast<ResourceId>(random() % resources));
      for (FlowId before = 0; before < id; ++before)
        if (random() % 10 == 0) flow.after.push_back(before);
      total += flow.bytes * static_cast<double>(flow.path.size());
      flows.push_back(flow);
      net.flow(flow);
    }
    const std::vector<double> expected = naive_ends(capacities, flows);
    const Outcome outcome = net.network.run();
    for (FlowId id = 0; id < flows.size(); ++id)
      EXPECT_NEAR(outcome.sent_s[id], expected[id], 1e-7 * expected[id]) << round << ' ' << id;
    EXPECT_NEAR(std::reduce(outcome.carried_bytes.begin(), outcome.carried_bytes.end()), total,
                1e-9 * total);
  }
}

// A ring all-reduce takes 2(n-1) steps of the slowest node, whatever the other nodes do.
TEST(Flow, ARingIsAsSlowAsItsSlowestNode) {
  for (const std::size_t nodes : {3U, 8U, 32U}) {
    for (const double slow : {1.0, 0.875, 0.5}) {
      Net net;
      for (std::size_t node = 0; node < nodes; ++node)
        for (int direction = 0; direction < 2; ++direction) net.resource(node == 1 ? slow : 1.0);
      std::vector<FlowId> last(nodes);
      for (std::size_t step = 0; step < 2 * (nodes - 1); ++step) {
        std::vector<FlowId> sent;
        for (std::size_t node = 0; node < nodes; ++node) {
          const std::size_t next = (node + 1) % nodes;
          Flow flow{
              .bytes = 1.0 / static_cast<double>(nodes),
              .path = {static_cast<ResourceId>(2 * node), static_cast<ResourceId>(2 * next + 1)}};
          // The message before in the stream, and the part that arrived in the step before.
          if (step > 0) {
            flow.behind = last[node];
            flow.after = {last[(node + nodes - 1) % nodes]};
          }
          sent.push_back(net.flow(flow));
        }
        last = sent;
      }
      const double form = 2.0 * static_cast<double>(nodes - 1) / static_cast<double>(nodes) / slow;
      EXPECT_NEAR(net.network.run().end_s, form, 1e-9 * form) << nodes << ' ' << slow;
    }
  }
}

// ---- the two-shot all-reduce ----

// Returns the time of a buffer of 1 byte among nodes of 1 byte/s, as a multiple of the ideal
// healthy time.  The first node lacks `lost` sixteenths.
double slowdown(std::size_t nodes, unsigned lost, bool even, std::size_t blocks, bool overlapped) {
  std::vector<std::uint8_t> all(nodes);
  all[0] = static_cast<std::uint8_t>(lost);
  AllReduce call{.node_bytes_per_s = std::vector<double>(nodes, 1.0), .bytes = 1};
  call.node_bytes_per_s[0] = (16.0 - lost) / 16;
  if (!even) call.weights = share_weights(all);
  call.blocks = blocks;
  call.overlapped = overlapped;
  auto time = time_of(call);
  if (!time.ok()) {
    ADD_FAILURE() << time.take_status().message();
    return 0;
  }
  return time.value() / (2.0 * static_cast<double>(nodes - 1) / static_cast<double>(nodes));
}

TEST(AllReduceFlows, OfEvenSharesAreAsSlowAsTheSlowestNode) {
  for (const std::size_t nodes : {2U, 3U, 4U, 8U})
    for (const unsigned lost : {0U, 2U, 4U, 8U})
      for (const std::size_t blocks : {1U, 5U})
        EXPECT_NEAR(slowdown(nodes, lost, /*even=*/true, blocks, /*overlapped=*/false),
                    16.0 / (16 - lost), 1e-9);
}

// Without the overlap, even shares are the best.
TEST(AllReduceFlows, OfUnevenSharesGainNothingWithoutTheOverlap) {
  for (const std::size_t nodes : {3U, 4U, 8U})
    EXPECT_GT(slowdown(nodes, 8, /*even=*/false, 8, /*overlapped=*/false),
              slowdown(nodes, 8, /*even=*/true, 8, /*overlapped=*/false));
}

TEST(AllReduceFlows, OfUnevenSharesApproachTheClosedForm) {
  for (const std::size_t nodes : {3U, 4U, 8U}) {
    for (const unsigned lost : {0U, 2U, 4U, 8U}) {
      std::vector<std::uint8_t> all(nodes);
      all[0] = static_cast<std::uint8_t>(lost);
      const double form = static_cast<double>(exchange_time(share_weights(all), all)) / (1 << 20) /
                          (2.0 * static_cast<double>(nodes - 1) / static_cast<double>(nodes));
      double last = std::numeric_limits<double>::infinity();
      for (const std::size_t blocks : {4U, 16U, 64U}) {
        const double time = slowdown(nodes, lost, /*even=*/false, blocks, /*overlapped=*/true);
        EXPECT_GE(time, form * (1 - 1e-5));
        EXPECT_LE(time, form * (1 + 1.1 / static_cast<double>(blocks)));
        EXPECT_LE(time, last * (1 + 1e-9)) << "more blocks are slower";
        last = time;
      }
    }
  }
}

TEST(AllReduceFlows, RefuseWrongInput) {
  EXPECT_FALSE(time_of({.node_bytes_per_s = {1, 1}, .bytes = 1, .blocks = 0}).ok());
  EXPECT_FALSE(time_of({.node_bytes_per_s = {1, 1}, .bytes = 1, .weights = {1}}).ok());
  EXPECT_FALSE(time_of({.node_bytes_per_s = {1, 1}, .bytes = 1, .weights = {0, 0}}).ok());
  EXPECT_FALSE(time_of({.node_bytes_per_s = {1, 0}, .bytes = 1}).ok());
  EXPECT_FALSE(time_of({.node_bytes_per_s = {1, 1}, .bytes = -1}).ok());
}

}  // namespace
}  // namespace r2ccl::flow
