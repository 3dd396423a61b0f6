#include "streams/stream_mux.hpp"

#include <algorithm>
#include <cstring>

#include "link/mutants.hpp"

namespace r2ccl {

// ---- the owner's streams ----

StreamId StreamMux::open(std::uint16_t port) {
  StreamId id = next_id_;
  if (planted(Mutant::stream_id_reused) && closed_ != 0)
    id = std::exchange(closed_, 0);
  else
    next_id_ += 2;
  (void)add(id);
  queue({RecordType::open, 0, port, id, 0, 0});
  return id;
}

StreamMux::Stream& StreamMux::add(StreamId id) {
  Stream& stream = streams_[id];
  stream.credit = stream.granted = options_.window;
  return stream;
}

std::size_t StreamMux::room(StreamId id) const {
  const auto found = streams_.find(id);
  if (found == streams_.end() || found->second.fin_due) return 0;
  return options_.queue_bytes -
         std::min<std::size_t>(options_.queue_bytes, found->second.out.size());
}

std::size_t StreamMux::write(StreamId id, std::span<const std::byte> bytes) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return 0;
  Stream& stream = found->second;
  const std::size_t accepted = std::min(bytes.size(), room(id));
  stream.out.append(bytes.first(accepted));
  stream.full = accepted < bytes.size() || stream.out.size() >= options_.queue_bytes;
  take_turn(id, stream);
  return accepted;
}

void StreamMux::finish(StreamId id) {
  const auto found = streams_.find(id);
  if (found == streams_.end() || found->second.fin_due) return;
  Stream& stream = found->second;
  stream.fin_due = true;
  if (planted(Mutant::fin_overtakes_data)) {
    queue({RecordType::fin, 0, 0, id, 0, 0});
    stream.fin_sent = true;
  }
  take_turn(id, stream);
}

void StreamMux::reset(StreamId id) {
  if (streams_.erase(id) == 0) return;
  if (is_own(id)) closed_ = id;
  queue({RecordType::reset, 0, 0, id, 0, 0});
}

std::span<const std::byte> StreamMux::read(StreamId id) const {
  const auto found = streams_.find(id);
  return found == streams_.end() ? std::span<const std::byte>() : found->second.in.view();
}

void StreamMux::consumed(StreamId id, std::size_t bytes) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  Stream& stream = found->second;
  const std::size_t taken = std::min(bytes, stream.in.size());
  stream.in.pop(taken);
  stream.eaten += taken;
  if (!stream.fin_received && stream.eaten >= options_.window / 4) {
    queue({RecordType::credit, 0, 0, id, static_cast<std::uint32_t>(stream.eaten), 0});
    stream.granted += stream.eaten;
    stream.eaten = 0;
  }
  drop_if_over(id);
}

bool StreamMux::finished(StreamId id) const {
  const auto found = streams_.find(id);
  return found != streams_.end() && found->second.fin_received;
}

bool StreamMux::at_end(StreamId id) const { return finished(id) && read(id).empty(); }

bool StreamMux::has_bytes() const {
  return std::any_of(streams_.begin(), streams_.end(),
                     [](const auto& entry) { return !entry.second.out.empty(); });
}

void StreamMux::sync(std::uint32_t token) {
  const RecordHeader record{RecordType::sync, 0, 0, 0, token, 0};
  if (planted(Mutant::mirror_before_listener))
    control_.push_front(record);
  else
    queue(record);
}

bool StreamMux::has_turn(const Stream& stream) const {
  if (!stream.out.empty()) return stream.credit > 0 || planted(Mutant::window_ignored);
  return stream.fin_due && !stream.fin_sent;
}

void StreamMux::take_turn(StreamId id, Stream& stream) {
  if (stream.queued || !has_turn(stream)) return;
  stream.queued = true;
  turns_.push_back(id);
}

// Both directions have ended in order, and the owner has read everything.
void StreamMux::drop_if_over(StreamId id) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  const Stream& stream = found->second;
  if (!stream.fin_sent || !stream.fin_received || !stream.in.empty() || !stream.out.empty()) return;
  if (is_own(id)) closed_ = id;
  streams_.erase(found);
}

// ---- records out ----

