// Flows over shared resources, in continuous time: the yardstick of collectives.
//
// A resource is a direction of a NIC, a PCIe path or a port of a switch, with a capacity.  A flow
// moves its bytes over all resources of its path at once.  At any time the rates are max-min fair:
// a flow could be faster only at the cost of a flow that is as slow or slower.  Flows begin after
// the flows on which they depend, so a network describes a whole collective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/errors.hpp"

namespace r2ccl::flow {

using ResourceId = std::uint32_t;
using FlowId = std::uint32_t;

struct Flow {
  double bytes = 0;
  double latency_s = 0;               // from the last byte sent to its arrival
  std::vector<ResourceId> path = {};  // each resource once; empty: bytes take no time
  std::vector<FlowId> after = {};     // these flows have arrived before the first byte is sent
  std::optional<FlowId> behind = {};  // the flow before in a stream: its last byte has been sent
};

struct Outcome {
  std::vector<double> sent_s;         // by flow: time of the last byte
  std::vector<double> arrived_s;      // by flow
  std::vector<double> carried_bytes;  // by resource
  double end_s = 0;                   // last arrival
  std::uint64_t rate_changes = 0;     // times at which rates were shared out
};

class Network {
 public:
  // Adds a resource; its capacity must be finite and above 0.
  Result<ResourceId> add_resource(double bytes_per_s);
  // Adds a flow that may depend on flows added before.  invalid_argument: bytes or latency is
  // negative or infinite, or an index is unknown or given twice in a path.
  Result<FlowId> add_flow(Flow flow);

  // Runs all flows from time 0.  Every flow arrives, because dependencies form no circle.
  [[nodiscard]] Outcome run() const;

  [[nodiscard]] std::size_t flows() const { return flows_.size(); }
  [[nodiscard]] std::size_t resources() const { return capacities_.size(); }

 private:
  std::vector<double> capacities_;
  std::vector<Flow> flows_;
};

}  // namespace r2ccl::flow
