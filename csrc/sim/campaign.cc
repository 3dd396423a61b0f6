#include "sim/campaign.hpp"

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include "sim/calls.hpp"
#include "sim/faults.hpp"
#include "sim/gpu.hpp"
#include "sim/job.hpp"
#include "sim/node.hpp"
#include "sim/posted_traffic.hpp"
#include "sim/stream_traffic.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {
namespace {

constexpr TimeNs start_limit = 2000 * ns_per_ms;
constexpr TimeNs run_limit = 30'000 * ns_per_ms;
// Time for the recovery of all rails after the last fault: the longest back-off, a few failed
// attempts, a slow fence.
constexpr TimeNs quiet_limit = 600 * ns_per_ms;
constexpr TimeNs outage = 2000 * ns_per_ms;
constexpr TimeNs linger = 5000 * ns_per_ms;
// Allowance for errors later than link_timeout: pauses, and notices in flight.
constexpr TimeNs error_slack = 600 * ns_per_ms;

// Outcome of a rank's calls on a communicator.
struct Outcome {
  std::size_t returned = 0;  // calls without an error
  bool failed = false;
  ErrorCode code = ErrorCode::ok;
  std::string text;
  TimeNs entered = 0;  // start of the latest call
  TimeNs failed_at = 0;
};

class SeedRun {
 public:
  SeedRun(std::uint64_t seed, const FaultOptions& options, const TraceLine& trace)
      : job_(make_job(seed, options)),
        random_(seed ^ 0x5EED),
        world_(job_.world),
        faults_(world_, job_, random_.next(), result_) {
    result_.seed = seed;
    result_.job = describe(job_);
    world_.observe_text = trace;
    world_.trace("seed " + std::to_string(seed) + ": " + result_.job);
  }

  SeedResult run() {
    if (!world_.run_until([this] { return world_.all_rails_up(); }, start_limit))
      violate("I4: not every rail came up before the first fault");
    spawn();
    faults_.begin();
    if (!world_.run_until([this] { return world_.all_returned(); }, run_limit)) report_hang();
    world_.trace("all threads have returned");
    judge_outcomes();
    if (result_.violations.empty() && world_.shadow().violations().empty()) settle();
    world_.stop();
    collect();
    return std::move(result_);
  }

 private:
  void violate(std::string text) { result_.violations.push_back(std::move(text)); }

  void spawn() {
    for (std::size_t index = 0; index < job_.communicators.size(); ++index) {
      const Job::Communicator& communicator = job_.communicators[index];
      outcomes_.emplace_back(communicator.members.size());
      for (std::size_t own = 0; own < communicator.members.size(); ++own) {
        const int rank = communicator.members[own];
        channels_.push_back(std::make_unique<SimChannel>(
            world_, communicator.id, communicator.members, static_cast<int>(own)));
        if (communicator.compared) channels_.back()->set_consensus(Consensus::step);
        const auto work_of = [this, index, own, channel = channels_.back().get()] {
          work(job_.communicators[index], *channel, outcomes_[index][own]);
        };
        if (communicator.inter_node) continue;
        if (communicator.on_gpu)
          spawn_gpu(communicator, *channels_.back(), outcomes_[index][own]);
        else
          world_.spawn(rank, think_time(), work_of);
      }
    }
    for (int rank = 0; job_.exchange && rank < job_.world.ranks; ++rank) spawn_node(rank);
    if (job_.streams) spawn_streams();
    if (job_.posted) spawn_posted();
  }

  void spawn_posted() {
    posted_ = std::make_unique<PostedTraffic>(world_, *job_.posted,
                                              [this](const std::string& what) { violate(what); });
    for (int rank = 0; rank < job_.world.ranks; ++rank)
      for (int peer = 0; peer < job_.world.ranks; ++peer)
        if (peer != rank)
          world_.spawn(rank, think_time(), [this, rank, peer] { posted_->run(rank, peer); });
  }

  void spawn_streams() {
    traffic_ = std::make_unique<StreamTraffic>(world_, *job_.streams,
                                               [this](const std::string& what) { violate(what); });
    for (int rank = 0; rank < job_.world.ranks; ++rank)
      for (int peer = 0; peer < job_.world.ranks; ++peer)
        if (peer != rank)
          world_.spawn(rank, think_time(), [this, rank, peer] { traffic_->run(rank, peer); });
  }

  // Returns the channels of all inter-node groups: the last entries of `channels_`, ordered by
  // group and node.
  [[nodiscard]] std::span<const std::unique_ptr<SimChannel>> inter_node_channels() const {
    return std::span(channels_).last(job_.exchange->local_ranks *
                                     static_cast<std::size_t>(job_.world.ranks));
  }

