#include "sim/sim_channel.hpp"

#include <cstdint>
#include <numeric>
#include <utility>

#include "sim/link_end.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {
namespace {

constexpr TimeNs compare_interval = 20 * ns_per_ms;  // between two looks of a rank that waits

}  // namespace

SimChannel::SimChannel(World& world, std::uint64_t communicator, std::vector<int> members, int own)
    : LinkChannel(communicator, std::to_string(communicator), own,
                  world.options().link.shape.slot_bytes, world.options().link_timeout_ns),
      world_(world),
      members_(std::move(members)) {
  for (int peer = 0; peer < static_cast<int>(members_.size()); ++peer)
    add_member(peer == own ? nullptr : &end(peer).link);
  std::vector<std::uint16_t> nodes(members_.size());  // each rank is a node
  std::iota(nodes.begin(), nodes.end(), std::uint16_t{0});
  set_nodes(std::move(nodes));
  world.add_channel(*this);
}

SimChannel::~SimChannel() { world_.remove_channel(*this); }

LinkEnd& SimChannel::end(int peer) const {
  return world_.end(world_rank(), members_[static_cast<std::size_t>(peer)]);
}

Memory& SimChannel::memory_to(int peer) const {
  return world_.memory(world_rank(), members_[static_cast<std::size_t>(peer)]);
}

Status SimChannel::call(const CallTag& tag, const std::function<Status()>& body) {
  R2CCL_TRY(begin_call(tag));
  exchange_bandwidths();
  return end_call(body());
}

void SimChannel::close_in_order(TimeNs limit) {
  linger(limit, [this] { return failed() || all_delivered(); });
  if (!failed()) leave();
}

void SimChannel::register_buffer(std::span<const std::byte> memory) {
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) memory_to(peer).add(memory);
}

void SimChannel::deregister_buffer(std::span<const std::byte> memory) {
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) memory_to(peer).remove(memory);
}

Result<std::span<const std::byte>> SimChannel::receive(int peer, std::size_t bytes) {
  auto view = LinkChannel::receive(peer, bytes);
  if (view.ok()) world_.on_message_read(end(peer), id(), view.value());
  return view;
}

Status SimChannel::release(int peer) {
  world_.on_message_released(end(peer), id());
  return LinkChannel::release(peer);
}

Status SimChannel::settle(int peer, std::size_t bytes) {
  R2CCL_TRY(LinkChannel::settle(peer, bytes));
  world_.on_memory_returned(end(peer), id());
  return {};
}

Status SimChannel::finish() {
  R2CCL_TRY(LinkChannel::finish());
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) world_.on_memory_returned(end(peer), id());
  return {};
}

Status SimChannel::wait(int peer, const std::function<std::uint64_t()>& come, std::uint64_t goal) {
  const TimeNs since = clock();
  const auto ended = [&] {
    return failed() || come() >= goal || !check_liveness(peer, since).ok();
  };
  for (;;) {
    const TimeNs until = world_.now() + compare_interval;
    R2CCL_TRY(world_.wait([&] { return ended() || world_.now() >= until; }));
    if (ended()) break;
    R2CCL_TRY(compare_waits(peer, since, clock()));
  }
  if (come() >= goal) return {};
  if (failed()) return failure();
  return check_liveness(peer, since);
}

void SimChannel::linger(TimeNs limit, const std::function<bool()>& done) {
  const TimeNs until = world_.now() + limit;
  (void)world_.wait([&] { return done() || world_.now() >= until; });
}

TimeNs SimChannel::clock() const { return world_.clock(world_rank()); }

void SimChannel::flush(int peer, TimeNs /*now*/) { end(peer).progress(); }

bool SimChannel::detach(int peer, const DetachScope& scope) {
  return end(peer).LinkOfRails::detach(scope, clock());
}

std::string SimChannel::describe_peer(int peer) const {
  return "rank " + std::to_string(members_[static_cast<std::size_t>(peer)]);
}

std::string SimChannel::describe_rails(int peer) const {
  std::string text;
  const Link& link = end(peer).link;
  for (RailId rail = 0; rail < link.rail_count(); ++rail)
    text += (rail == 0 ? "rail" : ", rail") + std::to_string(rail) + " " +
            std::string(name_of(link.state(rail)));
  return text;
}

void SimChannel::on_failed(ErrorCode code, const std::string& text) {
  world_.trace("rank " + std::to_string(world_rank()) + " communicator " + name() +
               " failed: " + text);
  (void)code;
}

}  // namespace r2ccl::sim
