#include "sim/sim_rail.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "sim/link_end.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {
namespace {

constexpr std::uint64_t window_bytes = 64U
                                       << 10;  // not acknowledged by the path: a socket's buffer
constexpr std::uint64_t max_pieces = 3;

}  // namespace

SimRail::SimRail(LinkEnd& owner, RailId rail, Connection& connection)
    : owner_(owner),
      link_(owner.link),
      rail_(rail),
      epoch_(owner.link.epoch(rail)),
      side_(owner.side),
      connection_(connection) {
  connection.attach(side_, *this);
}

bool SimRail::send_one() {
  World& world = owner_.world;
  if (!link_.has_frames(rail_) || sent_ - acked_ >= window_bytes) return false;
  if (connection_.free_at(side_) > world.now()) {
    if (!std::exchange(wake_due_, true)) {
      // The rail's end outlives its epochs, this object does not.
      world.events().at(connection_.free_at(side_), [&owner = owner_] { owner.settle(); });
    }
    return false;
  }
  wake_due_ = false;
  OutFrame frame;
  if (!link_.next_frame(rail_, frame, world.now())) return false;
  sent_ += sizeof(FrameHeader) + frame.header.payload_bytes;
  if (frame.header.type == FrameType::data) {
    world.check_slot_reuse(owner_, frame.header);
    world.shadow().chunk_sent({owner_.rank, owner_.peer, frame.header.communicator}, frame.header,
                              frame.payload);
  }
  Parcel header;
  header.kind = Parcel::Kind::header;
  header.header = frame.header;
  connection_.send(side_, std::move(header));
  send_payload(frame);
  link_.frame_written(frame.header);
  return true;
}

// In one to three pieces that arrive one after another.
void SimRail::send_payload(const OutFrame& frame) {
  const std::size_t bytes = frame.header.payload_bytes;
  const std::size_t pieces = 1 + owner_.world.random().below(max_pieces);
  const std::size_t step = (bytes + pieces - 1) / pieces;
  for (std::size_t begin = 0; begin < bytes; begin += step) {
    Parcel piece;
    piece.kind = Parcel::Kind::payload;
    piece.header = frame.header;
    const std::byte* const from = frame.payload + begin;
    piece.payload.assign(from, from + std::min(step, bytes - begin));
    connection_.send(side_, std::move(piece));
  }
}

void SimRail::on_parcel(const Parcel& parcel) {
  if (parcel.kind == Parcel::Kind::header) {
    (void)link_.frame_begin(rail_, parcel.header, owner_.world.now());
  } else {
    take_payload(parcel);
  }
  owner_.settle();
}

void SimRail::take_payload(const Parcel& parcel) {
  for (std::size_t begin = 0; begin < parcel.payload.size();) {
    const auto room = link_.payload_room(rail_);
    const std::size_t bytes = std::min(room.size(), parcel.payload.size() - begin);
    std::memcpy(room.data(), parcel.payload.data() + begin, bytes);
    begin += bytes;
    link_.payload_filled(rail_, bytes, owner_.world.now());
  }
}

void SimRail::on_path_acked(std::uint64_t position) {
  acked_ = position;
  link_.path_acked(rail_, epoch_, position, /*peer_limited=*/false, owner_.world.now());
  owner_.settle();
}

void SimRail::on_broken() {
  link_.rail_failed(rail_, epoch_, RailCause::socket_error, owner_.world.now());
  owner_.settle();
}

}  // namespace r2ccl::sim
