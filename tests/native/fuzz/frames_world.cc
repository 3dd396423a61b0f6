#include "frames_world.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "allocated.hpp"
#include "input.hpp"
#include "link/posted.hpp"

namespace r2ccl::fuzz {
namespace {

constexpr std::size_t max_streams = 4096;  // created by a peer, kept by a link

class Pipe final : public BytePipe {
 public:
  explicit Pipe(Path& path) : path_(path) {}

  Io write(std::span<const iovec> parts, std::size_t& bytes) override {
    if (path_.broken) return Io::broken;
    for (const iovec& part : parts) {
      const std::size_t taken = std::min(part.iov_len, path_.room);
      const auto* begin = static_cast<const std::byte*>(part.iov_base);
      path_.emitted.insert(path_.emitted.end(), begin, begin + taken);
      path_.room -= taken;
      bytes += taken;
    }
    return bytes == 0 ? Io::again : Io::ok;
  }
  Io read(std::span<const iovec> parts, std::size_t& bytes) override {
    if (path_.broken) return Io::broken;
    for (const iovec& part : parts) {
      const std::size_t taken = std::min(part.iov_len, path_.grant);
      std::copy_n(path_.left().begin(), taken, static_cast<std::byte*>(part.iov_base));
      path_.take(taken);
      path_.grant -= taken;
      bytes += taken;
    }
    return bytes == 0 ? Io::again : Io::ok;
  }
  PathReport path() override { return path_.report; }
  [[nodiscard]] int fd() const override { return -1; }
  [[nodiscard]] short arm(bool for_write) override { return for_write ? POLLOUT : POLLIN; }

 private:
  Path& path_;
};

// Computes the CRC bit by bit, so that an error in the production tables is not repeated here.
bool seal_right(const FrameHeader& header) {
  std::array<std::uint8_t, offsetof(FrameHeader, crc)> bytes{};
  std::memcpy(bytes.data(), &header, bytes.size());
  std::uint32_t crc = ~0U;
  for (const std::uint8_t byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1U) != 0 ? 0x82F63B78U : 0U);
  }
  return header.magic == frame_magic && header.crc == ~crc;
}

// Adds memory only for small slots. With large slots a flooding peer would make the link map
// gigabytes.
LinkOptions with_memory(LinkOptions options, WorldMemory& memory) {
  if (options.shape.slot_bytes <= 4096) options.memory = &memory;
  options.most_communicators = max_streams / 2;
  return options;
}

std::uint32_t longest_payload(FrameType type, const StreamShape& shape) {
  switch (type) {
    case FrameType::data: return shape.chunk_bytes;
    case FrameType::ping: return max_probe_bytes;
    case FrameType::abort: return max_abort_bytes;
    case FrameType::put: return max_put_bytes;
    default: return 0;
  }
}

}  // namespace

std::vector<std::byte> content(bool ours, std::uint64_t communicator, std::uint64_t number,
                               std::uint64_t position, std::size_t bytes) {
  // The content repeats every 256 bytes, so that most bytes come from a fast copy.
  std::vector<std::byte> made(bytes);
  const std::uint64_t first = (ours ? 1 : 128) + communicator * 31 + number * 57 + position * 13;
  for (std::size_t i = 0; i < std::min<std::size_t>(256, bytes); ++i)
    made[i] = static_cast<std::byte>(first + i * 13);
  for (std::size_t i = 256; i < bytes; i += 256)
    std::copy_n(made.begin(), std::min<std::size_t>(256, bytes - i),
                made.begin() + static_cast<std::ptrdiff_t>(i));
  return made;
}

