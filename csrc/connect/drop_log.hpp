// Log lines about dropped connections: the first at once, later ones as one line in 10 s. Strangers
// thus cannot fill the log.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/log.hpp"
#include "base/units.hpp"

namespace r2ccl {

class DropLog {
 public:
  DropLog(LogQueue& log, LogLevel level) : log_(log), level_(level) {}

  void add(const std::string& remote, const std::string& why, TimeNs now);
  // Writes the line that is due.
  void progress(TimeNs now);

 private:
  LogQueue& log_;
  const LogLevel level_;
  TimeNs quiet_until_ = 0;
  std::uint64_t dropped_ = 0;                     // not written yet
  std::map<std::string, std::uint64_t> reasons_;  // of these; a bounded number of reasons
  std::string last_;                              // address of the last
};

}  // namespace r2ccl
