// The link: everything between two processes.  A sans-IO state machine: rails report what arrived,
// what the path acknowledged and what broke; the clock comes in with tick(); frames are pulled by
// the rails and actions are taken from a queue.  No sockets, no clock calls, no threads.
//
// Step by step as docs/failover.md: path ack, delivery ack and credit are three signals and never
// stand in for each other; a rail that goes down has everything undelivered replayed at once; a
// slot is written again only with credit and every attempt of its last message resolved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/errors.hpp"
#include "base/units.hpp"
#include "link/control.hpp"
#include "link/frame.hpp"
#include "link/in_stream.hpp"
#include "link/link_types.hpp"
#include "link/out_stream.hpp"
#include "link/rail_state.hpp"
#include "link/rate_meter.hpp"
#include "link/ring.hpp"
#include "link/shape.hpp"
#include "link/verdict.hpp"

namespace r2ccl {

class Link {
 public:
  Link(const LinkOptions& options, std::span<const RailKind> rails, std::uint64_t jitter_seed);

  // ---- streams ----
  OutStream& out_stream(std::uint64_t communicator);
  InStream& in_stream(std::uint64_t communicator);
  void close_streams(std::uint64_t communicator);
  // The stream's next messages but `skip` may land in this memory, which their receiver keeps valid
  // and does not read or write before it has received them, until reclaim_target() says true.
  // True: the peer is to be told.
  bool offer_target(InStream& stream, std::uint64_t skip, std::span<std::byte> memory);
  // Nothing writes the stream's target any more.  Rails that still might are given up, and it is
  // to be asked again.  `received`: so were all messages that were to land there.
  [[nodiscard]] bool reclaim_target(InStream& stream, bool received, TimeNs now);
  // What cannot be reclaimed, since a fence does not complete.
  void revoke_target(InStream& stream);
  // Rails that reach memory by themselves reach that of these streams.
  [[nodiscard]] bool streams_reachable(std::uint64_t communicator) const {
    return options_.memory == nullptr || streams_.at(communicator)->in.block().base() != nullptr;
  }
  void post(OutStream& stream, std::span<const std::byte> data, const CallTag& tag, TimeNs now);
  // The front message has been read; gives the sender credit.  True: which is to be said at once.
  bool consume(InStream& stream, TimeNs now);
  void send_abort(const AbortNotice& notice);
  void send_close();
  // Of the accepting end: it listens for this rail elsewhere than the peer knows.  Said on every
  // rail, and again on each that is opened anew; the last word counts.
  void announce_address(RailId rail, const Endpoint& at);

  // ---- events of rails ----
  void start(TimeNs now);  // asks for the first connections
  // A connection passed its handshake: a new epoch begins, on probation.  False if that epoch may
  // not begin (the old one is not fenced by both sides, or this one is fenced already).
  [[nodiscard]] bool rail_established(RailId rail, Epoch epoch, TimeNs now);
  // The transport of this epoch broke, or something outside knows that it did.
  void rail_failed(RailId rail, Epoch epoch, RailCause cause, TimeNs now);
  // Somebody is to find out where the fault is that the rail's last epoch ended by.
  [[nodiscard]] bool wants_location(RailId rail) const;
  // What was found out of it on this side.  The peer is told of our port.
  void located(RailId rail, Epoch epoch, const Findings& findings);
  // Everything of the ended epoch is off the wire on our side: the local fence.
  void rail_closed(RailId rail, Epoch epoch, TimeNs now);
  // The epoch to offer to a connector that has fenced every one up to `connector_fenced`; empty if
  // it has not fenced the one that is open here.
  [[nodiscard]] std::optional<Epoch> epoch_to_offer(RailId rail, Epoch connector_fenced) const;
  // The peer says in a handshake that it has fenced this epoch.
  void peer_fenced(RailId rail, Epoch epoch, TimeNs now);
  // We answered for an epoch whose opening we never saw confirmed: it counts as fenced.
  void never_opened(RailId rail, Epoch epoch);
  // A connection attempt came to nothing; schedules the next.
  void connect_failed(RailId rail, TimeNs now);
  // The peer's process refused a connection, having fenced up to this epoch: over this path it can
  // be reached, whatever the epoch that is open says.
  void connect_refused(RailId rail, Epoch peer_fenced, TimeNs now);
  // Something suggests that a reconnection would succeed now (carrier is back).
  void connect_soon(RailId rail, TimeNs now);
  // The peer's end is somewhere else: an attempt under way is of no use.
  void connect_anew(RailId rail, TimeNs at);
  // The path has acknowledged the epoch's first `position` bytes.  `peer_limited`: it carries
  // nothing because the peer does not read, which no rail is charged for.
  void path_acked(RailId rail, Epoch epoch, std::uint64_t position, bool peer_limited, TimeNs now);
  // The peer's process has found the epoch's first `position` bytes in its memory: what a rail of
  // one-sided writes has acknowledged may still be on its way there.
  void attempts_landed(RailId rail, Epoch epoch, std::uint64_t position, TimeNs now);
  // The path has carried something, though perhaps not what is missing: it is not silent.
  void path_advanced(RailId rail, Epoch epoch, TimeNs now);
  // Smoothed: deadlines follow it.  Base, the recent minimum: small messages take the lowest.
  // `held_back`: so many bytes may be outstanding only because acknowledgements are delayed.
  void path_round_trip(RailId rail, TimeNs smoothed, TimeNs base, std::uint64_t held_back);

