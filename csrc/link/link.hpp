// The link: all rails between two processes and the failover state machine.  The state machine is
// sans-IO: no sockets, no clock calls, no threads.  Not thread-safe.  Rails report arrivals, path
// acknowledgements and faults, and pull frames to send.  The owner passes the time in and takes
// actions from a queue.
//
// docs/failover.md describes the protocol.  The main rules:
// - Path ack, delivery ack and credit are separate signals; none implies another.
// - A rail going DOWN triggers a replay of all its undelivered chunks at once.
// - A slot is reused only with credit and after every attempt of its last message is resolved.
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
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "base/units.hpp"
#include "link/aborts.hpp"
#include "link/control.hpp"
#include "link/drill.hpp"
#include "link/frame.hpp"
#include "link/in_stream.hpp"
#include "link/link_types.hpp"
#include "link/mutants.hpp"
#include "link/out_stream.hpp"
#include "link/rail_parts.hpp"
#include "link/rail_state.hpp"
#include "link/refusals.hpp"
#include "link/ring.hpp"
#include "link/shape.hpp"
#include "link/verdict.hpp"

namespace r2ccl {

class Posted;

class Link {
 public:
  Link(const LinkOptions& options, std::span<const RailKind> rails, std::uint64_t jitter_seed);
  ~Link();

  // ---- streams ----
  // Return a stream of a communicator, valid until close_streams().  The first call creates both
  // streams.
  OutStream& out_stream(std::uint64_t communicator);
  InStream& in_stream(std::uint64_t communicator);
  // Drops both streams and their undelivered messages.  Memory that a verbs rail may still access
  // is freed later.  Requires that rails have released all memory of callers.
  void close_streams(std::uint64_t communicator);
  // Returns true if the communicator was closed here, unless thousands were closed since.
  [[nodiscard]] bool has_closed(std::uint64_t communicator) const {
    return closed_.contains(communicator);
  }
  // Sets `memory` as the target of the stream's next messages, after `skip` messages.  The caller
  // keeps the memory valid until reclaim_target() returns true, and accesses a part only after the
  // message for this part is received.  Memory of at most small_message_bytes is ignored.  Returns
  // true if the memory is registered: verbs rails then announce the target to the peer.
  bool offer_target(InStream& stream, std::uint64_t skip, std::span<std::byte> memory);
  // Returns true if no rail can write the stream's target any more.  Otherwise takes down the rails
  // with pending writes; call again until true, for the fences to complete.  `received`: all
  // messages of the target have arrived; a late write on an UP rail then gets ack_deadline_floor to
  // land.
  [[nodiscard]] bool reclaim_target(InStream& stream, bool received, TimeNs now);
  // Withdraws the memory registration of the target and forgets the target.  The last resort if a
  // fence does not complete.
  void revoke_target(InStream& stream);
  // Returns false if verbs rails exist but cannot access the slots of the communicator's streams,
  // because allocation or registration failed.  Requires existing streams.
  [[nodiscard]] bool streams_reachable(std::uint64_t communicator) const {
    return options_.memory == nullptr || streams_.at(communicator)->in.block().base() != nullptr;
  }
  // Queues a message for sending.  `data` must stay valid until settled_position() passes its end.
  // Data sent without a copy must stay valid until all rails have detached, too; see
  // Rail::detach().  `copies`: rails to send the message to at once, perhaps control rails, too;
  // every_rail: all.  The first copy to arrive counts.  A message of several chunks is not copied.
  void post(OutStream& stream, std::span<const std::byte> data, const CallTag& tag, TimeNs now,
            std::uint8_t copies = 1);
  // Marks the front message as read and returns its slot to the sender.  Returns true if the credit
  // must be sent immediately.
  bool consume(InStream& stream, TimeNs now);
  // send_abort() queues an `abort` frame on every rail, and on each rail connected later.
  // send_close() queues a `close` frame on every usable rail.
  void send_abort(const AbortNotice& notice);
  void send_close();
  // Tells the peer of a wait for `stream`, in an ack request on every usable rail.
  void tell_wait(InStream& stream, const StreamWait& wait);
  // Announces a new listen address of a rail; used by the accepting end only.  Every rail carries
  // the announcement, and so does each rail opened later.  The highest sequence number counts.
  void announce_address(RailId rail, const Endpoint& at);

