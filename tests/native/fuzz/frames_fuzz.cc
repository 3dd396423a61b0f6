// Fuzz target: the wire parser and the link against a peer with arbitrary bytes.
//
// Headers carry a checksum beyond the reach of mutations, so there are two modes. Raw mode sends
// the input's bytes unchanged. Event mode reads a list of events, for example sealed frames with
// fields from the input.
#include "frames_world.hpp"
#include "fuzz_main.hpp"

namespace r2ccl::fuzz {
namespace {

constexpr std::size_t max_events = 400;
constexpr std::size_t max_payload = 256U << 10;  // payload bytes actually sent per frame
constexpr std::size_t flood_short = 200;
constexpr std::size_t flood_all = 5000;  // exceeds the number of streams a link keeps
// A flood takes long: only a corpus input with this word requests a full flood, and mutations
// hardly ever hit the word.
constexpr std::uint32_t flood_word = 0x594E414D;

struct Mode {
  bool sealed;
  unsigned rails_up;
  LinkOptions options;

  explicit Mode(std::uint8_t bits) : sealed((bits & 1) != 0), rails_up(bits >> 6) {
    // Two small shapes, a shape with the largest number of chunks per message, and a shape above
    // every buffer size.
    static const std::array shapes{StreamShape{.slot_bytes = 1024,
                                               .chunk_bytes = 256,
                                               .staging_bytes = 256,
                                               .slots = 4,
                                               .spare_slots = 2},
                                   StreamShape{.slot_bytes = 4096,
                                               .chunk_bytes = 64,
                                               .staging_bytes = 4096,
                                               .slots = 2,
                                               .spare_slots = 0},
                                   StreamShape{.slot_bytes = 72U << 10,
                                               .chunk_bytes = 72U << 10,
                                               .staging_bytes = 0,
                                               .slots = 2,
                                               .spare_slots = 1},
                                   StreamShape{.slot_bytes = 384,
                                               .chunk_bytes = 128,
                                               .staging_bytes = 128,
                                               .slots = 8,
                                               .spare_slots = 4}};
    options.shape = shapes[bits >> 3 & 3];
    options.shape.checksum = (bits & 2) != 0;
    options.shape.resilience = (bits & 4) != 0;
    options.small_message_bytes = options.shape.chunk_bytes;
    options.connects = (bits & 32) != 0;
    options.posted = rails_up == world_rails;
    options.put_bytes = options.shape.chunk_bytes;
  }
};

class Peer {
 public:
  Peer(FrameWorld& world, Input& input) : world_(world), input_(input) {}

  // Sends bytes unchanged, cut at positions from the input.
  void raw() {
    const std::uint8_t bits = input_.byte();
    const RailId to = rail(bits);
    world_.send(to, input_.bytes(input_.byte()));
    if ((bits & 4) != 0) world_.deliver(to, world_.coming(to));
    if ((bits & 8) != 0) world_.deliver(to, input_.byte());
    if ((bits & 16) != 0) world_.pass(ns_per_ms);
    if ((bits & 32) != 0) world_.pump_out(to, 1U << 20);
    if ((bits & 64) != 0) world_.consume(bits % world_communicators.size());
  }

  void event() {
    const std::uint8_t what = input_.byte();
    const RailId on = rail(what >> 4);
    const std::size_t which = (what >> 4) % world_communicators.size();
    switch (what & 15) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
        frame(on);
        world_.deliver(on, world_.coming(on));
        break;
      case 5:
      case 6: frame(on); break;
      case 7: world_.deliver(on, input_.byte()); break;
      case 8: world_.deliver(on, world_.coming(on)); break;
      case 9: world_.pump_out(on, amount()); break;
      case 10: world_.pass(pause()); break;
      case 11: world_.post(which, amount() % (3 * world_.shape().slot_bytes)); break;
      case 12: world_.consume(which); break;
      case 13: world_.reconnect(on, input_.byte()); break;
      case 14:
        world_.report(on, {.unacknowledged = amount(),
                           .round_trip = input_.byte() * ns_per_ms / 8,
                           .base_round_trip = input_.byte() * ns_per_ms / 16,
                           .peer_limited = (what & 64) != 0});
        break;
      default: rare(on, which); break;
    }
  }

 private:
  static RailId rail(unsigned bits) { return static_cast<RailId>((bits & 3) % world_rails); }

  void rare(RailId on, std::size_t which) {
    switch (input_.byte() & 7) {
      case 0: world_.close(which); break;
      case 1: world_.abort(which, amount() % 1000); break;
      case 2: world_.send_close(); break;
      case 3: world_.break_pipe(on); break;
      case 4: flood(on); break;
      case 5: world_.announce(on, 1 + input_.byte()); break;
      case 6: world_.expect(which, amount() % (4 * world_.shape().slot_bytes)); break;
      default: world_.send(on, input_.bytes(input_.byte())); break;
    }
  }

