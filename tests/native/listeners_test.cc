// Listeners: the address a port listens on when the addresses of its device change.
#include "connect/listeners.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

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
