#include "sim/world.hpp"

#include <algorithm>
#include <sstream>
#include <utility>

#include "sim/sim_channel.hpp"

namespace r2ccl::sim {

World::World(const Options& options)
    : options_(options),
      random_(options.seed),
      shadow_(options.link.shape.first_number),
      ranks_(static_cast<std::size_t>(options.ranks)) {
  histories_.resize(ranks_.size() * ranks_.size() * options.rails.size());
  if (options.nic_ns_per_byte > 0) share_nics();
  const auto& kinds = options.rails;
  const bool one_sided = std::find(kinds.begin(), kinds.end(), RailKind::verbs) != kinds.end();
  for (int rank = 0; rank < options.ranks; ++rank) {
    of(rank).memory.resize(ranks_.size());
    for (int peer = 0; peer < options.ranks; ++peer) {
      LinkOptions link = options.link;
      if (one_sided) link.memory = &of(rank).memory[static_cast<std::size_t>(peer)];
      link.connects = rank > peer;
      of(rank).ends.push_back(
          peer == rank ? nullptr
                       : std::make_unique<LinkEnd>(*this, rank, peer, link, options.rails));
    }
  }
  for (int rank = 0; rank < options.ranks; ++rank) {
    each_peer(rank, [&](int peer) { end(rank, peer).start(); });
    schedule_tick(rank);
  }
}

World::~World() = default;

// Schedules the next tick of a rank.  Jitter makes ranks tick at different times.
void World::schedule_tick(int rank) {
  const auto jitter =
      static_cast<TimeNs>(random_.below(static_cast<std::uint64_t>(options_.tick_ns / 8)));
  events_.after(options_.tick_ns - jitter, [this, rank] {
    if (of(rank).dead) return;
    if (!stopped(rank)) {
      each_peer(rank, [&](int peer) {
        end(rank, peer).tick();
        check_queues(end(rank, peer));
      });
      for (SimChannel* channel : channels_)
        if (channel->world_rank() == rank) channel->check_slots();
    }
    schedule_tick(rank);
  });
}

bool World::run_until(const std::function<bool()>& done, TimeNs limit) {
  const TimeNs deadline = now() + limit;
  while (!done()) {
    if (!events_.run_next(deadline)) return false;
    resume_ready();
  }
  return true;
}

// ---- threads ----

void World::spawn(int rank, TimeNs delay, std::function<void()> body) {
  Thread& thread = threads_.emplace_back(Thread{rank, std::make_unique<Fiber>(std::move(body))});
  events_.after(delay, [this, rank, &thread] {
    thread.begun = true;
    touched(rank);
  });
}

bool World::all_returned() const {
  return std::all_of(threads_.begin(), threads_.end(), [this](const Thread& thread) {
    return thread.fiber->done() || of(thread.rank).dead;
  });
}

void World::stop() {
  stopping_ = true;
  for (Rank& rank : ranks_) rank.touched = true;
  resume_ready();
  stopping_ = false;
  threads_.clear();
}

bool World::run(const std::function<void(int rank)>& body, TimeNs limit) {
  for (int rank = 0; rank < options_.ranks; ++rank) {
    // Jitter makes ranks enter a collective at different times.
    const auto delay =
        static_cast<TimeNs>(random_.below(static_cast<std::uint64_t>(options_.delays.latency_ns)));
    spawn(rank, delay, [&body, rank] { body(rank); });
  }
  const bool in_time = run_until([this] { return all_returned(); }, limit);
  stop();
  return in_time;
}

void World::resume_ready() {
  for (bool resumed = true; resumed;) {
    resumed = false;
    for (Thread& thread : threads_) {
      Rank& rank = of(thread.rank);
      if (!rank.touched || thread.fiber->done()) continue;
      if (!stopping_) {
        if (!thread.begun || stopped(thread.rank)) continue;
        if (thread.waits_for != nullptr && !(*thread.waits_for)()) continue;
      }
      thread.waits_for = nullptr;
      running_ = &thread;
      thread.fiber->resume();
      resumed = true;
    }
  }
  for (Rank& rank : ranks_) rank.touched = false;
}

Status World::wait(const std::function<bool()>& ready) {
  while (!ready()) {
    if (stopping_) return {ErrorCode::timeout, "the virtual time of the run is over"};
    running_->waits_for = &ready;
    running_->fiber->yield();
  }
  if (stopping_) return {ErrorCode::timeout, "the virtual time of the run is over"};
  return {};
}

void World::strike() {
  while (!strikes_.empty())
    for (const auto& fault : std::exchange(strikes_, {})) fault();
}

// ---- checks ----

void World::on_step(const TraceStep& step) {
  ++counters_.steps;
  if (observe_step) observe_step(step);
}

void World::trace(const std::string& text) {
  if (!observe_text) return;
  std::ostringstream line;
  line << now() / 1000 << " us  " << text;
  observe_text(line.str());
}

void World::on_frame_sent(const LinkEnd& from, RailId rail, const OutFrame& frame) {
  const FrameHeader& header = frame.header;
  if (traces()) {
    std::ostringstream text;
    text << "rank " << from.rank << " -> " << from.peer << " rail" << rail << ' '
         << name_of(header.type);
    if (header.type == FrameType::data)
      text << " communicator " << header.communicator << " message " << header.number << " slot "
           << header.slot << " offset " << header.offset << " of " << header.message_bytes;
    if (header.type == FrameType::put || header.type == FrameType::need)
      text << " connection " << header.communicator << " message " << header.number << " try "
           << (header.type == FrameType::put ? header.epoch : header.offset);
    if (header.type == FrameType::room)
      text << " connection " << header.communicator << " message " << header.number << " try "
           << header.offset << " on rail" << header.slot << " epoch " << header.epoch
           << " delivered " << header.delivered;
    if (header.type == FrameType::rail_down || header.type == FrameType::fenced)
      text << " rail" << header.number << " epoch " << header.epoch;
    if (header.type == FrameType::data || header.type == FrameType::ack)
      text << " delivered " << header.delivered << " credit " << header.credit;
    trace(text.str());
  }
  if (header.type != FrameType::data) return;
  // Copies of control messages go to every rail; the order of use holds for all other data.
  Link& sender = end(from.rank, from.peer).link;
  if (sender.out_stream(header.communicator).message(header.number).copies == 1)
    check_order(from, rail);
  shadow_.chunk_sent({from.rank, from.peer, header.communicator}, header, frame.payload);
  for (RailId other_rail = 0; other_rail < options_.rails.size(); ++other_rail)
    for (const QueuePairs& pairs : history(from.rank, from.peer, other_rail).pairs)
      if (pairs.carries_other_message(from.side, header))
        shadow_.report("I2: rank " + std::to_string(from.rank) + " reused slot " +
                       std::to_string(header.slot) + " of rank " + std::to_string(from.peer) +
                       " for message " + std::to_string(header.number) + " while rail " +
                       std::to_string(other_rail) + " may still write it");
}

void World::on_rail_moved(const LinkEnd& at, RailId rail, RailState from, RailState to,
                          RailCause cause) {
  trace("rank " + std::to_string(at.rank) + " rail" + std::to_string(rail) + " to rank " +
        std::to_string(at.peer) + ": " + std::string(name_of(from)) + " -> " +
        std::string(name_of(to)) + " (" + std::string(name_of(cause)) + ") epoch " +
        std::to_string(at.link.epoch(rail)));
  if (from == RailState::fencing) ++counters_.fences;
  if (to == RailState::down) ++counters_.downs;
  if ((from == RailState::up || from == RailState::suspect) && to == RailState::down &&
      cause != RailCause::recalled)
    lost_[{at.rank, at.peer, rail}] = at.now();
  check_move(at, rail, from, to, cause);
}

void World::check_move(const LinkEnd& at, RailId rail, RailState from, RailState to,
                       RailCause cause) {
  const auto report = [&](const char* invariant, const char* what) {
    shadow_.report(std::string(invariant) + ": rank " + std::to_string(at.rank) + " moved rail " +
                   std::to_string(rail) + " to rank " + std::to_string(at.peer) + " from " +
                   std::string(name_of(from)) + " to " + std::string(name_of(to)) + " (" +
                   std::string(name_of(cause)) + "), " + what);
  };
  const Link& theirs = end(at.peer, at.rank).link;
  const Epoch epoch = at.link.epoch(rail);
  if (from == RailState::fencing && !of(at.peer).dead && theirs.fenced_epoch(rail) < epoch)
    report("I2", "but the peer has not fenced that epoch");

  Path& over = history(at.rank, at.peer, rail).path;
  if (cause == RailCause::recalled) over.disturbed_at = now();
  const TimeNs patience = 4 * (options_.link.dead_deadline_ns + options_.link.probation_timeout_ns);
  const auto lately = [&](TimeNs when) { return when != 0 && now() - when < patience; };
  if (over.bad() || lately(over.disturbed_at)) return;
  // From here on: no recent event on the path explains the move.
  const bool peer_slept = lately(of(at.peer).disturbed_at);
  const bool slept = lately(of(at.rank).disturbed_at);
  const bool acks_late = over.acks_late() || lately(over.acks_late_at);
  if (to == RailState::suspect && !peer_slept && !acks_late) report("I7", "without a recent fault");
  if (to != RailState::down) return;
  switch (cause) {
    case RailCause::probation:
      // A new rail may fail its probation because a process did not run.
      if (!peer_slept && !slept) report("I7", "without a recent fault");
      break;
    case RailCause::peer_notice:
      if (theirs.epoch(rail) == epoch && theirs.connected(rail))
        report("I7", "but the peer still uses that epoch");
      break;
    case RailCause::dead_deadline:
    case RailCause::protocol:
    case RailCause::checksum:
    case RailCause::completion_error:
    case RailCause::device_loss:
    case RailCause::socket_error: report("I7", "without a recent fault on its path"); break;
    case RailCause::none:
    case RailCause::carrier_loss:
    case RailCause::address_loss:
    case RailCause::injected:
    case RailCause::recalled: break;
  }
}

void World::on_replay(const LinkEnd& at, RailId rail, std::uint32_t chunks, bool hedge) {
  (hedge ? counters_.hedges : counters_.replays) += chunks;
  if (traces())
    trace("rank " + std::to_string(at.rank) + (hedge ? " hedges " : " replays ") +
          std::to_string(chunks) + " chunks of rail" + std::to_string(rail) + " to rank " +
          std::to_string(at.peer));
}

void World::on_message_read(const LinkEnd& at, std::uint64_t communicator,
                            std::span<const std::byte> view) {
  const std::uint64_t number = end(at.rank, at.peer).link.in_stream(communicator).consumed();
  shadow_.message_read({at.peer, at.rank, communicator}, number, view);
}

void World::on_message_released(const LinkEnd& at, std::uint64_t communicator) {
  const InStream& in = end(at.rank, at.peer).link.in_stream(communicator);
  const InMessage& message = *in.front();
  shadow_.message_released({at.peer, at.rank, communicator}, message.number,
                           {in.front_data(), message.bytes});
}

void World::check_queues(const LinkEnd& at) {
  const QueueDepths depths = at.link.queue_depths();
  const StreamShape& shape = options_.link.shape;
  const std::size_t of_streams = options_.link.shape_of(streams_communicator).all_slots();
  const std::size_t chunks = (depths.streams * shape.all_slots() + of_streams) *
                             std::max<std::size_t>(1, shape.slot_bytes / shape.chunk_bytes);
  const std::size_t rails = options_.rails.size();
  const char* what = depths.replays > chunks * rails                      ? "replays"
                     : depths.copies > of_streams * rails                 ? "copies"
                     : depths.control > rails * (3 * depths.streams + 64) ? "control frames"
                     : depths.posted > rails * 1024                       ? "posted messages"
                     : depths.actions > 4 * rails                         ? "actions"
                                                                          : nullptr;
  if (what != nullptr)
    shadow_.report("I6: rank " + std::to_string(at.rank) + " queues too many " + what +
                   " for rank " + std::to_string(at.peer));
}

// ---- parts ----

World::PathHistory& World::history(int rank, int peer, RailId rail) {
  const auto low = static_cast<std::size_t>(std::min(rank, peer));
  const auto high = static_cast<std::size_t>(std::max(rank, peer));
  return histories_[(low * ranks_.size() + high) * options_.rails.size() + rail];
}

Connection& World::new_connection(int rank, int peer, RailId rail) {
  PathHistory& over = history(rank, peer, rail);
  return over.connections.emplace_back(events_, random_, options_.delays, over.path);
}

std::unique_ptr<Rail> World::new_queue_pair(LinkEnd& at, RailId rail, Epoch epoch) {
  PathHistory& over = history(at.rank, at.peer, rail);
  auto found = std::find_if(over.pairs.begin(), over.pairs.end(),
                            [epoch](const QueuePairs& pairs) { return pairs.epoch == epoch; });
  if (found == over.pairs.end()) {
    over.pairs.emplace_back(epoch, events_, random_, options_.delays, over.path);
    found = std::prev(over.pairs.end());
    found->on_zero_copy_read = [this, low = std::min(at.rank, at.peer),
                                high = std::max(at.rank, at.peer)](Side from,
                                                                   const FrameHeader& header) {
      const bool lower = from == acceptor_side;
      check_zero_copy({lower ? low : high, lower ? high : low, header.communicator}, header);
    };
    found->on_stray_write = [this](const FrameHeader& header) {
      shadow_.report("I2: message " + std::to_string(header.number) + " of communicator " +
                     std::to_string(header.communicator) + " is written to memory not in use");
    };
  }
  TimeNs fence = options_.fence_ns;
  if (Rank& rank = of(at.rank); rank.slow_fences > 0) {
    --rank.slow_fences;
    fence = rank.slow_fence_ns;
  }
  return std::make_unique<QueuePair>(at.link, rail,
                                     of(at.rank).memory[static_cast<std::size_t>(at.peer)], *found,
                                     at.side, at, events_, random_, options_.delays, fence);
}

LinkEnd& World::end(int rank, int peer) { return *of(rank).ends[static_cast<std::size_t>(peer)]; }

template <typename Predicate>
bool World::all_ends(Predicate predicate) const {
  for (const Rank& rank : ranks_) {
    if (rank.dead) continue;
    for (const auto& link_end : rank.ends)
      if (link_end && !of(link_end->peer).dead && !predicate(link_end->link)) return false;
  }
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

void World::add_channel(SimChannel& channel) { channels_.push_back(&channel); }

void World::remove_channel(const SimChannel& channel) { std::erase(channels_, &channel); }

void World::deliver_aborts(int rank, const std::vector<AbortNotice>& notices) {
  for (const AbortNotice& notice : notices)
    for (SimChannel* channel : channels_)
      if (channel->world_rank() == rank && channel->id() == notice.communicator)
        channel->on_abort(notice);
}

}  // namespace r2ccl::sim