  [[nodiscard]] Posted& posted() { return *posted_; }  // requires LinkOptions::posted

  // ---- events of rails ----
  void start(TimeNs now);  // requests the first connections
  // Starts a new epoch, on probation, after a successful handshake.  Returns false if the epoch
  // must not start: the old epoch is not fenced by both sides, or the new epoch is fenced already.
  [[nodiscard]] bool rail_established(RailId rail, Epoch epoch, TimeNs now);
  // Ends an epoch and takes the rail down: the transport failed, or the owner detected a fault.  No
  // effect if the epoch has ended already.
  void rail_failed(RailId rail, Epoch epoch, RailCause cause, TimeNs now);
  // Returns true if the fault that ended the rail's last epoch is not localised yet.
  [[nodiscard]] bool wants_location(RailId rail) const;
  // Stores this side's findings about the fault.  RAIL_DOWN tells the peer the state of our port.
  void located(RailId rail, Epoch epoch, const Findings& findings);
  // Records the local fence: no frame of the ended epoch can leave or arrive on our side any more.
  void rail_closed(RailId rail, Epoch epoch, TimeNs now);
  // Returns the epoch to offer to a connector with all epochs up to `connector_fenced` fenced.
  // Empty if the connector has not fenced our current epoch, or our own fence is pending.
  [[nodiscard]] std::optional<Epoch> epoch_to_offer(RailId rail, Epoch connector_fenced) const;
  // Records a fence of the peer, reported in a handshake.
  void peer_fenced(RailId rail, Epoch epoch, TimeNs now);
  // Counts an epoch as fenced: our side answered its handshake but never saw the confirmation.
  void never_opened(RailId rail, Epoch epoch);
  // Schedules the next connection attempt after a failed attempt.
  void connect_failed(RailId rail, TimeNs now);
  // Limit for a handshake or probation.  The limit starts at `first` and doubles, up to 16 times
  // `first`, with each handshake or probation in a row that did not end in time: ranks that start
  // on few cores are late, not dead.  handshake_late() reports such a handshake.
  [[nodiscard]] TimeNs patience(RailId rail, TimeNs first) const;
  void handshake_late(RailId rail);
  // The peer's process refused a connection and reported its last fenced epoch.  The refusal proves
  // a working path to the process, even if the open epoch is silent.
  void connect_refused(RailId rail, Epoch peer_fenced, TimeNs now);
  // Hints that a reconnection would succeed now, for example after the carrier came back.
  void connect_soon(RailId rail, TimeNs now);
  // The peer's address changed: replaces the pending connection attempt by a new attempt at time
  // `at`.
  void connect_anew(RailId rail, TimeNs at);
  // The path has acknowledged the epoch's first `position` bytes.  `peer_limited`: no byte moves
  // because the peer does not read; such silence does not count against the rail.
  void path_acked(RailId rail, Epoch epoch, std::uint64_t position, bool peer_limited, TimeNs now);
  // The peer's process has seen the epoch's first `position` bytes in its memory.  A path ack of a
  // verbs rail is weaker: acknowledged RDMA writes may still be on the way to memory.
  void attempts_landed(RailId rail, Epoch epoch, std::uint64_t position, TimeNs now);
  // The path has carried some bytes, perhaps behind a gap.  The rail is not silent.
  void path_advanced(RailId rail, Epoch epoch, TimeNs now);
  // Reports round-trip times.  Deadlines scale with `smoothed`; small messages prefer a rail with a
  // low `base`, the recent minimum.  `held_back`: bytes outstanding only because acks are delayed.
  void path_round_trip(RailId rail, TimeNs smoothed, TimeNs base, std::uint64_t held_back);

  // ---- frames out ----
  // Fills in the next frame for the rail.  Returns false if no frame is ready for this rail.
  bool next_frame(RailId rail, OutFrame& frame, TimeNs now);
  // Reports a frame handed to the transport in full.  The rail reads its payload no more.
  void frame_written(const FrameHeader& header);
  [[nodiscard]] bool has_frames(RailId rail) const;

