// Fuzz target: the stream multiplexer against a peer with arbitrary records.
//
// The input is a list of events: records of the peer, mostly well-formed, and calls of the owner.
// Any record is either a violation or leaves memory within its bounds.
#include <vector>

#include "fuzz_main.hpp"
#include "streams/stream_mux.hpp"

namespace r2ccl::fuzz {
namespace {

constexpr std::size_t max_events = 2000;
constexpr std::uint32_t window = 300;
constexpr std::uint32_t queue_bytes = 200;
constexpr std::size_t most_streams = 6;

class Owner {
 public:
  explicit Owner(Input& input)
      : input_(input),
        mux_({.even = false,
              .window = window,
              .queue_bytes = queue_bytes,
              .bulk_bytes = 100,
              .copied_bytes = 64,
              .most_streams = most_streams}) {}

  // Returns false after a violation: a relay then ends.
  bool event() {
    const std::uint8_t what = input_.byte();
    bool valid = true;
    switch (what & 7) {
      case 0:
      case 1:
      case 2: valid = mux_.on_record(record()); break;
      case 3: own_.push_back(mux_.open(1 + (what >> 3))); break;
      case 4: mux_.consumed(stream(), what); break;
      case 5: write(what); break;
      case 6: end(what); break;
      default: send(what); break;
    }
    require(valid == mux_.violation().empty(), "a violation ends the traffic");
    for (const StreamEvent& event : mux_.take_events())
      if (event.kind == StreamEvent::Kind::opened) theirs_.push_back(event.stream);
    check();
    return valid;
  }

 private:
  std::vector<std::byte> record() {
    RecordHeader header{};
    const std::uint8_t form = input_.byte();
    header.type = static_cast<RecordType>(form % 12);
    header.stream = (form & 16) != 0 ? next_ : stream();
    if (header.type == RecordType::open) {
      header.stream = next_;
      next_ += 2;
    }
    header.port = input_.byte();
    header.value = input_.byte();
    std::size_t payload = header.type == RecordType::data ? 1 + input_.byte() : 0;
    header.payload_bytes = static_cast<std::uint32_t>(payload);
    if (form >= 240) header = input_.take<RecordHeader>();
    if (form >= 250) payload = input_.byte();
    std::vector<std::byte> bytes(sizeof(header) + payload);
    std::memcpy(bytes.data(), &header, sizeof(header));
    if (form == 255) bytes.resize(input_.byte() % (bytes.size() + 1));
    return bytes;
  }

  StreamId stream() {
    const std::uint8_t which = input_.byte();
    const auto& of = (which & 1) != 0 ? own_ : theirs_;
    return of.empty() ? which : of[(which >> 1) % of.size()];
  }

  void write(std::uint8_t what) {
    const StreamId id = stream();
    const std::size_t room = mux_.room(id);
    const std::vector<std::byte> bytes(what);
    require(mux_.write(id, bytes) == std::min(bytes.size(), room), "write() accepts what it said");
  }

  void end(std::uint8_t what) {
    const StreamId id = stream();
    if ((what & 8) != 0)
      mux_.finish(id);
    else
      mux_.reset(id);
    require((what & 8) != 0 || !mux_.has(id), "a reset ends the stream at once");
  }

  void send(std::uint8_t what) {
    std::vector<std::byte> room(sizeof(RecordHeader) + 1 + what);
    const std::size_t bytes = mux_.next_record(room, (what & 8) != 0);
    require(bytes == 0 || bytes >= sizeof(RecordHeader), "a record has a header");
    require(bytes <= room.size(), "a record fits its room");
  }

  void check() const {
    // The peer's streams are limited; the owner limits its own.
    std::size_t theirs = 0;
    for (const auto* ids : {&own_, &theirs_})
      for (const StreamId id : *ids) {
        require(mux_.read(id).size() <= window, "a stream holds no more than its window");
        require(mux_.room(id) <= queue_bytes, "a queue is bounded");
        theirs += ids == &theirs_ && mux_.has(id) ? 1 : 0;
      }
    require(theirs <= most_streams, "the peer's streams are limited");
  }

  Input& input_;
  StreamMux mux_;
  std::vector<StreamId> own_;
  std::vector<StreamId> theirs_;
  StreamId next_ = 2;
};

}  // namespace

void run(Input& input, std::size_t /*baseline*/) {
  Owner owner(input);
  for (std::size_t event = 0; event < max_events && !input.empty(); ++event)
    if (!owner.event()) return;
}

}  // namespace r2ccl::fuzz