FrameWorld::FrameWorld(const LinkOptions& options, unsigned rails_up, std::size_t baseline)
    : options_(with_memory(options, memory_)),
      baseline_(baseline),
      carried_(options_, world_kinds, 1) {
  carried_.link.start(now_);
  carried_.act(now_);
  for (const std::uint64_t communicator : world_communicators) {
    carried_.link.out_stream(communicator);
    calls_[communicator];
  }
  for (RailId rail = 0; rail < world_rails; ++rail) {
    open(rail, 1, {});
    pump_out(rail, 1U << 20);
    if (rail >= rails_up) continue;
    FrameHeader pong{};
    pong.type = FrameType::pong;
    pong.number = static_cast<std::uint64_t>(now_);
    seal(pong);
    send(rail, pong, true, 0);
    deliver(rail, sizeof(pong));
    require(carried_.link.state(rail) == RailState::up, "an answered probe opens a rail");
  }
  if (options_.posted) {
    posted_memory_.resize(posted_at_once * posted_bytes);
    Posted& posted = carried_.link.posted();
    (void)posted.add_memory(posted_memory_);
    posted.open_receives(world_receives);
    posted.open_sends(world_sends);
  }
  const std::size_t slot = options.shape.slot_bytes;
  post(0, std::min<std::size_t>(100, slot));
  post(0, slot + 10);
  post(0, 0);
  post(1, options.shape.chunk_bytes + 1);
  check();
}

void FrameWorld::open(RailId rail, Epoch epoch, std::span<const std::byte> leftover) {
  if (!carried_.begin_epoch(rail, epoch, now_)) return;
  ++opened_;
  paths_[rail] = {};
  witnesses_[rail] = {};
  if (!leftover.empty()) {
    send(rail, leftover);
    witness(rail, leftover.size());
    paths_[rail].take(leftover.size());
  }
  carried_.carry(rail,
                 std::make_unique<FramedRail>(carried_.link, rail,
                                              std::make_unique<Pipe>(paths_[rail]), leftover),
                 now_);
}

void FrameWorld::reconnect(RailId rail, std::size_t leftover) {
  const Link& link = carried_.link;
  // The next bytes of the peer arrive together with the handshake.
  const auto left = paths_[rail].left().first(std::min(leftover, coming(rail)));
  const std::vector<std::byte> bytes(left.begin(), left.end());
  const auto epoch = carried_.offer(rail, link.epoch(rail), /*fresh=*/true, now_);
  if (!epoch || link.state(rail) != RailState::connecting) return;
  open(rail, *epoch, bytes);
  deliver(rail, 0);
}

void FrameWorld::send(RailId rail, std::span<const std::byte> bytes) {
  paths_[rail].coming.insert(paths_[rail].coming.end(), bytes.begin(), bytes.end());
}

void FrameWorld::send(RailId rail, const FrameHeader& header, bool honest,
                      std::size_t payload_bytes) {
  send(rail, std::as_bytes(std::span(&header, 1)));
  auto payload = content(false, header.communicator, header.number, header.offset, payload_bytes);
  if (!honest)
    for (std::byte& byte : payload) byte = ~byte;
  send(rail, payload);
}

// ---- frames in ----

void FrameWorld::deliver(RailId rail, std::size_t bytes) {
  Path& path = paths_[rail];
  const Link& link = carried_.link;
  bytes = std::min(bytes, coming(rail));
  if (!carried_.ends[rail].rail) return path.take(bytes);
  const Epoch epoch = link.epoch(rail);
  witness(rail, bytes);
  path.grant = bytes;
  do carried_.receive(now_, /*all_rails=*/true);
  while (path.grant > 0 && carried_.ends[rail].rail);
  path.grant = 0;
  if (!witnesses_[rail].poisoned || link.epoch(rail) != epoch || path.broken) return;
  require(!link.connected(rail), "a rail with bytes no correct peer sends is DOWN");
  const RailCause cause = link.cause(rail);
  require(cause == RailCause::protocol || cause == RailCause::checksum ||
              cause == RailCause::peer_notice,
          "the cause of this DOWN is in the peer's bytes");
}

void FrameWorld::witness(RailId rail, std::size_t bytes) {
  Witness& seen = witnesses_[rail];
  FrameHeader& header = seen.header;
  auto left = paths_[rail].left().first(bytes);
  while (!left.empty() && !seen.poisoned) {
    if (seen.payload_left > 0) {
      const std::size_t part = std::min(left.size(), seen.payload_left);
      if (header.type == FrameType::data || header.type == FrameType::put)
        witness_payload(seen, left.first(part));
      seen.payload_left -= part;
      left = left.subspan(part);
      continue;
    }
    const std::size_t part = std::min(left.size(), sizeof(header) - seen.header_bytes);
    std::memcpy(reinterpret_cast<std::byte*>(&header) + seen.header_bytes, left.data(), part);
    seen.header_bytes += part;
    left = left.subspan(part);
    if (seen.header_bytes < sizeof(header)) return;
    seen.header_bytes = 0;
    seen.poisoned = incorrect(rail, header);
    seen.payload_left = header.payload_bytes;
    if (header.type == FrameType::data && !calls_.contains(header.communicator))
      strange_.insert(header.communicator);
  }
}