  // ---- frames in ----
  // Starts a received frame.  Returns false on a protocol violation, after taking the rail down,
  // and on a rail that is not connected.
  [[nodiscard]] bool frame_begin(RailId rail, const FrameHeader& header, TimeNs now);
  // Predicts memory for the next frame: room for its header, then room for its payload.  If the
  // guess is right, payload_room() later returns the second part.  A wrong guess is harmless.
  // Empty: no prediction.
  [[nodiscard]] std::span<std::byte> likely_room() const;
  // Returns the destination of the frame's next payload bytes, at least 1 byte of room.  Call
  // before every read, since another rail may complete the same chunk in between.
  [[nodiscard]] std::span<std::byte> payload_room(RailId rail);
  // Reports bytes stored in payload_room().  The last byte of a frame triggers its processing.
  void payload_filled(RailId rail, std::size_t bytes, TimeNs now);

  // Returns true if a probe or an ack request arrived since the last call.  The owner then reads
  // and acknowledges all rails before the answer leaves.
  [[nodiscard]] bool take_probed() { return std::exchange(probed_, false); }

  // Reports a payload already placed in its slot or target by an RDMA write.
  void payload_placed(RailId rail, TimeNs now);

  // ---- time ----
  // Checks all deadlines.  Call after draining arrivals, at least every few milliseconds while
  // frames are outstanding.
  void tick(TimeNs now);

