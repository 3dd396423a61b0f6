// A rank's GPU in the simulated world, for a single communicator.  Each block of the production
// kernels is a fiber; the production server of their mailbox is a fiber of the host.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/kernel_bodies.hpp"
#include "device/server.hpp"
#include "sim/calls.hpp"
#include "sim/grid.hpp"
#include "sim/random.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {

class Gpu {
 public:
  // Callbacks to the campaign, run in fibers of the rank.
  struct Observer {
    std::function<void()> think;    // before a call: simulates computation
    std::function<void()> entered;  // the host starts a call
    std::function<void(const Call&, const Status&)> returned;
    std::function<void(const std::string&)> wrong;  // a kernel has delivered wrong bytes
  };

  Gpu(World& world, SimChannel& channel, const std::vector<Call>& calls, const ReductionTree& tree,
      std::uint64_t seed, Observer observer);

  // Bodies of the fibers: serve() for the host, run_block() for each block.  A block runs all
  // kernels of the stream.
  void serve();
  [[nodiscard]] std::uint32_t blocks() const { return grid_.blocks(); }
  void run_block(std::uint32_t block);

 private:
  // A kernel launch: stages a part of a call's input, or delivers the result.
  struct Kernel {
    std::size_t call = 0;
    bool stages = true;
    device::Rows rows;
    bool last = true;       // last part of the input
    std::uint32_t lag = 0;  // number of calls staged after this call
  };
  void compile(const std::vector<Call>& calls, const ReductionTree& tree, SimChannel& channel);
  void add_stages(std::size_t call);
  void add_delivery(std::size_t call, std::uint32_t lag);
  device::Rows rows_of(std::uint64_t bytes, std::uint64_t offset);
  void before(const Kernel& kernel);
  void after(const Kernel& kernel);

  World& world_;
  const int rank_;
  const std::vector<Call>& calls_;
  const Observer observer_;
  Random random_;
  Grid grid_;

  std::vector<std::unique_ptr<RankCall>> rank_calls_;  // by call number
  std::vector<Kernel> program_;
  std::vector<std::byte> source_;  // input of the staging kernel
  std::vector<std::byte> target_;  // output of the delivering kernel

  device::Mailbox mailbox_;
  device::DeviceState state_;
  std::vector<std::byte> memory_;
  device::Staging staging_;
  bool failed_ = false;
};

}  // namespace r2ccl::sim
