// A rank's end of a link over simulated transports, in place of the engine and its connections.
// The link, the framing of its rails and the handshake are production code.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "connect/handshake.hpp"
#include "rails/link_of_rails.hpp"
#include "sim/connection.hpp"

namespace r2ccl::sim {

class World;

class LinkEnd final : public LinkObserver, public EventSink, public LinkOfRails {
 public:
  LinkEnd(World& world, int own_rank, int peer_rank, const LinkOptions& options,
          std::span<const RailKind> rail_kinds);

  void start();
  void tick();
  // Handles all arrivals, sends pending frames and wakes the rank.
  void progress();
  void fail_rail(RailId rail, RailCause cause);
  void drill(RailId rail, bool begins);
  void connect_soon(RailId rail);
  void die();  // the process dies: all work stops, the kernel closes everything open

  void on_event() override { progress(); }
  void on_step(LinkStep step, RailId rail) override;
  void on_frame_sent(RailId rail, const OutFrame& frame) override;
  void on_rail_moved(RailId rail, RailState from, RailState to, RailCause cause) override;
  void on_replay(RailId rail, std::uint32_t chunks, bool hedge) override;

  [[nodiscard]] TimeNs now() const;

  const int rank;
  const int peer;
  const Side side;
  World& world;

 private:
  // A connection in its handshake.
  struct Pending {
    RailId rail = 0;
    Connection* connection = nullptr;
    std::unique_ptr<Handshake> handshake;
    ConnectorHandshake* connector = nullptr;
    TimeNs deadline = 0;
  };

  void start_due_connects();
  void start_connect(RailId rail);
  Pending& accept(RailId rail, Connection& connection);
  bool advance_handshakes();
  bool advance(Pending& pending);  // true: finished, successfully or not
  void give_up(Pending& pending);
  void finish(Pending& pending);
  [[nodiscard]] Decision decide(const Hello& hello, bool fresh);

  std::vector<Pending> pending_;
  TimeNs paths_refreshed_ = 0;
  bool progressing_ = false;
};

}  // namespace r2ccl::sim