bool StreamMux::pump(Link& link, TimeNs now) {
  OutStream& out = link.out_stream(streams_communicator);
  for (; !bulk_.empty() && bulk_.front().first < out.delivered(); bulk_.pop_front())
    bulk_bytes_ -= bulk_.front().second;
  scratch_.resize(out.shape().slot_bytes);
  bool posted = false;
  while (has_records() && out.has_room()) {
    const std::size_t bytes = next_record(scratch_, bulk_bytes_ < options_.bulk_bytes);
    if (bytes == 0) break;
    const bool bulk = bytes > options_.copied_bytes;
    if (bulk) {
      bulk_.emplace_back(out.next_number(), static_cast<std::uint32_t>(bytes));
      bulk_bytes_ += bytes;
    }
    // The link has room, so the message is copied to its slot at once.
    link.post(out, std::span(scratch_).first(bytes), {}, now, bulk ? 1 : every_rail);
    posted = true;
  }
  if (!has_records() || !out.lacks_slot())
    without_slot_since_ = 0;
  else if (posted || without_slot_since_ == 0)
    without_slot_since_ = now;
  return posted;
}

std::string_view StreamMux::why_lost(const Link& link, TimeNs now, TimeNs timeout) const {
  if (link.has_no_rail() && now - link.no_rail_since() >= timeout) return "no rail";
  if (link.unheard() >= unheard_timeouts * timeout) return "no frame";
  if (without_slot_since_ != 0 && now - without_slot_since_ >= timeout)
    return "no slot, because fences do not complete";
  return {};
}

std::size_t StreamMux::next_record(std::span<std::byte> room, bool bulk) {
  const auto put = [room](const RecordHeader& header, std::span<const std::byte> payload) {
    std::memcpy(room.data(), &header, sizeof(header));
    if (!payload.empty()) std::memcpy(room.data() + sizeof(header), payload.data(), payload.size());
    return sizeof(header) + payload.size();
  };
  if (!control_.empty()) {
    const RecordHeader header = control_.front();
    control_.pop_front();
    return put(header, {});
  }
  const std::size_t most = room.size() - sizeof(RecordHeader);
  for (std::size_t left = turns_.size(); left > 0; --left) {
    const StreamId id = turns_.front();
    turns_.pop_front();
    const auto found = streams_.find(id);
    if (found == streams_.end() || !found->second.queued) continue;  // reset meanwhile
    Stream& stream = found->second;
    stream.queued = false;
    if (!has_turn(stream)) continue;
    if (stream.out.empty()) {
      stream.fin_sent = true;
      const std::size_t bytes = put({RecordType::fin, 0, 0, id, 0, 0}, {});
      drop_if_over(id);
      return bytes;
    }
    const std::uint64_t credit =
        planted(Mutant::window_ignored) ? stream.out.size() : stream.credit;
    const std::size_t bytes = std::min<std::uint64_t>({stream.out.size(), credit, most});
    if (!bulk && sizeof(RecordHeader) + bytes > options_.copied_bytes) {
      take_turn(id, stream);
      continue;
    }
    const std::size_t size = put({RecordType::data, 0, 0, id, 0, static_cast<std::uint32_t>(bytes)},
                                 stream.out.view().first(bytes));
    stream.out.pop(bytes);
    stream.credit -= std::min<std::uint64_t>(bytes, stream.credit);
    if (std::exchange(stream.full, false))
      events_.push_back({.kind = StreamEvent::Kind::writable, .stream = id});
    take_turn(id, stream);
    return size;
  }
  return 0;
}

// ---- records in ----

bool StreamMux::take(Link& link, TimeNs now) {
  InStream& in = link.in_stream(streams_communicator);
  // Many answers wait for the link: leave the peer's records there, which holds up the peer.  The
  // owner stops at half of this limit.  If own records alone stopped both ends, neither end would
  // take the records of the other, and nothing would move again.
  while (const InMessage* message = in.front()) {
    if (control_.size() >= 2 * most_control_records) break;
    if (!on_record({in.front_data(), message->bytes}, message->replayed)) return false;
    link.consume(in, now);
  }
  return true;
}

bool StreamMux::violate(const std::string& text) {
  if (violation_.empty()) violation_ = text;
  return false;
}