  void spawn_node(int rank) {
    const Job::Exchange& exchange = *job_.exchange;
    const auto nodes = static_cast<std::size_t>(job_.world.ranks);
    const auto number = static_cast<std::size_t>(rank);
    std::vector<Node::InterNodeGroup> own;
    for (std::uint32_t local_rank = 0; local_rank < exchange.local_ranks; ++local_rank) {
      const Job::Communicator& group = job_.communicators[exchange.first_inter_node + local_rank];
      own.push_back({*inter_node_channels()[local_rank * nodes + number], group.calls, group.tree});
    }
    const auto outcome = [this, number, &exchange](std::uint32_t local_rank) -> Outcome& {
      return outcomes_[exchange.first_inter_node + local_rank][number];
    };
    nodes_.push_back(std::make_unique<Node>(
        world_, own, exchange.calls, random_.next(),
        Node::Observer{.think = [this] { think(); },
                       .entered =
                           [this, outcome](std::uint32_t local_rank) {
                             outcome(local_rank).entered = world_.now();
                           },
                       .returned =
                           [this, outcome, own](std::uint32_t local_rank, std::size_t call,
                                                const Status& status) {
                             note(own[local_rank].channel, own[local_rank].calls[call], status,
                                  outcome(local_rank));
                           },
                       .wrong =
                           [this, own](std::uint32_t local_rank, const std::string& what) {
                             wrong(own[local_rank].channel, what);
                           }}));
    Node& node = *nodes_.back();
    for (std::uint32_t local_rank = 0; local_rank < exchange.local_ranks; ++local_rank) {
      world_.spawn(rank, think_time(), [this, &exchange, &node, local_rank, outcome, own] {
        node.serve(local_rank);
        if (outcome(local_rank).returned == exchange.calls.size())
          leave(job_.communicators[exchange.first_inter_node + local_rank],
                own[local_rank].channel);
      });
      for (std::uint32_t block = 0; block < node.blocks(local_rank); ++block)
        world_.spawn(rank, think_time(),
                     [&node, local_rank, block] { node.run_block(local_rank, block); });
    }
    if (exchange.quit && exchange.quit->node == rank)
      world_.spawn(rank, exchange.quit->after, [this, &exchange, &node, outcome] {
        const std::uint32_t local_rank = exchange.quit->local_rank;
        if (outcome(local_rank).failed || outcome(local_rank).returned == exchange.calls.size())
          return;
        quit_at_ = world_.now();
        node.quit(local_rank);
      });
  }

  // Starts a GPU's host thread and blocks at random times.  The host thread stands for a proxy
  // thread, which may wake up late.
  void spawn_gpu(const Job::Communicator& communicator, SimChannel& channel, Outcome& outcome) {
    const int rank = channel.world_rank();
    gpus_.push_back(std::make_unique<Gpu>(
        world_, channel, communicator.calls, communicator.tree, random_.next(),
        Gpu::Observer{
            .think = [this] { think(); },
            .entered = [this, &outcome] { outcome.entered = world_.now(); },
            .returned = [this, &channel, &outcome](
                            const Call& call,
                            const Status& status) { note(channel, call, status, outcome); },
            .wrong = [this, &channel](const std::string& what) { wrong(channel, what); }}));
    Gpu& gpu = *gpus_.back();
    world_.spawn(rank, think_time(), [this, &communicator, &channel, &outcome, &gpu] {
      gpu.serve();
      if (outcome.returned == communicator.calls.size()) leave(communicator, channel);
    });
    for (std::uint32_t block = 0; block < gpu.blocks(); ++block)
      world_.spawn(rank, think_time(), [&gpu, block] { gpu.run_block(block); });
  }

  TimeNs think_time() { return static_cast<TimeNs>(random_.below(3) * random_.below(ns_per_ms)); }

  void work(const Job::Communicator& communicator, SimChannel& channel, Outcome& outcome) {
    for (const Call& call : communicator.calls_of(static_cast<std::size_t>(channel.rank()))) {
      think();
      outcome.entered = world_.now();
      channel.set_step(call.step, {});
      std::string bytes;
      const Status status = RankCall(channel, call, communicator.tree).run(bytes);
      // Calls of equal shape may be mixed until the end of the step in which the programs part.
      const bool mixed = communicator.parting && communicator.parting->step == call.step;
      if (!bytes.empty() && !mixed) wrong(channel, bytes);
      note(channel, call, status, outcome);
      if (outcome.failed) {
        if (communicator.parting) channel.close();  // rails outlive the communicator
        return;
      }
      if (call.kind == TagKind::end_of_step) ++result_.compared;
    }
    leave(communicator, channel);
  }

