// Mutants: deliberate bugs for testing the checks of the simulator.  A build with R2CCL_MUTANTS can
// enable a single mutant at a time.  In all other builds planted() is false at compile time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace r2ccl {

enum class Mutant : std::uint8_t {
  none,
  reuse_without_fence,        // a slot is reused with credit, without a fence
  fence_reported_at_once,     // an epoch counts as fenced when its fence starts
  fenced_epoch_not_checked,   // FENCED of an old epoch counts for the open epoch
  fenced_not_repeated,        // FENCED is sent only once
  path_ack_is_delivery,       // path-acked chunks are not replayed
  replay_starts_late,         // the replay skips the first undelivered message
  replay_needs_another_rail,  // without another rail, lost chunks are dropped
  generation_ignored,         // a chunk of an old message counts for the new message
  bitmap_not_cleared,         // the next message starts with the old chunk bits
  duplicate_counted,          // a duplicate chunk is counted
  checksum_ignored,           // a wrong chunk checksum is accepted
  credit_before_consumption,  // credit covers unread messages
  source_freed_early,         // a call returns while its bytes are in flight
  settled_not_detached,       // a rail may still read memory of delivered chunks
  ack_not_repeated,           // an ack request is not answered
  lost_wake_up,               // new credit does not resume blocked sends
  busy_peer_charged,          // silence alone takes a rail DOWN
  unanswered_peer_charged,    // an unanswered probe alone takes a rail DOWN
  late_ack_charged,           // a rail goes DOWN at the ack deadline
  inquiry_never_made,         // silence of the last rail triggers no inquiry
  backoff_never_ends,         // back-off doubles without an upper bound
  abort_not_forwarded,        // ABORT is not sent to other ranks
  railless_link_waits,        // a call waits forever for a link without rails
  acknowledged_is_landed,     // an RDMA path ack counts as written
  freed_at_once,              // memory of a closed stream is freed while rails write
  target_not_recalled,        // a call returns while a rail may write its result
  replay_into_target,         // a replay writes to a target, unexpected by the receiver
  arrival_before_result,      // a GPU is notified before the result is complete
  abort_not_published,        // a GPU is not notified of an abort
  entry_not_awaited,          // a kernel overwrites staging in use by the host
  block_decides_alone,        // a step succeeds although a block has given up
  reserve_shares_traffic,     // a reserve carries data beside better rails
  unit_ignored,               // the loss of a rail endangers no rail of its unit
  copy_not_deduplicated,      // a late copy of a message counts as a new message
  credit_lost_on_replay,      // credit of a stream is lost if a replay carried the record
  fin_overtakes_data,         // the end of a stream overtakes its queued bytes
  mirror_before_listener,     // SYNC overtakes LISTENS: a mirror is reported before it listens
  window_ignored,             // a stream is sent beyond its credit
  stream_id_reused,           // a new stream gets the id of an ended stream
  room_before_fence,          // an attempt is permitted while the last rail may still write
  sent_before_delivery,       // a path ack ends a posted send
  sent_while_read,            // a posted send ends while a rail may read its source
  room_not_repeated,          // ROOM is sent only once
  old_try_answered,           // a question about an older try leads to a further permission
  share_border_off,           // a border of uneven shares is one byte off
  bandwidths_not_adopted,     // a rank goes on using the bandwidths of an earlier call
  bandwidths_damped,          // a rank adopts bandwidths only if its own node's has changed
  drill_announced_once,       // the announcement of a drill is sent only once
  position_not_compared,      // any empty message counts as the end of a peer's step
  waits_not_compared,         // ranks that only wait for each other hear nothing of it
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
    std::string_view("late_ack_charged"),
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
    std::string_view("reserve_shares_traffic"),
    std::string_view("unit_ignored"),
    std::string_view("copy_not_deduplicated"),
    std::string_view("credit_lost_on_replay"),
    std::string_view("fin_overtakes_data"),
    std::string_view("mirror_before_listener"),
    std::string_view("window_ignored"),
    std::string_view("stream_id_reused"),
    std::string_view("room_before_fence"),
    std::string_view("sent_before_delivery"),
    std::string_view("sent_while_read"),
    std::string_view("room_not_repeated"),
    std::string_view("old_try_answered"),
    std::string_view("share_border_off"),
    std::string_view("bandwidths_not_adopted"),
    std::string_view("bandwidths_damped"),
    std::string_view("drill_announced_once"),
    std::string_view("position_not_compared"),
    std::string_view("waits_not_compared"),
};
static_assert(mutant_names.size() == static_cast<std::size_t>(Mutant::waits_not_compared) + 1);

#if defined(R2CCL_MUTANTS)
inline Mutant planted_mutant = Mutant::none;
inline bool planted(Mutant mutant) { return planted_mutant == mutant; }
#else
constexpr bool planted(Mutant /*mutant*/) { return false; }
#endif

}  // namespace r2ccl