bool StreamMux::on_record(std::span<const std::byte> record, bool replayed) {
  RecordHeader header;
  if (record.size() < sizeof(header))
    return violate("record of " + std::to_string(record.size()) +
                   " bytes is shorter than a header");
  std::memcpy(&header, record.data(), sizeof(header));
  const std::span<const std::byte> payload = record.subspan(sizeof(header));
  const auto type = std::string(name_of(header.type));
  const bool has_payload = header.type == RecordType::data;
  if (header.payload_bytes != payload.size() || has_payload == payload.empty() ||
      header.reserved != 0)
    return violate("record " + type + " has a malformed header");
  const auto tell = [&](StreamEvent::Kind kind) {
    events_.push_back({.kind = kind, .port = header.port, .token = header.value});
    return true;
  };
  switch (header.type) {
    case RecordType::open: return on_open(header);
    case RecordType::data:
    case RecordType::fin:
    case RecordType::reset:
    case RecordType::credit: return on_stream_record(header, payload, replayed);
    case RecordType::listens:
    case RecordType::unlistens:
    case RecordType::no_mirror:
      if (header.port == 0) return violate("record " + type + " has port 0");
      return tell(header.type == RecordType::listens     ? StreamEvent::Kind::listens
                  : header.type == RecordType::unlistens ? StreamEvent::Kind::unlistens
                                                         : StreamEvent::Kind::no_mirror);
    case RecordType::sync: return tell(StreamEvent::Kind::sync);
    case RecordType::synced: return tell(StreamEvent::Kind::synced);
  }
  return violate("record of unknown type " + std::to_string(static_cast<unsigned>(header.type)));
}

bool StreamMux::on_open(const RecordHeader& header) {
  const StreamId id = header.stream;
  const bool fresh = id > last_of_peer_ || planted(Mutant::stream_id_reused);
  if (id == 0 || is_own(id) || !fresh || header.port == 0)
    return violate("open of stream " + std::to_string(id) + ", port " +
                   std::to_string(header.port) + ", after stream " + std::to_string(last_of_peer_));
  last_of_peer_ = std::max(last_of_peer_, id);
  if (streams_.size() >= options_.most_streams) {
    queue({RecordType::reset, 0, 0, id, 0, 0});
    return true;
  }
  (void)add(id);
  events_.push_back({.kind = StreamEvent::Kind::opened, .stream = id, .port = header.port});
  return true;
}

// Returns true if the stream was opened at some time.
bool StreamMux::known(StreamId id) const {
  return is_own(id) ? id != 0 && id < next_id_ : id <= last_of_peer_;
}

bool StreamMux::on_stream_record(const RecordHeader& header, std::span<const std::byte> payload,
                                 bool replayed) {
  const StreamId id = header.stream;
  const auto found = streams_.find(id);
  if (found == streams_.end()) {
    if (known(id)) return true;  // the stream has ended here, and the peer did not know yet
    return violate(std::string(name_of(header.type)) + " of stream " + std::to_string(id) +
                   ", never opened");
  }
  Stream& stream = found->second;
  if (stream.fin_received && header.type == RecordType::data)
    return violate("data of stream " + std::to_string(id) + " after its end");
  switch (header.type) {
    case RecordType::data:
      if (payload.size() > stream.granted)
        return violate("data of stream " + std::to_string(id) + " exceeds its window");
      stream.granted -= payload.size();
      stream.in.append(payload);
      events_.push_back({.kind = StreamEvent::Kind::readable, .stream = id});
      return true;
    case RecordType::fin:
      stream.fin_received = true;
      events_.push_back({.kind = StreamEvent::Kind::finished, .stream = id});
      drop_if_over(id);
      return true;
    case RecordType::credit:
      if (planted(Mutant::credit_lost_on_replay) && replayed) return true;
      stream.credit += header.value;
      if (stream.credit > options_.window)
        return violate("credit of stream " + std::to_string(id) + " exceeds its window");
      take_turn(id, stream);
      return true;
    default:
      if (is_own(id)) closed_ = id;
      streams_.erase(found);
      events_.push_back({.kind = StreamEvent::Kind::reset, .stream = id});
      return true;
  }
}

}  // namespace r2ccl