  void note(const SimChannel& channel, const Call& call, const Status& status, Outcome& outcome) {
    if (world_.traces())
      world_.trace("rank " + std::to_string(channel.world_rank()) + " communicator " +
                   channel.name() + " " + describe(call) + ": " +
                   (status.ok() ? "returned" : status.message()));
    if (status.ok()) {
      ++outcome.returned;
      return;
    }
    outcome.failed = true;
    outcome.code = status.code();
    outcome.text = status.message();
    outcome.failed_at = world_.now();
  }

  void wrong(const SimChannel& channel, const std::string& what) {
    violate("I1: rank " + std::to_string(channel.world_rank()) + " communicator " + channel.name() +
            " " + what);
  }

  void leave(const Job::Communicator& communicator, SimChannel& channel) {
    if (communicator.id % 2 == 0) channel.close_in_order(linger);
  }

  // Simulates the computation of a rank between two calls.
  void think() {
    const TimeNs until = world_.now() + think_time();
    for (int rank = 0; rank < job_.world.ranks; ++rank)
      world_.events().at(until, [this, rank] { world_.touched(rank); });
    (void)world_.wait([this, until] { return world_.now() >= until; });
  }

  void report_hang() {
    std::string who;
    for (std::size_t index = 0; index < outcomes_.size(); ++index) {
      const Job::Communicator& communicator = job_.communicators[index];
      for (std::size_t own = 0; own < communicator.members.size(); ++own) {
        const Outcome& outcome = outcomes_[index][own];
        if (outcome.failed || outcome.returned == communicator.calls_of(own).size()) continue;
        if (world_.dead(communicator.members[own])) continue;
        who += " rank " + std::to_string(communicator.members[own]) + " in communicator " +
               std::to_string(communicator.id) + " call " + std::to_string(outcome.returned) + ";";
      }
    }
    if (traffic_ && who.empty()) who = traffic_->unfinished();
    if (posted_ && who.empty()) who = posted_->unfinished();
    if (who.empty()) who = " kernels of a GPU wait for a result";
    violate("I4: a collective hangs:" + who);
  }

  void judge_outcomes() {
    for (std::size_t index = 0; index < outcomes_.size(); ++index)
      judge(job_.communicators[index], outcomes_[index]);
    const auto lost_since = [this](int rank, int peer) { return faults_.lost_since({rank, peer}); };
    if (traffic_) {
      traffic_->judge(lost_since, faults_.endless(), error_slack);
      result_.streams = traffic_->streams();
      result_.stream_bytes = traffic_->bytes();
    }
    if (posted_) {
      posted_->judge(lost_since, faults_.endless(), error_slack);
      result_.posted = posted_->messages();
    }
  }

  void judge(const Job::Communicator& communicator, const std::vector<Outcome>& outcomes) {
    TimeNs lost = faults_.lost_since(communicator.members);
    if (communicator.inter_node) lost = std::max(lost, quit_at_);
    const bool may_fail = lost != 0 || faults_.endless();
    if (communicator.parting) return judge_parted(communicator, outcomes, may_fail);
    std::size_t first = communicator.calls.size();
    for (const Outcome& outcome : outcomes)
      if (outcome.failed) first = std::min(first, outcome.returned);
    for (std::size_t own = 0; own < outcomes.size(); ++own) {
      const Outcome& outcome = outcomes[own];
      const int rank = communicator.members[own];
      if (world_.dead(rank)) continue;
      const std::string who = "rank " + std::to_string(rank) + " communicator " +
                              std::to_string(communicator.id) + " call " +
                              std::to_string(outcome.returned);
      result_.calls += outcome.returned;
      if (communicator.on_gpu || communicator.inter_node) result_.gpu_calls += outcome.returned;
      if (communicator.inter_node) result_.exchange_calls += outcome.returned;
      if (outcome.failed) {
        ++result_.errors;
        judge_error(outcome, who, may_fail, lost);
      } else if (outcome.returned > first + 1) {
        violate("I5: " + who + " went on after another rank had failed in call " +
                std::to_string(first));
      }
    }
  }

  // Every rank gets an error before the end of the step in which a rank leaves out a call.
  void judge_parted(const Job::Communicator& communicator, const std::vector<Outcome>& outcomes,
                    bool may_fail) {
    const Job::Communicator::Parting& parting = *communicator.parting;
    ++result_.parted;
    for (std::size_t own = 0; own < outcomes.size(); ++own) {
      const Outcome& outcome = outcomes[own];
      if (world_.dead(communicator.members[own])) continue;
      const std::vector<Call>& calls = communicator.calls_of(own);
      const auto end = std::ranges::find_if(calls, [&](const Call& call) {
        return call.kind == TagKind::end_of_step && call.step == parting.step;
      });
      const std::string who = "rank " + std::to_string(communicator.members[own]) +
                              " communicator " + std::to_string(communicator.id);
      result_.calls += outcome.returned;
      if (outcome.failed) ++result_.errors;
      if (outcome.returned > static_cast<std::size_t>(end - calls.begin()))
        violate("I9: " + who + " ended step " + std::to_string(parting.step) + ", in which rank " +
                std::to_string(communicator.members[parting.own]) + " left out a call");
      else if (outcome.failed && outcome.code != ErrorCode::order_mismatch &&
               !(may_fail && is_loss(outcome.code)))
        violate("I9: " + who + " failed with an unexpected error code: " + outcome.text);
    }
  }