  // ---- frames out ----
  // The next frame for this rail; false if there is none it may carry.
  bool next_frame(RailId rail, OutFrame& frame, TimeNs now);
  // The rail has handed a frame on in full and reads its payload no more.
  void frame_written(const FrameHeader& header);
  [[nodiscard]] bool has_frames(RailId rail) const;

  // ---- frames in ----
  // False: no correct peer sends this; the rail has been failed.
  [[nodiscard]] bool frame_begin(RailId rail, const FrameHeader& header, TimeNs now);
  // Where the next frame is likely to belong: memory for its header and, right behind, for its
  // payload, in which payload_room() is found then.  What else is put there does no harm.  Empty:
  // nobody can tell.
  [[nodiscard]] std::span<std::byte> likely_room() const;
  // Where the next payload bytes of the frame begun go (at least one byte of room).  Asked anew
  // before every read, since another rail may complete the same chunk in between.
  [[nodiscard]] std::span<std::byte> payload_room(RailId rail);
  // Bytes were put there.  At the frame's last byte the frame is acted upon.
  void payload_filled(RailId rail, std::size_t bytes, TimeNs now);

  // A payload that a rail of one-sided writes has put into its slot already.
  void payload_placed(RailId rail, TimeNs now);

  // ---- time ----
  // Judges deadlines.  Call it after draining arrivals, at least every few milliseconds while
  // anything is outstanding.
  void tick(TimeNs now);

  // ---- what the owner asks ----
  [[nodiscard]] std::vector<LinkAction>& actions() { return actions_; }
  [[nodiscard]] std::vector<AbortNotice>& received_aborts() { return received_aborts_; }
  // At most one a rail, the newest.
  [[nodiscard]] std::vector<AddressNotice>& received_addresses() { return received_addresses_; }
  // Without resilience: a rail took undelivered bytes with it.
  [[nodiscard]] bool lost_bytes() const { return lost_bytes_; }
  [[nodiscard]] bool peer_closed() const { return peer_closed_; }
  [[nodiscard]] std::size_t rail_count() const { return rails_.size(); }
  [[nodiscard]] RailKind kind(RailId rail) const { return rails_[rail].kind; }
  [[nodiscard]] RailState state(RailId rail) const { return rails_[rail].state; }
  [[nodiscard]] RailCause cause(RailId rail) const { return rails_[rail].cause; }
  [[nodiscard]] Verdict verdict(RailId rail) const { return rails_[rail].verdict; }
  // Of a link that has no rail left: what all its rails have in common.
  [[nodiscard]] Verdict overall_verdict() const;
  [[nodiscard]] TimeNs last_heard(RailId rail) const { return rails_[rail].path.last_rx; }
  [[nodiscard]] Epoch epoch(RailId rail) const { return rails_[rail].epoch; }
  [[nodiscard]] Epoch fenced_epoch(RailId rail) const { return rails_[rail].own_fenced; }
  [[nodiscard]] const RailCounters& counters(RailId rail) const { return rails_[rail].counters; }
  [[nodiscard]] TimeNs round_trip(RailId rail) const { return rails_[rail].path.round_trip; }
  // Bytes per second when it was last what traffic waited for; 0: it never was in this epoch.
  [[nodiscard]] double rate(RailId rail) const { return rails_[rail].health.meter.measured(); }
  [[nodiscard]] bool slow(RailId rail) const { return rails_[rail].health.slow; }
  [[nodiscard]] RailId best_rail() const { return best_; }
  // By which the last data came: the peer's best rail, which need not be ours.
  [[nodiscard]] RailId inbound_rail() const { return inbound_; }
  // The rail may have bytes on the path that are not acknowledged yet.
  [[nodiscard]] bool awaits_path_ack(RailId rail) const;
  [[nodiscard]] bool connected(RailId rail) const {
    return rails_[rail].state == RailState::probation || usable(rails_[rail]);
  }
  [[nodiscard]] bool may_carry_data(RailId rail) const { return may_carry_data(rails_[rail]); }
  [[nodiscard]] bool has_data_rail() const;  // one is UP
  // No rail that may carry data is UP, and since when.
  [[nodiscard]] bool has_no_rail() const { return has_no_rail_; }
  [[nodiscard]] TimeNs no_rail_since() const { return no_rail_since_; }
  // How long the peer's process has said nothing on any rail, in time that we watched.  It answers
  // probes, so it is stopped, or its end of the rails is not what ours is.
  [[nodiscard]] TimeNs unheard() const { return unheard_; }
  [[nodiscard]] bool all_delivered() const;
  // What is queued, all rails together.
  struct QueueDepths {
    std::size_t streams = 0;
    std::size_t replays = 0;
    std::size_t attempts = 0;
    std::size_t control = 0;
    std::size_t actions = 0;
    std::size_t deferred_frees = 0;
  };
  [[nodiscard]] QueueDepths queue_depths() const;
  // Counts events on rails that a waiting collective may be stalled by.
  [[nodiscard]] std::uint64_t disturbances() const { return disturbances_; }
  void set_observer(LinkObserver* observer) { observer_ = observer; }
  // A fault of drills: where checksums are on, those of the chunks that this rail sends are wrong.
  void corrupt(RailId rail, bool on) { rails_[rail].corrupt = on; }