void FrameWorld::witness_payload(Witness& seen, std::span<const std::byte> payload) {
  const FrameHeader& header = seen.header;
  const std::uint64_t at = header.offset + (header.payload_bytes - seen.payload_left);
  const auto honest = content(false, header.communicator, header.number, at, payload.size());
  // Checksums must keep out changed bytes.
  if (!shape().checksum && !std::equal(payload.begin(), payload.end(), honest.begin()))
    changed_.insert({header.communicator, header.number});
}

// Whether a frame is wrong in any state of the link. The link itself checks the rules of slots and
// the choice of rails for data.
bool FrameWorld::incorrect(RailId rail, const FrameHeader& header) const {
  const auto type = static_cast<unsigned>(header.type);
  if (!seal_right(header) || type < 1 || type > static_cast<unsigned>(last_frame_type)) return true;
  if (header.type >= FrameType::room) return posted_incorrect(rail, header);
  const bool about_memory = header.type >= FrameType::slots && header.type <= FrameType::target;
  if (about_memory && world_kinds[rail] != RailKind::verbs) return true;
  if (header.payload_bytes > longest_payload(header.type, shape())) return true;
  if (header.type == FrameType::address) {
    const bool v4 = header.offset == 4 && header.delivered >> 32U == 0 && header.credit == 0;
    return !options_.connects || header.number >= world_rails || header.epoch == 0 ||
           header.slot == 0 || !(v4 || header.offset == 6);
  }
  const auto calls = calls_.find(header.communicator);
  const bool known = calls != calls_.end();
  const bool closed = known && !calls->second.open;
  // Beyond the limit, the data of an unknown communicator is discarded unread.
  if (!known && strange_.size() + calls_.size() >= 2 * options_.most_communicators) return false;
  if (closed || (header.type != FrameType::data && header.type != FrameType::ack)) return false;
  const std::uint64_t posted = known ? calls->second.posted : 0;
  const bool acknowledges = header.type == FrameType::data || known;
  if (acknowledges && header.delivered > posted) return true;
  if (acknowledges && header.credit > header.delivered) return true;
  if (header.type == FrameType::ack)
    return acknowledges && header.number > static_cast<std::uint64_t>(now_);
  const std::uint64_t first = known ? calls->second.consumed : 0;
  const bool none = header.message_bytes == 0 && header.offset == 0;
  if (header.offset >= header.message_bytes && !none) return true;
  return header.message_bytes > shape().slot_bytes || header.slot >= shape().all_slots() ||
         header.offset % shape().chunk_bytes != 0 || header.number >= first + shape().slots ||
         header.payload_bytes !=
             std::min(shape().chunk_bytes, header.message_bytes - header.offset);
}

bool FrameWorld::posted_incorrect(RailId rail, const FrameHeader& header) const {
  if (!options_.posted || header.payload_bytes > longest_payload(header.type, shape())) return true;
  switch (header.type) {
    case FrameType::room: return header.offset != 0 && header.slot >= world_rails;
    case FrameType::need: return header.slot >= world_rails;
    case FrameType::memory:
      return world_kinds[rail] != RailKind::verbs || header.number > 0xFFFFFFFF;
    default:
      return header.epoch == 0 ||
             std::uint64_t{header.offset} + header.payload_bytes > header.message_bytes ||
             (header.payload_bytes == 0 && header.message_bytes != 0);
  }
}

// ---- frames out ----

void FrameWorld::pump_out(RailId rail, std::size_t room) {
  if (!carried_.ends[rail].rail) return;
  paths_[rail].room = room;
  carried_.send(now_);
  paths_[rail].room = 0;
  check_emitted(rail);
}

