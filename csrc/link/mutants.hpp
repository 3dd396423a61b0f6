// Bugs planted on purpose, to show that the simulator's checks can fail.  They exist in builds with
// R2CCL_MUTANTS alone, and there one at a time is switched on; everywhere else planted() is false
// at compile time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace r2ccl {

enum class Mutant : std::uint8_t {
  none,
  reuse_without_fence,        // a slot is written again with credit alone
  fence_reported_at_once,     // an epoch counts as fenced as soon as its fence was asked for
  fenced_epoch_not_checked,   // FENCED of an old epoch counts for the one that is open
  fenced_not_repeated,        // FENCED is said once
  path_ack_is_delivery,       // what the path acknowledged is not replayed
  replay_starts_late,         // the first message that is not delivered is left out
  replay_needs_another_rail,  // without one, what a lost rail carried is forgotten
  generation_ignored,         // a chunk of an old message counts for the slot's new one
  bitmap_not_cleared,         // the slot's next message begins with the last one's chunks
  duplicate_counted,          // a chunk that comes twice counts twice
  checksum_ignored,
  credit_before_consumption,  // what has arrived counts as read
  source_freed_early,         // a call may return when its bytes are on their way
  settled_not_detached,       // a rail may still read what another one has delivered
  ack_not_repeated,           // a request for a lost acknowledgement is not answered
  lost_wake_up,               // credit does not start what waited for it
  busy_peer_charged,          // silence alone takes a rail down
  unanswered_peer_charged,    // so does a probe that is not answered
  own_pause_charged,          // time in which we did not look counts as silence
  inquiry_never_made,         // the last rail's silence is waited out
  backoff_never_ends,         // each failed attempt doubles the wait, without limit
  abort_not_forwarded,        // a fatal verdict is kept
  railless_link_waits,        // a link without rails is waited for, for ever
  acknowledged_is_landed,     // what a one-sided rail acknowledged is taken for written
  freed_at_once,              // memory of a closed stream is used again while rails write it
  target_not_recalled,        // a call returns while a rail may still write its result
  replay_into_target,         // replays go into a target, of which its owner knows nothing
  arrival_before_result,      // a GPU is told that a result is there before it is
  abort_not_published,        // a GPU is not told that no result will come
  entry_not_awaited,          // a kernel stages where the host still reads
  block_decides_alone,        // a step counts as good that one of its blocks has given up
};
inline constexpr std::array mutant_names{
    std::string_view("none"),
    std::string_view("reuse_without_fence"),
    std::string_view("fence_reported_at_once"),
    std::string_view("fenced_epoch_not_checked"),
    std::string_view("fenced_not_repeated"),
    std::string_view("path_ack_is_delivery"),
    std::string_view("replay_starts_late"),
    std::string_view("replay_needs_another_rail"),
    std::string_view("generation_ignored"),
    std::string_view("bitmap_not_cleared"),
    std::string_view("duplicate_counted"),
    std::string_view("checksum_ignored"),
    std::string_view("credit_before_consumption"),
    std::string_view("source_freed_early"),
    std::string_view("settled_not_detached"),
    std::string_view("ack_not_repeated"),
    std::string_view("lost_wake_up"),
    std::string_view("busy_peer_charged"),
    std::string_view("unanswered_peer_charged"),
    std::string_view("own_pause_charged"),
    std::string_view("inquiry_never_made"),
    std::string_view("backoff_never_ends"),
    std::string_view("abort_not_forwarded"),
    std::string_view("railless_link_waits"),
    std::string_view("acknowledged_is_landed"),
    std::string_view("freed_at_once"),
    std::string_view("target_not_recalled"),
    std::string_view("replay_into_target"),
    std::string_view("arrival_before_result"),
    std::string_view("abort_not_published"),
    std::string_view("entry_not_awaited"),
    std::string_view("block_decides_alone"),
};
static_assert(mutant_names.size() == static_cast<std::size_t>(Mutant::block_decides_alone) + 1);

#if defined(R2CCL_MUTANTS)
inline Mutant planted_mutant = Mutant::none;
inline bool planted(Mutant mutant) { return planted_mutant == mutant; }
#else
constexpr bool planted(Mutant /*mutant*/) { return false; }
#endif

}  // namespace r2ccl
