// The GPUs of a node in the simulated world, with exchanges inside the node.  Each block of the
// production kernels is a fiber; the production server of each GPU's mailbox is a fiber of the
// host.  A node is a single rank of the world, with a communicator for each inter-node group.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/exchange_bodies.hpp"
#include "device/server.hpp"
#include "sim/exchange_calls.hpp"
#include "sim/grid.hpp"
#include "sim/random.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {

class Node {
 public:
  // Callbacks to the campaign, run in fibers of the rank.  `local_rank` names the GPU.
  struct Observer {
    std::function<void()> think;                            // before a call: simulates computation
    std::function<void(std::uint32_t local_rank)> entered;  // the host starts a call
    std::function<void(std::uint32_t local_rank, std::size_t call, const Status&)> returned;
    std::function<void(std::uint32_t local_rank, const std::string&)> wrong;
  };

  // An inter-node group: the collectives of a local rank over the rails.
  struct InterNodeGroup {
    SimChannel& channel;  // this node's rank in the channel is the node number
    const std::vector<Call>& calls;
    const ReductionTree& tree;
  };
  Node(World& world, const std::vector<InterNodeGroup>& groups,
       const std::vector<ExchangeCall>& calls, std::uint64_t seed, Observer observer);

  [[nodiscard]] std::uint32_t blocks(std::uint32_t local_rank) const {
    return gpus_[local_rank]->grid->blocks();
  }
  // Bodies of the fibers: for each local rank, serve() for the host and run_block() for each block.
  void serve(std::uint32_t local_rank);
  void run_block(std::uint32_t local_rank, std::uint32_t block);
  // Ends the communicator of a local rank on the host, as after a failure of its engine.
  void quit(std::uint32_t local_rank);

 private:
  enum class Body : std::uint8_t {
    publish_input,
    local_reduce_scatter,
    stage_in_place,
    publish_result,
    local_all_gather,
    deliver_shard,
    quiesce,
  };
  struct Kernel {
    Body body = Body::quiesce;
    std::size_t call = 0;
    device::Rows rows{};
    device::OutputRows outputs{};
    bool last = true;  // last kernel of its step
    std::uint32_t lag = 0;
  };
  struct Gpu {
    std::uint32_t local_rank = 0;
    SimChannel* channel = nullptr;
    std::vector<std::unique_ptr<RankCall>> rank_calls;  // by call number
    std::vector<Kernel> program;
    std::unique_ptr<Grid> grid;
    std::vector<std::byte> source;  // input of the call being published
    std::vector<std::byte> target;  // output of the call being collected

    device::Mailbox mailbox;
    device::DeviceState state;
    device::Inbox inbox;
    std::vector<std::byte> staging;
    std::vector<std::byte> memory;  // read by local peers
    device::Exchange exchange{};
    bool quits = false;
  };
  void open(Gpu& gpu, const InterNodeGroup& group);
  void connect();
  void compile(Gpu& gpu);
  void add_posts(Gpu& gpu, std::size_t call);
  void add_deliveries(Gpu& gpu, std::size_t call, std::uint32_t lag);
  void run(Gpu& gpu, const Kernel& kernel, const device::ThreadPosition& at);
  Status await_call(Gpu& gpu, const device::Server& server);
  void before(Gpu& gpu, const Kernel& kernel);
  void after(Gpu& gpu, const Kernel& kernel);
  // Checks the data of a step signalled as complete.
  void check_step(Gpu& gpu, const Kernel& kernel);
  void check_target(Gpu& gpu, const Kernel& kernel);
  [[nodiscard]] bool is_over(const Gpu& gpu) const;
  Status carry(Gpu& gpu, std::size_t call, device::Sequence sequence);

  World& world_;
  const std::vector<ExchangeCall>& calls_;
  const Observer observer_;
  const std::uint32_t number_;  // number of the node
  Random random_;
  std::vector<std::unique_ptr<Gpu>> gpus_;
};

}  // namespace r2ccl::sim
