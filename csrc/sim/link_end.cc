#include "sim/link_end.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "rails/framed_rail.hpp"
#include "sim/queue_pair.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {
namespace {

constexpr std::uint64_t job = 1;
constexpr TimeNs path_refresh_ns = 5 * ns_per_ms;

std::uint32_t process_of(int rank) { return static_cast<std::uint32_t>(rank) + 1; }

}  // namespace

LinkEnd::LinkEnd(World& of, int own_rank, int peer_rank, const LinkOptions& options,
                 std::span<const RailKind> rail_kinds)
    : LinkOfRails(
          options, rail_kinds,
          (static_cast<std::uint64_t>(own_rank) << 32U) ^ static_cast<std::uint64_t>(peer_rank)),
      rank(own_rank),
      peer(peer_rank),
      side(own_rank < peer_rank ? acceptor_side : connector_side),
      world(of) {
  link.set_observer(this);
}

TimeNs LinkEnd::now() const { return world.clock(rank); }

// ---- connecting ----

void LinkEnd::start() {
  link.start(now());
  act(now());
}

void LinkEnd::start_due_connects() {
  for (RailId rail = 0; rail < ends.size(); ++rail) {
    TimeNs& connect_at = ends[rail].connect_at;
    if (connect_at == 0 || connect_at > now()) continue;
    connect_at = 0;
    start_connect(rail);
  }
}

void LinkEnd::start_connect(RailId rail) {
  const auto same = std::find_if(pending_.begin(), pending_.end(),
                                 [rail](const Pending& entry) { return entry.rail == rail; });
  if (same != pending_.end()) {
    if (same->connector->offered_epoch().has_value()) return;  // AUTH is sent: about to end
    same->connection->close(side);
    pending_.erase(same);
  }
  if (world.path(rank, peer, rail).cut() || world.dead(peer)) {
    connect_failed(rail, 0, {}, now());
    return;
  }
  Connection& connection = world.new_connection(rank, peer, rail);
  Hello hello;
  hello.connector = process_of(rank);
  hello.acceptor = process_of(peer);
  hello.job = job;
  hello.rail = rail;
  hello.kind = link.kind(rail);
  hello.last_fenced = link.fenced_epoch(rail);
  auto handshake = std::make_unique<ConnectorHandshake>(hello, HandshakeKey{});
  ConnectorHandshake* connector = handshake.get();
  connection.attach(side, *this);
  world.end(peer, rank).accept(rail, connection);
  pending_.push_back({rail, &connection, std::move(handshake), connector,
                      now() + world.options().handshake_timeout_ns});
}

LinkEnd::Pending& LinkEnd::accept(RailId rail, Connection& connection) {
  connection.attach(side, *this);
  auto handshake = std::make_unique<AcceptorHandshake>(
      AcceptorHandshake::Self{.process = process_of(rank), .job = job, .config = 0},
      [](std::uint32_t) { return HandshakeKey{}; },
      [this](const Hello& hello, bool fresh) { return decide(hello, fresh); });
  return pending_.emplace_back(Pending{rail, &connection, std::move(handshake), nullptr,
                                       now() + world.options().handshake_timeout_ns});
}

Decision LinkEnd::decide(const Hello& hello, bool fresh) {
  const auto epoch = offer(hello.rail, hello.last_fenced, fresh, now());
  return {.accept = epoch.has_value(),
          .epoch = epoch.value_or(0),
          .why = {},
          .last_fenced = link.fenced_epoch(hello.rail)};
}

bool LinkEnd::advance_handshakes() {
  bool moved = false;
  for (std::size_t i = 0; i < pending_.size();) {
    if (!advance(pending_[i])) {
      ++i;
      continue;
    }
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    moved = true;
  }
  return moved;
}

