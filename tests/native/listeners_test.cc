// Listeners: the address a port listens on when the addresses of its device change.
#include "connect/listeners.hpp"

#include <gtest/gtest.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <string>
#include <vector>

namespace r2ccl {
namespace {

const std::string device = "no-port";  // need not exist: loopback addresses are bound without it

IpAddress ip(const char* text) { return IpAddress::parse(text).value(); }

struct Fixture {
  Listeners listeners;
  std::vector<std::string> errors;

  std::uint16_t listen(const char* address, const std::string& on = device) {
    auto port = listeners.listen(SocketAddress::ip(ip(address), 0), on);
    EXPECT_TRUE(port.ok());
    return port.value();
  }
  std::vector<std::string> change(const std::vector<const char*>& present) {
    std::vector<IpAddress> addresses;
    addresses.reserve(present.size());
    for (const char* address : present) addresses.push_back(ip(address));
    std::vector<std::string> moved;
    for (const auto& entry : listeners.device_changed(device, addresses, errors))
      moved.push_back(entry.given.to_string() + " " + entry.now.text());
    return moved;
  }
  [[nodiscard]] bool reachable(const char* address, std::uint16_t port) const {
    const FileDescriptor socket(::socket(AF_INET, SOCK_STREAM, 0));
    const SocketAddress to = SocketAddress::ip(ip(address), port);
    return ::connect(socket.get(), to.get(), to.size) == 0;
  }
};

using Lines = std::vector<std::string>;

std::uint16_t port_of(const FileDescriptor& socket) {
  SocketAddress at = SocketAddress::ip(ip("0.0.0.0"), 0);
  EXPECT_EQ(::getsockname(socket.get(), at.get(), &at.size), 0);
  return at.port();
}

// Listens on a port at 127.0.1.1, without an engine.
FileDescriptor occupy(std::uint16_t port = 0) {
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM, 0));
  const SocketAddress at = SocketAddress::ip(ip("127.0.1.1"), port);
  EXPECT_EQ(::bind(socket.get(), at.get(), at.size), 0);
  EXPECT_EQ(::listen(socket.get(), 8), 0);
  return socket;
}

Listeners in_window(std::uint16_t first, std::uint16_t last) {
  return Listeners(PortWindow{first, last});
}

TEST(PortWindow, IsAPortOrARange) {
  const auto text = [](const char* of) -> std::string {
    const auto ports = PortWindow::parse(of);
    return ports ? std::to_string(ports->first) + " " + std::to_string(ports->last) : "none";
  };
  EXPECT_EQ(text(""), "0 0");
  EXPECT_EQ(text("40000"), "40000 40000");
  EXPECT_EQ(text("40000-40050"), "40000 40050");
  EXPECT_EQ(text("1-65535"), "1 65535");
  for (const char* wrong : {"0", "0-5", "5-4", "65536", "1-65536", "-", "5-", "-5", "a", "1-2-3",
                            " 5", "5 ", "+5", "40000–40050"})
    EXPECT_EQ(text(wrong), "none") << wrong;
}

TEST(Listeners, TakeTheLowestFreePortOfTheirWindowAtEachAddress) {
  const FileDescriptor other = occupy();
  const std::uint16_t taken = port_of(other);
  const auto last = static_cast<std::uint16_t>(std::min(65535, taken + 50));
  Listeners listeners = in_window(taken, last);
  auto first = listeners.listen(SocketAddress::ip(ip("127.0.1.1"), 0), device);
  ASSERT_TRUE(first.ok());
  EXPECT_GT(first.value(), taken);
  EXPECT_LE(first.value(), last);
  auto second = listeners.listen(SocketAddress::ip(ip("127.0.1.1"), 0), "no-port2");
  ASSERT_TRUE(second.ok());
  EXPECT_GT(second.value(), first.value());
  // The port is free at another address, since `other` listens at a single address.
  auto elsewhere = listeners.listen(SocketAddress::ip(ip("127.0.1.2"), 0), device);
  ASSERT_TRUE(elsewhere.ok());
  EXPECT_EQ(elsewhere.value(), taken);
  // A unix socket has no port.
  auto shm = listeners.listen(
      SocketAddress::abstract_unix("r2ccl-test-window-" + std::to_string(taken)).value(), "");
  ASSERT_TRUE(shm.ok());
  EXPECT_EQ(shm.value(), 0);
}

