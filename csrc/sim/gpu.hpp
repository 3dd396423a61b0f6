// A rank's GPU in the simulated world, for one communicator: the production kernels, each block a
// fiber, and the production server of their mailbox, a fiber of the host.
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
  // What the world makes of it, in fibers of the rank.
  struct Observer {
    std::function<void()> think;    // before a call: it computes
    std::function<void()> entered;  // the host carries one out
    std::function<void(const Call&, const Status&)> returned;
    std::function<void(const std::string&)> wrong;  // with what a kernel has delivered
  };

  Gpu(World& world, SimChannel& channel, const std::vector<Call>& calls, const ReductionTree& tree,
      std::uint64_t seed, Observer observer);

  // The fibers: one of the host, and one for each block, which runs all kernels of the stream.
  void serve();
  [[nodiscard]] std::uint32_t blocks() const { return grid_.blocks(); }
  void run_block(std::uint32_t block);

 private:
  // A launch: a part of a call's input is staged, or its result delivered.
  struct Kernel {
    std::size_t call = 0;
    bool stages = true;
    device::Rows rows;
    bool last = true;       // part of the input
    std::uint32_t lag = 0;  // calls staged since
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

  std::vector<std::unique_ptr<RankCall>> rank_calls_;  // by call
  std::vector<Kernel> program_;
  std::vector<std::byte> source_;  // of the kernel that stages
  std::vector<std::byte> target_;  // of the one that delivers

  device::Mailbox mailbox_;
  device::DeviceState state_;
  std::vector<std::byte> memory_;
  device::Staging staging_;
  bool failed_ = false;
};

}  // namespace r2ccl::sim
