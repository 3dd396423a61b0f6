#include "flow/all_reduce.hpp"

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace r2ccl::flow {
namespace {

Status invalid(const std::string& text) { return {ErrorCode::invalid_argument, text}; }

// Adds the flows of a call, message by message in the order of each rank's program.
class Messages {
 public:
  Messages(Network& network, const AllReduce& call)
      : network_(network), call_(call), nodes_(call.node_bytes_per_s.size()) {
    last_.resize(nodes_ * nodes_);
    gathered_.resize(nodes_);
    folded_.resize(nodes_);
    const double total = std::accumulate(call.weights.begin(), call.weights.end(), 0.0);
    for (std::size_t node = 0; node < nodes_; ++node)
      shares_.push_back(
          call.bytes / static_cast<double>(call.blocks) *
          (call.weights.empty() ? 1 / static_cast<double>(nodes_) : call.weights[node] / total));
  }

  // Adds the resources of the nodes: node i sends over resource 2i and receives over 2i + 1.
  Status add_nodes() {
    for (const double bytes_per_s : call_.node_bytes_per_s)
      for (int direction = 0; direction < 2; ++direction)
        if (auto added = network_.add_resource(bytes_per_s); !added.ok())
          return added.take_status();
    return {};
  }

  Status add_blocks() {
    if (!call_.overlapped) {
      for (std::size_t block = 0; block < call_.blocks; ++block) {
        R2CCL_TRY(scatter());
        R2CCL_TRY(fold());
        R2CCL_TRY(gather());
      }
      return {};
    }
    R2CCL_TRY(scatter());
    for (std::size_t block = 0; block < call_.blocks; ++block) {
      if (block + 1 < call_.blocks) R2CCL_TRY(scatter());
      R2CCL_TRY(fold());
      if (block > 0) R2CCL_TRY(gather());
    }
    return gather();
  }

 private:
  using Arrivals = std::vector<std::vector<FlowId>>;  // by receiver

  // Each node sends every other node a message of `bytes(from, to)` bytes, after its last fold and
  // its last gather.
  template <typename Bytes>
  Result<Arrivals> exchange(Bytes bytes) {
    Arrivals arrivals(nodes_);
    for (std::size_t from = 0; from < nodes_; ++from) {
      for (std::size_t to = 0; to < nodes_; ++to) {
        if (from == to) continue;
        std::optional<FlowId>& before = last_[from * nodes_ + to];
        Flow flow{.bytes = bytes(from, to),
                  .latency_s = call_.latency_s,
                  .path = {static_cast<ResourceId>(2 * from), static_cast<ResourceId>(2 * to + 1)},
                  .behind = before};
        for (const auto& event : {folded_[from], gathered_[from]})
          if (event) flow.after.push_back(*event);
        auto added = network_.add_flow(std::move(flow));
        if (!added.ok()) return added.take_status();
        before = added.value();
        arrivals[to].push_back(added.value());
      }
    }
    return arrivals;
  }

  // Makes each node's event: all messages have arrived, and the event before has happened.
  Status join(const Arrivals& arrivals, std::vector<std::optional<FlowId>>& events) {
    for (std::size_t node = 0; node < nodes_; ++node) {
      Flow flow{.after = arrivals[node]};
      if (events[node]) flow.after.push_back(*events[node]);
      auto added = network_.add_flow(std::move(flow));
      if (!added.ok()) return added.take_status();
      events[node] = added.value();
    }
    return {};
  }

  Status scatter() {
    auto arrivals = exchange([this](std::size_t, std::size_t to) { return shares_[to]; });
    if (!arrivals.ok()) return arrivals.take_status();
    scattered_.push_back(std::move(arrivals.value()));
    return {};
  }
  Status fold() {
    R2CCL_TRY(join(scattered_[folds_++], folded_));
    auto arrivals = exchange([this](std::size_t from, std::size_t) { return shares_[from]; });
    if (!arrivals.ok()) return arrivals.take_status();
    sent_back_.push_back(std::move(arrivals.value()));
    return {};
  }
  Status gather() { return join(sent_back_[gathers_++], gathered_); }

  Network& network_;
  const AllReduce& call_;
  const std::size_t nodes_;
  std::vector<double> shares_;                   // bytes of a block, by owner
  std::vector<std::optional<FlowId>> last_;      // of the stream of each pair
  std::vector<Arrivals> scattered_;              // by block
  std::vector<Arrivals> sent_back_;              // by block
  std::vector<std::optional<FlowId>> folded_;    // each node's last fold
  std::vector<std::optional<FlowId>> gathered_;  // each node's last gather
  std::size_t folds_ = 0;
  std::size_t gathers_ = 0;
};

}  // namespace

Result<double> time_of(const AllReduce& call) {
  const std::size_t nodes = call.node_bytes_per_s.size();
  if (call.blocks == 0) return invalid("blocks must be at least 1");
  if (!call.weights.empty() && call.weights.size() != nodes)
    return invalid("weights: " + std::to_string(call.weights.size()) + " for " +
                   std::to_string(nodes) + " nodes");
  if (!call.weights.empty() &&
      std::accumulate(call.weights.begin(), call.weights.end(), std::uint64_t{0}) == 0)
    return invalid("weights: their sum must be above 0");
  Network network;
  Messages messages(network, call);
  if (Status status = messages.add_nodes(); !status.ok()) return status;
  if (Status status = messages.add_blocks(); !status.ok()) return status;
  return network.run().end_s;
}

}  // namespace r2ccl::flow
