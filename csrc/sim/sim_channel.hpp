// A rank's communicator in the simulated world.  Waits yield to the world.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "collectives/link_channel.hpp"

namespace r2ccl::sim {

class World;
class LinkEnd;
class Memory;

class SimChannel final : public LinkChannel {
 public:
  // `members` holds world ranks in the order of the communicator.  `own` is the index of this rank.
  SimChannel(World& world, std::uint64_t communicator, std::vector<int> members, int own);
  ~SimChannel() override;
  SimChannel(const SimChannel&) = delete;
  SimChannel& operator=(const SimChannel&) = delete;

  // Runs a call; `body` is the algorithm.
  Status call(const CallTag& tag, const std::function<Status()>& body);
  [[nodiscard]] int world_rank() const { return members_[static_cast<std::size_t>(rank())]; }
  void close() { drop_streams(); }
  // Waits until everything is delivered or `limit` has passed, then leaves the communicator.
  void close_in_order(TimeNs limit);

  // Allows rails from all peers to write into the memory.
  void register_buffer(std::span<const std::byte> memory);
  void deregister_buffer(std::span<const std::byte> memory);

  Result<std::span<const std::byte>> receive(int peer, std::size_t bytes) override;
  Status release(int peer) override;
  Status settle(int peer, std::size_t bytes) override;
  Status finish() override;

 private:
  Status wait(int peer, const std::function<std::uint64_t()>& come, std::uint64_t goal) override;
  void linger(TimeNs limit, const std::function<bool()>& done) override;
  [[nodiscard]] TimeNs clock() const override;
  void flush(int peer, TimeNs now) override;
  bool detach(int peer, const DetachScope& scope) override;
  [[nodiscard]] std::string describe_peer(int peer) const override;
  [[nodiscard]] std::string describe_rails(int peer) const override;
  void on_failed(ErrorCode code, const std::string& text) override;
  void on_other_site(const std::string& /*text*/) override {}

  [[nodiscard]] LinkEnd& end(int peer) const;
  [[nodiscard]] Memory& memory_to(int peer) const;

  World& world_;
  const std::vector<int> members_;
};

}  // namespace r2ccl::sim
