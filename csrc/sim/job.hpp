// The job of a seed: ranks, rails, communicators, calls and enabled faults.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sim/calls.hpp"
#include "sim/exchange_calls.hpp"
#include "sim/fault_kinds.hpp"
#include "sim/world.hpp"
#include "streams/stream_mux.hpp"

namespace r2ccl::sim {

// All random choices made before the virtual time starts.
struct Job {
  World::Options world;
  struct Communicator {
    std::uint64_t id = 0;
    std::vector<int> members;
    ReductionTree tree;
    std::vector<Call> calls;
    bool on_gpu = false;      // calls are posted by the GPU of each rank
    bool inter_node = false;  // group of an exchange; calls are posted by its GPUs
    bool compared = false;    // calls belong to steps, whose ends compare positions
    // A rank whose program leaves out a call of a step.
    struct Parting {
      std::size_t own = 0;  // index of the rank in `members`
      std::uint32_t step = 0;
      std::vector<Call> calls;
    };
    std::optional<Parting> parting;

    [[nodiscard]] const std::vector<Call>& calls_of(std::size_t own) const {
      return parting && parting->own == own ? parting->calls : calls;
    }
  };
  std::vector<Communicator> communicators;
  // Turns every rank into a node with several GPUs.  The inter-node groups are adjacent in
  // `communicators`.
  struct Exchange {
    std::size_t first_inter_node = 0;  // index in `communicators`
    std::uint32_t local_ranks = 0;
    std::vector<ExchangeCall> calls;
    // A host that ends its communicator during the run, as after a failure of its engine.
    struct Quit {
      int node = 0;
      std::uint32_t local_rank = 0;
      TimeNs after = 0;
    };
    std::optional<Quit> quit;
  };
  std::optional<Exchange> exchange;
  // Byte streams between every pair of ranks, beside the collectives.
  struct Streams {
    StreamMux::Options mux;         // `even` is set for each end
    std::uint16_t ports = 0;        // listeners of each end
    std::uint32_t connections = 0;  // to each listener
    std::uint32_t most_bytes = 0;   // of a direction of a stream
    std::uint64_t seed = 0;
  };
  std::optional<Streams> streams;
  // Posted messages between every pair of ranks, beside the collectives.
  struct PostedMessages {
    std::uint32_t connections = 0;  // in each direction
    std::uint32_t buffers = 0;      // of each connection and end
    std::uint32_t most_bytes = 0;   // of a message; the size of each receive
    std::uint64_t messages = 0;     // of each connection
    std::uint64_t seed = 0;
  };
  std::optional<PostedMessages> posted;
  std::vector<FaultKind> enabled;
  std::optional<FaultKind> due;  // kind of the first fault
  std::uint64_t fault_count = 0;
  TimeNs fault_span = 0;  // faults begin within this time
};

[[nodiscard]] Job make_job(std::uint64_t seed, const FaultOptions& options);
[[nodiscard]] std::string describe(const Job& job);  // a single line

}  // namespace r2ccl::sim