  // ---- queries of the owner ----
  // Queues for the owner, which takes and clears the entries.
  [[nodiscard]] std::vector<LinkAction>& actions() { return actions_; }
  [[nodiscard]] std::vector<AbortNotice>& received_aborts() { return received_aborts_; }
  // Addresses announced by the peer; at most the newest per rail.
  [[nodiscard]] std::vector<AddressNotice>& received_addresses() { return received_addresses_; }
  // Returns true if resilience is off and a data rail was lost: bytes may be missing.
  [[nodiscard]] bool lost_bytes() const { return lost_bytes_; }
  [[nodiscard]] bool peer_closed() const { return peer_closed_; }
  // The peer's process has ended, as the owner has found out.  A new epoch disproves the death.
  void set_peer_gone() { peer_gone_ = true; }
  [[nodiscard]] bool peer_gone() const { return peer_gone_; }
  [[nodiscard]] std::size_t rail_count() const { return rails_.size(); }
  [[nodiscard]] RailKind kind(RailId rail) const { return rails_[rail].kind; }
  [[nodiscard]] RailState state(RailId rail) const { return rails_[rail].state; }
  [[nodiscard]] RailCause cause(RailId rail) const { return rails_[rail].cause; }
  [[nodiscard]] Verdict verdict(RailId rail) const { return rails_[rail].verdict; }
  // Returns the verdict of a link without rails: a NIC if all data rails agree, else peer.
  [[nodiscard]] Verdict overall_verdict() const;
  [[nodiscard]] TimeNs last_heard(RailId rail) const { return rails_[rail].path.last_rx; }
  [[nodiscard]] Epoch epoch(RailId rail) const { return rails_[rail].epoch; }
  [[nodiscard]] Epoch fenced_epoch(RailId rail) const { return rails_[rail].own_fenced; }
  [[nodiscard]] const RailCounters& counters(RailId rail) const { return rails_[rail].counters; }
  [[nodiscard]] TimeNs round_trip(RailId rail) const { return rails_[rail].path.round_trip; }
  // Returns the bandwidth of the rail in bytes/s, measured the last time the rail was the
  // bottleneck.  0: never measured in this epoch.
  [[nodiscard]] double rate(RailId rail) const { return rails_[rail].health.meter.measured(); }
  [[nodiscard]] bool slow(RailId rail) const { return rails_[rail].health.slow; }
  // Returns the rail for small messages; any_rail if no rail is usable.
  [[nodiscard]] RailId best_rail() const { return best_; }
  // Returns the rail of the last received data: the peer's best rail, perhaps not ours.  any_rail:
  // no data yet.
  [[nodiscard]] RailId inbound_rail() const { return inbound_; }
  // Return true if bytes of the last epoch have no path ack; awaits_path_ack(): of an open epoch.
  [[nodiscard]] bool has_unacked_bytes(RailId rail) const;
  [[nodiscard]] bool awaits_path_ack(RailId rail) const;
  [[nodiscard]] bool connected(RailId rail) const {
    return rails_[rail].state == RailState::probation || usable(rails_[rail]);
  }
  [[nodiscard]] bool may_carry_data(RailId rail) const { return may_carry_data(rails_[rail]); }
  [[nodiscard]] bool has_data_rail() const;  // a data rail is UP, perhaps a reserve
  // Tier of the rails that carry data now; none: no rail is UP.
  [[nodiscard]] RailTier tier() const { return tier_; }
  [[nodiscard]] RailTier tier(RailId rail) const { return rails_[rail].place.tier; }
  [[nodiscard]] bool reserve(RailId rail) const { return rails_[rail].place.reserve; }
  [[nodiscard]] std::uint8_t unit(RailId rail) const { return rails_[rail].place.unit; }
  // Returns true once the rail has been UP; a rail not UP is lost then, and was never up otherwise.
  [[nodiscard]] bool been_up(RailId rail) const { return rails_[rail].reconnect.been_up; }
  // Returns true if a data rail is suspected, or DOWN and not yet fenced on this side.
  [[nodiscard]] bool is_losing_a_rail() const;
  // has_no_rail(): no rail allowed to carry data is UP.  no_rail_since(): start time of this state.
  [[nodiscard]] bool has_no_rail() const { return has_no_rail_; }
  [[nodiscard]] TimeNs no_rail_since() const { return no_rail_since_; }
  // Returns the observed time without any frame from the peer's process.  A running process answers
  // probes.  A silent process is therefore stopped, or disagrees about the states of the rails.
  [[nodiscard]] TimeNs unheard() const { return unheard_; }
  // Returns true if the peer has confirmed every posted message and this side owes no ack.
  [[nodiscard]] bool all_delivered() const;
  [[nodiscard]] QueueDepths queue_depths() const;
  // Returns the number of rail events so far: a data rail left UP, or a replay completed a message.
  // Each event may stall a waiting collective.
  [[nodiscard]] std::uint64_t disturbances() const { return disturbances_; }
  void set_observer(LinkObserver* observer) { observer_ = observer; }
  // Drill: sends wrong chunk checksums on this rail.  No effect where checksums are off.
  void corrupt(RailId rail, bool on) { rails_[rail].corrupt = on; }
  // A test or drill has injected a fault into our end of the rail.  RAIL_DOWN tells the peer.
  void set_injected(RailId rail, bool on) { rails_[rail].injected = on; }
  // A drill of `kind`, the owner's number, begins or ends at our end.  The peer is told.
  void begin_drill(RailId rail, std::uint8_t kind, TimeNs duration, TimeNs now);
  void end_drill(RailId rail, TimeNs now);
  // Returns true once the peer has confirmed the last begin or end, or has ended.
  [[nodiscard]] bool drill_known(RailId rail) const;
  // Returns the kind of the drill by either end that explains events of the rail; no_drill: none.
  [[nodiscard]] std::uint8_t drill(RailId rail, TimeNs now) const;
  [[nodiscard]] bool in_drill(RailId rail, TimeNs now) const;

 private:
  friend class Posted;
  struct Rail {
    RailKind kind = RailKind::tcp;
    RailState state = RailState::connecting;
    RailCause cause = RailCause::none;
    Findings findings;  // about the fault of the last epoch
    Verdict verdict = Verdict::none;
    Epoch epoch = 0;
    Epoch own_fenced = 0;   // our side has fenced all epochs up to here
    Epoch peer_fenced = 0;  // the peer has fenced all epochs up to here
    RailPath path;
    RailPlace place;
    RailHealth health;
    RailReconnect reconnect;
    RailNotices notices;
    RailDrills drills;
    Incoming incoming;
    Control control;
    std::deque<Copy> copies;
    bool corrupt = false;   // drill: send wrong checksums
    bool injected = false;  // a fault is injected into our end
    RailCounters counters;
    [[nodiscard]] bool carries_data() const { return kind != RailKind::control; }
    [[nodiscard]] bool ended_by_drill() const { return injected || cause == RailCause::injected; }
    [[nodiscard]] bool one_sided() const { return kind == RailKind::verbs; }
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