 private:
  struct Attempt {
    OutStream* stream;
    std::uint64_t position;  // of the epoch's byte stream, after the frame
    std::uint64_t number;
    std::uint16_t slot;
    std::uint16_t chunk;
  };
  struct Incoming {
    FrameHeader header{};
    InStream* stream = nullptr;
    std::uint32_t received = 0;
    bool discard = false;
    bool placed = false;                 // the payload is in its slot already
    std::unique_ptr<std::byte[]> text;   // payload of an ABORT
    bool apart = false;                  // or in `chunk`
    std::unique_ptr<std::byte[]> chunk;  // payload of data that is brought to its slot later
  };
  struct RemoteSlots {
    std::uint64_t address;
    std::uint32_t key;
    // A target of the peer's caller, by the message that begins it.
    std::uint64_t target_first = 0;
    std::uint64_t target_bytes = 0;
    std::uint64_t target_address = 0;
    std::uint32_t target_key = 0;
  };
  // The path of this epoch: what it took, acknowledged and answered.
  struct Path {
    std::uint64_t sent = 0;    // bytes of frames pulled in this epoch
    std::uint64_t acked = 0;   // of these, acknowledged by the path
    std::uint64_t landed = 0;  // of these, found by the peer; where that is not the same
    std::unordered_map<std::uint64_t, RemoteSlots> remote_slots;  // by communicator
    Ring<Attempt> attempts;
    TimeNs round_trip = 0;
    TimeNs base_round_trip = 0;
    std::uint64_t held_back = 0;
    TimeNs outstanding_since = 0;
    TimeNs last_rx = 0;
    TimeNs last_tx = 0;
    // When `bytes` would be through, in ns, at a rate in bytes per second; 0: at once.
    [[nodiscard]] double time_for(std::uint64_t bytes, double rate) const {
      const double transfer = rate > 0 ? static_cast<double>(bytes) * 1e9 / rate : 0;
      return static_cast<double>(base_round_trip) + transfer;
    }
  };
  // Evidence for and against the rail: its rate, its silence, and probes.
  struct Health {
    RateMeter meter;
    bool slow = false;
    TimeNs differs = 0;  // how long its rate has spoken against `slow`
    TimeNs silent = 0;   // observed time without path progress while bytes are outstanding
    TimeNs suspect_since = 0;
    TimeNs asked_others = 0;      // while suspect or overdue: when the others were probed last
    TimeNs path_answered = 0;     // while suspect: the peer answered on another connection
    TimeNs contradicted = 0;      // observed time since another rail was answered
    TimeNs inquire_at = 0;        // while suspect: when to ask on another connection
    TimeNs inquire_interval = 0;  // grows
    TimeNs last_ping = 0;         // when a probe was sent last
    TimeNs answered = 0;          // when the last probe that was answered had been sent
    TimeNs pinged = 0;            // when the probe that is not answered yet was sent; 0: none is
    TimeNs unanswered = 0;  // observed time since then; once overdue, that others are answered
    TimeNs overdue_since = 0;
  };
  // When the next epoch begins.
  struct Reconnect {
    TimeNs at = 0;
    bool connecting = false;  // a connect action is out
    std::uint32_t failures = 0;
    TimeNs probation_since = 0;
    double penalty = 0.0;  // of flapping; halves every flap_half_life_s
    TimeNs penalty_at = 0;
  };
  // What the peer is told about the rail, on other rails.
  struct Notices {
    TimeNs at = 0;  // next repetition of RAIL_DOWN
    TimeNs interval = 0;
    Endpoint address;                    // announced to the peer
    std::uint32_t address_sequence = 0;  // of the last announcement, own or the peer's; 0: none
  };
  struct Rail {
    RailKind kind = RailKind::tcp;
    RailState state = RailState::connecting;
    RailCause cause = RailCause::none;
    Findings findings;  // about the fault that ended the epoch
    Verdict verdict = Verdict::none;
    Epoch epoch = 0;
    Epoch own_fenced = 0;   // our side wrote off every epoch up to this
    Epoch peer_fenced = 0;  // so did the peer
    Path path;
    Health health;
    Reconnect reconnect;
    Notices notices;
    Incoming incoming;
    Control control;
    bool corrupt = false;  // a drill: chunks have wrong checksums
    RailCounters counters;
    [[nodiscard]] bool carries_data() const { return kind != RailKind::control; }
    [[nodiscard]] bool one_sided() const { return kind == RailKind::verbs; }
  };
  struct Replay {
    OutStream* stream;
    std::uint64_t number;
    std::uint16_t chunk;
    RailId target;  // any_rail, or the one rail that is to carry it
    bool hedge;
    RailId from;
  };

