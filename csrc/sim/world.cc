#include "sim/world.hpp"

#include <algorithm>
#include <utility>

#include "sim/sim_channel.hpp"

namespace r2ccl::sim {

World::World(const Options& options)
    : options_(options), random_(options.seed), ranks_(static_cast<std::size_t>(options.ranks)) {
  const std::size_t pairs = ranks_.size() * ranks_.size();
  roads_.resize(pairs * options.rails);
  for (int rank = 0; rank < options.ranks; ++rank) {
    auto& ends = ranks_[static_cast<std::size_t>(rank)].ends;
    for (int peer = 0; peer < options.ranks; ++peer) {
      LinkOptions link = options.link;
      link.connects = rank > peer;
      ends.push_back(peer == rank ? nullptr : std::make_unique<LinkEnd>(*this, rank, peer, link));
    }
  }
  for (int rank = 0; rank < options.ranks; ++rank) {
    for (auto& link_end : ranks_[static_cast<std::size_t>(rank)].ends)
      if (link_end) link_end->start();
    schedule_tick(rank);
  }
}

World::~World() = default;

// Ranks tick at different moments.
void World::schedule_tick(int rank) {
  const auto jitter =
      static_cast<TimeNs>(random_.below(static_cast<std::uint64_t>(options_.tick_ns / 8)));
  events_.after(options_.tick_ns - jitter, [this, rank] {
    for (auto& link_end : ranks_[static_cast<std::size_t>(rank)].ends)
      if (link_end) link_end->tick();
    schedule_tick(rank);
  });
}

bool World::run_until(const std::function<bool()>& done, TimeNs limit) {
  const TimeNs deadline = now() + limit;
  while (!done()) {
    if (!events_.run_next(deadline)) return false;
    buried_.clear();
    resume_ready();
  }
  return true;
}

bool World::run(const std::function<void(int rank)>& body, TimeNs limit) {
  for (int rank = 0; rank < options_.ranks; ++rank) {
    Rank& entry = ranks_[static_cast<std::size_t>(rank)];
    entry.fiber = std::make_unique<Fiber>([&body, rank] { body(rank); });
    // Nobody enters a collective at the same instant.
    const auto delay =
        static_cast<TimeNs>(random_.below(static_cast<std::uint64_t>(options_.delays.latency_ns)));
    events_.after(delay, [&entry] { entry.fiber->resume(); });
  }
  const auto all_done = [this] {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [](const Rank& entry) { return entry.fiber->done(); });
  };
  const bool in_time = run_until(all_done, limit);
  stopping_ = true;
  for (Rank& entry : ranks_) entry.touched = true;
  resume_ready();
  stopping_ = false;
  for (Rank& entry : ranks_) entry.fiber.reset();
  return in_time;
}

void World::resume_ready() {
  for (bool resumed = true; resumed;) {
    resumed = false;
    for (Rank& entry : ranks_) {
      if (!std::exchange(entry.touched, false) || entry.waits_for == nullptr) continue;
      if (!stopping_ && !(*entry.waits_for)()) continue;
      entry.waits_for = nullptr;
      entry.fiber->resume();
      resumed = true;
    }
  }
  buried_.clear();
}

Status World::wait(int rank, const std::function<bool()>& ready) {
  Rank& entry = ranks_[static_cast<std::size_t>(rank)];
  while (!ready()) {
    if (stopping_) return {ErrorCode::timeout, "the virtual time of the run is over"};
    entry.waits_for = &ready;
    entry.fiber->yield();
  }
  return {};
}

void World::strike() {
  while (!strikes_.empty())
    for (const auto& fault : std::exchange(strikes_, {})) fault();
}

// --- faults --------------------------------------------------------------------------------------

void World::cut(int rank, RailId rail) {
  for (int peer = 0; peer < options_.ranks; ++peer)
    if (peer != rank) road(rank, peer, rail).path.carrier[side_of(rank, peer)] = false;
  for (int peer = 0; peer < options_.ranks; ++peer)
    if (peer != rank) end(rank, peer).fail_rail(rail, RailCause::carrier);
}

void World::restore(int rank, RailId rail) {
  for (int peer = 0; peer < options_.ranks; ++peer) {
    if (peer == rank) continue;
    Road& over = road(rank, peer, rail);
    over.path.carrier[side_of(rank, peer)] = true;
    for (Connection& connection : over.connections) connection.retry();
    end(rank, peer).connect_soon(rail);
  }
}

void World::black_hole(int from, int to, RailId rail, bool on) {
  Road& over = road(from, to, rail);
  over.path.black_hole[side_of(from, to)] = on;
  if (!on)
    for (Connection& connection : over.connections) connection.retry();
}

void World::reset(int rank, int peer, RailId rail) {
  Road& over = road(rank, peer, rail);
  if (!over.connections.empty()) over.connections.back().reset(side_of(rank, peer));
}

// --- parts ---------------------------------------------------------------------------------------

World::Road& World::road(int rank, int peer, RailId rail) {
  const auto low = static_cast<std::size_t>(std::min(rank, peer));
  const auto high = static_cast<std::size_t>(std::max(rank, peer));
  return roads_[(low * ranks_.size() + high) * options_.rails + rail];
}

Connection& World::new_connection(int rank, int peer, RailId rail) {
  Road& over = road(rank, peer, rail);
  return over.connections.emplace_back(events_, random_, options_.delays, over.path);
}

LinkEnd& World::end(int rank, int peer) {
  return *ranks_[static_cast<std::size_t>(rank)].ends[static_cast<std::size_t>(peer)];
}

template <typename Predicate>
bool World::all_ends(Predicate predicate) const {
  for (const Rank& entry : ranks_)
    for (const auto& link_end : entry.ends)
      if (link_end && !predicate(link_end->link)) return false;
  return true;
}

bool World::all_rails_up() const {
  return all_ends([](const Link& link) {
    for (RailId rail = 0; rail < link.rail_count(); ++rail)
      if (link.state(rail) != RailState::up) return false;
    return true;
  });
}

bool World::all_delivered() const {
  return all_ends([](const Link& link) { return link.all_delivered(); });
}

void World::check_slot_reuse(const LinkEnd& from, const FrameHeader& header) {
  for (RailId rail = 0; rail < options_.rails; ++rail)
    for (const Connection& connection : road(from.rank, from.peer, rail).connections)
      if (connection.carries_other_message(from.side, header))
        shadow_.report("rank " + std::to_string(from.rank) + " reused slot " +
                       std::to_string(header.slot) + " of rank " + std::to_string(from.peer) +
                       " for message " + std::to_string(header.number) + " while rail " +
                       std::to_string(rail) + " may still write it");
}

void World::add_channel(SimChannel& channel) { channels_.push_back(&channel); }

void World::remove_channel(const SimChannel& channel) { std::erase(channels_, &channel); }

void World::deliver_aborts(int rank, const std::vector<AbortNotice>& notices) {
  for (const AbortNotice& notice : notices)
    for (SimChannel* channel : channels_)
      if (channel->rank() == rank && channel->communicator() == notice.communicator)
        channel->fail(notice.code, notice.text);
}

}  // namespace r2ccl::sim
