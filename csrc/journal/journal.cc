#include "journal/journal.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "drivers/file_descriptor.hpp"

namespace r2ccl {
namespace {

constexpr std::uint32_t rail_capacity = 512;
constexpr std::uint32_t record_capacity = 8192;
constexpr std::size_t rails_offset = sizeof(JournalHeader);
constexpr std::size_t records_offset = rails_offset + rail_capacity * sizeof(JournalRail);

void copy_text(char* target, std::size_t capacity, std::string_view text) {
  const std::size_t length = std::min(capacity - 1, text.size());
  std::memcpy(target, text.data(), length);
  target[length] = '\0';
}

}  // namespace

std::size_t Journal::size() { return records_offset + record_capacity * sizeof(JournalRecord); }

Result<Journal> Journal::open(const std::string& directory) {
  FileDescriptor file;
  std::string path;
  if (!directory.empty()) {
    path = directory + "/r2ccl-" + std::to_string(::getpid()) + ".journal";
    file = FileDescriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!file.valid() || ::ftruncate(file.get(), static_cast<off_t>(size())) != 0)
      return Status(ErrorCode::invalid_argument,
                    "R2CCL_JOURNAL_DIR: cannot write '" + path + "': " + std::strerror(errno));
  }
  const int flags = file.valid() ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* memory = ::mmap(nullptr, size(), PROT_READ | PROT_WRITE, flags, file.get(), 0);
  if (memory == MAP_FAILED)
    return Status(ErrorCode::internal,
                  std::string("cannot map the journal: ") + std::strerror(errno));
  Journal journal(static_cast<char*>(memory), path);
  JournalHeader& header = journal.header();
  header.version = journal_version;
  header.process = static_cast<std::uint32_t>(::getpid());
  header.rail_capacity = rail_capacity;
  header.record_capacity = record_capacity;
  std::memcpy(header.magic, "R2JOURNL", sizeof(header.magic));
  return journal;
}

Journal::Journal(Journal&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)), path_(std::move(other.path_)) {}

Journal::~Journal() {
  if (memory_ != nullptr) ::munmap(memory_, size());
}

std::uint32_t Journal::add_rail(std::string_view name, std::string_view peer) {
  const std::uint32_t entry = header().rail_count;
  if (entry >= rail_capacity) return no_rail_entry;
  JournalRail* added = reinterpret_cast<JournalRail*>(memory_ + rails_offset) + entry;
  copy_text(added->name, sizeof(added->name), name);
  copy_text(added->peer, sizeof(added->peer), peer);
  std::atomic_ref(header().rail_count).store(entry + 1, std::memory_order_release);
  return entry;
}

JournalRail* Journal::rail(std::uint32_t entry) {
  if (entry == no_rail_entry) return nullptr;
  return reinterpret_cast<JournalRail*>(memory_ + rails_offset) + entry;
}

void Journal::record(JournalRecord record) {
  const std::uint64_t count = header().record_count;
  auto* place =
      reinterpret_cast<JournalRecord*>(memory_ + records_offset) + count % record_capacity;
  record.sequence = 0;
  std::atomic_ref(place->sequence).store(0, std::memory_order_release);
  std::memcpy(place, &record, sizeof(record));
  std::atomic_ref(place->sequence).store(count + 1, std::memory_order_release);
  std::atomic_ref(header().record_count).store(count + 1, std::memory_order_release);
}

}  // namespace r2ccl
