// The journal: a flight recorder of this process's rails and collectives.  Other processes read the
// file while the writer runs and after a crash of the writer.
//
//   header | rail table | group table | ring of records
//
// The layout is little-endian, has no pointers, and every entry has a fixed size.  The tables hold
// live counters: an entry per rail and an entry per communicator.  r2serve/observe/journal.py reads
// the file; docs/journal.md describes the format.
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

inline constexpr std::uint32_t journal_version = 5;

// Times are CLOCK_MONOTONIC in ns unless a field names another clock.
struct JournalHeader {
  char magic[8];  // "R2JOURNL"
  std::uint32_t version;
  std::uint32_t process;  // process id (pid)
  std::uint32_t rail_capacity;
  std::uint32_t group_capacity;
  std::uint32_t record_capacity;
  std::uint32_t rail_count;
  std::uint32_t group_count;
  std::uint32_t engine;          // number of the engine, unique in the job
  std::uint64_t record_count;    // records ever written; the ring keeps the last record_capacity
  std::int64_t opened_ns;        // creation of the journal
  std::int64_t opened_clock_ns;  // CLOCK_REALTIME at opened_ns
  std::int64_t heartbeat_ns;     // last progress of the links; 0: links closed
  char label[32];                // for example "rank 0"
  // Time in which the background thread wanted to run and did not: the host is short of CPU, or the
  // process was stopped.
  std::uint64_t short_of_cpu_ns;
  char serving_engine[16];  // name of the serving engine (vLLM) of this process; empty: none
  char host[64];            // name of the host; a journal may be read elsewhere
};
static_assert(sizeof(JournalHeader) == 192);

// Entry of a rail: names, state and counters.
struct JournalRail {
  char name[32];         // for example "rail0@node1"
  char peer[32];         // for example "rank 1"
  char device[32];       // for example "eth0" or "eth0/mlx5_0:1"
  std::uint8_t kind;     // RailKind
  std::uint8_t state;    // RailState
  std::uint8_t cause;    // RailCause
  std::uint8_t verdict;  // Verdict: location of the fault
  std::uint32_t epoch;
  std::uint8_t slow;
  std::uint8_t may_carry;       // may carry data; the control rail may if fallback is on
  std::uint8_t graceful_close;  // this process or the peer closes the links gracefully
  std::uint8_t been_up;         // the rail has been UP; if not UP now, the rail is lost
  std::uint32_t peer_engine;
  std::int64_t since_ns;        // start of the current state
  std::uint64_t tx_bytes;       // all frames, headers included
  std::uint64_t rx_bytes;       // all frames, headers included
  std::uint64_t data_tx_bytes;  // data frames, headers included
  std::uint64_t replayed_chunks;
  std::uint64_t hedged_chunks;
  std::int64_t last_tx_ns;     // last data frame; 0: none
  std::int64_t round_trip_ns;  // smoothed; 0: unknown
  std::uint64_t rate;  // bandwidth measured while the rail was the bottleneck, bytes/s; 0: never
  std::uint8_t connect_fault;  // ConnectFault: why the rail has never been UP
  std::uint8_t reserve;        // carries data only while no other rail is UP
  std::uint8_t unit;           // rails of a process with an equal unit above 0 share fate
  std::uint8_t drill;          // Fault of a running drill by either end; 255: unknown kind; 0: none
  std::uint32_t unheard_ms;    // time without a frame from the peer's process on any rail
};
static_assert(sizeof(JournalRail) == 192);

// Durations of all calls of a collective.  Bucket i counts calls of at most 4.096 us * 2^i and
// longer than the limit of bucket i - 1.  The last bucket also counts all longer calls.
struct JournalLatency {
  std::uint64_t calls;
  std::uint64_t total_ns;
  std::uint64_t bytes;  // sum over calls: size of this rank's larger buffer
  std::array<std::uint64_t, 24> buckets;
};
static_assert(sizeof(JournalLatency) == 216);

// Why an all-reduce took its algorithm: the caller or R2CCL_ALGORITHM gave the algorithm, the size
// decided, or the losses in use decided where the size alone leads to the other algorithm.
enum class AlgorithmReason : std::uint8_t { none, given, size, loss };
// Why an all-reduce had its shares.  none: one_shot has no shares.  Even shares: no loss in use, no
// gain by others, or too few blocks.  loss: uneven shares.
enum class SharesReason : std::uint8_t { none, no_loss, no_gain, few_blocks, loss };

// Choice of the latest all-reduce; all fields 0: none yet.
struct JournalChoice {
  std::uint8_t algorithm;         // Algorithm
  std::uint8_t algorithm_reason;  // AlgorithmReason
  std::uint8_t shares_reason;     // SharesReason
  std::uint8_t lost;              // largest loss of a node in use, in sixteenths
};

