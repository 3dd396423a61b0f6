// The network plugin while NCCL starts and ends: strangers at its listener, lost attempts, lack of
// descriptors, and communicators of several threads.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <functional>
#include <thread>
#include <vector>

#include "net_player.hpp"

namespace r2ccl {
namespace {

using net::NcclResult;
using testing::Player;
using testing::Rank;

sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

// A connection of a stranger to the first address of a handle.
int stranger_to(const Rank::Handle& handle) {
  constexpr std::size_t port = 42;
  const sockaddr_in address = loopback(static_cast<std::uint16_t>(
      std::to_integer<unsigned>(handle[port]) | std::to_integer<unsigned>(handle[port + 1]) << 8U));
  const int made = ::socket(AF_INET, SOCK_STREAM, 0);
  R2CCL_RANK_CHECK(::connect(made, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) ==
                   0);
  return made;
}

// Reads all bytes.  Returns true if the other end has closed the connection.
bool closed(int socket) {
  std::array<char, 512> bytes;
  ssize_t got = 1;
  while (got > 0) got = ::recv(socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
  return got == 0;
}

// Runs `body` on a thread without a free descriptor.  The thread has a table of descriptors of its
// own, and other threads keep free ones: UBSan makes a pipe to check an object of a type new to it.
void without_descriptors(const std::function<void()>& body) {
  rlimit before{};
  R2CCL_RANK_CHECK(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit few{.rlim_cur = 512, .rlim_max = before.rlim_max};
  R2CCL_RANK_CHECK(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  std::thread([&body] {
    R2CCL_RANK_CHECK(::unshare(CLONE_FILES) == 0);
    int taken = 0;
    while (taken >= 0) taken = ::dup(STDERR_FILENO);
    R2CCL_RANK_CHECK(errno == EMFILE);
    body();
  }).join();
  R2CCL_RANK_CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}

TEST(NetStart, ConnectionsWithoutProofAreLimitedAndEndWithTheLastListener) {
  EXPECT_TRUE(Player({.ranks = 1}).play([](Rank& rank) {
    Rank::Handle handle{};
    void* listener = nullptr;
    R2CCL_RANK_CHECK(rank.net->listen(0, handle.data(), &listener) == NcclResult::success);
    constexpr int limit = 256;
    std::vector<int> strangers;
    const auto dropped = [&] {
      void* receiver = nullptr;
      R2CCL_RANK_CHECK(rank.net->accept(listener, &receiver, nullptr) == NcclResult::success);
      R2CCL_RANK_CHECK(receiver == nullptr);
      return closed(strangers[0]);
    };
    for (int i = 0; i < limit; ++i) {
      strangers.push_back(stranger_to(handle));
      R2CCL_RANK_CHECK(!dropped());
    }
    strangers.push_back(stranger_to(handle));
    R2CCL_RANK_CHECK(testing::eventually(dropped, "the end of the oldest"));
    R2CCL_RANK_CHECK(!closed(strangers[1]) && !closed(strangers.back()));
    R2CCL_RANK_CHECK(rank.net->close_listen(listener) == NcclResult::success);
    R2CCL_RANK_CHECK(testing::eventually([&] { return closed(strangers.back()); }, "closed"));
  }));
}

TEST(NetStart, ALackOfDescriptorsIsInTheLog) {
  EXPECT_TRUE(Player({.ranks = 1}).play([](Rank& rank) {
    Rank::Handle handle{};
    void* listener = nullptr;
    void* receiver = nullptr;
    R2CCL_RANK_CHECK(rank.net->listen(0, handle.data(), &listener) == NcclResult::success);
    // UBSan meets the types of a call here, where it has descriptors.
    R2CCL_RANK_CHECK(rank.net->accept(listener, &receiver, nullptr) == NcclResult::success);
    (void)stranger_to(handle);
    testing::counted_text = "; peers cannot connect";
    without_descriptors([&] {
      for (int repeated = 0; repeated < 3; ++repeated)
        R2CCL_RANK_CHECK(rank.net->accept(listener, &receiver, nullptr) == NcclResult::success);
    });
    R2CCL_RANK_CHECK(testing::eventually([] { return testing::counted_lines > 0; }, "a line"));
    R2CCL_RANK_CHECK(rank.net->close_listen(listener) == NcclResult::success);
    R2CCL_RANK_CHECK(testing::counted_lines == 1);
  }));
}

// NCCL takes no result of a connection any more once its start has failed elsewhere.
TEST(NetStart, AnAttemptThatIsNotPolledHoldsNoSocketAfterItsTime) {
  const Player player{.ranks = 1, .environment = {{"R2CCL_CONNECT_TIMEOUT_S", "0.2"}}};
  EXPECT_TRUE(player.play([](Rank& rank) {
    // Accepts at every address, and never answers.
    const int silent = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = loopback(0);
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    socklen_t size = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    R2CCL_RANK_CHECK(::bind(silent, generic, size) == 0 && ::listen(silent, 8) == 0);
    R2CCL_RANK_CHECK(::getsockname(silent, generic, &size) == 0);
    Rank::Handle handle{};
    void* listener = nullptr;
    R2CCL_RANK_CHECK(rank.net->listen(0, handle.data(), &listener) == NcclResult::success);
    const unsigned port = ntohs(address.sin_port);
    for (const std::size_t place : {40U, 60U, 80U}) {
      handle[place + 2] = static_cast<std::byte>(port & 0xFFU);
      handle[place + 3] = static_cast<std::byte>(port >> 8U);
    }
    handle[24] ^= std::byte{1};  // the secret: of another process
    void* sender = nullptr;
    R2CCL_RANK_CHECK(rank.net->connect(0, handle.data(), &sender) == NcclResult::success);
    const int accepted = ::accept(silent, nullptr, nullptr);
    R2CCL_RANK_CHECK(accepted >= 0 && !closed(accepted));
    const auto ended = [&] {
      void* receiver = nullptr;
      R2CCL_RANK_CHECK(rank.net->accept(listener, &receiver, nullptr) == NcclResult::success);
      return closed(accepted);
    };
    R2CCL_RANK_CHECK(testing::eventually(ended, "the end of the attempt"));
    R2CCL_RANK_CHECK(rank.net->connect(0, handle.data(), &sender) == NcclResult::remote_error);
    R2CCL_RANK_CHECK(rank.net->close_listen(listener) == NcclResult::success);
  }));
}

TEST(NetStart, ThreadsBeginAndEndTheirCommunicatorsAtTheSameTime) {
  EXPECT_TRUE(Player({.ranks = 1}).play([](Rank& rank) {
    rank.net->finalize();  // no communicator is left, so that each may be the first or the last
    const auto communicators = [] {
      void* const library = ::dlopen(R2CCL_NETPLUGIN, RTLD_NOW | RTLD_LOCAL);
      R2CCL_RANK_CHECK(library != nullptr);
      const auto net = testing::load_net(library, 11);
      for (int round = 0; round < 50; ++round) {
        R2CCL_RANK_CHECK(net->init() == NcclResult::success);
        R2CCL_RANK_CHECK(net->devices() == 3);
        net->finalize();
      }
    };
    std::thread other(communicators);
    communicators();
    other.join();
  }));
}

}  // namespace
}  // namespace r2ccl