  struct LastAck {
    std::uint64_t delivered;
    std::uint64_t credit;
  };
  struct Streams {
    Streams(const StreamShape& shape, std::uint64_t communicator, StreamMemory* memory)
        : out(shape, communicator, memory), in(shape, communicator, memory) {
      out.reverse = &in;
      in.reverse = &out;
    }
    OutStream out;
    InStream in;
  };

  // link.cc: states of rails
  void move(RailId rail, RailState to, RailCause cause, TimeNs now);
  void update_has_no_rail(TimeNs now);
  void maybe_reopen(RailId rail, TimeNs now);
  void schedule_connect(RailId rail, TimeNs now);
  [[nodiscard]] double penalty(const Rail& rail, TimeNs now) const;
  [[nodiscard]] TimeNs backoff(const Rail& rail, TimeNs now);
  void clear_suspicion(RailId rail, TimeNs now);
  void resolve_epoch(RailId rail);
  void step(LinkStep what, RailId rail) {
    if (observer_ != nullptr) observer_->on_step(what, rail);
  }

  // link_choice.cc: which rail small messages take
  void choose_best();
  void follow(RailId rail);
  [[nodiscard]] double small_time(const Rail& rail) const;
  [[nodiscard]] bool near_enough(const Rail& rail, const Rail& lowest) const;
  void measure_rates(TimeNs observed);
  void forget_rate(RailId rail);

  // link_memory.cc: memory that rails reach by themselves
  struct DeferredFree {
    std::uint64_t communicator;
    std::uint64_t written_by;                               // bit r: perhaps by rail r
    std::vector<std::pair<RailId, std::uint64_t>> read_by;  // until so many bytes are acknowledged
    StreamBlock in;
    StreamBlock out;
  };
  void offer_slots(InStream& stream, RailId rail);
  void on_slots(RailId rail, const FrameHeader& header);
  void on_released(RailId rail, std::uint64_t communicator);
  [[nodiscard]] bool on_target(RailId rail, const FrameHeader& header);
  [[nodiscard]] bool target_fields_valid(RailId rail, const FrameHeader& header) const;
  void forget_memory(RailId rail);
  void defer_free(Streams& pair);
  void free_deferred();
  [[nodiscard]] bool can_place(const Rail& rail, const OutStream& stream) const {
    return !rail.one_sided() || rail.path.remote_slots.contains(stream.communicator());
  }

  // link_verdict.cc: where faults are
  void conclude(RailId rail);

