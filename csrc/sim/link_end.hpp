// One rank's end of a link: what the engine's peer, its connections and its progress are in
// production.  The link itself is the production one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "link/link.hpp"
#include "sim/connection.hpp"
#include "sim/sim_rail.hpp"

namespace r2ccl::sim {

class World;

class LinkEnd final : public LinkObserver {
 public:
  LinkEnd(World& world, int own_rank, int peer_rank, const LinkOptions& options);
  ~LinkEnd() override;

  void start();
  void tick();
  // After every call into the link: carries out its actions, sends its frames, wakes the rank.
  void settle();
  void fail_rail(RailId rail, RailCause cause);
  void connect_soon(RailId rail);

  void on_step(Step step, RailId rail) override;
  void on_rail_moved(RailId rail, RailState from, RailState to, RailCause cause) override;
  void on_replay(RailId /*rail*/, std::uint32_t /*chunks*/, bool /*hedge*/) override {}

  const int rank;
  const int peer;
  const Side side;
  Link link;
  World& world;

 private:
  // One connection on its way to being a rail: four messages, as engine/handshake.hpp says, without
  // the cryptography.
  class Handshake;

  struct RailEnd {
    std::unique_ptr<SimRail> open;
    TimeNs connect_at = 0;  // 0: no attempt is due
  };

  void apply_actions();
  void start_connect(RailId rail);
  Handshake& add_handshake(RailId rail, Connection& connection);
  [[nodiscard]] std::optional<Epoch> offer(RailId rail, Epoch last_fenced) const;
  void established(RailId rail, Epoch epoch, Connection& connection);
  void connect_failed(RailId rail, Epoch answered);
  void forget(const Handshake* handshake);

  std::vector<RailEnd> rails_;
  std::vector<std::unique_ptr<Handshake>> handshakes_;
  std::uint64_t next_handshake_ = 0;
};

}  // namespace r2ccl::sim
