// Finds errors of connections without a reaction of the program.  NCCL 2.26 and 2.27 lose errors of
// a plugin, and some programs never ask NCCL: the kernels of the job would wait without end.  A
// program that reacts closes the connection.  Thread-safe.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "base/units.hpp"

namespace r2ccl::net {

class Watchdog {
 public:
  // `limit`: time between an error and the end; 0: no end.
  explicit Watchdog(TimeNs limit) : limit_(limit) {}

  void failed(const void* connection, const std::string& why, TimeNs now);  // the first counts
  void closed(const void* connection);
  // Returns the text of an error that has been ignored for the limit.
  [[nodiscard]] std::optional<std::string> ignored(TimeNs now) const;

 private:
  struct Error {
    TimeNs since;
    std::string why;
  };
  const TimeNs limit_;
  mutable std::mutex mutex_;  // protects the errors
  std::map<const void*, Error> errors_;
};

}  // namespace r2ccl::net