  std::size_t amount() {
    const std::uint8_t bits = input_.byte();
    return bits < 192 ? bits : std::size_t{1} << (bits & 31) % 20;
  }

  TimeNs pause() {
    static constexpr std::array<int, 8> ms{0, 1, 5, 25, 50, 250, 600, 4000};
    return ms[input_.byte() & 7] * ns_per_ms;
  }

  // Returns a number close to `expected` in most cases.
  std::uint64_t about(std::uint64_t expected) {
    const std::uint8_t bits = input_.byte();
    if (bits >= 248) return input_.take<std::uint64_t>();
    return bits < 128 ? expected + bits % 8 : expected - bits % 8;
  }

  std::uint64_t communicator() {
    const std::uint8_t bits = input_.byte();
    return bits >= 248 ? input_.take<std::uint64_t>() : 5 + bits % 5;
  }

  std::uint64_t posted_connection(std::uint64_t usual) {
    const std::uint8_t bits = input_.byte();
    return bits >= 248 ? input_.take<std::uint64_t>() : usual;
  }

  std::uint32_t size() {
    const StreamShape& shape = world_.shape();
    const std::uint8_t bits = input_.byte();
    switch (bits & 7) {
      case 0: return 0;
      case 1: return bits;
      case 2: return shape.chunk_bytes;
      case 3: return shape.chunk_bytes + 1;
      case 4:
      case 5: return shape.slot_bytes;
      case 6: return shape.slot_bytes - shape.chunk_bytes / 2;
      default: return input_.take<std::uint32_t>();
    }
  }

  void frame(RailId on) {
    FrameHeader header{};
    const std::uint8_t form = input_.byte();
    if (form >= 240) {
      header = input_.take<FrameHeader>();
    } else {
      header.type = static_cast<FrameType>(form < 128 ? 1 : form < 224 ? form % 16 : 16 + form % 5);
      fields(on, header);
    }
    finish(on, header);
  }

