#include "journal/journal.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <span>
#include <sstream>
#include <utility>

#include "base/first_number.hpp"
#include "base/limits.hpp"

namespace r2ccl {
namespace {

constexpr std::size_t rails_offset = sizeof(JournalHeader);
constexpr std::size_t groups_offset = rails_offset + journal_rails * sizeof(JournalRail);
constexpr std::size_t records_offset = groups_offset + journal_groups * sizeof(JournalGroup);
constexpr int first_bucket_log2 = 12;  // 4.096 us

void copy_text(char* target, std::size_t capacity, std::string_view text) {
  const std::size_t length = std::min(capacity - 1, text.size());
  std::memcpy(target, text.data(), length);
  target[length] = '\0';
}

// Stores atomically: a reader in another process sees the old or the new value, never a torn value.
template <typename Value>
void publish(Value& place, Value value) {
  std::atomic_ref(place).store(value, std::memory_order_relaxed);
}

template <typename Value>
void add(Value& place, Value value) {
  publish(place, static_cast<Value>(place + value));
}

std::int64_t clock_ns(clockid_t clock) {
  timespec now{};
  (void)::clock_gettime(clock, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

std::string file_name(std::uint32_t engine) {
  std::ostringstream name;
  name << "/r2ccl-" << ::getpid() << '-' << std::hex << engine << ".journal";
  return name.str();
}

}  // namespace

std::size_t Journal::size() { return records_offset + journal_records * sizeof(JournalRecord); }

Result<Journal> Journal::open(const std::string& directory, std::uint32_t engine) {
  FileDescriptor file;
  std::string path;
  if (!directory.empty()) {
    path = directory + file_name(engine);
    // O_EXCL: an existing file may belong to another process or be a symbolic link.
    file = FileDescriptor::made_by(
        [&path] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600); });
    // Allocate all blocks now: a store to a mapped page of a full file system raises SIGBUS.
    int error = file.valid() ? ::posix_fallocate(file.get(), 0, static_cast<off_t>(size())) : errno;
    if (error == 0 && ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) error = errno;
    if (error != 0) {
      if (file.valid()) (void)::unlink(path.c_str());
      return Status(ErrorCode::invalid_argument,
                    "R2CCL_JOURNAL_DIR: cannot write '" + path + "': " + std::strerror(error));
    }
  }
  const int flags = file.valid() ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* memory = ::mmap(nullptr, size(), PROT_READ | PROT_WRITE, flags, file.get(), 0);
  if (memory == MAP_FAILED)
    return Status(ErrorCode::internal,
                  std::string("cannot map the journal: ") + std::strerror(errno));
  Journal journal(Mapping(memory, size()), path, std::move(file));
  JournalHeader& header = journal.header();
  header.version = journal_version;
  header.process = static_cast<std::uint32_t>(::getpid());
  header.rail_capacity = journal_rails;
  header.group_capacity = journal_groups;
  header.record_capacity = journal_records;
  header.opened_clock_ns = clock_ns(CLOCK_REALTIME);
  header.record_count = first_number();
  header.opened_ns = header.heartbeat_ns = clock_ns(CLOCK_MONOTONIC);
  header.engine = engine;
  std::array<char, sizeof(header.host)> host{};  // a longer name is cut
  (void)::gethostname(host.data(), host.size() - 1);
  copy_text(header.host, sizeof(header.host), host.data());
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(header.magic, "R2JOURNL", sizeof(header.magic));
  return journal;
}

std::string Journal::copy() const {
  using Word = std::uint64_t;
  std::string bytes(size(), '\0');
  auto* const words = reinterpret_cast<Word*>(memory_.get());
  for (std::size_t i = 0; i < size() / sizeof(Word); ++i) {
    const Word word = std::atomic_ref(words[i]).load(std::memory_order_relaxed);
    std::memcpy(bytes.data() + i * sizeof(word), &word, sizeof(word));
  }
  return bytes;
}

void Journal::set_label(std::string_view label) {
  copy_text(header().label, sizeof(header().label), label);
}

void Journal::set_serving_engine(std::string_view name) {
  copy_text(header().serving_engine, sizeof(header().serving_engine), name);
}

void Journal::beat(std::int64_t now) {
  if (header().heartbeat_ns != 0) publish(header().heartbeat_ns, now);
}

void Journal::add_short_of_cpu(std::int64_t ns) {
  publish(header().short_of_cpu_ns, header().short_of_cpu_ns + static_cast<std::uint64_t>(ns));
}

void Journal::closed() { publish(header().heartbeat_ns, std::int64_t{0}); }

std::uint32_t Journal::add_rail(const RailNames& names) {
  const std::uint32_t entry = header().rail_count;
  if (entry >= journal_rails) return no_rail_entry;
  JournalRail* added = reinterpret_cast<JournalRail*>(memory_.get() + rails_offset) + entry;
  copy_text(added->name, sizeof(added->name), names.name);
  copy_text(added->peer, sizeof(added->peer), names.peer);
  copy_text(added->device, sizeof(added->device), names.device);
  added->peer_engine = names.peer_engine;
  std::atomic_ref(header().rail_count).store(entry + 1, std::memory_order_release);
  return entry;
}

JournalRail* Journal::rail(std::uint32_t entry) {
  if (entry == no_rail_entry) return nullptr;
  return reinterpret_cast<JournalRail*>(memory_.get() + rails_offset) + entry;
}

void Journal::set_device(std::uint32_t entry, std::string_view device) {
  JournalRail* const found = rail(entry);
  if (found == nullptr) return;
  copy_text(found->device, sizeof(found->device), device);
}

JournalGroup* Journal::add_group(std::string_view name, std::uint64_t id, int rank, int ranks) {
  const std::span groups(reinterpret_cast<JournalGroup*>(memory_.get() + groups_offset),
                         journal_groups);
  const auto used = groups.first(header().group_count);
  const auto closed = [](const JournalGroup& group) { return group.closed != 0; };
  auto entry = std::ranges::find_if(
      used, [&](const JournalGroup& group) { return closed(group) && name == group.name; });
  if (entry == used.end() && used.size() == journal_groups) {
    entry = std::ranges::find_if(used, closed);
    if (entry == used.end()) return nullptr;
    *entry = {};
  }
  const bool added = entry == used.end();
  JournalGroup& group = added ? groups[used.size()] : *entry;
  copy_text(group.name, sizeof(group.name), name);
  group.id = id;
  group.rank = static_cast<std::uint32_t>(rank);
  group.ranks = static_cast<std::uint32_t>(ranks);
  publish(group.closed, std::uint8_t{0});
  if (added)
    std::atomic_ref(header().group_count)
        .store(header().group_count + 1, std::memory_order_release);
  return &group;
}

void Journal::record(JournalRecord record) {
  const std::uint64_t count = header().record_count;
  auto* place =
      reinterpret_cast<JournalRecord*>(memory_.get() + records_offset) + count % journal_records;
  record.sequence = 0;
  std::atomic_ref(place->sequence).store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // sequence 0 before the contents
  std::memcpy(place, &record, sizeof(record));
  std::atomic_ref(place->sequence).store(count + 1, std::memory_order_release);
  std::atomic_ref(header().record_count).store(count + 1, std::memory_order_release);
}

void note_call_begins(JournalGroup* group, Collective collective, std::int64_t now) {
  if (group == nullptr) return;
  publish(group->call_collective, static_cast<std::uint8_t>(collective));
  publish(group->call_began_ns, now);
}

void note_call_ends(JournalGroup* group, std::size_t bytes, std::int64_t now, bool failed) {
  if (group == nullptr) return;
  const auto took =
      static_cast<std::uint64_t>(std::max<std::int64_t>(1, now - group->call_began_ns));
  publish(group->call_began_ns, std::int64_t{0});
  if (failed) return add(group->failed_calls, std::uint64_t{1});
  JournalLatency& latency = group->latencies[group->call_collective];
  const std::uint64_t units = (took - 1) >> first_bucket_log2;
  const auto bucket = std::min<std::size_t>(std::bit_width(units), latency.buckets.size() - 1);
  add(latency.calls, std::uint64_t{1});
  add(latency.total_ns, took);
  add(latency.bytes, std::uint64_t{bytes});
  add(latency.buckets[bucket], std::uint64_t{1});
}

void note_choice(JournalGroup* group, const JournalChoice& choice) {
  if (group == nullptr) return;
  publish(group->choice.algorithm, choice.algorithm);
  publish(group->choice.algorithm_reason, choice.algorithm_reason);
  publish(group->choice.shares_reason, choice.shares_reason);
  publish(group->choice.lost, choice.lost);
}

void note_stall(JournalGroup* group, std::int64_t ns) {
  if (group == nullptr) return;
  add(group->stalled_calls, std::uint64_t{1});
  add(group->stalled_ns, static_cast<std::uint64_t>(ns));
}

void note_closed(JournalGroup* group) {
  if (group != nullptr) publish(group->closed, std::uint8_t{1});
}

}  // namespace r2ccl