// Entry of a communicator: the call in progress, statistics of finished calls, and the choice for
// the latest all-reduce.
struct JournalGroup {
  char name[32];  // for example "tp:0"
  std::uint64_t id;
  std::uint32_t rank;
  std::uint32_t ranks;
  std::int64_t call_began_ns;  // start of the call in progress; 0: none
  std::uint64_t failed_calls;
  std::uint64_t stalled_calls;
  std::uint64_t stalled_ns;
  std::uint8_t call_collective;  // Collective of the call in progress
  std::uint8_t closed;
  JournalChoice choice;
  char padding[2];
  std::array<JournalLatency, collective_count> latencies;  // indexed by Collective
};
static_assert(sizeof(JournalGroup) == 88 + collective_count * sizeof(JournalLatency));

enum class JournalKind : std::uint8_t {
  rail_state = 1,
  stall,
  replay,
  hedge,
  abort,
  verdict,       // location of a rail's fault
  speed,         // a rail became slow or recovered
  injected,      // a test or drill injected a fault into a rail, or removed the fault
  short_of_cpu,  // this process was ready to run and did not run
};

// An event; the meaning of some fields depends on `kind`.
struct JournalRecord {
  std::uint64_t sequence = 0;  // from 1; stored last, so readers see complete records only
  std::int64_t time_ns = 0;
  JournalKind kind = JournalKind::rail_state;
  // rail_state: RailState; stall: Collective; injected: 1 if the peer reports the fault; hedge: 1
  // if a hop withheld bytes that the path had acknowledged
  std::uint8_t from = 0;
  // rail_state: RailState; verdict: Verdict; speed: 1 slow, 0 not slow; injected: Fault, 0 removed,
  // 255 unknown
  std::uint8_t to = 0;
  std::uint8_t cause = 0;  // RailCause
  std::uint32_t rail = 0;  // index into the rail table; 0xFFFFFFFF: none
  // Epoch of the rail; stall: step of the serving engine, 0: none is open.
  std::uint32_t epoch_or_step = 0;
  std::uint32_t call = 0;  // stall, abort: call number within the communicator
  std::uint64_t communicator = 0;
  // stall, short_of_cpu: ns; replay, hedge: chunks; speed: bytes/s; abort: ErrorCode; rail_state: 1
  // if a rail in use was lost
  std::uint64_t value = 0;
  // stall: bytes of the call; other records of a rail: 1 if a drill by either end explains them
  std::uint64_t detail = 0;
};
static_assert(sizeof(JournalRecord) == 56);

inline constexpr std::uint32_t no_rail_entry = 0xFFFFFFFF;

// Not thread-safe, except for group entries: each communicator writes a separate entry.
class Journal {
 public:
  struct RailNames {
    std::string_view name, peer, device;
    std::uint32_t peer_engine = 0;
  };

  // Creates the journal file.  An empty `directory` keeps the journal in private memory.  `engine`
  // is a number unique among the engines of the directory.
  static Result<Journal> open(const std::string& directory, std::uint32_t engine);

  void set_label(std::string_view label);          // cut to 31 bytes
  void set_serving_engine(std::string_view name);  // cut to 15 bytes
  // Stores the heartbeat time; no effect after closed().
  void beat(std::int64_t now);
  // Adds to the time in which this process was ready to run and did not run.
  void add_short_of_cpu(std::int64_t ns);
  // Marks the links as closed and stops the heartbeat.
  void closed();
  // Adds an entry to the rail table; names are cut to 31 bytes.  Returns no_rail_entry if the table
  // is full.
  std::uint32_t add_rail(const RailNames& names);
  [[nodiscard]] JournalRail* rail(std::uint32_t entry);  // null for no_rail_entry
  // Replaces the device of an entry; cut to 31 bytes.  No effect for no_rail_entry.
  void set_device(std::uint32_t entry, std::string_view device);
  // Returns the entry of a communicator; the name is cut to 31 bytes.  A closed entry with the same
  // name is continued.  Null: the table is full of open entries.
  JournalGroup* add_group(std::string_view name, std::uint64_t id, int rank, int ranks);
  // Appends a record and sets its `sequence`.  A full ring overwrites the oldest record.
  void record(JournalRecord record);

  // Returns a copy of the contents.  Other threads may be writing group entries.
  [[nodiscard]] std::string copy() const;
  [[nodiscard]] const std::string& path() const { return path_; }  // empty: private memory

 private:
  Journal(Mapping memory, std::string path, FileDescriptor file)
      : memory_(std::move(memory)), path_(std::move(path)), file_(std::move(file)) {}
  [[nodiscard]] static std::size_t size();
  [[nodiscard]] JournalHeader& header() { return *reinterpret_cast<JournalHeader*>(memory_.get()); }

  Mapping memory_;
  std::string path_;
  FileDescriptor file_;  // locked (flock) while the process lives; marks a live writer
};

// Update a communicator's entry when a call begins, chooses, ends or stalls, and when the
// communicator closes.  A null group is ignored.  `bytes`: size of this rank's larger buffer.  A
// failed call counts in failed_calls only.
void note_call_begins(JournalGroup* group, Collective collective, std::int64_t now);
void note_call_ends(JournalGroup* group, std::size_t bytes, std::int64_t now, bool failed);
void note_choice(JournalGroup* group, const JournalChoice& choice);
void note_stall(JournalGroup* group, std::int64_t ns);
void note_closed(JournalGroup* group);

}  // namespace r2ccl
