// The flight recorder: what happened to this process's rails and collectives, in a file that other
// processes read while it is written, and after the writer died.
//
//   header | rail table | group table | ring of records
//
// Little-endian, no pointers, every entry of fixed size; the tables are live counters, one entry a
// rail and one a communicator.  r2serve/observe/journal.py reads it; docs/journal.md describes it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/errors.hpp"
#include "base/file_descriptor.hpp"
#include "base/types.hpp"

namespace r2ccl {

inline constexpr std::uint32_t journal_version = 3;

// Times are CLOCK_MONOTONIC, in ns, unless they say otherwise.
struct JournalHeader {
  char magic[8];  // "R2JOURNL"
  std::uint32_t version;
  std::uint32_t process;  // operating system's id
  std::uint32_t rail_capacity;
  std::uint32_t group_capacity;
  std::uint32_t record_capacity;
  std::uint32_t rail_count;
  std::uint32_t group_count;
  std::uint32_t engine;          // its number within the job
  std::uint64_t record_count;    // ever written; the ring holds the last record_capacity of them
  std::int64_t opened_ns;        // when the journal was made
  std::int64_t opened_clock_ns;  // CLOCK_REALTIME at that moment
  std::int64_t heartbeat_ns;  // when the process last looked after its links; 0: it has closed them
  char label[32];             // "rank 0"
  char padding[24];
};
static_assert(sizeof(JournalHeader) == 128);

struct JournalRail {
  char name[32];    // "rail0@node1"
  char peer[32];    // "rank 1"
  char device[32];  // "eth0", "mlx5_0:1"
  std::uint8_t kind;
  std::uint8_t state;
  std::uint8_t cause;
  std::uint8_t verdict;  // Verdict: where the fault is
  std::uint32_t epoch;
  std::uint8_t slow;
  std::uint8_t may_carry;       // data; the management NIC's rail may where it is the fallback
  std::uint8_t graceful_close;  // the peer has closed its links, or we are closing ours
  char padding;
  std::uint32_t peer_engine;
  std::int64_t since_ns;  // when it came to be in its state
  std::uint64_t tx_bytes;
  std::uint64_t rx_bytes;
  std::uint64_t data_tx_bytes;
  std::uint64_t replayed_chunks;
  std::uint64_t hedged_chunks;
  std::int64_t last_tx_ns;
  std::int64_t round_trip_ns;
  std::uint64_t rate;  // bytes per second when it was last what traffic waited for; 0: never
};
static_assert(sizeof(JournalRail) == 184);

// Calls of one kind.  Bucket i counts those of at most 4.096 us * 2^i that no bucket before it
// counts, the last one all that were longer.
struct JournalLatency {
  std::uint64_t calls;
  std::uint64_t total_ns;
  std::uint64_t bytes;  // of this rank's larger buffer
  std::array<std::uint64_t, 24> buckets;
};
static_assert(sizeof(JournalLatency) == 216);

struct JournalGroup {
  char name[32];  // "tp:0"
  std::uint64_t id;
  std::uint32_t rank;
  std::uint32_t ranks;
  std::int64_t call_began_ns;  // of the call that it is in; 0: none
  std::uint64_t failed_calls;
  std::uint64_t stalled_calls;
  std::uint64_t stalled_ns;
  std::uint8_t call_collective;  // Collective, while in a call
  std::uint8_t closed;
  char padding[6];
  std::array<JournalLatency, collective_count> latencies;  // by Collective
};
static_assert(sizeof(JournalGroup) == 88 + collective_count * sizeof(JournalLatency));

enum class JournalKind : std::uint8_t {
  rail_state = 1,
  stall,
  replay,
  hedge,
  abort,
  verdict,   // where the fault of a rail is
  speed,     // a rail is slow, or is so no more
  injected,  // a fault that a test or a drill puts into a rail, or its end
};

struct JournalRecord {
  std::uint64_t sequence = 0;  // 1-based; written last, so a reader sees whole records only
  std::int64_t time_ns = 0;
  JournalKind kind = JournalKind::rail_state;
  std::uint8_t from = 0;    // rail_state: RailState; stall: Collective
  std::uint8_t to = 0;      // rail_state; verdict: Verdict; speed: 1 slow, 0 not; injected: Fault
  std::uint8_t cause = 0;   // RailCause
  std::uint32_t rail = 0;   // index into the rail table; 0xFFFFFFFF: none
  std::uint32_t epoch = 0;  // stall: the step that it was in; 0: nobody told of steps
  std::uint32_t call = 0;   // stall, abort: call number within the communicator
  std::uint64_t communicator = 0;
  // stall: ns; replay, hedge: chunks; speed: bytes per second; abort: code
  std::uint64_t value = 0;
  std::uint64_t detail = 0;  // stall: bytes of the call
};
static_assert(sizeof(JournalRecord) == 56);

inline constexpr std::uint32_t no_rail_entry = 0xFFFFFFFF;

// Not for concurrent use, but for groups: each is its communicator's.
class Journal {
 public:
  struct RailNames {
    std::string_view name, peer, device;
    std::uint32_t peer_engine = 0;
  };

  // With an empty directory the journal lives in this process's memory only.  `engine` is a number
  // that no other engine of this directory has.
  static Result<Journal> open(const std::string& directory, std::uint32_t engine);
  Journal(Journal&& other) noexcept;
  Journal& operator=(Journal&&) = delete;
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;
  ~Journal();

  void set_label(std::string_view label);
  void beat(std::int64_t now);
  void closed();  // the links are; no heartbeat counts any more
  // no_rail_entry if the table is full.
  std::uint32_t add_rail(const RailNames& names);
  [[nodiscard]] JournalRail* rail(std::uint32_t entry);  // null for no_rail_entry
  // Goes on with the entry of a closed group of that name.  Null: the table is full of open ones.
  JournalGroup* add_group(std::string_view name, std::uint64_t id, int rank, int ranks);
  void record(JournalRecord record);

  [[nodiscard]] std::string_view bytes() const { return {memory_, size()}; }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  Journal(char* memory, std::string path, FileDescriptor file)
      : memory_(memory), path_(std::move(path)), file_(std::move(file)) {}
  [[nodiscard]] static std::size_t size();
  [[nodiscard]] JournalHeader& header() { return *reinterpret_cast<JournalHeader*>(memory_); }

  char* memory_;
  std::string path_;
  FileDescriptor file_;  // locked for as long as the process lives, so that others can tell
};

// What a communicator notes of its calls.  A null group notes nothing.
void note_call_begins(JournalGroup* group, Collective collective, std::int64_t now);
void note_call_ends(JournalGroup* group, std::size_t bytes, std::int64_t now, bool failed);
void note_stall(JournalGroup* group, std::int64_t ns);
void note_closed(JournalGroup* group);

}  // namespace r2ccl
