#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "link/mutants.hpp"
#include "sim/campaign.hpp"
#include "sim/played_all_reduce.hpp"

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
  fields["compared"] = result.compared;
  fields["parted"] = result.parted;
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

using Cut = std::tuple<int, int, double>;  // rank, rail, microseconds after the begin

nb::list simulate_all_reduce(const std::vector<nb::bytes>& inputs, const std::vector<int>& nodes,
                             int dtype, int op, bool one_shot,
                             const std::vector<std::uint8_t>& lost, std::uint32_t chunk_bytes,
                             std::uint32_t slot_bytes, int rails, bool in_place,
                             std::optional<Cut> cut, std::uint64_t seed) {
  if (dtype < 0 || dtype > static_cast<int>(DType::boolean))
    throw nb::value_error("dtype: unknown code");
  if (op < 0 || op > static_cast<int>(ReduceOp::avg)) throw nb::value_error("op: unknown code");
  sim::PlayedAllReduce call{.inputs = {},
                            .nodes = nodes,
                            .dtype = static_cast<DType>(dtype),
                            .op = static_cast<ReduceOp>(op),
                            .algorithm = one_shot ? Algorithm::one_shot : Algorithm::two_shot,
                            .lost = lost,
                            .chunk_bytes = chunk_bytes,
                            .slot_bytes = slot_bytes,
                            .rails = rails,
                            .in_place = in_place,
                            .cut = {},
                            .seed = seed};
  for (const nb::bytes& input : inputs) {
    const auto* data = static_cast<const std::byte*>(input.data());
    call.inputs.emplace_back(data, data + input.size());
  }
  if (cut) {
    const auto [rank, rail, after_us] = *cut;
    call.cut =
        sim::PortCut{.rank = rank, .rail = rail, .after_ns = static_cast<TimeNs>(after_us * 1e3)};
  }
  auto results = [&] {
    const nb::gil_scoped_release release;
    return sim::play(call);
  }();
  nb::list all;
  for (const std::vector<std::byte>& result : value_or_raise(std::move(results)))
    all.append(nb::bytes(result.data(), result.size()));
  return all;
}

}  // namespace

void register_simulator(nb::module_& module) {
  module.def("simulate", &simulate, nb::arg("seed"), nb::arg("mutant") = "none",
             nb::arg("trace").none() = sim::TraceLine(),
             "Runs one seed of the simulator with the production link and collectives.");
  module.def("simulate_all_reduce", &simulate_all_reduce, nb::arg("inputs"), nb::arg("nodes"),
             nb::arg("dtype"), nb::arg("op"), nb::kw_only(), nb::arg("one_shot") = false,
             nb::arg("lost") = std::vector<std::uint8_t>(), nb::arg("chunk_bytes") = 1024,
             nb::arg("slot_bytes") = 4096, nb::arg("rails") = 2, nb::arg("in_place") = false,
             nb::arg("cut") = nb::none(), nb::arg("seed") = 1,
             "Runs an all-reduce of the inputs in the simulator; returns the result of each rank.");
  module.def("fault_kinds", &fault_kind_names);
  module.def("mutants", &mutants, "Returns the names of the bugs that this build can plant.");
}

}  // namespace r2ccl::bindings
