#include "flow/network.hpp"

#include <algorithm>
#include <cmath>
#include <queue>
#include <string>
#include <utility>

namespace r2ccl::flow {
namespace {

// Events within this part of the time count as simultaneous: sums of rates are not exact.
constexpr double same_time = 1e-12;

bool is_amount(double value) { return std::isfinite(value) && value >= 0; }

Status invalid(FlowId flow, const std::string& what) {
  return {ErrorCode::invalid_argument, "flow " + std::to_string(flow) + ": " + what};
}

// A run of all flows.  A change of the active flows changes rates only among the flows that share
// resources with it, directly or over other flows.
class Run {
 public:
  Run(const std::vector<double>& capacities, const std::vector<Flow>& flows)
      : capacities_(capacities),
        flows_(flows),
        states_(flows.size()),
        resources_(capacities.size()) {
    outcome_.sent_s.resize(flows.size());
    outcome_.arrived_s.resize(flows.size());
    outcome_.carried_bytes.resize(capacities.size());
    for (FlowId flow = 0; flow < flows.size(); ++flow) {
      for (const FlowId before : flows[flow].after) states_[before].followers.push_back(flow);
      if (flows[flow].behind) states_[*flows[flow].behind].next_in_stream.push_back(flow);
      states_[flow].awaited = flows[flow].after.size() + (flows[flow].behind ? 1 : 0);
    }
  }

  Outcome run() {
    for (FlowId flow = 0; flow < flows_.size(); ++flow)
      if (states_[flow].awaited == 0) begin(flow);
    share_out();
    while (!events_.empty()) {
      now_ = std::max(now_, events_.top().time);
      while (!events_.empty() && events_.top().time <= now_ * (1 + same_time)) {
        const Event event = events_.top();
        events_.pop();
        handle(event);
      }
      share_out();
    }
    return std::move(outcome_);
  }

 private:
  enum class What : std::uint8_t { sent, arrived };
  struct Event {
    double time;
    FlowId flow;
    What what;
    std::uint32_t version;                                                  // of the flow's rate
    bool operator<(const Event& other) const { return time > other.time; }  // first event on top
  };
  struct State {
    std::size_t awaited = 0;             // flows that must send or arrive first
    std::vector<FlowId> followers;       // flows after the arrival
    std::vector<FlowId> next_in_stream;  // flows after the last byte
    double left = 0;                     // bytes at time `since`
    double since = 0;
    double rate = 0;
    std::uint32_t version = 0;
    bool active = false;
    bool shared = false;  // has a rate in the current share_out()
    bool seen = false;
  };
  struct Resource {
    std::vector<FlowId> flows;  // active flows, and flows that have ended since the last look
    double left = 0;            // capacity that no flow of share_out() has yet
    std::size_t unshared = 0;   // flows without a rate
    bool dirty = false;
    bool seen = false;
  };
  struct Level {
    double rate;
    ResourceId resource;
    bool operator<(const Level& other) const { return rate > other.rate; }  // least rate on top
  };

  void release(FlowId flow) {
    if (--states_[flow].awaited == 0) begin(flow);
  }

  void begin(FlowId flow) {
    State& state = states_[flow];
    const Flow& of = flows_[flow];
    if (of.bytes == 0 || of.path.empty()) {
      events_.push({now_, flow, What::sent, state.version});
      return;
    }
    state.active = true;
    state.left = of.bytes;
    state.since = now_;
    for (const ResourceId resource : of.path) {
      resources_[resource].flows.push_back(flow);
      touch(resource);
    }
  }

  void touch(ResourceId resource) {
    if (std::exchange(resources_[resource].dirty, true)) return;
    touched_.push_back(resource);
  }

  void handle(const Event& event) {
    State& state = states_[event.flow];
    if (event.what == What::arrived) {
      outcome_.arrived_s[event.flow] = outcome_.end_s = now_;
      for (const FlowId follower : state.followers) release(follower);
      return;
    }
    if (event.version != state.version) return;  // the rate has changed since
    const Flow& of = flows_[event.flow];
    outcome_.sent_s[event.flow] = now_;
    for (const ResourceId resource : of.path) {
      outcome_.carried_bytes[resource] += of.bytes;
      if (state.active) touch(resource);
    }
    state.active = false;
    events_.push({now_ + of.latency_s, event.flow, What::arrived, 0});
    for (const FlowId next : state.next_in_stream) release(next);
  }

  // Gives new rates to the flows that share resources with a changed resource.
  void share_out() {
    if (touched_.empty()) return;
    ++outcome_.rate_changes;
    collect();
    for (const ResourceId resource : group_) {
      resources_[resource].left = capacities_[resource];
      resources_[resource].unshared = resources_[resource].flows.size();
    }
    for (const FlowId flow : group_flows_) states_[flow].shared = false;
    fill();
  }

