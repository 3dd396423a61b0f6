#include "sim/sim_channel.hpp"

#include <algorithm>

#include "sim/link_end.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {

SimChannel::SimChannel(World& world, int rank, std::uint64_t communicator)
    : world_(world),
      rank_(rank),
      communicator_(communicator),
      members_(static_cast<std::size_t>(world.options().ranks)) {
  for (int peer = 0; peer < world.options().ranks; ++peer) {
    if (peer == rank) continue;
    LinkEnd& end = world.end(rank, peer);
    member(peer) = {.end = &end,
                    .out = &end.link.out_stream(communicator),
                    .in = &end.link.in_stream(communicator)};
  }
  world.add_channel(*this);
}

SimChannel::~SimChannel() { world_.remove_channel(*this); }

std::size_t SimChannel::segment_bytes() const { return world_.options().link.shape.slot_bytes; }

Status SimChannel::call(const CallTag& tag, const std::function<Status()>& body) {
  if (failed_ != ErrorCode::ok) return {failed_, failure_text_};
  tag_ = tag;
  for (Member& peer : members_)
    if (peer.end != nullptr) peer.call_position = peer.out->posted_position();
  Status status = body();
  if (status.ok()) return status;
  fail(status.code(), status.message());
  for (Member& peer : members_)
    if (peer.end != nullptr) peer.end->link.close_streams(communicator_);
  return status;
}

void SimChannel::fail(ErrorCode code, const std::string& text) {
  if (failed_ != ErrorCode::ok) return;
  failed_ = code;
  failure_text_ = text;
  for (Member& peer : members_) {
    if (peer.end == nullptr) continue;
    peer.end->link.send_abort({communicator_, code, text});
    peer.end->settle();
  }
}

Status SimChannel::send(int peer, std::span<const std::byte> data) {
  if (failed_ != ErrorCode::ok) return {failed_, failure_text_};
  Member& to = member(peer);
  to.end->link.post(*to.out, data, tag_, world_.now());
  to.end->settle();
  return {};
}

Result<std::span<const std::byte>> SimChannel::receive(int peer, std::size_t bytes) {
  Member& from = member(peer);
  R2CCL_TRY(wait(from, [&] { return from.in->front() != nullptr; }));
  const InMessage& message = *from.in->front();
  if (message.tag != tag_ || message.bytes != bytes)
    return Status(ErrorCode::order_mismatch,
                  "rank " + std::to_string(peer) + " called " + describe(message.tag) +
                      " where rank " + std::to_string(rank_) + " called " + describe(tag_));
  const std::span<const std::byte> view(from.in->front_data(), bytes);
  world_.shadow().message_read({peer, rank_, communicator_}, message.number, view);
  return view;
}

Status SimChannel::release(int peer) {
  if (failed_ != ErrorCode::ok) return {failed_, failure_text_};
  Member& from = member(peer);
  const InMessage& message = *from.in->front();
  world_.shadow().message_released({peer, rank_, communicator_}, message.number,
                                   {from.in->front_data(), message.bytes});
  from.end->link.consume(*from.in, world_.now());
  from.end->settle();
  return {};
}

Status SimChannel::settle(int peer, std::size_t bytes) {
  const Member& to = member(peer);
  return wait(to, [&] { return to.out->settled_position() >= to.call_position + bytes; });
}

Status SimChannel::finish() {
  for (const Member& peer : members_) {
    if (peer.end == nullptr) continue;
    R2CCL_TRY(
        wait(peer, [&] { return peer.out->settled_position() == peer.out->posted_position(); }));
  }
  return {};
}

Status SimChannel::wait(const Member& peer, const std::function<bool()>& done) {
  const TimeNs since = world_.now();
  R2CCL_TRY(world_.wait(
      rank_, [&] { return failed_ != ErrorCode::ok || done() || !liveness(peer, since).ok(); }));
  if (failed_ != ErrorCode::ok) return {failed_, failure_text_};
  if (done()) return {};
  return liveness(peer, since);
}

Status SimChannel::liveness(const Member& peer, TimeNs waiting_since) const {
  const Link& link = peer.end->link;
  const std::string name = "rank " + std::to_string(peer.end->peer);
  if (link.peer_said_bye()) return {ErrorCode::peer_closed, name + " has closed"};
  if (link.lost_bytes()) return {ErrorCode::peer_lost, "a rail to " + name + " was lost"};
  if (!link.dark()) return {};
  const TimeNs dark_since = std::max(link.dark_since(), waiting_since);
  if (world_.now() - dark_since < world_.options().link_timeout_ns) return {};
  return {ErrorCode::peer_lost, "no rail to " + name};
}

}  // namespace r2ccl::sim
