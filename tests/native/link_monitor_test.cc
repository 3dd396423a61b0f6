#include "drivers/link_monitor.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <thread>

#include "base/file_descriptor.hpp"
#include "drivers/fake_link_monitor.hpp"
#include "drivers/interfaces.hpp"
#include "drivers/netlink_link_monitor.hpp"
#include "eventually.hpp"

namespace r2ccl {

// Formats an event as "state a up" or "address_added a 10.0.0.1", to compare whole sequences.
std::string brief(const LinkEvent& event) {
  switch (event.kind) {
    case LinkEventKind::state:
      return "state " + event.name +
             (event.carrier_up ? " up" : (event.admin_up ? " no-carrier" : " down"));
    case LinkEventKind::removed: return "removed " + event.name;
    case LinkEventKind::address_added:
      return "address_added " + event.name + " " + event.address.to_string();
    case LinkEventKind::address_removed:
      return "address_removed " + event.name + " " + event.address.to_string();
  }
  return "unknown";
}

namespace {

using Lines = std::vector<std::string>;

IpAddress ip(const char* text) { return IpAddress::parse(text).value(); }

Lines poll_lines(LinkMonitor& monitor) {
  Lines lines;
  monitor.poll([&](const LinkEvent& event) { lines.push_back(brief(event)); });
  return lines;
}

bool has(const Lines& lines, const std::string& line) {
  return std::find(lines.begin(), lines.end(), line) != lines.end();
}

const int patience_ms = static_cast<int>(testing::patience_s * 1000);

bool readable(int fd, int timeout_ms) {
  pollfd item{.fd = fd, .events = POLLIN, .revents = 0};
  return ::poll(&item, 1, timeout_ms) == 1;
}

TEST(IpAddress, SharesANetworkByItsFirstBits) {
  EXPECT_TRUE(ip("10.1.2.3").shares_network(ip("10.1.2.200"), 24));
  EXPECT_FALSE(ip("10.1.2.3").shares_network(ip("10.1.3.3"), 24));
  EXPECT_TRUE(ip("10.1.2.3").shares_network(ip("10.1.3.3"), 23));
  EXPECT_FALSE(ip("10.1.2.3").shares_network(ip("10.1.2.2"), 32));
  EXPECT_TRUE(ip("fd00::1").shares_network(ip("fd00::ffff:1"), 64));
  EXPECT_FALSE(ip("fd00::1").shares_network(ip("fd01::1"), 16));
  EXPECT_FALSE(ip("10.1.2.3").shares_network(ip("10.1.2.3"), 0)) << "the length is unknown";
  EXPECT_FALSE(ip("10.1.2.3").shares_network(ip("fd00::1"), 8));
}

TEST(IpAddress, ReadsAndWritesNumericText) {
  for (const char* text :
       {"10.0.0.1", "255.255.255.255", "0.0.0.0", "::1", "fd00::12", "fe80::1"}) {
    EXPECT_EQ(ip(text).to_string(), text);
  }
  for (const char* text : {"", "10.0.0", "10.0.0.1/24", "host", "fe80::1%eth0", "1.2.3.4.5"}) {
    EXPECT_FALSE(IpAddress::parse(text).has_value()) << text;
  }
  EXPECT_TRUE(ip("127.9.8.7").is_loopback());
  EXPECT_TRUE(ip("::1").is_loopback());
  EXPECT_FALSE(ip("128.0.0.1").is_loopback());
  EXPECT_FALSE(ip("::2").is_loopback());
  EXPECT_FALSE(ip("1::1").is_loopback());
  EXPECT_FALSE(IpAddress::from_bytes(AF_INET, std::as_bytes(std::span("12345"))).has_value());
  EXPECT_EQ(IpAddress().to_string(), "none");
}

TEST(IpAddress, IsReplaceableOnlyByAnAddressOfItsScope) {
  for (const char* text : {"0.0.0.0", "0.1.2.3", "224.0.0.1", "255.255.255.255", "::", "ff02::1",
                           "::ffff:127.0.0.1", "::ffff:10.0.0.1"})
    EXPECT_EQ(ip(text).scope(), AddressScope::none) << text;
  for (const char* text : {"127.0.0.1", "127.9.8.7", "::1"})
    EXPECT_EQ(ip(text).scope(), AddressScope::loopback) << text;
  for (const char* text : {"169.254.0.1", "fe80::1", "febf::1"})
    EXPECT_EQ(ip(text).scope(), AddressScope::link) << text;
  for (const char* text :
       {"10.0.0.1", "169.253.0.1", "223.1.1.1", "fd00::1", "2001:db8::1", "fec0::1"})
    EXPECT_EQ(ip(text).scope(), AddressScope::global) << text;
  EXPECT_EQ(IpAddress().scope(), AddressScope::none);

  EXPECT_TRUE(ip("10.0.0.1").replaceable_by(ip("192.168.0.1")));
  EXPECT_TRUE(ip("fd00::1").replaceable_by(ip("2001:db8::1")));
  EXPECT_TRUE(ip("fe80::1").replaceable_by(ip("fe80::2")));
  EXPECT_FALSE(ip("fd00::1").replaceable_by(ip("fe80::2")));
  EXPECT_FALSE(ip("10.0.0.1").replaceable_by(ip("fd00::1")));
  EXPECT_FALSE(ip("10.0.0.1").replaceable_by(ip("127.0.0.1")));
  EXPECT_FALSE(ip("10.0.0.1").replaceable_by(ip("224.0.0.1")));
  EXPECT_FALSE(IpAddress().replaceable_by(IpAddress()));

  // A port without an address so far takes any address of its family.
  for (const char* text : {"10.0.0.1", "169.254.0.1"})
    EXPECT_TRUE(ip("0.0.0.0").replaceable_by(ip(text))) << text;
  for (const char* text : {"fd00::1", "224.0.0.1", "0.0.0.0"})
    EXPECT_FALSE(ip("0.0.0.0").replaceable_by(ip(text))) << text;
  EXPECT_TRUE(ip("::").is_unspecified());
  EXPECT_FALSE(ip("::1").is_unspecified());
  EXPECT_FALSE(IpAddress().is_unspecified());
}

TEST(FakeLinkMonitor, ListsTheAddressesOfADevice) {
  FakeLinkMonitor monitor;
  monitor.set_link(1, "a", true);
  monitor.set_link(2, "b", true);
  EXPECT_TRUE(monitor.addresses("a").empty());
  for (const char* text : {"fd00::1", "10.0.0.2", "10.0.0.1"}) monitor.add_address(1, ip(text));
  monitor.add_address(2, ip("10.0.0.3"));
  EXPECT_EQ(monitor.addresses("a"), (std::vector{ip("10.0.0.1"), ip("10.0.0.2"), ip("fd00::1")}));
  monitor.remove_address(1, ip("10.0.0.1"));
  monitor.remove_link(2);
  EXPECT_EQ(monitor.addresses("a"), (std::vector{ip("10.0.0.2"), ip("fd00::1")}));
  EXPECT_TRUE(monitor.addresses("b").empty());
}

TEST(FakeLinkMonitor, ReportsWatchedInterfacesOnly) {
  FakeLinkMonitor monitor;
  monitor.set_link(1, "a", true);
  monitor.set_link(2, "b", true);
  monitor.add_address(1, ip("10.0.0.1"));
  EXPECT_FALSE(readable(monitor.fd(), 0));
  EXPECT_EQ(poll_lines(monitor), Lines{});
  monitor.watch(1);
  EXPECT_TRUE(readable(monitor.fd(), 0));
  EXPECT_EQ(poll_lines(monitor), (Lines{"state a up", "address_added a 10.0.0.1"}));
  EXPECT_FALSE(readable(monitor.fd(), 0));
  monitor.set_link(2, "b", false);
  EXPECT_EQ(poll_lines(monitor), Lines{});
}

TEST(FakeLinkMonitor, ReportsEveryChangeOnceAndInOrder) {
  FakeLinkMonitor monitor;
  monitor.watch("a");
  monitor.set_link(1, "a", true);
  monitor.set_link(1, "a", true);
  monitor.set_link(1, "a", false);
  monitor.set_link(1, "a", true);
  monitor.set_link(1, "a", false, false);
  monitor.add_address(1, ip("10.0.0.1"));
  monitor.add_address(1, ip("10.0.0.1"));
  monitor.remove_address(1, ip("10.0.0.2"));
  monitor.remove_address(1, ip("10.0.0.1"));
  monitor.remove_link(1);
  monitor.remove_link(1);
  monitor.add_address(1, ip("10.0.0.1"));
  EXPECT_EQ(poll_lines(monitor),
            (Lines{"state a up", "state a no-carrier", "state a up", "state a down",
                   "address_added a 10.0.0.1", "address_removed a 10.0.0.1", "removed a"}));
}

TEST(FakeLinkMonitor, AWatchedNameFollowsItsDevice) {
  FakeLinkMonitor monitor;
  monitor.watch("a");
  monitor.set_link(1, "a", true);
  monitor.remove_link(1);
  monitor.set_link(7, "a", true);
  monitor.set_link(7, "z", true);
  monitor.set_link(7, "z", false);
  monitor.add_address(7, ip("10.0.0.1"));
  monitor.set_link(7, "a", false);
  EXPECT_EQ(poll_lines(monitor), (Lines{"state a up", "removed a", "state a up", "removed a",
                                        "state a no-carrier", "address_added a 10.0.0.1"}));
}

TEST(FakeLinkMonitor, IndexStaysThroughARename) {
  FakeLinkMonitor monitor;
  monitor.watch(1);
  monitor.watch("a");
  monitor.set_link(1, "a", true);
  monitor.set_link(1, "z", true);
  EXPECT_EQ(poll_lines(monitor), (Lines{"state a up", "state z up"}));
}

TEST(FakeLinkMonitor, CallbackMayWatchMore) {
  FakeLinkMonitor monitor;
  monitor.set_link(2, "b", true);
  monitor.watch("a");
  monitor.set_link(1, "a", true);
  monitor.poll([&](const LinkEvent&) { monitor.watch("b"); });
  EXPECT_EQ(poll_lines(monitor), Lines{"state b up"});
}

TEST(LinkTable, ResyncReportsTheDifference) {
  LinkTable table;
  LinkTable::Events events;
  for (const char* name : {"a", "b", "c"}) table.watch(std::string(name), events);
  table.set_link(1, {"a", true, true}, events);
  table.add_address(1, ip("10.0.0.1"), events);
  table.add_address(1, ip("10.0.0.2"), events);
  table.set_link(2, {"b", true, true}, events);
  events.clear();
  table.begin_resync();
  table.set_link(1, {"a", false, true}, events);
  table.set_link(3, {"c", true, true}, events);
  table.add_address(1, ip("10.0.0.2"), events);
  table.end_resync(events);
  Lines lines;
  for (const LinkEvent& event : events) lines.push_back(brief(event));
  EXPECT_EQ(lines,
            (Lines{"state a no-carrier", "state c up", "removed b", "address_removed a 10.0.0.1"}));
  EXPECT_FALSE(events[2].carrier_up);
}

// A separate network namespace. The namespace belongs to the threads inside, so the kernel removes
// the namespace and its devices when these threads end, however they end.
class NetlinkLinkMonitorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root may make a network namespace";
    if (std::system("ip -V >/dev/null 2>&1") != 0) GTEST_SKIP() << "the command ip is missing";
    std::thread([this] {
      if (::unshare(CLONE_NEWNET) != 0) return;
      namespace_ = FileDescriptor(::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
    }).join();
    if (!namespace_.valid()) GTEST_SKIP() << "this system allows no network namespace";
  }

