// LinkMonitor without events, for processes that may not open a routing netlink socket (seccomp,
// RestrictAddressFamilies of systemd).  A lost port is then noticed by the deadlines of its rails.
#pragma once

#include <sys/eventfd.h>

#include <string>
#include <vector>

#include "base/file_descriptor.hpp"
#include "drivers/link_monitor.hpp"

namespace r2ccl {

class SilentLinkMonitor final : public LinkMonitor {
 public:
  void watch(int) override {}
  void watch(const std::string&) override {}
  [[nodiscard]] std::vector<IpAddress> addresses(const std::string&) const override { return {}; }
  [[nodiscard]] bool shares_network(const std::string&, const IpAddress&) const override {
    return false;
  }
  [[nodiscard]] int fd() const override { return never_.get(); }
  void poll(const Callback&) override {}

 private:
  const FileDescriptor never_ =
      FileDescriptor::made_by([] { return ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); });
};

}  // namespace r2ccl
