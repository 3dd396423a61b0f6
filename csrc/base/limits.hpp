// Limits of the core: bounds of counts and memory that a peer, the network or a program could make
// grow.  docs/failover.md has the effect beyond each limit.  Limits of kernels are in device/,
// since kernels are compiled apart.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace r2ccl {

// ---- equal at both ends of a link: part of the configuration fingerprint ----

// Ranks of a communicator.
inline constexpr int max_ranks = 256;
// Sets of rails, and sets of chunks of a message, are words of 64 bits.
inline constexpr std::size_t max_rails_per_link = 64;
inline constexpr std::size_t max_chunks_per_message = 64;
// Largest payloads in bytes: text of an ABORT, full-size probe, part of a posted message.
inline constexpr std::uint32_t max_abort_bytes = 480;
inline constexpr std::uint32_t max_probe_bytes = 16384;
inline constexpr std::uint32_t max_put_bytes = 1U << 20;
// Verbs rails: the largest payload sent together with the header, and the largest probe, in bytes.
inline constexpr std::uint32_t max_eager_bytes = 4096;
// Verbs rails: frames in flight per direction.
inline constexpr std::uint32_t verbs_ring_frames = 64;
// Rails of shared memory: bytes in flight per direction.
inline constexpr std::size_t shm_ring_bytes = 1U << 20;
// Receives of a connection that are not taken, and sends.
inline constexpr std::uint64_t most_posted = 32;
// The communicator of streams: bytes of a slot, slots, spare slots.  A copy on a silent rail keeps
// its slot until the fence, hence the many spare slots.
inline constexpr std::uint32_t streams_slot_bytes = 64U << 10;
inline constexpr std::uint16_t streams_slots = 16;
inline constexpr std::uint16_t streams_spare_slots = 48;
// Bytes of a stream sent ahead of its reader.
inline constexpr std::uint32_t stream_window_bytes = 1U << 20;

inline constexpr std::array<std::uint64_t, 14> shared_limits{
    max_ranks,           max_rails_per_link,  max_chunks_per_message, max_abort_bytes,
    max_probe_bytes,     max_put_bytes,       max_eager_bytes,        verbs_ring_frames,
    shm_ring_bytes,      most_posted,         streams_slot_bytes,     streams_slots,
    streams_spare_slots, stream_window_bytes,
};

// ---- communicators, by a program or a peer ----

// Open communicators of a process.  Messages of communicators that the peer has made earlier than
// this process have room for as many again.
inline constexpr std::size_t most_communicators = 4096;
// Closed communicators that a link remembers.  Frames of earlier communicators cannot be in flight
// any more.
inline constexpr std::size_t most_closed_communicators = 4096;
// Communicators without room that a link remembers.
inline constexpr std::size_t most_refused_communicators = most_communicators;
// Communicators that failed here, of which a link tells each rail that connects.
inline constexpr std::size_t most_aborts = most_communicators;
// Answers due on a rail about communicators that are closed, or not made here yet.
inline constexpr std::size_t most_answers = 256;
// Aborts of communicators not made here yet, of a process.
inline constexpr std::size_t most_early_aborts = 256;

// ---- connections of posted messages, by a peer ----

// Closed connections that a link remembers.
inline constexpr std::size_t most_closed_connections = 4096;
// Closed connections for which the peer waits: those of a link not handled yet, and those of a peer
// that were ended.
inline constexpr std::size_t most_orphans = 256;
inline constexpr std::size_t most_orphans_told = 65'536;
// Ranges of memory that a peer may announce on a rail.
inline constexpr std::size_t most_announced_ranges = 65'536;

// ---- streams of a relay, by a program or a peer ----

// Control records that wait for the link before no further stream is opened.  Answers to the peer
// have room for as many again.
inline constexpr std::size_t most_control_records = 4096;
// Open streams of a peer; further streams are reset.
inline constexpr std::size_t most_open_streams = 4096;

// ---- connections of rails, by a peer or a stranger ----

// Accepted connections before a valid HELLO from addresses that no peer has told, and after a valid
// HELLO besides one for each rail of a peer.
inline constexpr std::size_t most_strangers = 128;
// Accepted connections before a valid HELLO from addresses of peers, besides one for each rail of a
// peer: earlier attempts may still be open.
inline constexpr std::size_t most_early_knowns = 32;
// Addresses of peers that are remembered.
inline constexpr std::size_t most_known_sources = 4096;
// Accepts of each listener within stranger_tick_ns, while connections arrive without a pause.
inline constexpr int accepts_per_tick = 4;
// With more accepted connections before a valid HELLO, these are looked at once in
// stranger_tick_ns.
inline constexpr std::size_t calm_strangers = 8;
inline constexpr std::int64_t stranger_tick_ns = 1'000'000;
// Interval of the log lines about dropped connections, and most reasons in a line.
inline constexpr std::int64_t drop_log_ns = 10'000'000'000;
inline constexpr std::size_t most_drop_reasons = 16;
// Attempts of a process at the same time.  More attempts would time out where many ranks start on
// few cores.
inline constexpr std::size_t most_connects = 16;
// Further connections of all attempts together; see RailRoute::flows.  Without a limit, attempts of
// many silent rails would take all descriptors.
inline constexpr std::size_t most_rivals = 64;
// Connections of a listener that wait for an accept.
inline constexpr int listen_backlog = 128;
// Bytes that a muted rail holds back.
inline constexpr std::size_t most_held_bytes = 8U << 20;

// ---- journal, log and texts, by a program or by faults ----

// Entries of the journal; the ring of records keeps the last.  128 ranks with 16 rails each.
inline constexpr std::uint32_t journal_rails = 2048;
inline constexpr std::uint32_t journal_groups = 64;
inline constexpr std::uint32_t journal_records = 8192;
// Lines of the log between two reads.
inline constexpr std::size_t most_log_lines = 1024;
// Texts of call sites, in each of two generations.
inline constexpr std::size_t most_site_texts = 8192;
// Warnings about differing call sites of a communicator.
inline constexpr unsigned most_site_warnings = 20;

}  // namespace r2ccl
