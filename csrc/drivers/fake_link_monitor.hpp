// A LinkMonitor with simulated interfaces, for tests.  The script functions may run on another
// thread than poll().
#pragma once

#include <sys/eventfd.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.hpp"
#include "drivers/link_monitor.hpp"
#include "drivers/link_table.hpp"

namespace r2ccl {

class FakeLinkMonitor final : public LinkMonitor {
 public:
  FakeLinkMonitor() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

  // Script functions: change the simulated interfaces.
  void set_link(int ifindex, const std::string& name, bool carrier_up, bool admin_up = true) {
    change([&] { table_.set_link(ifindex, {name, carrier_up, admin_up}, pending_); });
  }
  void remove_link(int ifindex) {
    change([&] { table_.remove_link(ifindex, pending_); });
  }
  void add_address(int ifindex, const IpAddress& address, int bits = 0) {
    change([&] { table_.add_address(ifindex, address, pending_, bits); });
  }
  void remove_address(int ifindex, const IpAddress& address) {
    change([&] { table_.remove_address(ifindex, address, pending_); });
  }

  void watch(int ifindex) override {
    change([&] { table_.watch(ifindex, pending_); });
  }
  void watch(const std::string& name) override {
    change([&] { table_.watch(name, pending_); });
  }
  [[nodiscard]] std::vector<IpAddress> addresses(const std::string& name) const override {
    const std::lock_guard lock(mutex_);
    return table_.addresses(name);
  }
  [[nodiscard]] bool shares_network(const std::string& name,
                                    const IpAddress& other) const override {
    const std::lock_guard lock(mutex_);
    return table_.shares_network(name, other);
  }
  [[nodiscard]] int fd() const override { return fd_.get(); }

  void poll(const Callback& callback) override {
    std::vector<LinkEvent> events;
    {
      const std::lock_guard lock(mutex_);
      eventfd_t count = 0;
      ::eventfd_read(fd_.get(), &count);
      events = std::exchange(pending_, {});
    }
    for (const LinkEvent& event : events) callback(event);
  }

 private:
  template <typename Change>
  void change(Change apply) {
    const std::lock_guard lock(mutex_);
    apply();
    if (!pending_.empty()) ::eventfd_write(fd_.get(), 1);
  }

  const FileDescriptor fd_;
  mutable std::mutex mutex_;
  LinkTable table_;
  std::vector<LinkEvent> pending_;
};

}  // namespace r2ccl
