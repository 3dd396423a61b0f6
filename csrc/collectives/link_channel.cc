#include "collectives/link_channel.hpp"

#include <algorithm>
#include <functional>
#include <string_view>
#include <utility>

#include "base/text.hpp"
#include "link/device_memory.hpp"
#include "link/mutants.hpp"

namespace r2ccl {
namespace {

// Longest wait of a failed call for fences of rails with access to the caller's memory.
constexpr TimeNs abandon_limit_ns = 500 * ns_per_ms;
// Longest position in an ABORT, in bytes.
constexpr std::size_t most_position_bytes = max_abort_bytes / 2 + 40;
// Separates the position of the sender from the error in the ABORT of an order mismatch.
constexpr char before_position = '\n';

}  // namespace

void LinkChannel::add_member(Link* link) {
  Member added;
  if (link != nullptr)
    added = {.link = link, .out = &link->out_stream(id_), .in = &link->in_stream(id_)};
  members_.push_back(added);
  announced_.push_back(0);
}

void LinkChannel::set_nodes(std::vector<std::uint16_t> node_of_rank) {
  bandwidths_ = NodeBandwidths(std::move(node_of_rank));
}

// ---- calls ----

Status LinkChannel::begin_call(const CallTag& tag) {
  if (failed()) {
    if (failed_ == ErrorCode::order_mismatch) collect_positions();
    return failure();
  }
  heard_all_ = heard_all();
  tag_ = tag;
  has_called_ = true;
  in_call_.store(true, std::memory_order_relaxed);
  for (Member& peer : members_)
    if (peer.link != nullptr) peer.call_position = peer.out->posted_position();
  return {};
}

// After a full exchange, every rank has heard the same announcements.
bool LinkChannel::heard_all() const {
  if (!has_called_ || !is_full_exchange(tag_) || !bandwidths_.can_shift()) return false;
  if (planted(Mutant::bandwidths_not_adopted) && rank_ == 0) return false;
  const std::uint8_t own = announced_[static_cast<std::size_t>(rank_)];
  return !planted(Mutant::bandwidths_damped) ||
         bandwidths_.lost()[bandwidths_.node_of(rank_)] != own;
}

void LinkChannel::exchange_bandwidths() {
  if (heard_all_) bandwidths_.adopt(announced_);
  heard_all_ = false;
  if (!is_full_exchange(tag_) || !bandwidths_.can_shift()) return;
  tag_.lost_bandwidth = loss_to_announce(tag_);
  tag_.bandwidth_hash = bandwidths_.hash();
  announced_[static_cast<std::size_t>(rank_)] = tag_.lost_bandwidth;
}

std::vector<std::uint8_t> LinkChannel::lost_bandwidths() {
  if (!failed() && heard_all()) bandwidths_.adopt(announced_);
  return {bandwidths_.lost().begin(), bandwidths_.lost().end()};
}

// Another thread may read the tag for an error while the call holds no lock.
void LinkChannel::set_algorithm(Algorithm algorithm) {
  const StepLock lock(*this);
  tag_.algorithm = algorithm;
}

void LinkChannel::works_on(const std::byte* in, const std::byte* out) {
  of_device_ = is_device_memory(out) ? out : is_device_memory(in) ? in : nullptr;
}

Status LinkChannel::end_call(Status status) {
  scratch() = {};
  if (!status.ok()) fail(status.code(), status.message());
  note_call_ended();
  if (status.ok()) return status;
  drop_streams();  // no rail may access the caller's buffers after the return
  if (failed_ != ErrorCode::order_mismatch) return status;
  collect_positions();
  return failure();
}

// Reclaims callers' memory and the streams' memory from all rails, since frames in flight point
// into both.  Returns true if no rail can read or write the memory any more; otherwise call again.
bool LinkChannel::let_go() {
  bool all = true;
  for (int peer = 0; peer < size(); ++peer) {
    const Member& from = member(peer);
    if (from.out == nullptr) continue;
    all = from.link->reclaim_target(*from.in, /*received=*/false, clock()) && all;
    all = detach(peer, {.communicator = id_, .before = {}}) && all;
  }
  return all;
}

void LinkChannel::drop_streams() {
  if (!let_go()) linger(abandon_limit_ns, [this] { return let_go(); });
  for (int peer = 0; peer < size(); ++peer) {
    Member& dropped = member(peer);
    if (dropped.out == nullptr) continue;
    dropped.link->revoke_target(*dropped.in);
    dropped.link->close_streams(id_);
    dropped.out = nullptr;
    dropped.in = nullptr;
  }
}

bool LinkChannel::delivered(const Member& peer) const {
  return peer.out == nullptr || peer.link->peer_closed() ||
         (peer.out->idle() && !peer.in->owes_ack());
}

bool LinkChannel::all_delivered() const {
  return std::all_of(members_.begin(), members_.end(), [this](const Member& peer) {
    return delivered(peer) || peer.link->peer_gone() ||
           (peer.link->has_no_rail() && clock() - peer.link->no_rail_since() >= link_timeout_);
  });
}

void LinkChannel::leave() {
  for (int peer = 0; peer < size(); ++peer) {
    if (delivered(member(peer))) continue;
    member(peer).link->send_abort({id_, ErrorCode::peer_closed,
                                   "rank " + std::to_string(rank_) + " has closed communicator '" +
                                       name_ + "' before all messages were delivered"});
    flush(peer, clock());
  }
  drop_streams();
}

// ---- Channel ----

Status LinkChannel::send(int peer, std::span<const std::byte> data) {
  const StepLock lock(*this);
  if (failed()) return failure();
  Member& to = member(peer);
  const TimeNs now = recently();
  to.link->post(*to.out, data, tag_, now);
  flush(peer, now);
  return {};
}

Status LinkChannel::expect(int peer, std::size_t skip, std::span<std::byte> memory) {
  const StepLock lock(*this);
  if (failed()) return failure();
  const Member& from = member(peer);
  if (from.link->offer_target(*from.in, skip, memory)) flush(peer, clock());
  return {};
}

Result<std::span<const std::byte>> LinkChannel::receive(int peer, std::size_t bytes) {
  const StepLock lock(*this);
  const Member& from = member(peer);
  receiving_ = true;
  Status status = wait(
      peer, [&from] { return from.in->delivered(); }, from.in->consumed() + 1);
  receiving_ = false;
  if (!status.ok()) return status;
  const InMessage& message = *from.in->front();
  const bool compared =
      tag_.kind != TagKind::end_of_step || !planted(Mutant::position_not_compared);
  if ((compared && !same_call(message.tag, tag_)) || message.bytes != bytes ||
      !same_site(peer, message.tag))
    return mismatch(peer, message, bytes);
  if (is_full_exchange(tag_))
    announced_[static_cast<std::size_t>(peer)] = message.tag.lost_bandwidth;
  return std::span<const std::byte>(from.in->front_data(), bytes);
}

Status LinkChannel::release(int peer) {
  const StepLock lock(*this);
  const Member& from = member(peer);
  const TimeNs now = recently();
  if (from.link->consume(*from.in, now)) flush(peer, now);
  return {};
}

Status LinkChannel::settle(int peer, std::size_t bytes) {
  const StepLock lock(*this);
  return settle_to(peer, member(peer).call_position + bytes);
}

Status LinkChannel::settle_to(int peer, std::uint64_t position) {
  const Member& to = member(peer);
  settling_ = position;
  R2CCL_TRY(wait(
      peer, [&to] { return to.out->settled_position(); }, position));
  return detach_settled(peer);
}

// A chunk delivered by a rail may still be queued on another rail.  Waits until no rail can read
// the caller's memory for such a chunk.
Status LinkChannel::detach_settled(int peer) {
  const Member& to = member(peer);
  if (to.out->zero_copy_position() <= to.call_position || planted(Mutant::settled_not_detached))
    return {};
  const DetachScope scope{.communicator = id_, .before = to.out->delivered()};
  const auto released = [&] { return detach(peer, scope); };
  return await_release(peer, "a lost rail may still read memory sent to ",
                       std::cref(released));  // by reference: std::function would allocate
}

Status LinkChannel::finish() {
  const StepLock lock(*this);
  for (int peer = 0; peer < size(); ++peer) {
    const Member& to = member(peer);
    if (to.link == nullptr) continue;
    R2CCL_TRY(settle_to(peer, to.out->posted_position()));
    // The target may still be written: a chunk came in a slot, but its first attempt is in flight.
    R2CCL_TRY(await_release(peer, "a lost rail may still write a result received from ", [&] {
      return to.link->reclaim_target(*to.in, /*received=*/true, clock());
    }));
  }
  return {};
}

Status LinkChannel::await_release(int peer, const char* what,
                                  const std::function<bool()>& released) {
  bool done = released();
  if (!done) linger(link_timeout_, [&] { return failed() || (done = released()); });
  if (done) return {};
  if (failed()) return failure();
  return lost(peer, what);
}

// ---- failure ----

// Memory may be what has failed.  So everything that needs memory comes before the first change,
// and the notices can be continued.
void LinkChannel::fail(ErrorCode code, const std::string& text) {
  if (failed()) return tell_all();
  std::string reason = text;
  std::string notice = text;
  std::string own;
  if (code == ErrorCode::order_mismatch && consensus_ >= Consensus::step) {
    own = position();
    cut(own, most_position_bytes);
    cut(notice, max_abort_bytes - 1 - own.size());
    notice += before_position + own;
  }
  failure_text_ = std::move(reason);
  failure_notice_ = std::move(notice);
  failed_ = code;
  telling_ = true;
  if (!own.empty()) add_position(own);
  on_failed(code, text);
  // Every rank must learn of the failure, including ranks without traffic to the lost peer.
  tell_all();
}

void LinkChannel::tell_all() {
  if (!telling_) return;
  for (int peer = 0; peer < size(); ++peer) {
    Member& to = member(peer);
    if (to.link == nullptr || to.told || planted(Mutant::abort_not_forwarded)) continue;
    to.link->send_abort({id_, failed_, failure_notice_});
    to.told = true;
    flush(peer, clock());
  }
  telling_ = false;
}

void LinkChannel::on_abort(const AbortNotice& notice) {
  const std::size_t end = notice.code == ErrorCode::order_mismatch
                              ? notice.text.find(before_position)
                              : std::string::npos;
  fail(notice.code, notice.text.substr(0, end));
  if (end != std::string::npos) add_position(notice.text.substr(end + 1));
}

Status LinkChannel::failure() const {
  std::string text = failure_text_;
  const char* before = "; positions: ";
  for (const Member& peer : members_) {
    if (peer.program_position.empty()) continue;
    text += before + peer.program_position;
    before = "; ";
  }
  return {failed_, std::move(text)};
}

// ---- liveness ----

Status LinkChannel::check_liveness(int awaited, TimeNs waiting_since) const {
  R2CCL_TRY(device_memory_failure(of_device_));
  const Link& link = *members_[static_cast<std::size_t>(awaited)].link;
  if (link.peer_closed())
    return {ErrorCode::peer_closed, describe_peer(awaited) + " has closed communicator '" + name_ +
                                        "' while rank " + std::to_string(rank_) + " waits in " +
                                        describe(tag_)};
  if (link.lost_bytes())
    return {ErrorCode::peer_lost,
            "a rail to " + describe_peer(awaited) +
                " was lost and R2CCL_RESILIENCE is off: " + describe_rails(awaited)};
  // Check all peers: the awaited peer may be in no call and never detect the loss of a third rank.
  return check_rails(waiting_since);
}

Status LinkChannel::check_members() const {
  if (failed()) return failure();
  for (int peer = 0; peer < static_cast<int>(members_.size()); ++peer) {
    const Link* link = members_[static_cast<std::size_t>(peer)].link;
    if (link != nullptr && link->peer_closed())
      return {ErrorCode::peer_closed,
              describe_peer(peer) + " has closed communicator '" + name_ + "' between two calls"};
  }
  return check_rails(0);
}

Status LinkChannel::check_rails(TimeNs waiting_since) const {
  const TimeNs now = clock();
  const auto for_long = [&](TimeNs since) {
    return now - std::max(since, waiting_since) >= link_timeout_;
  };
  for (int peer = 0; peer < static_cast<int>(members_.size()); ++peer) {
    const Member& other = members_[static_cast<std::size_t>(peer)];
    if (other.link == nullptr || other.link->peer_closed()) continue;
    if (other.link->peer_gone()) return lost(peer, "the process has ended: ");
    if (!for_long(waiting_since) || planted(Mutant::railless_link_waits)) continue;
    const char* what = nullptr;
    if (other.link->has_no_rail() && for_long(other.link->no_rail_since()))
      what = "no rail within the link timeout to ";
    else if (other.link->unheard() >= unheard_timeouts * link_timeout_)
      what = "no frame within ten link timeouts from the process of ";
    if (what != nullptr) return lost(peer, what);
  }
  return {};
}

void LinkChannel::check_slots() {
  if (failed()) return tell_all();
  const TimeNs now = clock();
  for (int peer = 0; peer < size(); ++peer) {
    const OutStream* out = member(peer).out;
    if (out == nullptr || out->quarantined_since_ns == 0 ||
        now - out->quarantined_since_ns < link_timeout_)
      continue;
    const Status status = lost(peer, "all slots are in quarantine (incomplete fence) at ");
    fail(status.code(), status.message());
    return;
  }
}

Status LinkChannel::lost(int peer, const char* what) const {
  const Member& other = members_[static_cast<std::size_t>(peer)];
  return {ErrorCode::peer_lost,
          what + describe_peer(peer) +
              "; link_timeout_s = " + std::to_string(static_cast<double>(link_timeout_) * 1e-9) +
              " s, communicator '" + name_ + "', rank " + std::to_string(rank_) + ", " +
              describe(tag_) + "; verdict: " + std::string(name_of(other.link->overall_verdict())) +
              "; rails: " + describe_rails(peer)};
}

Status LinkChannel::mismatch(int peer, const InMessage& message, std::size_t bytes) const {
  std::string text = "communicator '" + name_ + "': rank " + std::to_string(peer) + " called " +
                     describe(message.tag) + " where rank " + std::to_string(rank_) + " called " +
                     describe(tag_);
  if (tag_.kind == TagKind::result && message.tag.kind == TagKind::result)
    return {ErrorCode::internal, "communicator '" + name_ + "': rank " + std::to_string(peer) +
                                     " and rank " + std::to_string(rank_) +
                                     " have different bits in the result of call " +
                                     std::to_string(tag_.number) +
                                     "; one of the machines computes or stores wrong values"};
  CallTag alike = message.tag;
  alike.bandwidth_hash = tag_.bandwidth_hash;
  if (!same_call(message.tag, tag_) && same_call(alike, tag_))
    return {ErrorCode::order_mismatch,
            std::move(text) + "; the ranks use different bandwidths of the nodes"};
  alike = message.tag;
  alike.count = tag_.count;
  if (tag_.kind == TagKind::end_of_step && same_call(alike, tag_))
    text += "; the captured calls of the step differ";
  else if (same_call(message.tag, tag_) && message.bytes == bytes)
    text += " from another place";
  else if (same_call(message.tag, tag_))
    text += "; the message has " + std::to_string(message.bytes) + " bytes where " +
            std::to_string(bytes) + " were expected";
  return {ErrorCode::order_mismatch, std::move(text)};
}

}  // namespace r2ccl
