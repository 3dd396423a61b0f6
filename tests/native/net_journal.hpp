// The journal of a process with the network plugin, read from its file as r2serve's commands do.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "engine/peer.hpp"
#include "journal/journal.hpp"

namespace r2ccl::testing {

// A folder for journals that ends with the object.
class JournalFolder {
 public:
  JournalFolder() { std::filesystem::create_directories(path); }
  ~JournalFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  JournalFolder(const JournalFolder&) = delete;
  JournalFolder& operator=(const JournalFolder&) = delete;

  const std::string path = ::testing::TempDir() + "net-journals-" + std::to_string(::getpid());
};

class JournalFile {
 public:
  // The folder must have a journal of the process.
  JournalFile(const std::string& folder, pid_t process) {
    const std::string begin = "r2ccl-" + std::to_string(process) + "-";
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      if (entry.path().filename().string().starts_with(begin)) path_ = entry.path();
    seen_ = header().record_count;
  }

  [[nodiscard]] bool exists() const { return !path_.empty(); }

  [[nodiscard]] JournalHeader header() const {
    JournalHeader found{};
    read(0, found);
    return found;
  }

  // Returns how many times this process has injected the fault into a rail since the last call.
  std::size_t new_faults(Fault fault) {
    const JournalHeader now = header();
    std::size_t count = 0;
    for (; seen_ < now.record_count; ++seen_) {
      JournalRecord record;
      read(records_at(now) + seen_ % now.record_capacity * sizeof(record), record);
      if (record.kind == JournalKind::injected && record.from == 0 &&
          record.to == static_cast<std::uint8_t>(fault))
        ++count;
    }
    return count;
  }

 private:
  static std::size_t records_at(const JournalHeader& of) {
    return sizeof(JournalHeader) + of.rail_capacity * sizeof(JournalRail) +
           of.group_capacity * sizeof(JournalGroup);
  }
  template <typename Value>
  void read(std::size_t offset, Value& value) const {
    std::ifstream file(path_, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    file.read(reinterpret_cast<char*>(&value), static_cast<std::streamsize>(sizeof(value)));
  }

  std::filesystem::path path_;
  std::uint64_t seen_ = 0;  // records counted so far
};

}  // namespace r2ccl::testing