void FrameWorld::check_emitted(RailId rail) {
  std::vector<std::byte>& emitted = paths_[rail].emitted;
  std::size_t at = 0;
  while (emitted.size() - at >= sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(&header, emitted.data() + at, sizeof(header));
    require(seal_right(header), "every outgoing header is sealed");
    require(header.payload_bytes <= longest_payload(header.type, shape()),
            "every outgoing payload is within the limit of its type");
    if (emitted.size() - at < sizeof(header) + header.payload_bytes) break;
    const std::byte* payload = emitted.data() + at + sizeof(header);
    at += sizeof(header) + header.payload_bytes;
    if (header.type == FrameType::address)
      require(!options_.connects && header.number < world_rails && header.epoch != 0 &&
                  header.slot != 0,
              "only the accepting end announces an address");
    if (header.type == FrameType::put) {
      require(header.communicator == world_sends && header.number < sent_,
              "an outgoing posted message was posted");
      const auto posted =
          content(true, world_sends, header.number, header.offset, header.payload_bytes);
      require(std::equal(posted.begin(), posted.end(), payload),
              "outgoing bytes of a posted message equal the posted bytes");
    }
    if (header.type != FrameType::data) continue;
    const auto calls = calls_.find(header.communicator);
    require(calls != calls_.end(), "outgoing data belongs to a known communicator");
    require(header.number < calls->second.posted, "outgoing data was posted");
    require(header.slot < shape().all_slots(), "outgoing data goes to an existing slot");
    // The link may drop data already delivered according to the peer.
    if (header.number < calls->second.delivered) continue;
    const auto posted =
        content(true, header.communicator, header.number, header.offset, header.payload_bytes);
    require(std::equal(posted.begin(), posted.end(), payload),
            "outgoing bytes equal the posted bytes");
    if (shape().checksum)
      require(header.payload_crc == crc32c(payload, header.payload_bytes),
              "the checksum of outgoing data is right");
  }
  emitted.erase(emitted.begin(), emitted.begin() + static_cast<std::ptrdiff_t>(at));
}

void FrameWorld::pass(TimeNs time) {
  now_ += time;
  carried_.tick(now_, /*refresh_paths=*/true);
}

void FrameWorld::break_pipe(RailId rail) {
  paths_[rail].broken = true;
  carried_.receive(now_, /*all_rails=*/true);
}

// ---- the communicators ----

void FrameWorld::post(std::size_t which, std::size_t bytes) {
  const std::uint64_t communicator = world_communicators[which];
  Calls& calls = calls_[communicator];
  if (!calls.open) return;
  const std::size_t slot = shape().slot_bytes;
  auto data = std::make_unique<std::byte[]>(bytes);
  for (std::size_t i = 0; i < bytes; i += slot) {
    const auto message =
        content(true, communicator, calls.posted + i / slot, 0, std::min(slot, bytes - i));
    std::copy(message.begin(), message.end(), data.get() + i);
  }
  const std::size_t messages = std::max<std::size_t>(1, (bytes + slot - 1) / slot);
  calls.posted += messages;
  chunks_posted_ += messages * (slot / shape().chunk_bytes);
  OutStream& stream = carried_.link.out_stream(communicator);
  carried_.link.post(stream, {data.get(), bytes}, CallTag{}, now_);
  calls.posts.push_back({std::move(data), calls.position, calls.position + bytes});
  calls.position += bytes;
}

void FrameWorld::consume(std::size_t which) {
  const std::uint64_t communicator = world_communicators[which];
  Calls& calls = calls_[communicator];
  if (!calls.open) return;
  InStream& stream = carried_.link.in_stream(communicator);
  const InMessage* message = stream.front();
  if (message == nullptr) return;
  require(message->number == calls.consumed, "messages arrive in order, each exactly once");
  require(message->bytes <= shape().slot_bytes, "no message is larger than a slot");
  if (!changed_.contains({communicator, message->number})) {
    const auto sent = content(false, communicator, message->number, 0, message->bytes);
    require(std::equal(sent.begin(), sent.end(), stream.front_data()),
            "a message has the sent bytes");
  }
  carried_.link.consume(stream, now_);
  ++calls.consumed;
}