bool LinkEnd::advance(Pending& pending) {
  Handshake& handshake = *pending.handshake;
  const auto flush = [&] {
    const auto output = handshake.output();
    if (!output.empty()) handshake.sent(pending.connection->write(side, output));
  };
  flush();
  std::array<std::byte, 64> buffer;
  while (handshake.state() == HandshakeState::in_progress) {
    const std::size_t bytes = pending.connection->read(side, buffer);
    if (bytes == 0) break;
    (void)handshake.feed(std::span(buffer).first(bytes));
    flush();
  }
  if (handshake.state() == HandshakeState::established && handshake.output().empty() &&
      !pending.connection->broken(side)) {
    finish(pending);
    return true;
  }
  if (handshake.state() == HandshakeState::in_progress && now() < pending.deadline &&
      !pending.connection->broken(side))
    return false;
  give_up(pending);
  return true;
}

void LinkEnd::give_up(Pending& pending) {
  pending.connection->close(side);
  if (pending.connector == nullptr) return;
  std::optional<Epoch> refused;
  if (pending.handshake->fault() == HandshakeFault::refused)
    refused = pending.handshake->peer_last_fenced();
  connect_failed(pending.rail, pending.connector->offered_epoch().value_or(0), refused, now());
}

void LinkEnd::finish(Pending& pending) {
  const RailId rail = pending.rail;
  const Epoch epoch = pending.handshake->epoch();
  if (!begin_epoch(rail, epoch, now())) {
    pending.connection->close(side);
    return;
  }
  std::unique_ptr<Rail> by;
  if (link.kind(rail) == RailKind::verbs) {
    by = world.new_queue_pair(*this, rail, epoch);
  } else {
    by = std::make_unique<FramedRail>(
        link, rail, std::make_unique<SimPipe>(*pending.connection, side, world.random()),
        pending.handshake->take_leftover());
  }
  carry(rail, std::move(by), now());
}

// ---- progress ----

void LinkEnd::progress() {
  if (world.stopped(rank) || std::exchange(progressing_, true)) return;
  for (bool moved = true; moved;) {
    moved = advance_handshakes();
    moved |= receive(now(), /*all_rails=*/true);
    if (!link.received_aborts().empty())
      world.deliver_aborts(rank, std::exchange(link.received_aborts(), {}));
    if (world.carry_streams) world.carry_streams(*this);
    if (world.carry_posted) world.carry_posted(*this);
    send(now());
    progressing_ = false;
    world.strike();
    progressing_ = true;
  }
  progressing_ = false;
  world.touched(rank);
}

void LinkEnd::tick() {
  progress();
  const bool refresh = now() - paths_refreshed_ >= path_refresh_ns;
  if (refresh) paths_refreshed_ = now();
  LinkOfRails::tick(now(), refresh);
  start_due_connects();
  progress();
}

void LinkEnd::fail_rail(RailId rail, RailCause cause) {
  link.rail_failed(rail, link.epoch(rail), cause, now());
  act(now());
  progress();
}

void LinkEnd::drill(RailId rail, bool begins) {
  constexpr std::uint8_t kind = 1;
  if (begins)
    link.begin_drill(rail, kind, longest_drill_ns, now());
  else
    link.end_drill(rail, now());
  progress();
}

void LinkEnd::connect_soon(RailId rail) {
  link.connect_soon(rail, now());
  act(now());
  start_due_connects();
}

void LinkEnd::die() {
  for (Pending& pending : pending_) pending.connection->close(side);
  pending_.clear();
  for (End& end : ends) {
    end.rail.reset();
    end.fencing.reset();
  }
}

// ---- observers of the link ----

void LinkEnd::on_step(LinkStep step, RailId rail) { world.on_step({rank, peer, step, rail}); }

void LinkEnd::on_frame_sent(RailId rail, const OutFrame& frame) {
  world.on_frame_sent(*this, rail, frame);
}

void LinkEnd::on_rail_moved(RailId rail, RailState from, RailState to, RailCause cause) {
  world.on_rail_moved(*this, rail, from, to, cause);
}

void LinkEnd::on_replay(RailId rail, std::uint32_t chunks, bool hedge) {
  world.on_replay(*this, rail, chunks, hedge);
}

}  // namespace r2ccl::sim
