#include "sim/posted_traffic.hpp"

#include <algorithm>

namespace r2ccl::sim {
namespace {

constexpr ConnectionId first_connection = 0x100;  // differs from all communicators

}  // namespace

PostedTraffic::PostedTraffic(World& world, const Job::PostedMessages& plan,
                             std::function<void(const std::string&)> violate)
    : world_(world), plan_(plan), violate_(std::move(violate)) {
  const auto rails = static_cast<std::uint64_t>(std::ranges::count_if(
      world.options().rails, [](RailKind kind) { return kind != RailKind::control; }));
  const std::size_t bytes = std::size_t{plan.connections} * plan.buffers * plan.most_bytes;
  for (int rank = 0; rank < world.options().ranks; ++rank)
    for (int peer = 0; peer < world.options().ranks; ++peer) {
      if (rank == peer) continue;
      const auto pair = static_cast<std::uint64_t>(rank) * 64 + static_cast<std::uint64_t>(peer);
      auto made = std::make_unique<End>(world.end(rank, peer), plan.seed + pair);
      made->memory.assign(bytes, garbage);
      made->sources.assign(bytes, garbage);
      world.memory(rank, peer).add(made->memory);
      Posted& posted = made->link_end.link.posted();
      made->id = posted.add_memory(made->memory);
      for (std::uint32_t index = 0; index < plan.connections; ++index) {
        const auto half = [&](bool receives, std::vector<std::byte>& memory) {
          const int from = receives ? peer : rank;
          const int to = receives ? rank : peer;
          Half of;
          of.connection = first_connection + 2 * index + (from < to ? 0U : 1U);
          of.seed =
              Random(plan.seed + static_cast<std::uint64_t>(from * 64 + to) * 1000 + index).next();
          of.home = static_cast<RailId>(of.seed % rails);
          for (std::uint32_t buffer = 0; buffer < plan.buffers; ++buffer)
            of.buffers.push_back(
                {.bytes = std::span(memory).subspan(
                     (std::size_t{index} * plan.buffers + buffer) * plan.most_bytes,
                     plan.most_bytes)});
          return of;
        };
        made->receives.push_back(half(true, made->memory));
        made->sends.push_back(half(false, made->sources));
        posted.open_receives(made->receives.back().connection);
        posted.open_sends(made->sends.back().connection);
      }
      ends_[{rank, peer}] = std::move(made);
    }
  world_.carry_posted = [this](LinkEnd& at) { carry(at); };
}

PostedTraffic::~PostedTraffic() { world_.carry_posted = {}; }

std::string PostedTraffic::name(const End& of) const {
  return "rank " + std::to_string(of.link_end.rank) + " posted messages with rank " +
         std::to_string(of.link_end.peer);
}

std::uint32_t PostedTraffic::size_of(std::uint64_t seed, std::uint64_t number) const {
  return static_cast<std::uint32_t>(Random(seed ^ number).below(plan_.most_bytes + 1U));
}

std::byte PostedTraffic::byte_at(std::uint64_t seed, std::uint64_t number, std::size_t at) {
  return static_cast<std::byte>((seed + number * 59 + at * 31 + (at >> 8U) * 7) & 0xFFU);
}

bool PostedTraffic::is_over(const End& of) const {
  if (of.failed_at != 0) return true;
  const auto ended = [this](const Half& half) { return half.ended == plan_.messages; };
  return of.begun && std::ranges::all_of(of.receives, ended) &&
         std::ranges::all_of(of.sends, ended);
}

void PostedTraffic::run(int rank, int peer) {
  End& own = *ends_.at({rank, peer});
  own.begun = true;
  own.begun_at = own.moved_at = world_.now();
  own.link_end.progress();
  (void)world_.wait([this, &own] { return is_over(own); });
}

void PostedTraffic::carry(LinkEnd& at) {
  End& own = *ends_.at({at.rank, at.peer});
  if (!own.begun || own.failed_at != 0) return;
  for (bool moved = true; moved;) {
    moved = false;
    for (Half& half : own.receives) moved |= receive(own, half);
    for (Half& half : own.sends) moved |= send(own, half);
    if (moved) own.moved_at = world_.now();
  }
  if (!is_over(own)) give_up_lost(own);
}

// Posts and ends receives of a connection.  Returns true if anything moved.
bool PostedTraffic::receive(End& at, Half& half) {
  Posted& posted = at.link_end.link.posted();
  bool moved = false;
  for (Buffer& buffer : half.buffers) {
    if (buffer.posted || half.next == plan_.messages || world_.now() < buffer.rests_until) continue;
    check_rest(at, buffer);
    const auto offset = static_cast<std::uint64_t>(buffer.bytes.data() - at.memory.data());
    const auto number = posted.receive(
        half.connection,
        {.memory = at.id, .offset = offset, .bytes = plan_.most_bytes, .home = half.home});
    if (!number) break;
    buffer.posted = moved = true;
    buffer.number = *number;
    half.next = *number + 1;
  }
  for (Buffer& buffer : half.buffers) {
    if (!buffer.posted) continue;
    const auto bytes = posted.received(half.connection, buffer.number);
    if (!bytes) continue;
    const std::uint64_t number = buffer.number;
    bool right = *bytes == size_of(half.seed, number);
    for (std::size_t i = 0; right && i < *bytes; ++i)
      right = buffer.bytes[i] == byte_at(half.seed, number, i);
    if (!right)
      violate_("I1: " + name(at) + ": message " + std::to_string(number) + " of connection " +
               std::to_string(half.connection) + " is wrong");
    posted.take_received(half.connection, number);
    ++messages_;
    rest(at, half, buffer);
    moved = true;
  }
  if (half.ended == plan_.messages && !half.closed)
    half.closed = posted.close_receives(half.connection, at.link_end.now());
  return moved;
}

// Posts and ends sends of a connection.  Returns true if anything moved.
bool PostedTraffic::send(End& at, Half& half) {
  Posted& posted = at.link_end.link.posted();
  const TimeNs now = at.link_end.now();
  bool moved = false;
  for (Buffer& buffer : half.buffers) {
    if (!buffer.posted) continue;
    SendState state = posted.send_state(half.connection, buffer.number);
    if (state == SendState::detach &&
        at.link_end.LinkOfRails::detach(
            {.communicator = half.connection, .before = buffer.number + 1, .type = FrameType::put},
            now))
      state = SendState::done;
    if (state != SendState::done) continue;
    posted.take_sent(half.connection, buffer.number);
    world_.on_source_returned(at.link_end, half.connection, buffer.number);
    rest(at, half, buffer);
    moved = true;
  }
  for (Buffer& buffer : half.buffers) {
    if (buffer.posted || half.next == plan_.messages || world_.now() < buffer.rests_until) continue;
    const auto source = buffer.bytes.first(size_of(half.seed, half.next));
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = byte_at(half.seed, half.next, i);
    const auto number = posted.send(half.connection, source, now);
    if (!number) break;
    buffer.posted = moved = true;
    buffer.number = *number;
    half.next = *number + 1;
  }
  if (half.ended == plan_.messages && !half.closed)
    half.closed = posted.close_sends(half.connection, now);
  return moved;
}

// The caller has the buffer, and uses it again later.
void PostedTraffic::rest(End& at, Half& half, Buffer& buffer) {
  ++half.ended;
  buffer.posted = false;
  std::ranges::fill(buffer.bytes, garbage);
  if (at.random.chance(0.5)) return;
  buffer.rests_until = world_.now() + at.random.between(1000, 10 * ns_per_ms);
  world_.events().at(buffer.rests_until, [&at] { at.link_end.progress(); });
}

void PostedTraffic::check_rest(const End& at, const Buffer& buffer) {
  if (std::ranges::all_of(buffer.bytes, [](std::byte byte) { return byte == garbage; })) return;
  violate_("I2: " + name(at) + ": a buffer was written after message " +
           std::to_string(buffer.number) + " was done");
}

void PostedTraffic::give_up_lost(End& at) {
  const TimeNs timeout = world_.options().link_timeout_ns;
  const Link& link = at.link_end.link;
  const TimeNs now = at.link_end.now();
  const bool dark = link.has_no_rail() && now - link.no_rail_since() >= timeout;
  if (!dark && world_.now() - at.moved_at < 3 * timeout) return;
  at.failed_at = world_.now();
  at.why = dark ? "no rail" : "no message";
  at.why += " for " + std::to_string(timeout / ns_per_ms) + " ms";
  world_.trace(name(at) + " end: " + at.why);
}

// ---- outcome ----

std::string PostedTraffic::unfinished() const {
  std::string text;
  for (const auto& [ranks, own] : ends_) {
    if (world_.dead(ranks.first) || is_over(*own)) continue;
    text += " " + name(*own) + " (";
    for (const auto* halves : {&own->receives, &own->sends})
      for (const Half& half : *halves)
        text += " connection " + std::to_string(half.connection) + ": " +
                std::to_string(half.ended) + " of " + std::to_string(plan_.messages);
    text += ");";
  }
  return text;
}

void PostedTraffic::judge(const std::function<TimeNs(int, int)>& lost_since, bool endless,
                          TimeNs slack) {
  for (const auto& [ranks, own] : ends_) {
    if (world_.dead(ranks.first)) continue;
    for (const Half& half : own->receives)
      for (const Buffer& buffer : half.buffers)
        if (!buffer.posted) check_rest(*own, buffer);
    if (own->failed_at == 0 || endless) continue;
    const TimeNs lost = lost_since(ranks.first, ranks.second);
    if (lost == 0) {
      violate_("I4: " + name(*own) + " were given up: " + own->why + unfinished());
      continue;
    }
    const TimeNs since = std::max({lost, own->begun_at, own->moved_at});
    if (own->failed_at - since > 3 * world_.options().link_timeout_ns + slack)
      violate_("I5: " + name(*own) + " were given up " +
               std::to_string((own->failed_at - since) / ns_per_ms) +
               " ms after the peer was lost");
  }
}

}  // namespace r2ccl::sim
