#include "sim/stream_traffic.hpp"

#include <algorithm>

namespace r2ccl::sim {
namespace {

constexpr std::uint64_t part_bytes = 300;  // of a write or a read, at most

}  // namespace

StreamTraffic::StreamTraffic(World& world, const Job::Streams& plan,
                             std::function<void(const std::string&)> violate)
    : world_(world), plan_(plan), violate_(std::move(violate)) {
  for (int rank = 0; rank < world.options().ranks; ++rank)
    for (int peer = 0; peer < world.options().ranks; ++peer) {
      if (rank == peer) continue;
      StreamMux::Options options = plan.mux;
      options.even = rank < peer;
      const auto seed = plan.seed + static_cast<std::uint64_t>(rank * 64 + peer);
      ends_[{rank, peer}] = std::make_unique<End>(world.end(rank, peer), options, seed);
    }
  world_.carry_streams = [this](LinkEnd& at) { carry(at); };
}

StreamTraffic::~StreamTraffic() { world_.carry_streams = {}; }

StreamTraffic::End& StreamTraffic::end(int rank, int peer) { return *ends_.at({rank, peer}); }
const StreamTraffic::End& StreamTraffic::end(int rank, int peer) const {
  return *ends_.at({rank, peer});
}

std::string StreamTraffic::name(const End& of) const {
  return "rank " + std::to_string(of.link_end.rank) + " streams with rank " +
         std::to_string(of.link_end.peer);
}

// Returns the seed of the `number`-th stream that `client` opens to `server`.
std::uint64_t StreamTraffic::seed_of(const End& client, const End& server,
                                     std::uint32_t number) const {
  const auto pair = static_cast<std::uint64_t>(client.link_end.rank) * 64 +
                    static_cast<std::uint64_t>(server.link_end.rank);
  return Random(plan_.seed + pair * 1000 + number).next();
}

std::byte StreamTraffic::byte_at(std::uint64_t seed, bool even, std::uint64_t position) {
  const std::uint64_t word = seed >> (even ? 8U : 24U);
  return static_cast<std::byte>((word + position * 31 + (position >> 8U) * 7) & 0xFFU);
}

bool StreamTraffic::is_over(const End& of) const {
  if (of.failed_at != 0) return true;
  const bool all = of.begun && of.opened == all_streams() && of.accepted == all_streams();
  return all && std::ranges::all_of(of.halves, [](const auto& entry) { return entry.second.over; });
}

void StreamTraffic::run(int rank, int peer) {
  End& own = end(rank, peer);
  own.begun = true;
  own.begun_at = world_.now();
  // All listeners are announced together: a token says which of them the peer may then connect to.
  for (std::uint16_t port = 1; port <= plan_.ports; ++port) {
    own.mux.listens(port);
    if (own.random.chance(0.3)) own.mux.sync(plan_.ports + port);
  }
  own.mux.sync(plan_.ports);
  own.link_end.progress();
  (void)world_.wait([this, &own] { return is_over(own); });
}

// ---- events ----

void StreamTraffic::carry(LinkEnd& at) {
  End& own = end(at.rank, at.peer);
  if (own.failed_at != 0) return;
  const TimeNs timeout = world_.options().link_timeout_ns;
  for (; own.begun && own.opened < own.due; ++own.opened) {
    const auto port = static_cast<std::uint16_t>(1 + own.opened / plan_.connections);
    begin_half(own, own.mux.open(port), seed_of(own, other(own), own.opened));
  }
  for (bool moved = true; moved;) {
    moved = false;
    if (!own.mux.take(at.link, at.now())) {
      violate_("I3: " + name(own) + ": " + own.mux.violation());
      own.failed_at = world_.now();
      return;
    }
    for (const StreamEvent& event : own.mux.take_events()) on_event(own, event);
    for (auto& [id, half] : own.halves) moved |= !half.over && move(own, id, half);
    moved |= own.mux.pump(at.link, at.now());
  }
  const std::string_view why = own.mux.why_lost(at.link, at.now(), timeout);
  if (why.empty() || is_over(own)) return;
  own.failed_at = world_.now();
  own.why = why;
  world_.trace(name(own) + " end: " + own.why);
}

void StreamTraffic::on_event(End& at, const StreamEvent& event) {
  switch (event.kind) {
    case StreamEvent::Kind::listens: at.mirrors.insert(event.port); break;
    case StreamEvent::Kind::unlistens: at.mirrors.erase(event.port); break;
    case StreamEvent::Kind::sync: at.mux.synced(event.token); break;
    case StreamEvent::Kind::synced:
      if (event.token == plan_.ports) publish(at, event.token);
      break;
    case StreamEvent::Kind::opened: {
      at.ports[event.stream] = event.port;
      begin_half(at, event.stream, seed_of(other(at), at, at.accepted++));
      break;
    }
    case StreamEvent::Kind::reset: {
      Half& half = at.halves[event.stream];
      const auto theirs = other(at).halves.find(event.stream);
      const bool told =
          theirs != other(at).halves.end() && theirs->second.resets && theirs->second.finished;
      if (!half.over && !told)
        violate_("I4: " + name(at) + ": stream " + std::to_string(event.stream) +
                 " was reset, but the peer did not reset it");
      end_half(at, event.stream, half);
      break;
    }
    case StreamEvent::Kind::readable:
    case StreamEvent::Kind::finished:
    case StreamEvent::Kind::writable:
    case StreamEvent::Kind::no_mirror: break;
  }
}

// All mirrors of the listeners at `at` are said to be there: clients of the peer's node connect.
void StreamTraffic::publish(End& at, std::uint32_t last_port) {
  End& client = other(at);
  for (std::uint16_t port = 1; port <= last_port; ++port) {
    if (!client.mirrors.contains(port) && !world_.dead(client.link_end.rank))
      violate_("I3: " + name(at) + ": the peer has no mirror of port " + std::to_string(port) +
               " although SYNC was answered");
    for (std::uint32_t each = 0; each < plan_.connections; ++each) connect_soon(client);
  }
}

// Clients connect at different times, so that some streams end before others begin.
void StreamTraffic::connect_soon(End& client) {
  const TimeNs later = client.random.chance(0.5) ? 0 : client.random.between(1000, 20 * ns_per_ms);
  world_.events().at(world_.now() + later, [&client] {
    ++client.due;
    client.link_end.progress();
  });
}

void StreamTraffic::begin_half(End& at, StreamId id, std::uint64_t seed) {
  Half& half = at.halves[id] = {};
  half.seed = seed;
  half.random = Random(at.random.next());
  half.total = half.random.below(plan_.most_bytes + 1);
  half.resets = half.random.chance(0.15);
  if (!half.random.chance(0.3)) return;
  half.read_at = world_.now() + half.random.between(1000, 20 * ns_per_ms);
  wake(at, half.read_at);
}

// Writes and reads some bytes.  Returns true if anything moved.
bool StreamTraffic::move(End& at, StreamId id, Half& half) {
  bool moved = false;
  const bool even = at.link_end.rank < at.link_end.peer;
  const TimeNs now = world_.now();
  if (!half.finished && now >= half.write_at) {
    std::vector<std::byte> bytes(
        std::min<std::uint64_t>({half.total - half.written, part_bytes, at.mux.room(id)}));
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = byte_at(half.seed, even, half.written + i);
    half.written += at.mux.write(id, bytes);
    moved = !bytes.empty();
    if (half.written == half.total) {
      half.finished = moved = true;
      if (half.resets)
        at.mux.reset(id);
      else
        at.mux.finish(id);
    } else if (moved && half.random.chance(0.2)) {
      half.write_at = now + half.random.between(1000, 3 * ns_per_ms);
      wake(at, half.write_at);
    }
    if (half.finished && half.resets) {
      end_half(at, id, half);
      return true;
    }
  }
  const bool ended = at.mux.at_end(id);
  if (now >= half.read_at) {
    const auto view = at.mux.read(id);
    const std::size_t count = std::min<std::size_t>(view.size(), 1 + half.random.below(part_bytes));
    for (std::size_t i = 0; i < count; ++i)
      if (view[i] != byte_at(half.seed, !even, half.read + i)) {
        violate_("I1: " + name(at) + ": byte " + std::to_string(half.read + i) + " of stream " +
                 std::to_string(id) + " is wrong");
        end_half(at, id, half);
        return true;
      }
    if (view.size() > plan_.mux.window)
      violate_("I6: " + name(at) + ": stream " + std::to_string(id) + " holds " +
               std::to_string(view.size()) + " bytes, more than its window");
    half.read += count;
    moved |= count > 0;
    const bool last = count == view.size();
    at.mux.consumed(id, count);
    if (!last && half.random.chance(0.1)) {
      half.read_at = now + half.random.between(1000, 5 * ns_per_ms);
      wake(at, half.read_at);
    }
    if ((ended || at.mux.at_end(id) || !at.mux.has(id)) && last && half.finished) {
      const Half& theirs = other(at).halves[id];
      if (half.read != theirs.total)
        violate_("I1: " + name(at) + ": stream " + std::to_string(id) + " ended after " +
                 std::to_string(half.read) + " of " + std::to_string(theirs.total) + " bytes");
      if (!at.mux.has(id)) end_half(at, id, half);
    }
  }
  return moved;
}

void StreamTraffic::end_half(End& at, StreamId id, Half& half) {
  if (half.over) return;
  half.over = true;
  ++ended_;
  bytes_ += half.read;
  const auto port = at.ports.find(id);
  if (port != at.ports.end() && ++at.ended[port->second] == plan_.connections)
    at.mux.unlistens(port->second);
}

void StreamTraffic::wake(End& at, TimeNs when) {
  world_.events().at(std::max(when, world_.now()), [&at] {
    at.link_end.progress();  // a stopped rank goes on after its pause
  });
}

// ---- outcome ----

std::string StreamTraffic::unfinished() const {
  std::string text;
  for (const auto& [ranks, own] : ends_) {
    if (world_.dead(ranks.first) || is_over(*own)) continue;
    text += " " + name(*own) + " (" + std::to_string(own->opened) + " opened, " +
            std::to_string(own->accepted) + " accepted of " + std::to_string(all_streams()) + ",";
    for (const auto& [id, half] : own->halves)
      if (!half.over)
        text += " stream " + std::to_string(id) + " wrote " + std::to_string(half.written) +
                " of " + std::to_string(half.total) + " and read " + std::to_string(half.read);
    text += ");";
  }
  return text;
}

void StreamTraffic::judge(const std::function<TimeNs(int, int)>& lost_since, bool endless,
                          TimeNs slack) {
  for (const auto& [ranks, own] : ends_) {
    if (world_.dead(ranks.first) || own->failed_at == 0) continue;
    const TimeNs lost = lost_since(ranks.first, ranks.second);
    if (lost == 0 && !endless) {
      violate_("I4: " + name(*own) + " were given up: " + own->why);
    } else if (!endless) {
      const TimeNs since = std::max(lost, own->begun_at);
      if (own->failed_at - since > world_.options().link_timeout_ns + slack)
        violate_("I5: " + name(*own) + " were given up " +
                 std::to_string((own->failed_at - since) / ns_per_ms) +
                 " ms after the peer was lost");
    }
  }
}

}  // namespace r2ccl::sim
