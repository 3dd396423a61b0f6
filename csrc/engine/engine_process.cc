// Engine: the death of a peer's process, told long before link_timeout.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "engine/engine.hpp"

namespace r2ccl {
namespace {

// Refusals in a row that prove a death, together with the connections that the peer's kernel
// closed.
constexpr int refused_rounds = 3;

// Starts a connection to the peer's listener of a rail.  A rail that has never been up may lead to
// another host, or to this one.
FileDescriptor ask(const Peer& peer, RailId rail) {
  if (!peer.link.been_up(rail)) {
    errno = EADDRNOTAVAIL;
    return {};
  }
  const RailRoute& route = peer.rails[rail].route;
  if (route.remote.family() != AF_UNIX) return begin_connect(route);
  return connect_to(route.remote);
}

}  // namespace

void Engine::on_word_of_end(std::uint32_t process) {
  const Lock guard(*this);
  Peer* const peer = find(process);
  if (peer == nullptr) return;
  const TimeNs now = now_ns();
  peer->on_word_of_end(now);
  watch_process(*peer, now);
}

// Two pieces of evidence prove a death: the peer's kernel has closed all connections, at least one
// of them in order, and its host refuses new connections.  A filter that rejects packets resets the
// connections, and refuses new ones as well.  A host that is lost answers nothing.  The word of a
// relay, whose connections outlive all NICs but one, takes the place of the refusals.
void Engine::watch_process(Peer& peer, TimeNs now) {
  if (!peer.started || peer.in_graceful_close() || peer.link.peer_gone()) return;
  const bool by_word = peer.ended_by_word(now);
  if (!by_word && !proved_by_refusals(peer, now)) return;
  peer.on_process_gone(now);
  peer.loss_told = true;
  const std::string proof = by_word ? "the relay of its node says so"
                                    : "its host closed all connections and refuses new ones";
  log_.add(LogLevel::warning, peer.label + " is lost: its process has ended (" + proof + ")");
  if (blocked_ > 0) notify_blocked();
}

bool Engine::proved_by_refusals(Peer& peer, TimeNs now) const {
  if (!peer.absence) {
    const auto grace = static_cast<TimeNs>(config_.refused_grace_s * 1e9);
    peer.absence.emplace(
        peer.rails.size(),
        [&peer](std::size_t rail) { return ask(peer, static_cast<RailId>(rail)); },
        Absence::Limits{.round = std::max<TimeNs>(grace / refused_rounds, 1),
                        .rounds = refused_rounds});
  }
  return peer.absence->certain(peer.closed_by_peer(), now);
}

}  // namespace r2ccl
