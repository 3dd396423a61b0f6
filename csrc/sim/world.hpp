// The simulated world: ranks that run the production collectives over the production links, a
// virtual clock, and paths between them that fail when they are told to.  One thread; a run depends
// on its options alone, so a seed replays any bug.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "link/link.hpp"
#include "r2ccl/errors.hpp"
#include "sim/connection.hpp"
#include "sim/event_queue.hpp"
#include "sim/fiber.hpp"
#include "sim/link_end.hpp"
#include "sim/random.hpp"
#include "sim/shadow.hpp"

namespace r2ccl::sim {

class SimChannel;

// One step of one end's link.
struct TraceStep {
  int rank = 0;
  int peer = 0;
  Step step = Step::frame_sent;
  RailId rail = 0;
  friend bool operator==(const TraceStep&, const TraceStep&) = default;
};

class World {
 public:
  struct Options {
    int ranks = 2;
    std::size_t rails = 2;
    LinkOptions link;  // `connects` is set for each end
    Delays delays;
    TimeNs tick_ns = 1 * ns_per_ms;
    TimeNs handshake_timeout_ns = 3000 * ns_per_ms;
    TimeNs link_timeout_ns = 30'000 * ns_per_ms;
    std::uint64_t seed = 1;
  };

  explicit World(const Options& options);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // Lets things happen until `done`; false: it did not come true within `limit`.
  bool run_until(const std::function<bool()>& done, TimeNs limit);
  // Runs body(rank) on a fiber a rank.  False: not all returned within `limit`; then their waits
  // have ended with an error.
  bool run(const std::function<void(int rank)>& body, TimeNs limit);

  [[nodiscard]] bool all_rails_up() const;
  [[nodiscard]] bool all_delivered() const;
  [[nodiscard]] TimeNs now() const { return events_.now(); }

  // --- faults ------------------------------------------------------------------------------------
  // The rank's port loses its carrier: its links know, its peers do not.
  void cut(int rank, RailId rail);
  void restore(int rank, RailId rail);
  // Nothing that `from` sends to `to` on this rail gets through, and nobody is told.
  void black_hole(int from, int to, RailId rail, bool on);
  // The path resets the connection, if there is one; at the end of `rank` first.
  void reset(int rank, int peer, RailId rail);

  // Called at each step of any link, in the middle of the link's work: no fault may be applied from
  // there, but strike_next() makes one happen before anything else does.
  std::function<void(const TraceStep&)> observe_step;
  void strike_next(std::function<void()> fault) { strikes_.push_back(std::move(fault)); }

  // --- for the parts of the world ----------------------------------------------------------------
  // On the fiber of `rank`: until `ready`.  An error: the time that run() was given is over.
  Status wait(int rank, const std::function<bool()>& ready);
  void strike();
  void touched(int rank) { ranks_[static_cast<std::size_t>(rank)].touched = true; }
  void on_step(const TraceStep& step) {
    if (observe_step) observe_step(step);
  }
  void bury(std::unique_ptr<Connection::End> end) { buried_.push_back(std::move(end)); }
  void add_channel(SimChannel& channel);
  void remove_channel(const SimChannel& channel);
  void deliver_aborts(int rank, const std::vector<AbortNotice>& notices);
  void check_slot_reuse(const LinkEnd& from, const FrameHeader& header);

  Connection& new_connection(int rank, int peer, RailId rail);
  [[nodiscard]] const Path& path(int rank, int peer, RailId rail) {
    return road(rank, peer, rail).path;
  }
  [[nodiscard]] LinkEnd& end(int rank, int peer);
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] EventQueue& events() { return events_; }
  [[nodiscard]] Random& random() { return random_; }
  [[nodiscard]] Shadow& shadow() { return shadow_; }

 private:
  // A path and every connection that was ever opened over it.
  struct Road {
    Path path;
    std::deque<Connection> connections;
  };
  struct Rank {
    std::vector<std::unique_ptr<LinkEnd>> ends;  // by peer; null: itself
    std::unique_ptr<Fiber> fiber;
    const std::function<bool()>* waits_for = nullptr;
    bool touched = false;
  };

  [[nodiscard]] Road& road(int rank, int peer, RailId rail);
  [[nodiscard]] static Side side_of(int rank, int peer) {
    return rank < peer ? acceptor_side : connector_side;
  }
  void schedule_tick(int rank);
  void resume_ready();
  template <typename Predicate>
  [[nodiscard]] bool all_ends(Predicate predicate) const;

  const Options options_;
  EventQueue events_;
  Random random_;
  Shadow shadow_;
  std::deque<Road> roads_;  // by lower rank, higher rank, rail
  std::vector<Rank> ranks_;
  std::vector<SimChannel*> channels_;
  std::vector<std::function<void()>> strikes_;
  std::vector<std::unique_ptr<Connection::End>> buried_;  // may still be on the stack
  bool stopping_ = false;
};

}  // namespace r2ccl::sim
