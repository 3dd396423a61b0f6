#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "bindings.hpp"
#include "link/mutants.hpp"
#include "sim/campaign.hpp"

namespace r2ccl::bindings {
namespace {

std::vector<std::string> fault_kind_names() {
  std::vector<std::string> names;
  for (std::size_t kind = 0; kind < sim::fault_kinds; ++kind)
    names.emplace_back(sim::name_of(static_cast<sim::FaultKind>(kind)));
  return names;
}

// Returns the names of the mutants; empty in a build without R2CCL_MUTANTS.
std::vector<std::string> mutants() {
#if defined(R2CCL_MUTANTS)
  return {mutant_names.begin() + 1, mutant_names.end()};
#else
  return {};
#endif
}

void plant(const std::string& name) {
#if defined(R2CCL_MUTANTS)
  const auto found = std::find(mutant_names.begin(), mutant_names.end(), name);
  if (found == mutant_names.end()) throw std::invalid_argument("mutant: unknown name " + name);
  planted_mutant = static_cast<Mutant>(found - mutant_names.begin());
#else
  if (name != "none") throw std::invalid_argument("this build has no mutants");
#endif
}

nb::dict simulate(std::uint64_t seed, const std::string& mutant, const sim::TraceLine& trace) {
  plant(mutant);
  sim::SeedResult result;
  {
    // Each trace line calls Python and takes the GIL again.
    const nb::gil_scoped_release release;
    result = sim::run_seed(seed, {}, trace);
  }
  nb::dict fields;
  fields["seed"] = result.seed;
  fields["job"] = result.job;
  fields["violations"] = result.violations;
  fields["steps"] = result.steps;
  fields["calls"] = result.calls;
  fields["gpu_calls"] = result.gpu_calls;
  fields["exchange_calls"] = result.exchange_calls;
  fields["streams"] = result.streams;
  fields["stream_bytes"] = result.stream_bytes;
  fields["posted"] = result.posted;
  fields["errors"] = result.errors;
  fields["replays"] = result.replays;
  fields["hedges"] = result.hedges;
  fields["fences"] = result.fences;
  fields["downs"] = result.downs;
  fields["virtual_ms"] = static_cast<double>(result.virtual_ns) * 1e-6;
  nb::dict faults;
  for (std::size_t kind = 0; kind < sim::fault_kinds; ++kind)
    faults[std::string(sim::name_of(static_cast<sim::FaultKind>(kind))).c_str()] =
        result.faults[kind];
  fields["faults"] = faults;
  return fields;
}

}  // namespace

void register_simulator(nb::module_& module) {
  module.def("simulate", &simulate, nb::arg("seed"), nb::arg("mutant") = "none",
             nb::arg("trace").none() = sim::TraceLine(),
             "Runs one seed of the simulator with the production link and collectives.");
  module.def("fault_kinds", &fault_kind_names);
  module.def("mutants", &mutants, "Returns the names of the bugs that this build can plant.");
}

}  // namespace r2ccl::bindings
