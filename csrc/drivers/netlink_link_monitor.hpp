// LinkMonitor over a routing netlink socket (rtnetlink(7)).  The monitor needs no privilege and
// sees the network namespace of the thread that opened the socket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "base/file_descriptor.hpp"
#include "base/units.hpp"
#include "drivers/link_monitor.hpp"
#include "drivers/link_table.hpp"

namespace r2ccl {

class NetlinkLinkMonitor final : public LinkMonitor {
 public:
  // Opens the sockets.  The kernel drops events beyond the receive buffer and reports the loss; the
  // monitor then reads everything again.  A full read briefly holds the kernel's lock on network
  // configuration, so full reads have a pause between them; meanwhile the watched interfaces are
  // read by themselves.
  static Result<std::unique_ptr<NetlinkLinkMonitor>> open(int receive_buffer_bytes = 256 * 1024);

  void watch(int ifindex) override;
  void watch(const std::string& name) override;
  [[nodiscard]] std::vector<IpAddress> addresses(const std::string& name) const override {
    return table_.addresses(name);
  }
  [[nodiscard]] bool shares_network(const std::string& name,
                                    const IpAddress& other) const override {
    return table_.shares_network(name, other);
  }
  [[nodiscard]] int fd() const override { return events_.get(); }
  void poll(const Callback& callback) override;

  // Returns the number of full reads, including the first.
  [[nodiscard]] std::uint64_t resyncs() const { return resyncs_; }

 private:
  NetlinkLinkMonitor(FileDescriptor events, FileDescriptor query);

  [[nodiscard]] bool read_events();
  void resync();
  void read_watched();
  [[nodiscard]] bool send(std::span<const std::byte> request);
  [[nodiscard]] bool dump(std::uint16_t request_type);
  [[nodiscard]] bool read_dump(std::uint32_t sequence);
  void handle(std::uint16_t type, std::span<const std::byte> payload);
  void handle_link(std::uint16_t type, std::span<const std::byte> payload);
  void handle_address(std::uint16_t type, std::span<const std::byte> payload);

  const FileDescriptor events_;  // member of the multicast groups
  const FileDescriptor query_;   // for dumps only: keeps replies apart from events
  bool resync_wanted_ = true;
  bool events_lost_ = false;  // and neither a full read nor read_watched() has followed
  TimeNs resync_at_ = 0;      // earliest time of the next full read
  std::uint64_t resyncs_ = 0;
  std::uint32_t sequence_ = 0;
  LinkTable table_;
  std::vector<LinkEvent> pending_;
  std::vector<std::byte> buffer_;
};

}  // namespace r2ccl