  // link_send.cc: frames out
  void queue_stream(OutStream& stream);
  void open_and_queue(OutStream& stream, TimeNs now);
  bool next_control(RailId rail, OutFrame& frame, TimeNs now);
  bool next_replay(RailId rail, OutFrame& frame);
  bool next_chunk(RailId rail, OutFrame& frame);
  void fill_chunk(RailId rail, OutStream& stream, OutMessage& message, std::uint16_t chunk,
                  OutFrame& frame);
  void place(RailId rail, OutMessage& message, std::uint16_t chunk, OutFrame& frame);
  [[nodiscard]] bool better_left(RailId rail, std::uint64_t remaining,
                                 const OutStream& stream) const;
  void reap(Rail& rail);
  void replay_from(RailId rail, bool hedge);

  // link_receive.cc: frames in
  Streams& streams(std::uint64_t communicator);
  [[nodiscard]] bool begin_data(RailId rail, const FrameHeader& header, TimeNs now);
  [[nodiscard]] bool take_acks(OutStream& stream, const FrameHeader& header, TimeNs now);
  void frame_end(RailId rail, TimeNs now);
  void hear(Rail& rail, TimeNs now);
  [[nodiscard]] bool take_payload(Incoming& incoming);
  [[nodiscard]] bool names_an_epoch(const FrameHeader& header) const;
  void on_rail_down(const FrameHeader& header, TimeNs now);
  void on_fenced(RailId rail, Epoch epoch, TimeNs now);
  [[nodiscard]] bool on_address(RailId via, const FrameHeader& header);
  void queue_ack(InStream& stream, RailId rail);
  void queue_ack_everywhere(InStream& stream);
  void repeat_last_ack(RailId rail, std::uint64_t communicator);

  // link_deadlines.cc: time
  void judge_rail(RailId rail, TimeNs observed, TimeNs now);
  void judge_unanswered(RailId rail, TimeNs watched, TimeNs now);
  void suspect(RailId rail, TimeNs now);
  void inquire(RailId rail, TimeNs now);
  void ask_others(RailId rail, TimeNs now);
  [[nodiscard]] bool contradicted(RailId rail) const;
  [[nodiscard]] bool others_answered_since(RailId rail, TimeNs since) const;
  [[nodiscard]] TimeNs ack_deadline(const Rail& rail) const;
  void repeat_notices(TimeNs now);
  void repeat_acks(TimeNs now);
  void probe(RailId rail, std::uint32_t bytes);

  [[nodiscard]] bool may_carry_data(const Rail& rail) const {
    return rail.carries_data() || options_.fallback;
  }
  // Data may go there now.
  [[nodiscard]] bool takes_data(RailId id) const {
    const Rail& rail = rails_[id];
    return id == best_ ? usable(rail) : rail.carries_data() && rail.state == RailState::up;
  }
  [[nodiscard]] bool usable(const Rail& rail) const {
    return rail.state == RailState::up || rail.state == RailState::suspect;
  }
  template <typename Visit>
  void each_usable(Visit visit) {
    for (RailId id = 0; id < rails_.size(); ++id)
      if (usable(rails_[id])) visit(id, rails_[id]);
  }

  const LinkOptions options_;
  std::vector<Rail> rails_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Streams>> streams_;  // by communicator
  // Communicators closed here, by what they acknowledged last: late data is dropped, a lost last
  // ack is repeated.
  std::unordered_map<std::uint64_t, LastAck> closed_;
  std::deque<std::uint64_t> closed_order_;  // oldest first
  std::list<DeferredFree> deferred_frees_;
  InStream* last_in_ = nullptr;      // most frames are for the stream of the frame before
  std::vector<OutStream*> posting_;  // streams with chunks never posted
  std::deque<Replay> replays_;
  std::vector<LinkAction> actions_;
  std::deque<AbortNotice> aborts_;  // frames point into their texts
  std::vector<AbortNotice> received_aborts_;
  std::uint64_t announced_ = 0;  // bit r: the peer has been told another address of rail r
  std::vector<AddressNotice> received_addresses_;
  std::vector<std::byte> scratch_;  // payload that nobody wants; zeros to send in probes are apart
  LinkObserver* observer_ = nullptr;
  RailId best_ = any_rail;
  RailId inbound_ = any_rail;
  std::uint64_t jitter_;
  TimeNs last_tick_ = 0;
  TimeNs no_rail_since_ = 0;
  TimeNs unheard_ = 0;
  bool heard_ = false;  // since the last tick
  bool has_no_rail_ = true;
  std::uint64_t disturbances_ = 0;
  bool close_sent_ = false;
  bool peer_closed_ = false;
  bool lost_bytes_ = false;
};

}  // namespace r2ccl