void FrameWorld::expect(std::size_t which, std::size_t bytes) {
  const std::uint64_t communicator = world_communicators[which];
  Calls& calls = calls_[communicator];
  if (!calls.open) return;
  if (!calls.target.empty()) {
    if (calls.consumed >= calls.target_end) reclaim(communicator, /*received=*/true);
    return;
  }
  if (bytes == 0) return;
  calls.target.resize(bytes);
  const std::uint64_t skip = bytes % 3;
  calls.target_end = calls.consumed + skip + (bytes + shape().slot_bytes - 1) / shape().slot_bytes;
  (void)carried_.link.offer_target(carried_.link.in_stream(communicator), skip, calls.target);
}

void FrameWorld::reclaim(std::uint64_t communicator, bool received) {
  InStream& stream = carried_.link.in_stream(communicator);
  if (!carried_.link.reclaim_target(stream, received, now_)) {
    now_ += options_.ack_deadline_floor_ns + 1;
    (void)carried_.link.reclaim_target(stream, received, now_);
    carried_.act(now_);
    require(carried_.link.reclaim_target(stream, received, now_), "closed rails write no memory");
  }
  calls_[communicator].target = {};
}

// Returns memory to the caller as soon as the memory is settled, as the channel does after a call.
void FrameWorld::settle() {
  for (auto& [communicator, calls] : calls_) {
    if (!calls.open) continue;
    const OutStream& stream = carried_.link.out_stream(communicator);
    calls.delivered = std::max(calls.delivered, stream.delivered());
    while (!calls.posts.empty() && stream.settled_position() >= calls.posts.front().end) {
      if (stream.zero_copy_position() > calls.posts.front().begin)
        (void)carried_.detach({.communicator = communicator, .before = stream.delivered()}, now_);
      calls.posts.pop_front();
    }
  }
}

// Posts receives and sends, and takes those that are done.
void FrameWorld::settle_posted() {
  if (!options_.posted) return;
  Posted& posted = carried_.link.posted();
  while (receives_posted_ < received_ + posted_at_once) {
    const std::uint64_t offset = receives_posted_ % posted_at_once * posted_bytes;
    const auto number = posted.receive(
        world_receives, {.memory = 1, .offset = offset, .bytes = posted_bytes, .home = 0});
    require(number == receives_posted_, "receives are numbered in order");
    ++receives_posted_;
  }
  while (const auto bytes = posted.received(world_receives, received_)) {
    require(*bytes <= posted_bytes, "no posted message is larger than its receive");
    const auto sent = content(false, world_receives, received_, 0, *bytes);
    const auto* const memory = posted_memory_.data() + received_ % posted_at_once * posted_bytes;
    if (!changed_.contains({world_receives, received_}))
      require(std::equal(sent.begin(), sent.end(), memory), "a posted message has the sent bytes");
    posted.take_received(world_receives, received_);
    ++received_;
  }
  while (posted_sources_.size() < posted_at_once) {
    const auto room = posted.room(world_sends);
    const std::size_t bytes = std::min<std::size_t>(room.value_or(0), posted_bytes);
    auto source = std::make_unique<std::byte[]>(bytes);
    std::ranges::copy(content(true, world_sends, sent_, 0, bytes), source.get());
    const auto number = posted.send(world_sends, {source.get(), bytes}, now_);
    if (!number) break;
    posted_sources_[*number] = std::move(source);
    ++sent_;
  }
  std::erase_if(posted_sources_, [&](const auto& entry) {
    const SendState state = posted.send_state(world_sends, entry.first);
    if (state == SendState::sending) return false;
    const DetachScope scope{
        .communicator = world_sends, .before = entry.first + 1, .type = FrameType::put};
    if (state == SendState::detach && !carried_.detach(scope, now_)) return false;
    posted.take_sent(world_sends, entry.first);
    return true;
  });
  carried_.act(now_);
}

void FrameWorld::close(std::size_t which) {
  const std::uint64_t communicator = world_communicators[which];
  Calls& calls = calls_[communicator];
  if (!calls.open) return;
  reclaim(communicator, /*received=*/false);
  (void)carried_.detach({.communicator = communicator, .before = {}}, now_);
  carried_.link.close_streams(communicator);
  calls.open = false;
  calls.posts.clear();
}

void FrameWorld::abort(std::size_t which, std::size_t text_bytes) {
  carried_.link.send_abort(
      {world_communicators[which], ErrorCode::aborted, std::string(text_bytes, '!')});
}

