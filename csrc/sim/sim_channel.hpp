// A rank's communicator in the simulated world: the Channel that the production collectives run on,
// over production links.  Waits are yields to the world.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "collectives/channel.hpp"
#include "link/link.hpp"
#include "r2ccl/errors.hpp"
#include "r2ccl/types.hpp"

namespace r2ccl::sim {

class World;
class LinkEnd;

class SimChannel final : public Channel {
 public:
  SimChannel(World& world, int rank, std::uint64_t communicator);
  ~SimChannel() override;
  SimChannel(const SimChannel&) = delete;
  SimChannel& operator=(const SimChannel&) = delete;

  // One call: `body` is the algorithm.  An error is sticky and told to all ranks.
  Status call(const CallTag& tag, const std::function<Status()>& body);
  void fail(ErrorCode code, const std::string& text);
  [[nodiscard]] std::uint64_t communicator() const { return communicator_; }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return static_cast<int>(members_.size()); }
  [[nodiscard]] std::size_t segment_bytes() const override;
  Status send(int peer, std::span<const std::byte> data) override;
  Result<std::span<const std::byte>> receive(int peer, std::size_t bytes) override;
  Status release(int peer) override;
  Status settle(int peer, std::size_t bytes) override;
  Status finish() override;

 private:
  struct Member {
    LinkEnd* end = nullptr;  // null: ourselves
    OutStream* out = nullptr;
    InStream* in = nullptr;
    std::uint64_t call_position = 0;
  };

  [[nodiscard]] Member& member(int peer) { return members_[static_cast<std::size_t>(peer)]; }
  Status wait(const Member& member, const std::function<bool()>& done);
  [[nodiscard]] Status liveness(const Member& member, TimeNs waiting_since) const;

  World& world_;
  const int rank_;
  const std::uint64_t communicator_;
  std::vector<Member> members_;
  CallTag tag_;
  ErrorCode failed_ = ErrorCode::ok;
  std::string failure_text_;
};

}  // namespace r2ccl::sim