  // Runs `body` in a thread inside the namespace, as `user`. Other threads of the test keep their
  // namespace and user.
  void inside(const std::function<void()>& body, uid_t user = 0) {
    std::thread([&] {
      ASSERT_EQ(::setns(namespace_.get(), CLONE_NEWNET), 0);
      if (user != 0) {
        ASSERT_EQ(::syscall(SYS_setresuid, user, user, user), 0);
      }
      body();
    }).join();
  }

  static void ip_command(const std::string& arguments) {
    ASSERT_EQ(std::system(("ip " + arguments).c_str()), 0) << "ip " << arguments;
  }

  static std::unique_ptr<NetlinkLinkMonitor> open(int receive_buffer_bytes = 256 * 1024) {
    auto monitor = NetlinkLinkMonitor::open(receive_buffer_bytes);
    EXPECT_TRUE(monitor.ok()) << monitor.take_status().message();
    return monitor.ok() ? std::move(monitor.value()) : nullptr;
  }

  // Waits for the line `last`, because the kernel reports with a delay.
  static Lines wait_for(LinkMonitor& monitor, const std::string& last) {
    Lines lines;
    const auto is_reported = [&] {
      for (std::string& line : poll_lines(monitor)) lines.push_back(std::move(line));
      return has(lines, last);
    };
    EXPECT_TRUE(testing::eventually(is_reported, last)) << ::testing::PrintToString(lines);
    return lines;
  }