  // link_choice.cc: order of use, and the choice of the rail for small messages
  [[nodiscard]] RailTier tier_of(RailId rail, TimeNs now) const;
  bool update_tiers(TimeNs now);
  void endanger_unit(RailId rail, TimeNs now);
  void end_danger(TimeNs now);
  void choose_tier(RailId lowest);
  void choose_best();
  [[nodiscard]] RailId nearest(RailState wanted, RailId lowest) const;
  void follow(RailId rail);
  [[nodiscard]] double small_time(const Rail& rail) const;
  [[nodiscard]] bool near_enough(const Rail& rail, const Rail& lowest) const;
  void measure_rates(TimeNs observed);
  void forget_rate(RailId rail);

  // link_memory.cc: memory accessed by verbs rails
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

  // link_verdict.cc: location of faults
  void conclude(RailId rail);
  void port_broken(RailId rail);

  // link_drills.cc: drills of both ends
  void announce_drill(RailId rail, TimeNs now);
  void repeat_drills(TimeNs now);
  void fill_drill(RailId about, FrameHeader& header, TimeNs now) const;
  [[nodiscard]] bool on_drill(RailId via, const FrameHeader& header, TimeNs now);

  // link_send.cc: frames out
  void queue_stream(OutStream& stream);
  void open_and_queue(OutStream& stream, TimeNs now);
  bool next_control(RailId rail, OutFrame& frame, TimeNs now);
  bool next_replay(RailId rail, OutFrame& frame);
  bool next_chunk(RailId rail, OutFrame& frame);
  void fill_chunk(RailId rail, OutStream& stream, OutMessage& message, std::uint16_t chunk,
                  OutFrame& frame, bool copy = false);
  void place(RailId rail, const OutStream& stream, OutMessage& message, std::uint16_t chunk,
             OutFrame& frame);
  static double weighed_time(const Rail& rail, std::uint64_t bytes, double fastest);
  [[nodiscard]] bool better_left(RailId rail, std::uint64_t remaining,
                                 const OutStream& stream) const;
  void reap(Rail& rail);
  void replay_from(RailId rail, bool hedge);

  // link_copies.cc: messages sent to several rails at once
  [[nodiscard]] bool takes_copies(const Rail& rail) const;
  [[nodiscard]] bool rests(const Rail& rail) const;
  [[nodiscard]] bool begins(RailId rail, const OutStream& stream) const;
  [[nodiscard]] bool begins_any(RailId rail) const;
  void queue_copies(RailId rail, OutStream& stream, const OutMessage& message);
  bool next_copy(RailId rail, OutFrame& frame);
  [[nodiscard]] bool carried(const OutMessage& message, RailId except = any_rail) const;
  [[nodiscard]] bool loses_copy(RailId rail, OutMessage& message, bool hedge) const;

  // link_receive.cc: frames in
  Streams& streams(std::uint64_t communicator);
  [[nodiscard]] bool begin_data(RailId rail, const FrameHeader& header, TimeNs now);
  [[nodiscard]] bool take_acks(OutStream& stream, const FrameHeader& header, TimeNs now);
  [[nodiscard]] bool on_ack(OutStream& stream, const FrameHeader& header, TimeNs now);
  void frame_end(RailId rail, TimeNs now);
  void hear(Rail& rail, TimeNs now);
  [[nodiscard]] bool take_payload(Incoming& incoming);
  [[nodiscard]] bool names_an_epoch(const FrameHeader& header) const;
  void on_rail_down(const FrameHeader& header, TimeNs now);
  void on_fenced(RailId rail, Epoch epoch, TimeNs now);
  void on_fenced_frame(const FrameHeader& header, TimeNs now);
  [[nodiscard]] bool on_address(RailId via, const FrameHeader& header);
  void queue_ack(InStream& stream, RailId rail);
  void queue_ack_on(InStream& stream, RailId rail);
  void queue_ack_everywhere(InStream& stream);
  void on_ack_request(RailId rail, const FrameHeader& request);

