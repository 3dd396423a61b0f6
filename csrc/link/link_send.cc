// Frames to send: choice and content of a rail's next frame.
#include <algorithm>
#include <array>
#include <bit>

#include "link/link.hpp"
#include "link/mutants.hpp"
#include "link/posted.hpp"

namespace r2ccl {
namespace {

std::uint64_t credit_of(const InStream& stream) {
  return planted(Mutant::credit_before_consumption) ? stream.delivered() : stream.consumed();
}

// Weight of the expected time of a rail with less than half of the fastest rail's rate.  The
// measured rate is too high behind a traffic shaper with a burst, and doubles for each second
// without a measurement.  Such a rail gets a chunk only if the chunk clearly saves time.
constexpr double slow_rail_weight = 4.0 / 3;

const std::byte* probe_payload() {
  static constexpr std::array<std::byte, max_probe_bytes> zeros{};
  return zeros.data();
}

}  // namespace

void Link::post(OutStream& stream, std::span<const std::byte> data, const CallTag& tag, TimeNs now,
                std::uint8_t copies) {
  if (stream.copies_per_rail(rails_.size()) == 0) copies = 1;
  copies_ = copies_ || copies != 1;
  stream.post(data.data(), data.size(), tag, copies);
  if (!stream.wants_ack() || stream.last_ack_ns == 0) stream.last_ack_ns = now;
  open_and_queue(stream, now);
}

bool Link::consume(InStream& stream, TimeNs now) {
  stream.consume();
  if (stream.owed_since_ns == 0) stream.owed_since_ns = now;
  if (!stream.owes_ack_now()) return false;
  queue_ack(stream, best_);
  return true;
}

void Link::open_and_queue(OutStream& stream, TimeNs now) {
  const bool was_idle = stream.delivered() == stream.next_number();
  const bool opened = stream.open_messages() > 0;
  if (!stream.quarantined())
    stream.quarantined_since_ns = 0;
  else if (opened || stream.quarantined_since_ns == 0)
    stream.quarantined_since_ns = now;
  if (!opened) return;
  if (was_idle) {
    stream.last_ack_ns = now;
    stream.ack_request_after = 0;
  }
  queue_stream(stream);
}

void Link::queue_stream(OutStream& stream) {
  if (stream.queued) return;
  posting_.push_back(&stream);  // may throw: a stream that counts as queued is never queued again
  stream.queued = true;
}

bool Link::has_frames(RailId id) const {
  const Rail& rail = rails_[id];
  if (!connected(id)) return false;
  if (rail.control.any(aborts_.end(), refusals_.end()) || !rail.copies.empty()) return true;
  if (!takes_data(id)) return copies_ && begins_any(id);
  return !posting_.empty() || !replays_.empty();
}

bool Link::next_frame(RailId id, OutFrame& frame, TimeNs now) {
  Rail& rail = rails_[id];
  if (!connected(id)) return false;
  rail.path.attempts.make_room();  // a frame that is counted and not sent would never be acked
  frame = {};
  bool found = rail.control.any(aborts_.end(), refusals_.end()) && next_control(id, frame, now);
  const bool data = takes_data(id);
  if (!found)
    found = (data && !replays_.empty() && next_replay(id, frame)) ||
            (!rail.copies.empty() && next_copy(id, frame)) ||
            ((data || copies_) && !posting_.empty() && next_chunk(id, frame));
  if (!found) return false;

  if (rail.path.acked == rail.path.sent) {
    rail.path.outstanding_since = now;
    rail.health.path_alive();
  }
  const std::uint64_t bytes = sizeof(FrameHeader) + frame.header.payload_bytes;
  rail.path.sent += bytes;
  rail.path.last_tx = now;
  rail.counters.tx_bytes += bytes;
  if (frame.header.type == FrameType::data) {
    rail.counters.data_tx_bytes += bytes;
    rail.counters.last_tx_ns = now;
    rail.path.attempts.push_back(
        {frame.stream, rail.path.sent, frame.header.number, frame.header.slot,
         static_cast<std::uint16_t>(frame.header.offset / options_.shape.chunk_bytes)});
  } else if (frame.header.type == FrameType::put) {
    rail.counters.data_tx_bytes += bytes;
    rail.counters.last_tx_ns = now;
  }
  if (frame.header.type == FrameType::ping) {
    rail.health.last_ping =
        std::max(rail.health.last_ping, static_cast<TimeNs>(frame.header.number));
    if (rail.health.pinged == 0) rail.health.pinged = now;
  }
  seal(frame.header);
  if (observer_ != nullptr) observer_->on_frame_sent(id, frame);
  step(LinkStep::frame_sent, id);
  return true;
}

void Link::frame_written(const FrameHeader& header) {
  // With resilience on, delivery acks settle messages; with resilience off, written frames do.
  if (options_.shape.resilience || header.type != FrameType::data) return;
  const auto found = streams_.find(header.communicator);  // may be closed meanwhile
  if (found == streams_.end()) return;
  OutMessage& message = found->second->out.in_slot(header.slot);
  if (message.number == header.number && message.unwritten > 0) --message.unwritten;
}

bool Link::next_control(RailId id, OutFrame& frame, TimeNs now) {
  Rail& rail = rails_[id];
  Control& control = rail.control;
  FrameHeader& header = frame.header;
  const auto take_rail = [&](std::uint64_t& mask) {
    const int about = std::countr_zero(mask);
    mask &= mask - 1;
    return static_cast<RailId>(about);
  };
  if (control.drills != 0) {  // before the news of the drill's effects
    fill_drill(take_rail(control.drills), header, now);
  } else if (control.drill_acks != 0) {
    const RailId about = take_rail(control.drill_acks);
    header.type = FrameType::drill_ack;
    header.number = about;
    header.epoch = rails_[about].drills.received;
  } else if (control.notices != 0) {
    const RailId about = take_rail(control.notices);
    header.type = FrameType::rail_down;
    header.flags = static_cast<std::uint8_t>(rails_[about].findings.own);
    if (rails_[about].ended_by_drill()) header.flags |= frame_flag::injected;
    header.number = about;
    header.epoch = rails_[about].epoch;
  } else if (control.owed != 0) {
    const RailId about = take_rail(control.owed);
    header.type = FrameType::rail_down;
    header.flags = frame_flag::injected;
    header.number = about;
    header.epoch = rails_[about].notices.owed;
  } else if (control.fenced != 0) {
    const RailId about = take_rail(control.fenced);
    header.type = FrameType::fenced;
    header.number = about;
    header.epoch = rails_[about].own_fenced;
    const RailNotices& notices = rails_[about].notices;
    if (notices.reported_in >= rails_[about].epoch)
      header.flags = static_cast<std::uint8_t>(notices.reported);
  } else if (!control.slots.empty()) {
    InStream* const stream = control.slots.back();
    control.slots.pop_back();
    stream->offered |= std::uint64_t{1} << id;
    header.type = FrameType::slots;
    header.communicator = stream->communicator();
    header.number = reinterpret_cast<std::uintptr_t>(stream->block().base());
  } else if (!control.released.empty()) {
    header.type = FrameType::released;
    header.communicator = control.released.back();
    control.released.pop_back();
  } else if (!control.targets.empty()) {
    InStream* const stream = control.targets.back();
    control.targets.pop_back();
    stream->target.offered |= std::uint64_t{1} << id;
    header.type = FrameType::target;
    header.communicator = stream->communicator();
    header.number = stream->target.first;
    header.delivered = reinterpret_cast<std::uintptr_t>(stream->target.memory);
    header.credit = stream->target.bytes;
  } else if (control.addresses != 0 && usable(rail)) {
    const RailId about = take_rail(control.addresses);
    header.type = FrameType::address;
    header.number = about;
    header.epoch = rails_[about].notices.address_sequence;
    put(rails_[about].notices.address, header);
  } else if (control.aborts_sent < aborts_.end() && usable(rail)) {
    const std::uint64_t number = std::max(control.aborts_sent, aborts_.first());
    control.aborts_sent = number + 1;
    const AbortNotice& notice = aborts_.at(number);
    header.type = FrameType::abort;
    header.communicator = notice.communicator;
    header.epoch = static_cast<std::uint32_t>(notice.code);
    header.payload_bytes = static_cast<std::uint32_t>(notice.text.size());
    frame.payload = reinterpret_cast<const std::byte*>(notice.text.data());
  } else if (control.refusals_sent < refusals_.end() && usable(rail)) {
    const std::uint64_t number = std::max(control.refusals_sent, refusals_.first());
    control.refusals_sent = number + 1;
    const Refusals::Notice& notice = refusals_.at(number);
    header.type = FrameType::abort;
    header.communicator = notice.communicator;
    header.epoch = static_cast<std::uint32_t>(notice.code);
    header.payload_bytes = static_cast<std::uint32_t>(notice.text->size());
    frame.payload = reinterpret_cast<const std::byte*>(notice.text->data());
  } else if (control.pong) {
    control.pong = false;
    header.type = FrameType::pong;
    header.number = control.pong_number;
  } else if (control.ping) {
    control.ping = false;
    header.type = FrameType::ping;
    last_probe_ = std::max(now, last_probe_ + 1);
    header.number = static_cast<std::uint64_t>(last_probe_);  // the pong echoes the send time
    header.payload_bytes = control.ping_bytes;
    frame.payload = probe_payload();
  } else if (!control.acks.empty()) {
    InStream* stream = control.acks.back();
    control.acks.pop_back();
    header.type = FrameType::ack;
    header.communicator = stream->communicator();
    header.number = stream->requested;
    header.delivered = stream->delivered();
    header.credit = credit_of(*stream);
    stream->ack_sent();
  } else if (!control.answers.empty()) {
    header.type = FrameType::ack;
    header.communicator = control.answers.back().communicator;
    header.number = control.answers.back().requested;
    const auto last = closed_.find(header.communicator);
    if (last != closed_.end()) {
      header.delivered = last->second.delivered;
      header.credit = last->second.credit;
    }
    control.answers.pop_back();
  } else if (!control.ack_requests.empty()) {
    const OutStream& stream = *control.ack_requests.back();
    control.ack_requests.pop_back();
    header.type = FrameType::ack_request;
    header.communicator = stream.communicator();
    header.number = static_cast<std::uint64_t>(stream.ack_requested_ns);
    const InStream& awaited = *stream.reverse;
    const auto& wait = awaited.own_wait;
    if (wait && wait->consumed == (wait->for_room ? stream.credit() : awaited.consumed()))
      put(*wait, header);
  } else if (control.posted != 0 && posted_->next_frame(id, frame)) {
    return true;
  } else if (control.close) {
    control.close = false;
    header.type = FrameType::close;
  } else {
    return false;
  }
  return true;
}

bool Link::next_replay(RailId id, OutFrame& frame) {
  for (auto replay = replays_.begin(); replay != replays_.end();) {
    OutStream& stream = *replay->stream;
    if (replay->number < stream.delivered()) {
      replay = replays_.erase(replay);
      continue;
    }
    const bool other = replay->target != any_rail
                           ? replay->target != id
                           : better_left(id, replays_.size() * options_.shape.chunk_bytes, stream);
    if (other || !can_place(rails_[id], stream)) {
      ++replay;
      continue;
    }
    OutMessage& message = stream.message(replay->number);
    if (message.copies != 1 && carried(message)) {  // a copy went out meanwhile
      message.replay_queued = 0;
      replay = replays_.erase(replay);
      continue;
    }
    RailCounters& lost_on = rails_[replay->from].counters;
    ++lost_on.replayed_chunks;
    if (replay->hedge) ++lost_on.hedged_chunks;
    message.replay_queued &= ~(std::uint64_t{1} << replay->chunk);
    fill_chunk(id, stream, message, replay->chunk, frame);
    replays_.erase(replay);
    return true;
  }
  return false;
}

bool Link::next_chunk(RailId id, OutFrame& frame) {
  for (std::size_t i = 0; i < posting_.size(); ++i) {
    OutStream& stream = *posting_[i];
    OutMessage* message = stream.posting();
    if (message == nullptr) {
      stream.queued = false;
      posting_.erase(posting_.begin() + static_cast<std::ptrdiff_t>(i));
      --i;
      continue;
    }
    const std::uint32_t remaining =
        message->bytes - message->next_chunk * options_.shape.chunk_bytes;
    // A small message goes over the best rail only: striping would be slower.
    const bool other = message->copies != 1 ? !begins(id, stream)
                       : message->bytes <= options_.small_message_bytes
                           ? id != best_
                           : !takes_data(id) || better_left(id, remaining, stream);
    if (other || !can_place(rails_[id], stream)) continue;
    fill_chunk(id, stream, *message, message->next_chunk, frame);
    if (message->copies != 1) queue_copies(id, stream, *message);
    stream.advance_posting();
    // Round robin between streams.
    posting_.erase(posting_.begin() + static_cast<std::ptrdiff_t>(i));
    stream.queued = stream.posting() != nullptr;
    if (stream.queued) posting_.push_back(&stream);
    return true;
  }
  return false;
}

// Returns the expected time in ns until the rail has carried `bytes` more, as a choice between
// rails counts it.
double Link::weighed_time(const Rail& rail, std::uint64_t bytes, double fastest) {
  const double measured = rail.health.meter.believed();
  const double rate = std::max(measured, rail.health.meter.at_least());
  const double time = rail.path.time_for(rail.path.sent - rail.path.acked + bytes, rate);
  return measured > 0 && measured < fastest / 2 ? time * slow_rail_weight : time;
}

// Returns true if another rail would finish all `remaining` bytes before this rail finishes a
// chunk.  Rails cannot all defer to each other, because the rail with the lowest weighed time never
// defers.
bool Link::better_left(RailId id, std::uint64_t remaining, const OutStream& stream) const {
  const Rail& rail = rails_[id];
  if (rail.health.meter.believed() <= 0) return false;
  double fastest = 0;
  for (const Rail& each : rails_)
    if (carries_now(each))
      fastest = std::max({fastest, each.health.meter.believed(), each.health.meter.at_least()});
  const std::uint64_t chunk = std::min<std::uint64_t>(options_.shape.chunk_bytes, remaining);
  const double time = weighed_time(rail, chunk, fastest);
  for (RailId other = 0; other < rails_.size(); ++other) {
    const Rail& faster = rails_[other];
    if (other == id || !carries_now(faster)) continue;
    if (!can_place(faster, stream)) continue;
    // A rail with unknown rate counts only while idle: a first chunk measures the rate.
    if (faster.health.meter.at_least() <= 0 && faster.path.sent > faster.path.acked) continue;
    if (weighed_time(faster, remaining, fastest) < time) return true;
  }
  return false;
}

// Fills a data frame.  `copy`: a copy of a message under way on other rails is no replay, unless
// the first attempt went to the target of the receiver.
void Link::fill_chunk(RailId id, OutStream& stream, OutMessage& message, std::uint16_t chunk,
                      OutFrame& frame, bool copy) {
  const std::uint32_t offset = chunk * options_.shape.chunk_bytes;
  const bool again = message.attempts[chunk] > 0;
  const bool replay = again && (!copy || message.target_rail[chunk] != 0);
  FrameHeader& header = frame.header;
  header.type = FrameType::data;
  header.flags = static_cast<std::uint8_t>((replay ? frame_flag::replay : 0) |
                                           (message.ack_now ? frame_flag::ack_now : 0));
  header.slot = message.slot;
  header.offset = offset;
  header.message_bytes = message.bytes;
  header.payload_bytes = std::min(options_.shape.chunk_bytes, message.bytes - offset);
  header.communicator = stream.communicator();
  header.number = message.number;
  header.tag = message.tag;
  if (options_.shape.checksum)
    header.payload_crc =
        crc32c(message.data + offset, header.payload_bytes) ^ (rails_[id].corrupt ? 1U : 0U);
  InStream& reverse = *stream.reverse;
  header.delivered = reverse.delivered();
  header.credit = credit_of(reverse);
  reverse.ack_sent();
  frame.payload = message.data + offset;
  frame.zero_copy = !message.staged;
  if (!again && chunk == 0) frame.ahead = stream.ahead_of(message);
  frame.stream = &stream;
  if (again) header.epoch = message.target_rail[chunk];
  if (rails_[id].one_sided())
    place(id, stream, message, chunk, frame);
  else if (!again)
    message.target_rail[chunk] = 0;
  reap(rails_[id]);
  stream.attempt_posted(message, chunk, id);
}

// Sets the destination of an RDMA write.  A first attempt goes to the target if the message has a
// target; every other attempt goes to the slot.
void Link::place(RailId id, const OutStream& stream, OutMessage& message, std::uint16_t chunk,
                 OutFrame& frame) {
  FrameHeader& header = frame.header;
  const std::uint32_t slot_bytes = stream.shape().slot_bytes;
  const RemoteSlots& slots = rails_[id].path.remote_slots.at(header.communicator);
  const auto offset = offset_in_target(slots.target_first, slots.target_bytes, message.number,
                                       message.bytes, slot_bytes);
  const bool again = message.attempts[chunk] > 0;
  if (offset.has_value() && (!again || planted(Mutant::replay_into_target))) {
    header.flags |= frame_flag::in_target;
    message.target_rail[chunk] = static_cast<std::uint8_t>(id + 1);
    frame.remote_address = slots.target_address + *offset + header.offset;
    frame.remote_key = slots.target_key;
    return;
  }
  if (!again) message.target_rail[chunk] = 0;
  frame.remote_address = slots.address + std::uint64_t{message.slot} * slot_bytes + header.offset;
  frame.remote_key = slots.key;
}

// Resolves attempts, oldest first.  An attempt is resolved after its path ack (verbs rails: after
// attempts_landed()).  An attempt is also resolved if its message is delivered and the chunk had no
// other attempt, since the chunk then arrived by this attempt.
void Link::reap(Rail& rail) {
  const auto id = static_cast<RailId>(&rail - rails_.data());
  const std::uint64_t resolved = rail.one_sided() && !planted(Mutant::acknowledged_is_landed)
                                     ? rail.path.landed
                                     : rail.path.acked;
  while (!rail.path.attempts.empty()) {
    const Attempt& attempt = rail.path.attempts.front();
    OutMessage& message = attempt.stream->in_slot(attempt.slot);
    const bool arrived =
        attempt.number < attempt.stream->delivered() && message.attempts[attempt.chunk] == 1;
    if (attempt.position > resolved && !arrived) return;
    attempt.stream->attempt_resolved(message, id, rail.path.acked_at);
    rail.path.attempts.pop_front();
  }
}

void Link::replay_from(RailId id, bool hedge) {
  std::vector<RailId> others;
  for (RailId other = 0; other < rails_.size(); ++other)
    if (other != id && carries_now(rails_[other])) others.push_back(other);
  const bool fallback =
      others.empty() && best_ != any_rail && best_ != id && rails_[best_].state == RailState::up;
  if ((hedge || planted(Mutant::replay_needs_another_rail)) && others.empty() && !fallback) return;
  std::uint32_t chunks = 0;
  for (auto& [communicator, pair] : streams_) {
    OutStream& stream = pair->out;
    const std::uint64_t late = planted(Mutant::replay_starts_late) ? 1 : 0;
    for (std::uint64_t number = stream.delivered() + late; number < stream.next_number();
         ++number) {
      OutMessage& message = stream.message(number);
      if (planted(Mutant::path_ack_is_delivery) && message.unresolved == 0) continue;
      for (std::uint16_t chunk = 0; chunk < message.next_chunk; ++chunk) {
        const std::uint64_t bit = std::uint64_t{1} << chunk;
        const bool lost =
            message.copies != 1 ? loses_copy(id, message, hedge) : message.last_rail[chunk] == id;
        if (!lost || (message.replay_queued & bit) != 0) continue;
        message.replay_queued |= bit;
        ++chunks;
        if (hedge && !fallback && message.bytes <= options_.small_message_bytes) {
          for (const RailId other : others)
            replays_.push_back({&stream, number, chunk, other, hedge, id});
        } else {
          replays_.push_back({&stream, number, chunk, any_rail, hedge, id});
        }
      }
    }
  }
  if (chunks == 0) return;
  if (hedge && rails_[id].health.withheld) rails_[id].counters.withheld_chunks += chunks;
  if (observer_ != nullptr) observer_->on_replay(id, chunks, hedge);
  step(hedge ? LinkStep::hedge_queued : LinkStep::replay_queued, id);
}

}  // namespace r2ccl