  void fields(RailId on, FrameHeader& header) {
    const StreamShape& shape = world_.shape();
    header.communicator = communicator();
    switch (header.type) {
      case FrameType::data: {
        header.flags = input_.byte() & 7;
        if ((header.flags & frame_flag::replay) != 0) header.epoch = input_.byte() % 5;
        header.number = about(world_.consumed(header.communicator));
        header.message_bytes = size();
        const std::uint8_t slot = input_.byte();
        header.slot = slot < 128   ? static_cast<std::uint16_t>(header.number % shape.slots)
                      : slot < 250 ? static_cast<std::uint16_t>(slot % (shape.all_slots() + 1U))
                                   : input_.take<std::uint16_t>();
        const std::uint8_t chunk = input_.byte();
        const std::uint32_t chunks = std::max(1U, header.message_bytes / shape.chunk_bytes);
        header.offset =
            chunk < 250 ? chunk % chunks * shape.chunk_bytes : input_.take<std::uint32_t>();
        header.payload_bytes = std::min(shape.chunk_bytes, header.message_bytes - header.offset);
        acknowledge(header);
        break;
      }
      case FrameType::ack: acknowledge(header); break;
      case FrameType::ping:
        header.number = input_.byte();
        header.payload_bytes = size() % (2 * max_probe_bytes);
        break;
      case FrameType::pong: header.number = about(1'000'000'000 + input_.byte() * ns_per_ms); break;
      case FrameType::rail_down:
      case FrameType::fenced:
        header.flags = input_.byte() & (frame_flag::injected | 3);
        header.number = about(input_.byte() & 3);
        header.epoch = static_cast<Epoch>(about(world_.link().epoch(on)));
        break;
      case FrameType::drill:
      case FrameType::drill_ack:
        header.number = about(input_.byte() & 3);
        header.epoch = static_cast<std::uint32_t>(about(1));
        header.slot = static_cast<std::uint16_t>(about(input_.byte()));
        header.delivered = input_.byte() < 64 ? 0 : about(input_.byte() * ns_per_ms);
        break;
      case FrameType::address: {
        header.number = about(input_.byte() & 3);
        header.epoch = static_cast<std::uint32_t>(about(1));
        header.slot = input_.take<std::uint16_t>();
        const std::uint8_t version = input_.byte();
        header.offset = version < 96 ? 4 : version < 192 ? 6 : version;
        header.delivered = input_.take<std::uint32_t>();
        if (header.offset == 6) header.credit = input_.take<std::uint64_t>();
        break;
      }
      case FrameType::slots:
        header.number = input_.take<std::uint64_t>();
        header.epoch = input_.byte();
        break;
      case FrameType::target:
        header.number = about(input_.byte());
        header.delivered = input_.take<std::uint64_t>();
        header.credit = input_.byte() < 200 ? size() : input_.take<std::uint64_t>();
        header.epoch = input_.byte();
        break;
      case FrameType::room:
        header.communicator = posted_connection(world_sends);
        header.number = about(world_.posted_sends());
        header.offset = static_cast<std::uint32_t>(about(1));
        header.slot = static_cast<std::uint16_t>(input_.byte() % (world_rails + 1));
        header.epoch = static_cast<Epoch>(about(world_.link().epoch(on)));
        header.tag.count = input_.byte() % 4;
        header.message_bytes = size();
        header.delivered = std::min<std::uint64_t>(about(0), world_.posted_sends());
        break;
      case FrameType::need:
        header.communicator = posted_connection(world_receives);
        header.number = about(world_.posted_receives());
        header.offset = input_.byte() % 4;
        header.slot = static_cast<std::uint16_t>(input_.byte() % (world_rails + 1));
        break;
      case FrameType::memory:
        header.number = input_.byte() % 4;
        header.delivered = input_.take<std::uint64_t>();
        header.credit = input_.byte() < 200 ? size() : input_.take<std::uint64_t>();
        break;
      case FrameType::put:
        header.communicator = posted_connection(world_receives);
        header.number = about(world_.posted_receives());
        header.epoch = input_.byte() % 4;
        header.message_bytes = static_cast<std::uint32_t>(size() % (2 * FrameWorld::posted_bytes));
        header.offset = input_.byte() < 128 ? 0 : size();
        header.payload_bytes = input_.byte() < 128 ? header.message_bytes : size();
        break;
      case FrameType::abort:
        header.epoch = input_.byte();
        header.payload_bytes = input_.byte() * 2U;
        break;
      default: break;
    }
  }

  void acknowledge(FrameHeader& header) {
    const std::uint8_t bits = input_.byte();
    if (bits < 64) return;
    if (bits < 240) {
      header.delivered = bits % (world_.posted_messages(header.communicator) + 1);
      header.credit = input_.byte() % (header.delivered + 1);
    } else {
      header.delivered = about(world_.posted_messages(header.communicator));
      header.credit = about(header.delivered);
    }
  }

  // Seals and sends a frame. Most frames stay correct from here on.
  void finish(RailId on, FrameHeader& header) {
    const std::uint8_t how = input_.byte();
    const bool wrong = how >= 224;
    if (wrong && (how & 1) != 0) header.payload_bytes = input_.take<std::uint32_t>();
    const bool honest = !wrong || (how & 2) == 0;
    std::size_t payload = std::min<std::size_t>(header.payload_bytes, max_payload);
    if (wrong && (how & 4) != 0) payload = std::min<std::size_t>(payload, input_.byte());
    const bool checked = header.type == FrameType::data || header.type == FrameType::put;
    if (world_.shape().checksum && checked) {
      const auto bytes = content(false, header.communicator, header.number, header.offset, payload);
      header.payload_crc = crc32c(bytes.data(), bytes.size());
    }
    seal(header);
    if (wrong && (how & 8) != 0)
      reinterpret_cast<std::uint8_t*>(&header)[input_.byte() % sizeof(header)] ^= input_.byte();
    world_.send(on, header, honest, payload);
  }

  // Sends a frame for each of many communicators unknown to the link.
  void flood(RailId on) {
    if (flooded_) return;
    flooded_ = true;
    const auto word = input_.take<std::uint32_t>();
    const std::size_t count = word == flood_word ? flood_all : word % flood_short;
    FrameHeader header{};
    header.type = FrameType::data;
    header.communicator = 1000;
    for (std::size_t i = 0; i < count; ++i) {
      ++header.communicator;
      seal(header);
      world_.send(on, header, true, 0);
    }
    world_.deliver(on, world_.coming(on));
  }

  FrameWorld& world_;
  Input& input_;
  bool flooded_ = false;
};

}  // namespace

void run(Input& input, std::size_t baseline) {
  const Mode mode(input.byte());
  FrameWorld world(mode.options, mode.rails_up, baseline);
  Peer peer(world, input);
  for (std::size_t i = 0; i < max_events && !input.empty(); ++i) {
    if (mode.sealed)
      peer.event();
    else
      peer.raw();
    world.check();
  }
}

}  // namespace r2ccl::fuzz
