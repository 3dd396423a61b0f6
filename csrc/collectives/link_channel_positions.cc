// LinkChannel: the comparison of positions, and of waits, between the programs of the ranks.
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/sites.hpp"
#include "collectives/link_channel.hpp"
#include "collectives/positions_limit.hpp"
#include "link/mutants.hpp"

namespace r2ccl {

void LinkChannel::set_step(std::uint32_t step, std::string about) {
  step_ = step;
  about_ = std::move(about);
}

// Begins with "rank N ", from which other ranks know whose position this is.
std::string LinkChannel::position() const {
  std::string text = "rank " + std::to_string(rank_);
  text += !has_called_ ? " before its first call" : in_call_ ? " in " : " after ";
  if (has_called_) text += describe(tag_);
  if (has_called_ && tag_.site != 0) text += " at " + site_text(tag_.site);
  if (step_ != 0) text += ", step " + std::to_string(step_);
  if (!about_.empty()) text += ": " + about_;
  return text;
}

void LinkChannel::add_position(const std::string& text) {
  constexpr std::string_view start = "rank ";
  std::size_t rank = members_.size();
  if (text.starts_with(start))
    (void)std::from_chars(text.data() + start.size(), text.data() + text.size(), rank);
  if (failed_ == ErrorCode::order_mismatch && rank < members_.size())
    members_[rank].program_position = text;
}

// A position arrives with the ABORT of each rank.
void LinkChannel::collect_positions() {
  if (consensus_ < Consensus::step || std::exchange(collected_, true)) return;
  linger(positions_limit(), [this] {
    return std::ranges::all_of(members_, [](const Member& peer) {
      return !peer.program_position.empty() || peer.link == nullptr || peer.link->peer_closed();
    });
  });
}

bool LinkChannel::same_site(int peer, const CallTag& tag) {
  if (tag.site == tag_.site || tag.kind == TagKind::result) return tag.site == tag_.site;
  if (tag.site == 0 || tag_.site == 0) return true;
  if (consensus_ == Consensus::site_error) return false;
  if (other_sites_ >= most_site_warnings) return true;
  const bool last = ++other_sites_ == most_site_warnings;
  on_other_site("communicator '" + name_ + "': " + describe(tag_) + " is at " +
                site_text(tag_.site) + " on rank " + std::to_string(rank_) + ", and at " +
                site_text(tag.site) + " on rank " + std::to_string(peer) +
                (last ? "; further such calls are not logged" : ""));
  return true;
}

// Returns true if the program of a rank in call `tag` has parted from this rank's: this rank is
// past the call, or makes another call in its place.  Calls between two ranks have numbers of their
// own.
bool LinkChannel::has_passed(const CallTag& tag) const {
  const auto between_two = [](const CallTag& call) { return call.collective == Collective::send; };
  if (between_two(tag) || between_two(tag_)) return false;
  const auto ahead = static_cast<std::int32_t>(tag_.number - tag.number);  // numbers may wrap
  if (ahead != 0) return ahead > 0;
  // The comparison of a result follows its call, with the same number.
  const bool own_result = tag_.kind == TagKind::result;
  if (own_result != (tag.kind == TagKind::result)) return own_result;
  return !same_call(tag, tag_);
}

// Returns a wait of a peer that still lasts.  A wait for a message goes on while nothing is posted
// to the peer, a wait for room while none of its messages is consumed.
const StreamWait* LinkChannel::lasting_wait(const Member& of) {
  const std::optional<StreamWait>& message = of.out->peers_wait;
  if (message && of.out->posted_only(message->consumed)) return &*message;
  const std::optional<StreamWait>& room = of.in->peers_wait;
  return room && of.in->consumed() == room->consumed ? &*room : nullptr;
}

// This rank posts and consumes nothing while it waits itself, so all waits of a chain last at the
// same time.  A rank waits for one peer at a time, so a chain of as many waits as ranks is a
// circle, which no message ends.
Status LinkChannel::compare_waits(int awaited, TimeNs since, TimeNs now) {
  if (now - since < waits_interval() || planted(Mutant::waits_not_compared)) return {};
  std::uint32_t chain = 0;
  for (int peer = 0; peer < size(); ++peer) {
    const Member& other = member(peer);
    if (other.out == nullptr) continue;
    const InMessage* const unread = other.in->front();
    if (unread != nullptr && has_passed(unread->tag)) return mismatch(peer, *unread, unread->bytes);
    const StreamWait* const wait = lasting_wait(other);
    if (wait == nullptr) continue;
    if (const bool parted = has_passed(wait->tag); parted || wait->chain >= members_.size())
      return {ErrorCode::order_mismatch,
              "communicator '" + name_ + "': " +
                  (parted ? "the programs of the ranks have parted"
                          : "the ranks only wait for each other") +
                  ": rank " + std::to_string(peer) + " waits in " + describe(wait->tag) +
                  " for rank " + std::to_string(rank_) + ", which waits in " + describe(tag_) +
                  " for rank " + std::to_string(awaited)};
    chain = std::max(chain, wait->chain);
  }
  const Member& from = member(awaited);
  const bool for_room = !receiving_ && from.out->waits_for_credit(settling_);
  if (!receiving_ && !for_room) return {};
  if (now - told_at_ < waits_interval() && chain < told_chain_) return {};
  told_at_ = now;
  told_chain_ = chain + 1;
  from.link->tell_wait(*from.in, {.tag = tag_,
                                  .consumed = for_room ? from.out->credit() : from.in->consumed(),
                                  .chain = told_chain_,
                                  .for_room = for_room});
  flush(awaited, now);
  return {};
}

}  // namespace r2ccl