  FileDescriptor namespace_;
};

TEST_F(NetlinkLinkMonitorTest, SeesCarrierOfARealInterface) {
  inside([] {
    ip_command("link add name port0 type veth peer name port1");
    ip_command("link set dev port0 up");
    ip_command("link set dev port1 up");
    auto monitor = open();
    monitor->watch("port0");
    wait_for(*monitor, "state port0 up");
    ip_command("link set dev port1 down");
    EXPECT_TRUE(readable(monitor->fd(), patience_ms));
    wait_for(*monitor, "state port0 no-carrier");
    ip_command("link set dev port1 up");
    wait_for(*monitor, "state port0 up");
    ip_command("link set dev port0 down");
    wait_for(*monitor, "state port0 down");
    EXPECT_EQ(monitor->resyncs(), 1U);
  });
}

TEST_F(NetlinkLinkMonitorTest, SeesAddressesComeAndGo) {
  inside([] {
    ip_command("link add name port0 type veth peer name port1");
    ip_command("addr add 10.7.0.1/24 dev port0");
    ip_command("addr add 10.7.1.1 peer 10.7.1.2 dev port0");
    auto monitor = open();
    monitor->watch("port0");
    const Lines first = wait_for(*monitor, "address_added port0 10.7.0.1");
    ASSERT_FALSE(first.empty());
    EXPECT_EQ(first.front(), "state port0 down");
    EXPECT_TRUE(has(first, "address_added port0 10.7.1.1"));
    ip_command("addr add fd07::1/64 dev port0 nodad");
    wait_for(*monitor, "address_added port0 fd07::1");
    ip_command("addr del 10.7.0.1/24 dev port0");
    wait_for(*monitor, "address_removed port0 10.7.0.1");
    ip_command("addr del fd07::1/64 dev port0");
    wait_for(*monitor, "address_removed port0 fd07::1");
  });
}

// An address under duplicate address detection cannot be bound yet.
TEST_F(NetlinkLinkMonitorTest, TentativeAddressIsNotReported) {
  inside([] {
    ip_command("link add name port0 type veth peer name port1");
    ip_command("link set dev port0 up");
    auto monitor = open();
    monitor->watch("port0");
    wait_for(*monitor, "state port0 no-carrier");
    ip_command("addr add fd07::2/64 dev port0");  // no carrier: stays tentative
    ip_command("addr add 10.7.0.2/24 dev port0");
    const Lines lines = wait_for(*monitor, "address_added port0 10.7.0.2");
    EXPECT_FALSE(has(lines, "address_added port0 fd07::2"));
    ip_command("link set dev port1 up");
    wait_for(*monitor, "address_added port0 fd07::2");
  });
}

TEST_F(NetlinkLinkMonitorTest, SeesRemovalRenameAndReturn) {
  inside([] {
    ip_command("link add name port0 type veth peer name port1");
    auto monitor = open();
    monitor->watch("port0");
    wait_for(*monitor, "state port0 down");
    ip_command("link set dev port0 name moved");
    wait_for(*monitor, "removed port0");
    ip_command("link set dev moved name port0");
    wait_for(*monitor, "state port0 down");
    ip_command("link del dev port0");
    wait_for(*monitor, "removed port0");
    ip_command("link add name port0 type veth peer name port1");
    wait_for(*monitor, "state port0 down");
  });
}

// Leaving a bridge sends the same message type as removal.
TEST_F(NetlinkLinkMonitorTest, LeavingABridgeIsNotRemoval) {
  inside([] {
    ip_command("link add name port0 type veth peer name port1");
    if (std::system("ip link add name br0 type bridge 2>/dev/null") != 0) {
      GTEST_SKIP() << "this kernel has no bridges";
    }
    ip_command("link set dev port0 up");
    ip_command("link set dev port0 master br0");
    auto monitor = open();
    monitor->watch("port0");
    wait_for(*monitor, "state port0 no-carrier");
    ip_command("link set dev port0 nomaster");
    ip_command("link set dev port0 down");
    const Lines lines = wait_for(*monitor, "state port0 down");
    EXPECT_FALSE(has(lines, "removed port0"));
  });
}

TEST_F(NetlinkLinkMonitorTest, LostEventsCauseAResync) {
  inside([] {
    ip_command("link add name port0 type veth peer name port1");
    ip_command("link add name gone type veth peer name gone2");
    auto monitor = open(4096);
    for (const char* name : {"port0", "gone"}) monitor->watch(std::string(name));
    wait_for(*monitor, "state gone down");
    // Several times the capacity of the buffer, without a reader.
    ip_command("link del dev gone");
    const std::string flap =
        "for i in $(seq 60); do echo link set dev port0 up; echo link set dev port0 down; done";
    ASSERT_EQ(std::system(("(" + flap + ") | ip -batch -").c_str()), 0);
    ip_command("addr add 10.7.0.3/24 dev port0");
    ip_command("link set dev port0 up");
    const Lines lines = wait_for(*monitor, "address_added port0 10.7.0.3");
    EXPECT_GE(monitor->resyncs(), 2U);
    EXPECT_TRUE(has(lines, "removed gone"));
    Lines states;
    for (const std::string& line : lines) {
      if (line.starts_with("state port0")) states.push_back(line);
    }
    ASSERT_FALSE(states.empty());
    EXPECT_EQ(states.back(), "state port0 no-carrier");
  });
}

// The full read after a loss has to wait, if another was a moment before.
TEST_F(NetlinkLinkMonitorTest, LostEventsOfAWatchedInterfaceAreReadAtOnce) {
  inside([] {
    ip_command("link add name port0 type veth peer name port1");
    ip_command("link add name other type veth peer name other2");
    auto monitor = open(4096);
    monitor->watch("port0");
    wait_for(*monitor, "state port0 down");
    const std::string flap =
        "for i in $(seq 20); do echo link set dev other up; echo link set dev other down; done";
    ASSERT_EQ(std::system(("(" + flap + "; echo link set dev port0 up) | ip -batch -").c_str()), 0);
    EXPECT_EQ(poll_lines(*monitor), Lines{"state port0 no-carrier"});
  });
}

TEST_F(NetlinkLinkMonitorTest, NeedsNoPrivilege) {
  inside([] { ip_command("link add name port0 type veth peer name port1"); });
  std::unique_ptr<NetlinkLinkMonitor> monitor;
  inside(
      [&] {
        ASSERT_EQ(::geteuid(), 65534U);
        monitor = open();
        monitor->watch("port0");
        wait_for(*monitor, "state port0 down");
      },
      65534);
  inside([] { ip_command("link del dev port0"); });
  // The monitor stays in the namespace of its open(), whatever thread polls.
  wait_for(*monitor, "removed port0");
}

TEST_F(NetlinkLinkMonitorTest, IgnoresMessagesOfOtherProcesses) {
  inside([] {
    ip_command("link add name port0 type veth peer name port1");
    auto monitor = open();
    monitor->watch("port0");
    wait_for(*monitor, "state port0 down");
    sockaddr_nl address{};
    socklen_t size = sizeof(address);
    ASSERT_EQ(::getsockname(monitor->fd(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    address.nl_groups = 0;
    struct {
      nlmsghdr header;
      ifinfomsg info;
    } forged{};
    forged.header.nlmsg_len = sizeof(forged);
    forged.header.nlmsg_type = RTM_DELLINK;
    forged.info.ifi_index = static_cast<int>(::if_nametoindex("port0"));
    ASSERT_GT(forged.info.ifi_index, 0);
    const FileDescriptor socket(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE));
    ASSERT_EQ(::sendto(socket.get(), &forged, sizeof(forged), 0,
                       reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
              static_cast<ssize_t>(sizeof(forged)));
    ASSERT_TRUE(readable(monitor->fd(), patience_ms));
    ip_command("link set dev port0 up");
    const Lines lines = wait_for(*monitor, "state port0 no-carrier");
    EXPECT_FALSE(has(lines, "removed port0"));
  });
}

TEST_F(NetlinkLinkMonitorTest, InterfacesAreListed) {
  inside([] {
    ip_command("link set lo up");
    ip_command("link add name port0 type veth peer name port1");
    ip_command("link set dev port0 up");
    ip_command("link set dev port1 up");
    ip_command("addr add 10.7.0.1/24 dev port0");
    ip_command("addr add 10.7.0.5/24 dev port0 label port0:x");
    ip_command("addr add fd07::1/64 dev port1 nodad");
    auto interfaces = list_interfaces();
    ASSERT_TRUE(interfaces.ok());
    ASSERT_EQ(interfaces.value().size(), 3U);
    const Interface& lo = interfaces.value()[0];
    EXPECT_EQ(lo.name, "lo");
    EXPECT_TRUE(lo.is_loopback);
    EXPECT_TRUE(lo.carrier_up);
    const Interface* a = find_interface(interfaces.value(), ip("10.7.0.1"));
    ASSERT_NE(a, nullptr);
    EXPECT_EQ(a->name, "port0");
    EXPECT_EQ(a->index, static_cast<int>(::if_nametoindex("port0")));
    EXPECT_TRUE(a->admin_up);
    EXPECT_TRUE(a->carrier_up);
    EXPECT_FALSE(a->is_loopback);
    EXPECT_EQ(a->speed_mbps, 10'000) << "speed reported by a veth";
    EXPECT_EQ(find_interface(interfaces.value(), ip("10.7.0.5")), a) << "labelled address";
    const Interface* b = find_interface(interfaces.value(), ip("fd07::1"));
    ASSERT_NE(b, nullptr);
    EXPECT_EQ(b->name, "port1");
    EXPECT_EQ(find_interface(interfaces.value(), ip("127.0.0.9")), &lo);
    EXPECT_EQ(find_interface(interfaces.value(), ip("10.7.0.2")), nullptr);

    auto index = ifindex_of(ip("fd07::1"));
    ASSERT_TRUE(index.ok());
    EXPECT_EQ(index.value(), b->index);
    auto missing = ifindex_of(ip("10.7.0.2"));
    ASSERT_FALSE(missing.ok());
    const std::string text = missing.take_status().message();
    EXPECT_NE(text.find("10.7.0.2"), std::string::npos) << text;
    EXPECT_NE(text.find("port0=10.7.0.1"), std::string::npos) << text;

    ip_command("link set dev port0 down");
    interfaces = list_interfaces();
    ASSERT_TRUE(interfaces.ok());
    const Interface* down = find_interface(interfaces.value(), ip("10.7.0.1"));
    ASSERT_NE(down, nullptr);
    EXPECT_FALSE(down->admin_up);
    EXPECT_FALSE(down->carrier_up);
  });
}

// Runs on any machine, without privileges.
TEST(Interfaces, LoopbackIsListed) {
  auto interfaces = list_interfaces();
  ASSERT_TRUE(interfaces.ok());
  const Interface* loopback = find_interface(interfaces.value(), ip("127.0.0.1"));
  ASSERT_NE(loopback, nullptr);
  EXPECT_TRUE(loopback->is_loopback);
  EXPECT_EQ(loopback->speed_mbps, -1);
}

}  // namespace
}  // namespace r2ccl