  // Finds the resources connected with the touched ones by active flows.
  void collect() {
    group_.clear();
    group_flows_.clear();
    const auto add = [this](ResourceId resource) {
      if (!std::exchange(resources_[resource].seen, true)) group_.push_back(resource);
    };
    for (const ResourceId resource : touched_) {
      resources_[resource].dirty = false;
      add(resource);
    }
    touched_.clear();
    for (std::size_t i = 0; i < group_.size(); ++i) {
      Resource& resource = resources_[group_[i]];
      std::erase_if(resource.flows, [this](FlowId flow) { return !states_[flow].active; });
      for (const FlowId flow : resource.flows) {
        if (std::exchange(states_[flow].seen, true)) continue;
        group_flows_.push_back(flow);
        for (const ResourceId next : flows_[flow].path) add(next);
      }
    }
    for (const ResourceId resource : group_) resources_[resource].seen = false;
    for (const FlowId flow : group_flows_) states_[flow].seen = false;
  }

  // Raises all rates alike.  A resource that becomes full fixes the rates of its flows.
  void fill() {
    std::priority_queue<Level> levels;
    const auto push = [&](ResourceId resource) {
      const Resource& of = resources_[resource];
      if (of.unshared > 0)
        levels.push({std::max(of.left, 0.0) / static_cast<double>(of.unshared), resource});
    };
    for (const ResourceId resource : group_) push(resource);
    double reached = 0;
    while (!levels.empty()) {
      const Level level = levels.top();
      levels.pop();
      Resource& full = resources_[level.resource];
      if (full.unshared == 0) continue;
      const double present = std::max(full.left, 0.0) / static_cast<double>(full.unshared);
      if (present > level.rate) {  // other flows of the resource got less than their part
        push(level.resource);
        continue;
      }
      reached = std::max(reached, level.rate);
      for (const FlowId flow : full.flows) {
        State& state = states_[flow];
        if (std::exchange(state.shared, true)) continue;
        set_rate(flow, reached);
        for (const ResourceId resource : flows_[flow].path) {
          resources_[resource].left -= reached;
          --resources_[resource].unshared;
        }
      }
    }
  }

  void set_rate(FlowId flow, double rate) {
    State& state = states_[flow];
    if (state.rate == rate && state.version != 0) return;  // the event of the end stays right
    state.left = std::max(0.0, state.left - state.rate * (now_ - state.since));
    state.since = now_;
    state.rate = rate;
    ++state.version;
    events_.push({now_ + state.left / rate, flow, What::sent, state.version});
  }

  const std::vector<double>& capacities_;
  const std::vector<Flow>& flows_;
  Outcome outcome_;
  double now_ = 0;
  std::vector<State> states_;
  std::vector<Resource> resources_;
  std::priority_queue<Event> events_;
  std::vector<ResourceId> touched_;
  std::vector<ResourceId> group_;
  std::vector<FlowId> group_flows_;
};

}  // namespace

Result<ResourceId> Network::add_resource(double bytes_per_s) {
  if (!std::isfinite(bytes_per_s) || bytes_per_s <= 0)
    return Status(ErrorCode::invalid_argument, "resource " + std::to_string(capacities_.size()) +
                                                   ": capacity must be finite and above 0");
  capacities_.push_back(bytes_per_s);
  return static_cast<ResourceId>(capacities_.size() - 1);
}

Result<FlowId> Network::add_flow(Flow flow) {
  const auto id = static_cast<FlowId>(flows_.size());
  if (!is_amount(flow.bytes)) return invalid(id, "bytes must be finite and at least 0");
  if (!is_amount(flow.latency_s)) return invalid(id, "latency must be finite and at least 0");
  for (std::size_t i = 0; i < flow.path.size(); ++i) {
    const auto twice = std::find(flow.path.begin(),
                                 flow.path.begin() + static_cast<std::ptrdiff_t>(i), flow.path[i]);
    if (flow.path[i] >= capacities_.size() ||
        twice != flow.path.begin() + static_cast<std::ptrdiff_t>(i))
      return invalid(
          id, "path: resource " + std::to_string(flow.path[i]) + " is unknown or given twice");
  }
  const auto later = [id](FlowId other) { return other >= id; };
  if (std::ranges::any_of(flow.after, later) || (flow.behind && later(*flow.behind)))
    return invalid(id, "must depend on flows added before");
  flows_.push_back(std::move(flow));
  return id;
}

Outcome Network::run() const { return Run(capacities_, flows_).run(); }

}  // namespace r2ccl::flow
