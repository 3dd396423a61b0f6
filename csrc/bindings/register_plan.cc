#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "flow/all_reduce.hpp"
#include "flow/network.hpp"
#include "plan/bandwidths.hpp"
#include "plan/blocks.hpp"
#include "plan/cost_model.hpp"
#include "plan/shares.hpp"

namespace r2ccl::bindings {
namespace {

using Losses = std::vector<std::uint8_t>;
using Weights = std::vector<std::uint32_t>;

// Returns the losses that the nodes announce if these losses last.
Losses announced_losses(const Losses& lost) {
  Losses in_use(lost.size());
  std::vector<Announcer> announcers(lost.size());
  while (true) {
    Losses announced = in_use;
    for (std::size_t node = 0; node < lost.size(); ++node)
      announced[node] = announcers[node].update(lost[node], in_use, node, 0);
    if (announced == in_use) return in_use;
    in_use = std::move(announced);
  }
}

nb::dict choose(std::size_t bytes, const std::vector<std::uint16_t>& node_sizes,
                const Losses& lost) {
  if (!lost.empty() && lost.size() != node_sizes.size())
    throw nb::value_error("lost: must be a loss for each node, or none");
  const CostConstants& costs = loopback_costs;
  nb::dict choice;
  choice["algorithm"] = std::string(name_of(choose_all_reduce(bytes, node_sizes, costs, lost)));
  choice["one_shot_s"] = static_cast<double>(one_shot_ps(bytes, node_sizes, costs, lost)) * 1e-12;
  choice["two_shot_s"] = static_cast<double>(two_shot_ps(bytes, node_sizes, costs, lost)) * 1e-12;
  return choice;
}

double exchange_factor(const Weights& weights, const Losses& lost) {
  const bool given = std::ranges::any_of(weights, [](std::uint32_t weight) { return weight > 0; });
  if (!weights.empty() && (weights.size() != lost.size() || !given))
    throw nb::value_error("weights: must be one for each node with a sum above 0, or none");
  return static_cast<double>(exchange_time(weights, lost)) / (1 << 20);
}

double flow_time(const std::vector<double>& node_bytes_per_s, double latency_s, double bytes,
                 const Weights& weights, std::size_t blocks, bool overlapped) {
  auto time = [&] {
    const nb::gil_scoped_release release;
    return flow::time_of({.node_bytes_per_s = node_bytes_per_s,
                          .latency_s = latency_s,
                          .bytes = bytes,
                          .weights = weights,
                          .blocks = blocks,
                          .overlapped = overlapped});
  }();
  return value_or_raise(std::move(time));
}

flow::FlowId add_flow(flow::Network& network, double bytes,
                      const std::vector<flow::ResourceId>& path,
                      const std::vector<flow::FlowId>& after, std::optional<flow::FlowId> behind,
                      double latency_s) {
  return value_or_raise(network.add_flow(
      {.bytes = bytes, .latency_s = latency_s, .path = path, .after = after, .behind = behind}));
}

nb::dict run(const flow::Network& network) {
  flow::Outcome outcome;
  {
    const nb::gil_scoped_release release;
    outcome = network.run();
  }
  nb::dict fields;
  fields["sent_s"] = outcome.sent_s;
  fields["arrived_s"] = outcome.arrived_s;
  fields["carried_bytes"] = outcome.carried_bytes;
  fields["end_s"] = outcome.end_s;
  fields["rate_changes"] = outcome.rate_changes;
  return fields;
}

}  // namespace

void register_plan(nb::module_& module) {
  module.attr("whole_bandwidth") = whole_bandwidth;
  module.attr("least_gain_percent") = Announcer::least_gain_percent;
  module.def("choose_all_reduce", &choose, nb::arg("bytes"), nb::arg("node_sizes"),
             nb::arg("lost") = Losses(),
             "Returns the algorithm of an all-reduce while the nodes lack `lost`, in sixteenths, "
             "and the modelled time of each algorithm.  Inputs beyond 1 GiB count as 1 GiB.");
  module.def("announced_losses", &announced_losses, nb::arg("lost"),
             "Returns the losses that the nodes announce while they lack `lost`, in sixteenths.");
  module.def(
      "share_weights", [](const Losses& lost) { return share_weights(lost); }, nb::arg("lost"),
      "Returns the weights of the nodes' shares; empty for even shares.");
  module.def(
      "weights_in_use", [](const Losses& lost) { return weights_in_use(lost); }, nb::arg("lost"),
      "Returns share_weights(lost), or an empty list where the flow model prefers even shares.");
  module.def(
      "exchange_factor", &exchange_factor, nb::arg("weights"), nb::arg("lost"),
      "Returns the time of an all-reduce by the closed form.  Unit: the time of a whole node "
      "to move the buffer once.");
  module.def(
      "even_block_bytes",
      [](std::size_t ranks, std::size_t segment_bytes) {
        return even_block_bytes(std::max<std::size_t>(ranks, 1), segment_bytes);
      },
      nb::arg("ranks"), nb::arg("segment_bytes"),
      "Returns the size of a block of even shares in bytes.");
  module.def(
      "overlapped_blocks",
      [](std::size_t bytes, std::size_t ranks, std::size_t segment_bytes) {
        return overlapped_blocks(bytes, std::max<std::size_t>(ranks, 1), segment_bytes);
      },
      nb::arg("bytes"), nb::arg("ranks"), nb::arg("segment_bytes"),
      "Returns the number of blocks of uneven shares; 0 if even shares are used.");
  module.def("flow_time", &flow_time, nb::arg("node_bytes_per_s"), nb::arg("latency_s"),
             nb::arg("bytes"), nb::arg("weights"), nb::arg("blocks"), nb::arg("overlapped"),
             "Returns the time of a two-shot all-reduce in the flow model, in seconds.");
  nb::class_<flow::Network>(module, "FlowNetwork")
      .def(nb::init<>())
      .def(
          "add_resource",
          [](flow::Network& network, double bytes_per_s) {
            return value_or_raise(network.add_resource(bytes_per_s));
          },
          nb::arg("bytes_per_s"), "Adds a resource and returns its number.")
      .def("add_flow", &add_flow, nb::arg("bytes"), nb::arg("path"),
           nb::arg("after") = std::vector<flow::FlowId>(), nb::arg("behind") = nb::none(),
           nb::arg("latency_s") = 0.0,
           "Adds a flow over the resources of `path` and returns its number.  The flow begins once "
           "all flows of `after` have arrived and `behind` has sent its last byte.")
      .def("run", &run, "Runs all flows; returns the times and the bytes of each resource.");
}

}  // namespace r2ccl::bindings
