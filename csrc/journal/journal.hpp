// The flight recorder: what happened to this process's rails, as fixed-size records in a file that
// other processes map and read while it is written, and after the writer died.
//
//   header | rail table (live counters, one entry a rail) | ring of records
//
// Little-endian, no pointers, every entry of fixed size.  r2serve/observe/journal.py reads it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "r2ccl/errors.hpp"

namespace r2ccl {

inline constexpr std::uint32_t journal_version = 2;

struct JournalHeader {
  char magic[8];  // "R2JOURNL"
  std::uint32_t version;
  std::uint32_t process;  // operating system's id
  std::uint32_t rail_capacity;
  std::uint32_t record_capacity;
  std::uint32_t rail_count;
  std::uint32_t reserved;
  std::uint64_t record_count;  // ever written; the ring holds the last record_capacity of them
  char padding[24];
};
static_assert(sizeof(JournalHeader) == 64);

struct JournalRail {
  char name[32];  // "rail0@node1"
  char peer[32];  // "rank 1"
  std::uint8_t kind;
  std::uint8_t state;
  std::uint8_t cause;
  std::uint8_t verdict;  // Verdict: where the fault is
  std::uint32_t epoch;
  std::uint64_t tx_bytes;
  std::uint64_t rx_bytes;
  std::uint64_t data_tx_bytes;
  std::uint64_t replayed_chunks;
  std::uint64_t hedged_chunks;
  std::int64_t last_tx_ns;
  std::int64_t round_trip_ns;
  std::uint64_t rate;  // bytes per second when it was last what traffic waited for; 0: never
};
static_assert(sizeof(JournalRail) == 136);

enum class JournalKind : std::uint8_t {
  rail_state = 1,
  stall,
  replay,
  hedge,
  abort,
  verdict,  // where the fault of a rail is
  speed,    // a rail is slow, or is so no more
};

struct JournalRecord {
  std::uint64_t sequence = 0;  // 1-based; written last, so a reader sees whole records only
  std::int64_t time_ns = 0;    // CLOCK_MONOTONIC
  JournalKind kind = JournalKind::rail_state;
  std::uint8_t from = 0;   // rail_state: RailState
  std::uint8_t to = 0;     // verdict: Verdict; speed: 1 slow, 0 not
  std::uint8_t cause = 0;  // RailCause
  std::uint32_t rail = 0;  // index into the rail table; 0xFFFFFFFF: none
  std::uint32_t epoch = 0;
  std::uint32_t call = 0;  // stall: call number within the communicator
  std::uint64_t communicator = 0;
  std::uint64_t value = 0;   // stall: ns; replay, hedge: chunks; speed: bytes per second
  std::uint64_t detail = 0;  // stall: bytes of the call
};
static_assert(sizeof(JournalRecord) == 56);

inline constexpr std::uint32_t no_rail_entry = 0xFFFFFFFF;

// Not for concurrent use.
class Journal {
 public:
  // With an empty directory the journal lives in this process's memory only.
  static Result<Journal> open(const std::string& directory);
  Journal(Journal&& other) noexcept;
  Journal& operator=(Journal&&) = delete;
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;
  ~Journal();

  // no_rail_entry if the table is full.
  std::uint32_t add_rail(std::string_view name, std::string_view peer);
  [[nodiscard]] JournalRail* rail(std::uint32_t entry);  // null for no_rail_entry
  void record(JournalRecord record);

  [[nodiscard]] std::string_view bytes() const { return {memory_, size()}; }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  Journal(char* memory, std::string path) : memory_(memory), path_(std::move(path)) {}
  [[nodiscard]] static std::size_t size();
  [[nodiscard]] JournalHeader& header() { return *reinterpret_cast<JournalHeader*>(memory_); }

  char* memory_;
  std::string path_;
};

}  // namespace r2ccl
