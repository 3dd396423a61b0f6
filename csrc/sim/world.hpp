// The simulated world: ranks with production collectives over production links, a virtual clock,
// and paths that fail on command.  The world runs on a single thread.  A run depends only on its
// options, so a seed replays any bug.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "base/errors.hpp"
#include "link/link.hpp"
#include "sim/connection.hpp"
#include "sim/event_queue.hpp"
#include "sim/fiber.hpp"
#include "sim/link_end.hpp"
#include "sim/memory.hpp"
#include "sim/queue_pair.hpp"
#include "sim/random.hpp"
#include "sim/shadow.hpp"

namespace r2ccl::sim {

class SimChannel;

// A step of the state machine of a link end.
struct TraceStep {
  int rank = 0;
  int peer = 0;
  LinkStep step = LinkStep::frame_sent;
  RailId rail = 0;
  friend bool operator==(const TraceStep&, const TraceStep&) = default;
};

struct Counters {
  std::uint64_t steps = 0;
  std::uint64_t replays = 0;  // chunks
  std::uint64_t hedges = 0;   // chunks
  std::uint64_t fences = 0;   // epochs fenced by both sides
  std::uint64_t downs = 0;
};

class World {
 public:
  struct Options {
    int ranks = 2;
    std::vector<RailKind> rails{RailKind::tcp, RailKind::tcp};  // tcp, verbs, control
    LinkOptions link;                                           // `connects` is set for each end
    Delays delays;
    TimeNs tick_ns = 1 * ns_per_ms;
    TimeNs handshake_timeout_ns = Config().handshake_timeout_ms * ns_per_ms;
    TimeNs link_timeout_ns = static_cast<TimeNs>(Config().link_timeout_s * 1e9);
    // Time per byte of a NIC that a rank's TCP connections to all peers share, in each direction.
    // 0: each pair of ranks has a bandwidth of its own, see Delays.
    TimeNs nic_ns_per_byte = 0;
    TimeNs fence_ns = 10'000;  // usual time of a queue pair's fence
    std::uint64_t seed = 1;
  };

  explicit World(const Options& options);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // Runs events until `done` returns true.  Returns false if `limit` of virtual time passes first.
  bool run_until(const std::function<bool()>& done, TimeNs limit);
  // Starts a thread of a rank, which is a fiber, after `delay`.
  void spawn(int rank, TimeNs delay, std::function<void()> body);
  [[nodiscard]] bool all_returned() const;
  // Ends all waits with an error and drops the threads.
  void stop();
  // Runs a thread per rank.  Returns false if a thread has not returned within `limit`.
  bool run(const std::function<void(int rank)>& body, TimeNs limit);

  [[nodiscard]] bool all_rails_up() const;
  [[nodiscard]] bool all_delivered() const;
  [[nodiscard]] TimeNs now() const { return events_.now(); }
  // Returns the clock of a rank, which may jump.
  [[nodiscard]] TimeNs clock(int rank) const { return now() + of(rank).clock_offset; }

  // ---- faults ----
  // Takes the carrier from the port of `rank`.  The rank's own links are notified after `notice`;
  // its peers are not.
  void cut(int rank, RailId rail, TimeNs notice = 0);
  void restore(int rank, RailId rail);
  // Changes the effect of the port of `from` on packets to `to`.
  void disturb(int from, int to, RailId rail, const std::function<void(Port&)>& change);
  void black_hole(int from, int to, RailId rail, bool on) {
    disturb(from, to, rail, [on](Port& port) { port.black_hole = on; });
  }
  // Delays the acknowledgements by the host of `rank` of bytes from `peer`; 0 = no delay.
  void delay_acks(int rank, int peer, RailId rail, TimeNs time);
  // Resets the newest connection of the rail, if any: at `rank` now, at `peer` later.
  void reset(int rank, int peer, RailId rail);
  // Fails the rail at the end of `rank`; the link may notify the peer.  A paused rank notices the
  // failure after its pause.
  void fail_rail(int rank, int peer, RailId rail, RailCause cause);
  // Announces the begin or the end of a drill.  A paused rank does so after its pause.
  void drill(int rank, int peer, RailId rail, bool begins);
  // Like fail_rail(), but the path loses all resets and errors, so only a frame on another rail can
  // notify the peer.
  void half_open(int rank, int peer, RailId rail);
  void pause(int rank, TimeNs time);     // like SIGSTOP: kernel and ports continue
  void jump_clock(int rank, TimeNs by);  // forward
  // Stops the threads of the rank forever.  `kernel_lives`: only the process dies, and its kernel
  // closes the connections; otherwise the host dies as well, and its ports lose their carrier.
  void kill(int rank, bool kernel_lives);
  // Makes the fence of the next `count` queue pairs opened by `rank` take `time`; negative = never.
  void delay_fences(int rank, std::uint32_t count, TimeNs time);

  // Called at each step of any link, in the middle of the link's work.  The callback must not apply
  // faults directly; strike_next() applies a fault before any other event.
  std::function<void(const TraceStep&)> observe_step;
  std::function<void(const std::string&)> observe_text;  // readable trace
  // Moves streams of an end: called after the end has read its rails, and before it sends.
  std::function<void(LinkEnd&)> carry_streams;
  std::function<void(LinkEnd&)> carry_posted;  // moves posted messages in the same way
  void strike_next(std::function<void()> fault) { strikes_.push_back(std::move(fault)); }