TEST(Listeners, NameAWindowWithoutAFreePort) {
  const FileDescriptor other = occupy();
  const std::string port = std::to_string(port_of(other));
  Listeners listeners = in_window(port_of(other), port_of(other));
  auto refused = listeners.listen(SocketAddress::ip(ip("127.0.1.1"), 0), device);
  ASSERT_FALSE(refused.ok());
  const std::string text = refused.take_status().message();
  EXPECT_EQ(text.find("ports (R2CCL_PORTS) is '" + port + "-" + port +
                      "': all 1 ports are in use at 127.0.1.1 (no-port); must have"),
            0U)
      << text;
}

// After a crash, the remains of its connections (TIME_WAIT) must not occupy the window.
TEST(Listeners, TheRemainsOfConnectionsDoNotOccupyAWindow) {
  std::uint16_t port = 0;
  {
    const std::uint16_t first = port_of(occupy());
    Listeners before = in_window(first, static_cast<std::uint16_t>(std::min(65535, first + 50)));
    auto listening_at = before.listen(SocketAddress::ip(ip("127.0.1.1"), 0), device);
    ASSERT_TRUE(listening_at.ok());
    port = listening_at.value();
    FileDescriptor client(::socket(AF_INET, SOCK_STREAM, 0));
    const SocketAddress to = SocketAddress::ip(ip("127.0.1.1"), port);
    ASSERT_EQ(::connect(client.get(), to.get(), to.size), 0);
    before.each_socket([&](int listening) {
      pollfd ready{listening, POLLIN, 0};
      ASSERT_EQ(::poll(&ready, 1, 60'000), 1);
      const FileDescriptor accepted(::accept(listening, nullptr, nullptr));
      EXPECT_TRUE(accepted.valid());  // closed first at this end, so the remains stay here
    });
  }
  Listeners after = in_window(port, port);
  EXPECT_TRUE(after.listen(SocketAddress::ip(ip("127.0.1.1"), 0), device).ok());
}

TEST(Listeners, LoopbackIsNeverAnAddressOfBothEnds) {
  Fixture fixture;
  fixture.listen("127.0.1.1");
  EXPECT_FALSE(fixture.listeners.has(SocketAddress::ip(ip("127.0.1.1"), 7)));
  EXPECT_FALSE(fixture.listeners.has(SocketAddress::ip(ip("10.255.255.1"), 7)));
}

TEST(Listeners, FollowAnAddressChangeAndKeepTheirPort) {
  Fixture fixture;
  const std::uint16_t port = fixture.listen("127.0.1.1");
  const std::string colon_port = ":" + std::to_string(port);
  EXPECT_EQ(fixture.change({"127.0.1.1", "127.0.1.5"}), Lines());
  EXPECT_EQ(fixture.change({}), Lines());
  EXPECT_TRUE(fixture.reachable("127.0.1.1", port));
  EXPECT_EQ(fixture.change({"127.0.1.6", "127.0.1.7"}), Lines{"127.0.1.1 127.0.1.6" + colon_port});
  EXPECT_TRUE(fixture.reachable("127.0.1.6", port));
  EXPECT_FALSE(fixture.reachable("127.0.1.1", port));
  // A listener keeps its address while possible, even if a lower address appears.
  EXPECT_EQ(fixture.change({"127.0.1.5", "127.0.1.6"}), Lines());
  EXPECT_EQ(fixture.listeners.at(device, ip("127.0.1.1"))->text(), "127.0.1.6" + colon_port);
  EXPECT_EQ(fixture.change({"127.0.1.5"}), Lines{"127.0.1.1 127.0.1.5" + colon_port});
  // The configured address takes precedence.
  EXPECT_EQ(fixture.change({"127.0.1.1", "127.0.1.5"}), Lines{"127.0.1.1 127.0.1.1" + colon_port});
  EXPECT_TRUE(fixture.reachable("127.0.1.1", port));
  EXPECT_EQ(fixture.errors, Lines());
}

TEST(Listeners, NeverShareAnAddressOnADevice) {
  Fixture fixture;
  const std::string first = "127.0.1.1 127.0.1.6:" + std::to_string(fixture.listen("127.0.1.1"));
  const std::string second = "127.0.1.2 127.0.1.7:" + std::to_string(fixture.listen("127.0.1.2"));
  EXPECT_EQ(fixture.change({"127.0.1.2"}), Lines());
  EXPECT_EQ(fixture.change({"127.0.1.6"}), Lines{first});
  EXPECT_EQ(fixture.change({"127.0.1.6", "127.0.1.7"}), Lines{second});
}

TEST(Listeners, IgnoreAddressesOfAnotherFamilyScopeOrDevice) {
  Fixture fixture;
  fixture.listen("127.0.1.1");
  const std::uint16_t elsewhere = fixture.listen("127.0.1.2", "no-port2");
  const std::uint16_t by_address = fixture.listen("127.0.1.3", "");
  EXPECT_EQ(fixture.change({"10.255.255.1", "::1", "fd00::1", "224.0.0.1"}), Lines());
  EXPECT_EQ(fixture.change({"127.0.1.9"}).size(), 1U);
  EXPECT_TRUE(fixture.reachable("127.0.1.2", elsewhere));
  EXPECT_TRUE(fixture.reachable("127.0.1.3", by_address));
}

TEST(Listeners, WaitForTheFirstAddressOfAPort) {
  Fixture fixture;
  const std::uint16_t port = fixture.listen("0.0.0.0");
  const auto sockets = [&fixture] {
    int count = 0;
    fixture.listeners.each_socket([&count](int) { ++count; });
    return count;
  };
  EXPECT_EQ(sockets(), 0);  // an idle socket would wake every poll
  EXPECT_FALSE(fixture.reachable("127.0.1.1", port));
  EXPECT_EQ(fixture.change({"fd00::1"}), Lines());
  const std::string moved = "0.0.0.0 127.0.1.1:" + std::to_string(port);
  EXPECT_EQ(fixture.change({"127.0.1.1"}), Lines{moved});
  EXPECT_EQ(sockets(), 1);
  EXPECT_TRUE(fixture.reachable("127.0.1.1", port));
  EXPECT_EQ(fixture.errors, Lines());
}

// Two processes of a host wait for the same port.
TEST(Listeners, WaitForAnAddressWithDifferentPortsOfAWindow) {
  const std::uint16_t first = port_of(occupy());
  const auto last = static_cast<std::uint16_t>(std::min(65535, first + 50));
  std::vector<Listeners> processes;
  std::vector<std::uint16_t> ports;
  for (int process = 0; process < 2; ++process) {
    auto port = processes.emplace_back(in_window(first, last))
                    .listen(SocketAddress::ip(ip("0.0.0.0"), 0), device);
    ASSERT_TRUE(port.ok()) << port.take_status().message();
    ports.push_back(port.value());
  }
  EXPECT_NE(ports[0], ports[1]);
  std::vector<std::string> errors;
  for (Listeners& process : processes)
    EXPECT_EQ(process.device_changed(device, {ip("127.0.1.1")}, errors).size(), 1U);
  EXPECT_EQ(errors, Lines());
}

TEST(Listeners, TakeTheScopeOfALinkLocalAddress) {
  const SocketAddress local = SocketAddress::ip(ip("fe80::1"), 7);
  const auto scope = [](const SocketAddress& address) {
    return reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_scope_id;
  };
  EXPECT_EQ(scope(scoped_to(local, "lo")), ::if_nametoindex("lo"));
  EXPECT_EQ(scope(scoped_to(local, "no-port")), 0U);
  EXPECT_EQ(scope(scoped_to(SocketAddress::ip(ip("fd00::1"), 7), "lo")), 0U);
  EXPECT_EQ(scoped_to(local, "lo").text(), local.text());
}

TEST(Listeners, RetryWhileThePortIsInUse) {
  Fixture fixture;
  const std::uint16_t port = fixture.listen("127.0.1.1");
  FileDescriptor other(::socket(AF_INET, SOCK_STREAM, 0));
  const SocketAddress taken = SocketAddress::ip(ip("127.0.1.8"), port);
  ASSERT_EQ(::bind(other.get(), taken.get(), taken.size), 0);
  ASSERT_EQ(::listen(other.get(), 1), 0);
  for (int again = 0; again < 3; ++again) {
    EXPECT_EQ(fixture.change({"127.0.1.8"}), Lines());
    EXPECT_EQ(fixture.listeners.broken(), Lines{device});
  }
  EXPECT_EQ(fixture.errors.size(), 1U);  // logged once
  other.reset();
  EXPECT_EQ(fixture.change({"127.0.1.8"}).size(), 1U);
  EXPECT_EQ(fixture.listeners.broken(), Lines());
  EXPECT_TRUE(fixture.reachable("127.0.1.8", port));
}

}  // namespace
}  // namespace r2ccl