  static bool is_loss(ErrorCode code) {
    return code == ErrorCode::peer_lost || code == ErrorCode::peer_closed ||
           code == ErrorCode::aborted;
  }

  void judge_error(const Outcome& outcome, const std::string& who, bool may_fail, TimeNs lost) {
    if (!may_fail) return violate("I4: " + who + " failed: " + outcome.text);
    if (!is_loss(outcome.code))
      violate("I5: " + who + " failed with an unexpected error code: " + outcome.text);
    const TimeNs since = std::max(lost, outcome.entered);
    const TimeNs limit = job_.world.link_timeout_ns + error_slack;
    if (!faults_.endless() && outcome.failed_at - since > limit)
      violate("I5: " + who + " failed " + std::to_string((outcome.failed_at - since) / ns_per_ms) +
              " ms after its peer was lost");
  }

  // Checks the recovery after the last fault: every rail comes back, and everything is delivered.
  void settle() {
    // An ended engine accepts nothing any more, so its peers close their channels as well.
    if (quit_at_ != 0)
      for (const auto& channel : inter_node_channels())
        world_.spawn(channel->world_rank(), 0, [&channel] { channel->close(); });
    if (faults_.begin_outage()) (void)world_.run_until([] { return false; }, outage);
    faults_.end();
    world_.trace("all faults are over");
    if (faults_.endless()) return;
    const auto quiet = [this] {
      for (int rank = 0; rank < job_.world.ranks; ++rank)
        for (int peer = 0; peer < job_.world.ranks; ++peer) {
          if (rank == peer || faults_.isolated(rank, peer)) continue;
          if (world_.dead(rank) || world_.dead(peer)) continue;
          const Link& link = world_.end(rank, peer).link;
          for (RailId rail = 0; rail < link.rail_count(); ++rail)
            if (link.state(rail) != RailState::up || !link.drill_known(rail)) return false;
          if (!link.all_delivered()) return false;
        }
      return true;
    };
    if (world_.run_until(quiet, quiet_limit)) return;
    for (int rank = 0; rank < job_.world.ranks; ++rank)
      for (int peer = 0; peer < job_.world.ranks; ++peer) {
        if (rank == peer || faults_.isolated(rank, peer)) continue;
        if (world_.dead(rank) || world_.dead(peer)) continue;
        const Link& link = world_.end(rank, peer).link;
        for (RailId rail = 0; rail < link.rail_count(); ++rail) {
          if (!link.drill_known(rail))
            violate("I4: rank " + std::to_string(peer) + " does not know the drill on rail" +
                    std::to_string(rail) + " of rank " + std::to_string(rank));
          if (link.state(rail) != RailState::up)
            violate("I4: rail" + std::to_string(rail) + " of rank " + std::to_string(rank) +
                    " to rank " + std::to_string(peer) +
                    " did not come back: " + std::string(name_of(link.state(rail))));
        }
        if (!link.all_delivered())
          violate("I4: rank " + std::to_string(rank) + " does not deliver everything to rank " +
                  std::to_string(peer));
      }
  }

  void collect() {
    const auto& seen = world_.shadow().violations();
    result_.violations.insert(result_.violations.end(), seen.begin(), seen.end());
    const Counters& counters = world_.counters();
    result_.steps = counters.steps;
    result_.replays = counters.replays;
    result_.hedges = counters.hedges;
    result_.fences = counters.fences;
    result_.downs = counters.downs;
    result_.virtual_ns = world_.now();
    traffic_.reset();
    posted_.reset();
    gpus_.clear();
    nodes_.clear();
    channels_.clear();
  }

  SeedResult result_;
  const Job job_;
  Random random_;
  World world_;
  Faults faults_;
  std::vector<std::unique_ptr<SimChannel>> channels_;
  std::vector<std::unique_ptr<Gpu>> gpus_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::unique_ptr<StreamTraffic> traffic_;
  std::unique_ptr<PostedTraffic> posted_;
  std::vector<std::vector<Outcome>> outcomes_;
  TimeNs quit_at_ = 0;  // time when an engine ended with open calls; 0 = never
};

}  // namespace

SeedResult run_seed(std::uint64_t seed, const FaultOptions& options, const TraceLine& trace) {
  return SeedRun(seed, options, trace).run();
}

}  // namespace r2ccl::sim