  // ---- for the parts of the world ----
  // Blocks the running thread until `ready` returns true.  Returns an error once the run is over.
  Status wait(const std::function<bool()>& ready);
  // Applies the faults of strike_next().
  void strike();
  // Has the waits of the rank's threads checked before the next event.
  void touched(int rank) { of(rank).touched = true; }
  [[nodiscard]] bool stopped(int rank) const {
    return of(rank).dead || of(rank).paused_until > now();
  }
  [[nodiscard]] bool dead(int rank) const { return of(rank).dead; }
  void add_channel(SimChannel& channel);
  void remove_channel(const SimChannel& channel);
  void deliver_aborts(int rank, const std::vector<AbortNotice>& notices);
  Connection& new_connection(int rank, int peer, RailId rail);
  std::unique_ptr<Rail> new_queue_pair(LinkEnd& end, RailId rail, Epoch epoch);

  void on_step(const TraceStep& step);
  void on_frame_sent(const LinkEnd& from, RailId rail, const OutFrame& frame);
  void on_rail_moved(const LinkEnd& end, RailId rail, RailState from, RailState to,
                     RailCause cause);
  void on_replay(const LinkEnd& end, RailId rail, std::uint32_t chunks, bool hedge);
  void on_message_read(const LinkEnd& end, std::uint64_t communicator,
                       std::span<const std::byte> view);
  void on_message_released(const LinkEnd& end, std::uint64_t communicator);
  // Called when sent memory returns to the caller: delivered messages may be overwritten.
  void on_memory_returned(const LinkEnd& end, std::uint64_t communicator);
  // Called when the source of a posted message returns to the caller.
  void on_source_returned(const LinkEnd& end, std::uint64_t connection, std::uint64_t number);
  void trace(const std::string& text);
  [[nodiscard]] bool traces() const { return observe_text != nullptr; }

  // Returns true if the port of `rank` disturbs packets to `peer`, apart from carrier loss.
  [[nodiscard]] bool is_disturbed(int rank, int peer, RailId rail) {
    Port port = path(rank, peer, rail).ports[side_of(rank, peer)];
    port.carrier = true;
    return port != Port{};
  }
  [[nodiscard]] bool has_carrier(int rank, int peer, RailId rail) {
    return path(rank, peer, rail).ports[side_of(rank, peer)].carrier;
  }
  [[nodiscard]] const Path& path(int rank, int peer, RailId rail) {
    return history(rank, peer, rail).path;
  }
  [[nodiscard]] LinkEnd& end(int rank, int peer);
  // Returns the memory of `rank` that is writable by ports of `peer`.
  [[nodiscard]] Memory& memory(int rank, int peer) {
    return of(rank).memory[static_cast<std::size_t>(peer)];
  }
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] EventQueue& events() { return events_; }
  [[nodiscard]] Random& random() { return random_; }
  [[nodiscard]] Shadow& shadow() { return shadow_; }
  [[nodiscard]] const Counters& counters() const { return counters_; }
  // Returns the bytes that a rank's shared NICs have sent, headers included; see nic_ns_per_byte.
  [[nodiscard]] std::uint64_t sent_bytes(int rank) const;

 private:
  // A path, and all connections and queue pairs ever opened over the path.
  struct PathHistory {
    Path path;
    std::deque<Connection> connections;
    std::deque<QueuePairs> pairs;
  };
  struct Thread {
    int rank;
    std::unique_ptr<Fiber> fiber;
    const std::function<bool()>* waits_for = nullptr;
    bool begun = false;
  };
  struct Rank {
    std::vector<Memory> memory;                  // by peer
    std::vector<std::unique_ptr<LinkEnd>> ends;  // by peer; null at the own index
    TimeNs clock_offset = 0;
    TimeNs paused_until = 0;
    TimeNs disturbed_at = 0;  // end of the latest pause
    TimeNs slow_fence_ns = 0;
    std::uint32_t slow_fences = 0;
    bool dead = false;
    bool touched = false;
  };

  [[nodiscard]] Rank& of(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] const Rank& of(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] PathHistory& history(int rank, int peer, RailId rail);
  [[nodiscard]] static Side side_of(int rank, int peer) {
    return rank < peer ? acceptor_side : connector_side;
  }
  template <typename Visit>
  void each_peer(int rank, Visit visit) {
    for (int peer = 0; peer < options_.ranks; ++peer)
      if (peer != rank) visit(peer);
  }
  void share_nics();
  void retry(PathHistory& over);
  void schedule_tick(int rank);
  void resume_ready();
  void check_queues(const LinkEnd& end);
  void check_zero_copy(const Shadow::Stream& stream, const FrameHeader& header);
  void check_move(const LinkEnd& end, RailId rail, RailState from, RailState to, RailCause cause);
  void check_order(const LinkEnd& from, RailId rail);
  [[nodiscard]] bool in_danger(const LinkEnd& end, RailId rail);
  template <typename Predicate>
  [[nodiscard]] bool all_ends(Predicate predicate) const;

  const Options options_;
  EventQueue events_;
  Random random_;
  Shadow shadow_;
  Counters counters_;
  std::map<std::tuple<int, int, RailId>, TimeNs> lost_;  // last loss of a rail in use, at an end
  std::map<Shadow::Stream, std::uint64_t> returned_;  // messages with memory returned to the caller
  std::map<Shadow::Stream, std::set<std::uint64_t>> sources_returned_;  // posted messages
  std::deque<PathHistory> histories_;  // by lower rank, higher rank, rail
  std::deque<Nic> nics_;               // by rank and rail, if shared
  std::vector<Rank> ranks_;
  std::deque<Thread> threads_;
  Thread* running_ = nullptr;
  std::vector<SimChannel*> channels_;
  std::vector<std::function<void()>> strikes_;
  bool stopping_ = false;
};

}  // namespace r2ccl::sim
