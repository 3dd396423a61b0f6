// Received frames.  Every field is validated before use.
#include <algorithm>
#include <new>
#include <string>

#include "link/device_memory.hpp"
#include "link/link.hpp"
#include "link/mutants.hpp"
#include "link/posted.hpp"

namespace r2ccl {
namespace {

constexpr Epoch max_epochs_ahead = 1U << 20;  // limit on epochs named by the peer

bool type_and_size_valid(const FrameHeader& header, const LinkOptions& options) {
  switch (header.type) {
    case FrameType::data: return header.payload_bytes <= options.shape.chunk_bytes;
    case FrameType::ping: return header.payload_bytes <= max_probe_bytes;
    case FrameType::abort: return header.payload_bytes <= max_abort_bytes;
    case FrameType::ack:
    case FrameType::ack_request:
    case FrameType::pong:
    case FrameType::rail_down:
    case FrameType::fenced:
    case FrameType::close:
    case FrameType::address:
    case FrameType::slots:
    case FrameType::released:
    case FrameType::target:
    case FrameType::drill:
    case FrameType::drill_ack: return header.payload_bytes == 0;
    case FrameType::room:
    case FrameType::need:
    case FrameType::memory: return options.posted && header.payload_bytes == 0;
    case FrameType::put: return options.posted && header.payload_bytes <= max_put_bytes;
  }
  return false;
}

// Returns the code of a peer's error; internal for a number that no error has.
ErrorCode error_code_of(Epoch number) {
  const bool known = number > static_cast<Epoch>(ErrorCode::ok) &&
                     number <= static_cast<Epoch>(ErrorCode::internal);
  return known ? static_cast<ErrorCode>(number) : ErrorCode::internal;
}

}  // namespace

bool Link::frame_begin(RailId id, const FrameHeader& header, TimeNs now) {
  Rail& rail = rails_[id];
  if (!connected(id)) return false;
  const bool about_memory = header.type == FrameType::slots || header.type == FrameType::released ||
                            header.type == FrameType::target;
  bool valid = intact(header) && type_and_size_valid(header, options_) &&
               (!about_memory || rail.one_sided());
  if (valid) {
    rail.incoming.header = header;
    rail.incoming.stream = nullptr;
    rail.incoming.received = 0;
    rail.incoming.placed = false;
    rail.incoming.apart = false;
    hear(rail, now);
    if (header.type == FrameType::data) {
      valid = begin_data(id, header, now);
    } else if (header.type >= FrameType::room) {
      valid = posted_->valid(id, header);
      rail.incoming.wanted = valid && header.type == FrameType::put && posted_->permits(id, header);
    }
  }
  if (!valid) {
    rail_failed(id, rail.epoch, RailCause::protocol, now);
    return false;
  }
  if (header.payload_bytes == 0) frame_end(id, now);
  return true;
}

bool Link::begin_data(RailId id, const FrameHeader& header, TimeNs now) {
  if (!may_carry_data(rails_[id]) || !target_fields_valid(id, header)) return false;
  if (header.communicator != streams_communicator) {  // its copies arrive on every rail
    inbound_ = id;
    if (header.payload_bytes == header.message_bytes) follow(id);  // a message in a single chunk
  }
  try {
    return admit(id, header, now);
  } catch (const std::bad_alloc&) {
    refuse(header.communicator, ErrorCode::internal, "out of memory for a received message");
    return true;  // the payload is discarded
  }
}

bool Link::admit(RailId id, const FrameHeader& header, TimeNs now) {
  InStream* stream = last_in_;
  if (stream == nullptr || stream->communicator() != header.communicator) {
    if (closed_.contains(header.communicator)) return true;  // late data: discard
    if (streams_.size() >= most_streams() && !streams_.contains(header.communicator)) {
      refuse(header.communicator, ErrorCode::aborted,
             "the peer has room for " + std::to_string(most_streams()) +
                 " communicators that it has made or received messages of, the limit; close some");
      return true;
    }
    stream = &streams(header.communicator).in;
    last_in_ = stream;
  }
  if (!take_acks(*stream->reverse, header, now)) return false;
  if ((header.flags & frame_flag::in_target) != 0 && !stream->put_into_target(id, header))
    return false;
  switch (stream->judge(header)) {
    case InStream::Admission::accept:
      (void)stream->chunk_memory(header);  // allocates the slot, or throws
      rails_[id].incoming.stream = stream;
      return true;
    case InStream::Admission::discard: return true;
    case InStream::Admission::reject: return false;
  }
  return false;
}

// Drops the messages of a communicator without room here, and ends the communicator with an error
// at both ends.  The rail is not to blame.
void Link::refuse(std::uint64_t communicator, ErrorCode code, const std::string& why) {
  if (refusals_.add(communicator, code, why)) received_aborts_.push_back({communicator, code, why});
}

bool Link::take_acks(OutStream& stream, const FrameHeader& header, TimeNs now) {
  if (!stream.acknowledge(header.delivered, header.credit, now)) return false;
  for (Rail& rail : rails_) reap(rail);
  if (!planted(Mutant::lost_wake_up)) open_and_queue(stream, now);
  return true;
}

// Takes an ack, perhaps the answer to a request.  The peer has read its rails before an answer.  An
// attempt acknowledged before the request must therefore have arrived.  If the first undelivered
// message had only such attempts, a hop acknowledged bytes that it withholds.  Later messages prove
// nothing, since `delivered` does not count them.
bool Link::on_ack(OutStream& stream, const FrameHeader& header, TimeNs now) {
  if (header.number > static_cast<std::uint64_t>(stream.ack_requested_ns)) return false;
  if (!take_acks(stream, header, now)) return false;
  const auto asked = static_cast<TimeNs>(header.number);
  if (asked == 0 || stream.delivered() == stream.next_number()) return true;
  const OutMessage& message = stream.message(stream.delivered());
  const bool acknowledged = message.unresolved == 0 && message.next_chunk == message.chunks;
  if (!acknowledged || message.replay_queued != 0 || message.resolved_at >= asked) return true;
  for (std::uint16_t chunk = 0; chunk < message.chunks; ++chunk)
    accuse(message.last_rail[chunk], asked, now);
  for (RailId id = 0; id < rails_.size(); ++id)
    if ((message.carriers >> id & 1U) != 0) accuse(id, asked, now);
  return true;
}

std::span<std::byte> Link::likely_room() const {
  const bool apart = last_in_ == nullptr || options_.shape.checksum;
  return apart ? std::span<std::byte>() : last_in_->likely_room();
}

std::span<std::byte> Link::payload_room(RailId id) {
  Incoming& incoming = rails_[id].incoming;
  const std::size_t left = incoming.header.payload_bytes - incoming.received;
  if (incoming.stream != nullptr) {
    // Buffer the payload until its checksum is verified, because another rail may fill the same
    // chunk.  Payload for device memory is buffered, too, because the CPU cannot write there.
    std::byte* const memory = incoming.stream->chunk_memory(incoming.header);
    if (options_.shape.checksum || is_device_memory(memory)) {
      if (!incoming.chunk)
        incoming.chunk = std::make_unique_for_overwrite<std::byte[]>(options_.shape.chunk_bytes);
      incoming.apart = true;
      return {incoming.chunk.get() + incoming.received, left};
    }
    if (memory != nullptr) return {memory + incoming.received, left};
  } else if (incoming.header.type == FrameType::abort) {
    if (!incoming.text) incoming.text = std::make_unique<std::byte[]>(max_abort_bytes);
    return {incoming.text.get() + incoming.received, left};
  } else if (incoming.header.type == FrameType::put && incoming.wanted) {
    if (std::byte* const memory = posted_->destination(id, incoming.header); memory != nullptr)
      return {memory + incoming.received, left};
  }
  return std::span(scratch_).first(std::min(left, scratch_.size()));
}

void Link::payload_placed(RailId id, TimeNs now) {
  rails_[id].incoming.placed = true;
  payload_filled(id, rails_[id].incoming.header.payload_bytes, now);
}

void Link::payload_filled(RailId id, std::size_t bytes, TimeNs now) {
  Rail& rail = rails_[id];
  rail.incoming.received += static_cast<std::uint32_t>(bytes);
  hear(rail, now);
  if (rail.incoming.received == rail.incoming.header.payload_bytes) frame_end(id, now);
}

void Link::hear(Rail& rail, TimeNs now) {
  rail.path.last_rx = now;
  rail.health.pinged = rail.health.unanswered = rail.health.overdue_since = 0;
  heard_ = true;
}

// Verifies a chunk and copies the chunk to its destination unless already there.  Returns false on
// a wrong checksum or a failed copy.
bool Link::take_payload(Incoming& incoming) {
  const FrameHeader& header = incoming.header;
  const bool checked = options_.shape.checksum;
  if (header.payload_bytes == 0 || (!incoming.apart && !incoming.placed)) return true;
  std::byte* const memory = incoming.stream->chunk_memory(header);
  if (memory == nullptr) return true;  // arrived meanwhile
  const std::byte* const bytes =
      incoming.placed ? incoming.stream->chunk_placed(header) : incoming.chunk.get();
  if (checked && crc32c(bytes, header.payload_bytes) != header.payload_crc &&
      !planted(Mutant::checksum_ignored))
    return false;
  return bytes == memory || copy_bytes(memory, bytes, header.payload_bytes);
}

void Link::frame_end(RailId id, TimeNs now) {
  Rail& rail = rails_[id];
  Incoming& incoming = rail.incoming;
  const FrameHeader& header = incoming.header;
  rail.counters.rx_bytes += sizeof(FrameHeader) + header.payload_bytes;
  step(LinkStep::frame_received, id);
  switch (header.type) {
    case FrameType::data: {
      InStream* stream = incoming.stream;
      if (stream != nullptr && !take_payload(incoming)) {
        rail_failed(id, rail.epoch,
                    options_.shape.checksum ? RailCause::checksum : RailCause::device_loss, now);
        break;
      }
      if (stream != nullptr && stream->chunk_arrived(header)) {
        if (stream->owed_since_ns == 0) stream->owed_since_ns = now;
        if (stream->owes_ack_now()) queue_ack(*stream, id);
        if ((header.flags & frame_flag::replay) != 0) ++disturbances_;
      }
      break;
    }
    case FrameType::ack:
      if (const auto found = streams_.find(header.communicator);
          found != streams_.end() && !on_ack(found->second->out, header, now))
        rail_failed(id, rail.epoch, RailCause::protocol, now);
      break;
    case FrameType::ack_request:
      if (planted(Mutant::ack_not_repeated)) break;
      probed_ = true;
      on_ack_request(id, header);
      break;
    case FrameType::ping:
      rail.control.pong = true;
      rail.control.pong_number = header.number;
      probed_ = true;
      break;
    case FrameType::pong:
      if (header.number > static_cast<std::uint64_t>(rail.health.last_ping)) {
        rail_failed(id, rail.epoch, RailCause::protocol, now);
        break;
      }
      rail.health.answered = std::max(rail.health.answered, static_cast<TimeNs>(header.number));
      if (rail.health.withheld && rail.health.answered >= rail.health.suspect_since) {
        rail.health.withheld = false;
        clear_suspicion(id, now);
      }
      if (rail.state == RailState::probation &&
          rail.health.answered >= rail.reconnect.probation_since) {
        rail.reconnect.failures = rail.reconnect.late = 0;
        rail.reconnect.been_up = true;
        move(id, RailState::up, RailCause::none, now);
      }
      break;
    case FrameType::rail_down:
    case FrameType::fenced:
      if (!names_an_epoch(header))
        rail_failed(id, rail.epoch, RailCause::protocol, now);
      else if (header.type == FrameType::rail_down)
        on_rail_down(header, now);
      else
        on_fenced_frame(header, now);
      break;
    case FrameType::abort: {
      const auto* text = reinterpret_cast<const char*>(incoming.text.get());
      received_aborts_.push_back({header.communicator, error_code_of(header.epoch),
                                  std::string(text, header.payload_bytes)});
      break;
    }
    case FrameType::close: peer_closed_ = true; break;
    case FrameType::slots: on_slots(id, header); break;
    case FrameType::released: on_released(id, header.communicator); break;
    case FrameType::target:
      if (!on_target(id, header)) rail_failed(id, rail.epoch, RailCause::protocol, now);
      break;
    case FrameType::address:
      if (!on_address(id, header)) rail_failed(id, rail.epoch, RailCause::protocol, now);
      break;
    case FrameType::drill:
    case FrameType::drill_ack:
      if (!on_drill(id, header, now)) rail_failed(id, rail.epoch, RailCause::protocol, now);
      break;
    case FrameType::room:
    case FrameType::need:
    case FrameType::memory:
      if (!posted_->take(id, header, now)) rail_failed(id, rail.epoch, RailCause::protocol, now);
      break;
    case FrameType::put:
      if (incoming.wanted && !posted_->take(id, header, now))
        rail_failed(id, rail.epoch, RailCause::checksum, now);
      break;
  }
}

// Validates the rail and epoch of a frame.  Failed connection attempts raise epochs, up to a limit.
bool Link::names_an_epoch(const FrameHeader& header) const {
  const std::uint8_t evidence = header.flags & static_cast<std::uint8_t>(~frame_flag::injected);
  if (evidence > static_cast<std::uint8_t>(PortEvidence::broken)) return false;
  if (header.number >= rails_.size()) return false;
  const Rail& rail = rails_[header.number];
  return header.epoch <= std::uint64_t{std::max(rail.epoch, rail.own_fenced)} + max_epochs_ahead;
}

void Link::on_rail_down(const FrameHeader& header, TimeNs now) {
  const auto about = static_cast<RailId>(header.number);
  Rail& rail = rails_[about];
  // The news of a drill may come after the start of the next epoch, whose losses are no drill's.
  // Announced drills are no news.
  const bool by_drill = (header.flags & frame_flag::injected) != 0 &&
                        header.epoch > rail.notices.injected && header.epoch <= rail.epoch;
  const bool announced = rail.drills.peers.active(now);
  if (by_drill && !announced && header.epoch == rail.epoch) {
    rail.drills.peers.begin(unknown_drill, 0, now);
    rail.drills.peers.end(/*rail_is_up=*/false, now);
  }
  if (header.epoch == rail.epoch) rail_failed(about, header.epoch, RailCause::peer_notice, now);
  if (by_drill) {
    rail.notices.injected = header.epoch;
    if (!announced && observer_ != nullptr) observer_->on_injected(about);
  }
  const auto port =
      static_cast<PortEvidence>(header.flags & static_cast<std::uint8_t>(~frame_flag::injected));
  if (port != PortEvidence::unknown) {
    if (header.epoch >= rail.notices.reported_in) {
      rail.notices.reported_in = header.epoch;
      rail.notices.reported = port;
    }
    if (header.epoch == rail.epoch) {
      rail.findings.peer = port;
      conclude(about);
    }
  }
  // An epoch never opened on this side cannot open any more and counts as fenced.
  if (header.epoch > rail.epoch && !connected(about) && rail.state != RailState::down)
    rail.own_fenced = std::max(rail.own_fenced, header.epoch);
  if (header.epoch <= rail.own_fenced && !planted(Mutant::fenced_not_repeated))
    each_usable([&](RailId, Rail& other) { other.control.fenced |= std::uint64_t{1} << about; });
}

// FENCED confirms the state of our port that the peer knows.  An older FENCED, or a finding since
// then, leaves a difference, and RAIL_DOWN goes out again.
void Link::on_fenced_frame(const FrameHeader& header, TimeNs now) {
  const auto about = static_cast<RailId>(header.number);
  on_fenced(about, header.epoch, now);
  Rail& rail = rails_[about];
  if (header.epoch >= rail.epoch) rail.notices.confirmed = static_cast<PortEvidence>(header.flags);
}

// Stores an address announced by the peer.  Returns false on a protocol violation.
bool Link::on_address(RailId via, const FrameHeader& header) {
  const auto at = endpoint_of(header);
  if (!options_.connects || header.number >= rails_.size() || header.epoch == 0 || !at)
    return false;
  const auto about = static_cast<RailId>(header.number);
  // All rails carry the announcement, so an older sequence may arrive after a newer sequence.
  if (header.epoch <= rails_[about].notices.address_sequence) return true;
  rails_[about].notices.address_sequence = header.epoch;
  std::erase_if(received_addresses_, [&](const AddressNotice& old) { return old.rail == about; });
  received_addresses_.push_back({about, via, *at});
  return true;
}

// A hop may withhold the frames of a SUSPECT rail.  The acks of streams go out on every rail that
// takes copies: a silent rail would hold up the sender's window.
void Link::queue_ack(InStream& stream, RailId id) {
  if (stream.communicator() == streams_communicator)
    return each_usable([&](RailId each, const Rail& rail) {
      if (!rests(rail)) queue_ack_on(stream, each);
    });
  if (id == any_rail || rails_[id].state != RailState::up) id = best_;
  if (id != any_rail) queue_ack_on(stream, id);  // no rail: tick() queues the ack again
}

void Link::queue_ack_on(InStream& stream, RailId id) {
  auto& acks = rails_[id].control.acks;
  if (std::find(acks.begin(), acks.end(), &stream) == acks.end()) acks.push_back(&stream);
}

// The answer for a communicator that is closed, or of which nothing has arrived yet, goes out on
// the rail of the request.  The peer asks on every usable rail, so every usable rail carries the
// answer.
void Link::on_ack_request(RailId id, const FrameHeader& request) {
  if (const auto found = streams_.find(request.communicator); found != streams_.end()) {
    Streams& pair = *found->second;
    pair.in.requested = std::max(pair.in.requested, request.number);
    // A request may overtake a newer one on another rail.
    const auto wait = wait_of(request);
    auto& known = wait && wait->for_room ? pair.in.peers_wait : pair.out.peers_wait;
    if (wait && (!known || wait->consumed > known->consumed ||
                 (wait->consumed == known->consumed && wait->chain > known->chain)))
      known = wait;
    return queue_ack_everywhere(pair.in);
  }
  auto& answers = rails_[id].control.answers;
  std::erase_if(answers, [&](const Control::Answer& old) {
    return old.communicator == request.communicator;
  });
  if (answers.size() >= most_answers) return;
  // Data of a closed or refused communicator is dropped, and never acknowledged.
  const bool dropped =
      closed_.contains(request.communicator) || refusals_.contains(request.communicator);
  answers.push_back({request.communicator, dropped ? 0 : request.number});
}

void Link::queue_ack_everywhere(InStream& stream) {
  each_usable([&](RailId id, Rail&) { queue_ack_on(stream, id); });
}

}  // namespace r2ccl