void FrameWorld::announce(RailId rail, std::uint16_t port) {
  if (!options_.connects)
    carried_.link.announce_address(rail, {.version = 4, .port = port, .address = {}});
}

void FrameWorld::send_close() { carried_.link.send_close(); }

std::uint64_t FrameWorld::consumed(std::uint64_t communicator) const {
  const auto found = calls_.find(communicator);
  return found == calls_.end() ? 0 : found->second.consumed;
}

std::uint64_t FrameWorld::posted_messages(std::uint64_t communicator) const {
  const auto found = calls_.find(communicator);
  return found == calls_.end() ? 0 : found->second.posted;
}

// ---- invariants ----

void FrameWorld::check() {
  settle();
  settle_posted();
  Link& link = carried_.link;
  for (const AbortNotice& notice : link.received_aborts())
    require(notice.text.size() <= max_abort_bytes, "the text of an ABORT is bounded");
  link.received_aborts().clear();
  require(link.received_addresses().size() <= world_rails, "at most 1 address per rail is kept");
  for (const AddressNotice& notice : link.received_addresses()) {
    require(notice.rail < world_rails && notice.via < world_rails,
            "an address notice names existing rails");
    require(notice.at.port != 0 && (notice.at.version == 4 || notice.at.version == 6),
            "an address notice has a valid port and IP version");
  }
  if (now_ / ns_per_ms % 2 == 0) link.received_addresses().clear();
  for (RailId rail = 0; rail < world_rails; ++rail)
    require(link.connected(rail) == (carried_.ends[rail].rail != nullptr),
            "a rail object exists while its epoch is open");

  const QueueDepths depths = link.queue_depths();
  const std::size_t streams = world_communicators.size() + strange_.size();
  require(depths.streams <= std::min(streams, max_streams), "streams are bounded");
  require(depths.replays <= chunks_posted_ * world_rails, "replays are bounded");
  require(depths.attempts <= chunks_posted_ * (opened_ + world_rails), "attempts are bounded");
  require(depths.control <= world_rails * (4 * streams + world_communicators.size()),
          "control frames are bounded");
  require(depths.posted <= world_rails * 16 * posted_at_once,
          "frames of posted receives are bounded");
  require(depths.actions == 0, "all actions of the link are carried out");
  check_memory();
}

// Memory of the test, not charged to the link.
std::size_t FrameWorld::own_bytes() const {
  std::size_t bytes = 0;
  for (const Path& path : paths_) bytes += path.coming.capacity() + path.emitted.capacity();
  for (const auto& [communicator, calls] : calls_) {
    bytes += calls.target.capacity();
    for (const Post& post : calls.posts) bytes += post.end - post.begin + sizeof(Post);
  }
  bytes += posted_memory_.capacity() + posted_sources_.size() * (posted_bytes + 128);
  return bytes + 64 * (strange_.size() + changed_.size());
}

void FrameWorld::check_memory() const {
  const StreamShape& s = shape();
  const std::size_t staging = std::min(s.staging_bytes, s.slot_bytes);
  const std::size_t entries = sizeof(OutMessage) + sizeof(InMessage) + 64;
  const std::size_t stream = 4096 + s.all_slots() * entries;
  const std::size_t streams = world_communicators.size() + strange_.size();
  // Messages land in slots. Without memory for one-sided rails, only our own posts need staging.
  const std::size_t slots = s.all_slots() * s.slot_bytes * streams;
  const std::size_t staged =
      s.all_slots() * staging * (options_.memory != nullptr ? streams : world_communicators.size());
  // Input, a batch of frames, and copies left by calls.
  const std::size_t rail = (64U << 10) + 8 * (sizeof(OutFrame) + s.chunk_bytes);
  const std::size_t queued = 64 * chunks_posted_ * (opened_ + world_rails);
  const std::size_t fixed = 256U << 10;
  const std::size_t limit = slots + staged + stream * streams + rail * world_rails + queued + fixed;
  const std::size_t live = allocated_bytes();
  require(live <= baseline_ + own_bytes() + limit, "memory is bounded by the options");
}

}  // namespace r2ccl::fuzz
