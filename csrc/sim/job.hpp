// The job of a seed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sim/calls.hpp"
#include "sim/exchange_calls.hpp"
#include "sim/fault_kinds.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {

// Everything that is decided before time begins.
struct Job {
  World::Options world;
  struct Communicator {
    std::uint64_t id = 0;
    std::vector<int> members;
    ReductionTree tree;
    std::vector<Call> calls;
    bool on_gpu = false;      // each rank's GPU posts them
    bool inter_node = false;  // of an exchange, whose GPUs post them
  };
  std::vector<Communicator> communicators;
  // Every rank is a node of several GPUs; of the communicators those of their inter-node groups are
  // in a row.
  struct Exchange {
    std::size_t first_inter_node = 0;  // in `communicators`
    std::uint32_t local_ranks = 0;
    std::vector<ExchangeCall> calls;
    // One host ends its communicator by itself: its engine has failed.
    struct Quit {
      int node = 0;
      std::uint32_t local_rank = 0;
      TimeNs after = 0;
    };
    std::optional<Quit> quit;
  };
  std::optional<Exchange> exchange;
  std::vector<FaultKind> enabled;
  std::optional<FaultKind> due;  // struck first
  std::uint64_t fault_count = 0;
  TimeNs fault_span = 0;
};

[[nodiscard]] Job make_job(std::uint64_t seed, const FaultOptions& options);
[[nodiscard]] std::string describe(const Job& job);  // one line

}  // namespace r2ccl::sim