  // link_deadlines.cc: time
  void judge_rail(RailId rail, TimeNs observed, TimeNs now);
  void judge_unanswered(RailId rail, TimeNs watched, TimeNs now);
  void doubt(RailId rail, TimeNs watched, TimeNs now);
  void accuse(RailId rail, TimeNs asked, TimeNs now);
  void judge_accused(RailId rail, TimeNs watched, TimeNs now);
  void suspect(RailId rail, TimeNs now);
  void inquire(RailId rail, TimeNs now);
  void ask_others(RailId rail, TimeNs now);
  [[nodiscard]] bool contradicted(RailId rail, TimeNs since) const;
  [[nodiscard]] bool others_answered_since(RailId rail, TimeNs since) const;
  [[nodiscard]] bool others_advanced_since(RailId rail, TimeNs since) const;
  [[nodiscard]] TimeNs ack_deadline(const Rail& rail) const;
  void repeat_notices(TimeNs now);
  void tell_port(RailId rail);
  void drop_notices(RailId rail);
  void repeat_acks(TimeNs now);
  void probe(RailId rail, std::uint32_t bytes);

  [[nodiscard]] bool may_carry_data(const Rail& rail) const {
    return rail.carries_data() || options_.fallback;
  }
  // Returns true if the rail may carry data now.
  [[nodiscard]] bool takes_data(RailId id) const {
    const Rail& rail = rails_[id];
    return id == best_ ? usable(rail) : carries_now(rail);
  }
  // Returns true if the rail is UP and no rail of a lower tier is.
  [[nodiscard]] bool carries_now(const Rail& rail) const {
    const bool its_turn = rail.place.tier == tier_ || planted(Mutant::reserve_shares_traffic);
    return its_turn && rail.carries_data() && rail.state == RailState::up;
  }
  [[nodiscard]] bool usable(const Rail& rail) const {
    return rail.state == RailState::up || rail.state == RailState::suspect;
  }
  template <typename Visit>
  void each_usable(Visit visit) {
    for (RailId id = 0; id < rails_.size(); ++id)
      if (usable(rails_[id])) visit(id, rails_[id]);
  }

  // Communicators made here, and as many that only the peer has made so far.
  [[nodiscard]] std::size_t most_streams() const { return 2 * options_.most_communicators; }
  void refuse(std::uint64_t communicator, ErrorCode code, const std::string& why);
  bool admit(RailId id, const FrameHeader& header, TimeNs now);

  const LinkOptions options_;
  std::vector<Rail> rails_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Streams>> streams_;  // by communicator
  // Last acknowledgement of each communicator closed here.  Late data is dropped; a lost last ack
  // is repeated.
  std::unordered_map<std::uint64_t, LastAck> closed_;
  std::deque<std::uint64_t> closed_order_;  // oldest first
  Refusals refusals_;                       // see refuse()
  std::list<DeferredFree> deferred_frees_;
  InStream* last_in_ = nullptr;      // stream of the last data frame; a cache
  std::vector<OutStream*> posting_;  // streams with unposted chunks
  std::deque<Replay> replays_;
  std::vector<LinkAction> actions_;
  Aborts aborts_;
  std::vector<AbortNotice> received_aborts_;
  std::uint64_t announced_ = 0;  // bit r: a new address of rail r was announced
  std::vector<AddressNotice> received_addresses_;
  std::vector<std::byte> scratch_;  // destination of discarded payload
  LinkObserver* observer_ = nullptr;
  RailId best_ = any_rail;
  RailId followed_ = any_rail;  // last rail adopted from the peer; see follow()
  RailTier tier_ = RailTier::none;
  RailId inbound_ = any_rail;
  std::unique_ptr<Posted> posted_;  // null: no posted receives
  std::uint64_t jitter_;
  TimeNs refused_attempt_ = 0;  // start of the last connection attempt that the peer refused
  TimeNs last_tick_ = 0;
  TimeNs last_probe_ = 0;  // all probes sent from now on have a later time
  TimeNs no_rail_since_ = 0;
  TimeNs unheard_ = 0;
  bool copies_ = false;  // a message was posted with copies
  bool probed_ = false;  // a probe or an ack request arrived; see take_probed()
  bool heard_ = false;   // a frame or refusal arrived since the last tick
  bool has_no_rail_ = true;
  std::uint64_t disturbances_ = 0;
  bool close_sent_ = false;
  bool peer_closed_ = false;
  bool peer_gone_ = false;
  bool lost_bytes_ = false;
};

}  // namespace r2ccl
