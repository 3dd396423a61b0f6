// Parts of the network plugin without a network: pairs of NICs, the exchange, options, and
// connections inside a process.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <thread>
#include <utility>

#include "netplugin/abi.hpp"
#include "netplugin/exchange_messages.hpp"
#include "netplugin/local_queue.hpp"
#include "netplugin/nics.hpp"
#include "netplugin/options.hpp"
#include "netplugin/pairing.hpp"
#include "netplugin/watchdog.hpp"

namespace r2ccl::net {
namespace {

using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

RailListener nic(const std::string& address, int prefix = 24, std::uint32_t mbit_s = 0) {
  return {.place = {*IpAddress::parse(address), 4000},
          .prefix = static_cast<std::uint8_t>(prefix),
          .mbit_s = mbit_s};
}

// ---- pairs of NICs ----

TEST(NetPairing, ACommonNetworkComesBeforeTheOrder) {
  const std::vector<RailListener> lower{nic("10.0.1.1"), nic("10.0.2.1"), nic("10.0.3.1")};
  const std::vector<RailListener> higher{nic("10.0.3.2"), nic("10.0.1.2"), nic("10.0.2.2")};
  EXPECT_EQ(pair_nics(lower, higher), (Pairs{{0, 1}, {1, 2}, {2, 0}}));
}

TEST(NetPairing, OneNetworkForAllPairsInOrder) {
  const std::vector<RailListener> lower{nic("10.0.0.1", 20), nic("10.0.1.1", 20)};
  const std::vector<RailListener> higher{nic("10.0.15.2", 20), nic("10.0.9.2", 20)};
  EXPECT_EQ(pair_nics(lower, higher), (Pairs{{0, 0}, {1, 1}}));
  const std::vector<RailListener> loopback{nic("127.0.0.1", 8), nic("127.0.0.2", 8)};
  EXPECT_EQ(pair_nics(loopback, loopback), (Pairs{{0, 0}, {1, 1}}));
}

TEST(NetPairing, NetworksEndAtTheirLastBit) {
  // 10.0.0.64/26 and 10.0.0.128/26 are neighbours; only the route joins them.
  const std::vector<RailListener> lower{nic("10.0.0.65", 26), nic("10.0.0.129", 26)};
  const std::vector<RailListener> higher{nic("10.0.0.130", 26), nic("10.0.0.66", 26)};
  EXPECT_EQ(pair_nics(lower, higher), (Pairs{{0, 1}, {1, 0}}));
}

TEST(NetPairing, EqualSpeedComesBeforeTheOrder) {
  const std::vector<RailListener> lower{nic("10.0.0.1", 24, 1000), nic("10.0.0.2", 24, 100'000)};
  const std::vector<RailListener> higher{nic("10.0.0.3", 24, 100'000), nic("10.0.0.4", 24, 1000)};
  EXPECT_EQ(pair_nics(lower, higher), (Pairs{{0, 1}, {1, 0}}));
}

TEST(NetPairing, NicsLeftOverJoinTheNicWithTheFewestRails) {
  const std::vector<RailListener> four{nic("10.0.0.1"), nic("10.0.0.2"), nic("10.0.0.3"),
                                       nic("10.0.0.4")};
  const std::vector<RailListener> two{nic("10.0.0.5"), nic("10.0.0.6")};
  EXPECT_EQ(pair_nics(four, two), (Pairs{{0, 0}, {1, 1}, {2, 0}, {3, 1}}));
  EXPECT_EQ(pair_nics(two, four), (Pairs{{0, 0}, {1, 1}, {0, 2}, {1, 3}}));
}

TEST(NetPairing, RoutesJoinNicsOfDifferentNetworks) {
  const std::vector<RailListener> lower{nic("10.0.1.1", 31), nic("10.0.2.1", 31)};
  const std::vector<RailListener> higher{nic("10.1.1.1", 31), nic("10.1.2.1", 31)};
  EXPECT_EQ(pair_nics(lower, higher), (Pairs{{0, 0}, {1, 1}}));
}

TEST(NetPairing, WhatCannotWorkIsNoRail) {
  const std::vector<RailListener> four{nic("10.0.0.1")};
  const std::vector<RailListener> six{nic("fd00::1", 64)};
  const std::vector<RailListener> loopback{nic("127.0.0.1", 8)};
  EXPECT_TRUE(pair_nics(four, six).empty());
  EXPECT_TRUE(pair_nics(four, loopback).empty());
  EXPECT_TRUE(pair_nics(four, four).empty());  // the same address at both ends
  EXPECT_TRUE(pair_nics(four, {}).empty());
}

TEST(NetPairing, ANicBelowAnEighthOfTheFastestIsAReserve) {
  const std::vector<RailListener> nics{nic("10.0.0.1", 24, 100'000), nic("10.0.0.2", 24, 10'000),
                                       nic("10.0.0.3", 24, 12'500), nic("10.0.0.4", 24, 0)};
  EXPECT_FALSE(is_reserve(nics, 0));
  EXPECT_TRUE(is_reserve(nics, 1));
  EXPECT_FALSE(is_reserve(nics, 2));
  EXPECT_FALSE(is_reserve(nics, 3));
}

// ---- NICs ----

TEST(NetNics, NamedNicsAreFoundOnce) {
  auto found = find_nics("127.0.0.1,127.0.0.2", "");
  ASSERT_TRUE(found.ok()) << found.take_status().message();
  ASSERT_EQ(found.value().size(), 2U);
  EXPECT_EQ(found.value()[1].address, IpAddress::parse("127.0.0.2"));
  for (const char* rails : {"127.0.0.1,127.0.0.1", "127.0.0.1,", "", "no-such-device", "a=b"}) {
    const Status refused = find_nics(rails, "").take_status();
    EXPECT_EQ(refused.code(), ErrorCode::invalid_argument) << rails;
    EXPECT_NE(refused.message().find("R2CCL_RAILS"), std::string::npos) << refused.message();
  }
}

// ---- exchange ----

constexpr Secret secret{std::byte{1}, std::byte{2}};

std::vector<std::byte> key_of(char letter) { return {40, static_cast<std::byte>(letter)}; }

Description end_of(std::uint32_t process) {
  Description made;
  made.process = process;
  made.host = "host" + std::to_string(process);
  made.shm = "socket" + std::to_string(process);
  made.rails = {nic("10.0.0." + std::to_string(process), 24, 1000), nic("fd00::5", 64)};
  return made;
}

struct Exchanged {
  ExchangeConnector connector;
  ExchangeAcceptor acceptor;

  Exchanged(const Secret& connecting, const Secret& accepting)
      : connector(connecting, {.listener = 7, .connection = 8, .nic = 1, .process = 1},
                  {std::byte{3}}),
        acceptor(accepting, {std::byte{4}}) {}

  // Carries all output to the other end.  Returns true if there was any.
  bool carry() {
    const auto move = [](ExchangeEnd& from, ExchangeEnd& to) {
      const std::vector<std::byte> bytes(from.output().begin(), from.output().end());
      from.sent(bytes.size());
      for (const std::byte byte : bytes) to.feed({&byte, 1});
      return !bytes.empty();
    };
    const bool there = move(connector, acceptor);
    return move(acceptor, connector) || there;
  }
};

TEST(NetExchange, BothEndsLearnEachOtherAndTheKey) {
  const PairKey key{std::byte{9}, std::byte{10}};
  for (const bool connector_makes : {false, true}) {
    Exchanged pair(secret, secret);
    while (pair.carry()) {
      if (pair.acceptor.wants() == ExchangeAcceptor::Wants::answer) {
        EXPECT_EQ(pair.acceptor.call().listener, 7U);
        EXPECT_EQ(pair.acceptor.call().connection, 8U);
        pair.acceptor.answer(end_of(2), connector_makes ? std::optional<PairKey>() : key);
      }
      if (pair.connector.answer_due())
        pair.connector.details(end_of(1), connector_makes ? key : std::optional<PairKey>());
      if (pair.acceptor.wants() == ExchangeAcceptor::Wants::verdict) pair.acceptor.accept();
    }
    EXPECT_EQ(pair.connector.state(), ExchangeState::done);
    EXPECT_EQ(pair.acceptor.state(), ExchangeState::done);
    const auto& learned = connector_makes ? pair.acceptor.peer_key() : pair.connector.peer_key();
    EXPECT_EQ(learned, key);
    EXPECT_EQ(pair.connector.peer().host, "host2");
    ASSERT_EQ(pair.acceptor.peer().rails.size(), 2U);
    EXPECT_EQ(pair.acceptor.peer().rails[0].place.address, IpAddress::parse("10.0.0.1"));
    EXPECT_EQ(pair.acceptor.peer().rails[0].prefix, 24);
    EXPECT_EQ(pair.acceptor.peer().rails[0].mbit_s, 1000U);
    EXPECT_EQ(pair.acceptor.peer().rails[1].prefix, 64);
  }
}

TEST(NetExchange, ARefusalTellsItsReason) {
  Exchanged pair(secret, secret);
  pair.carry();
  ASSERT_EQ(pair.acceptor.wants(), ExchangeAcceptor::Wants::answer);
  pair.acceptor.refuse("the listener is closed");
  pair.carry();
  EXPECT_TRUE(pair.connector.refused());
  EXPECT_NE(pair.connector.why().find("the listener is closed"), std::string::npos);
}

TEST(NetExchange, AWrongSecretOrAChangedByteEndsTheExchange) {
  Exchanged strangers(with_key(secret, key_of('a')), with_key(secret, key_of('b')));
  strangers.carry();
  EXPECT_EQ(strangers.acceptor.state(), ExchangeState::failed);
  EXPECT_NE(strangers.acceptor.why().find("R2CCL_SECRET_FILE"), std::string::npos);

  const std::size_t size = Exchanged(secret, secret).connector.output().size();
  for (std::size_t at = 0; at < size; ++at) {
    Exchanged pair(secret, secret);
    std::vector<std::byte> bytes(pair.connector.output().begin(), pair.connector.output().end());
    bytes[at] ^= std::byte{4};
    pair.acceptor.feed(bytes);
    EXPECT_NE(pair.acceptor.wants(), ExchangeAcceptor::Wants::answer) << at;
  }
}

TEST(NetExchange, AHandleKeepsAllItsFields) {
  Handle handle;
  handle.process = 77;
  handle.key_check = check_of_key(secret, key_of('a'));
  handle.listener = 5;
  handle.secret = secret;
  for (std::uint16_t i = 1; i <= Handle::most_places; ++i)
    handle.places.push_back({*IpAddress::parse("fd00::" + std::to_string(i)), i});
  std::array<std::byte, nccl_handle_bytes> bytes{};
  write(handle, bytes);
  write_dial(9, bytes);
  auto read = read_handle(bytes);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read.value().process, 77U);
  EXPECT_EQ(read.value().key_check, handle.key_check);
  EXPECT_EQ(read.value().listener, 5U);
  EXPECT_EQ(read.value().secret, secret);
  EXPECT_EQ(read.value().dial, 9U);
  ASSERT_EQ(read.value().places.size(), Handle::most_places);
  EXPECT_EQ(read.value().places[3].address, IpAddress::parse("fd00::4"));
  EXPECT_EQ(read.value().places[3].port, 4);
}

TEST(NetExchange, AKeyChangesTheSecretAndItsCheck) {
  EXPECT_EQ(with_key(secret, {}), secret);
  EXPECT_EQ(check_of_key(secret, {}), 0U);
  EXPECT_NE(with_key(secret, key_of('a')), secret);
  EXPECT_NE(with_key(secret, key_of('a')), with_key(secret, key_of('b')));
  EXPECT_NE(check_of_key(secret, key_of('a')), 0U);
  EXPECT_NE(check_of_key(secret, key_of('a')), check_of_key(secret, key_of('b')));
}

// ---- options ----

class NetSecretFile : public ::testing::Test {
 protected:
  ~NetSecretFile() override {
    ::unsetenv("R2CCL_SECRET_FILE");
    std::remove(path_.c_str());
  }
  auto read(const std::string& content, mode_t mode) {
    std::remove(path_.c_str());
    std::ofstream(path_) << content;
    EXPECT_EQ(::chmod(path_.c_str(), mode), 0);
    ::setenv("R2CCL_SECRET_FILE", path_.c_str(), 1);
    return options_from_environment();
  }
  const std::string path_ = ::testing::TempDir() + "net-secret-" + std::to_string(::getpid());
};

TEST_F(NetSecretFile, TheKeyHasNoBlanksAtItsEnds) {
  auto options = read(" " + std::string(32, 'k') + "\n", 0600);
  ASSERT_TRUE(options.ok()) << options.take_status().message();
  EXPECT_EQ(options.value().key, std::vector<std::byte>(32, static_cast<std::byte>('k')));
}

TEST_F(NetSecretFile, AFileForOthersOrWithAShortKeyIsAnError) {
  EXPECT_EQ(read(std::string(32, 'k'), 0640).take_status().code(), ErrorCode::invalid_argument);
  EXPECT_EQ(read(std::string(31, 'k'), 0600).take_status().code(), ErrorCode::invalid_argument);
  EXPECT_EQ(read(std::string(5000, 'k'), 0600).take_status().code(), ErrorCode::invalid_argument);
  ::setenv("R2CCL_SECRET_FILE", (path_ + "-absent").c_str(), 1);
  EXPECT_NE(options_from_environment().take_status().message().find("R2CCL_SECRET_FILE"),
            std::string::npos);
}

// ---- watchdog ----

TEST(NetWatchdog, AnErrorIsIgnoredIfItsConnectionStaysOpen) {
  Watchdog watchdog(100);
  int open = 0;
  int closed = 0;
  watchdog.failed(&closed, "closed", 1000);
  watchdog.failed(&open, "first", 1010);
  watchdog.failed(&open, "second", 1090);
  watchdog.closed(&closed);
  EXPECT_EQ(watchdog.ignored(1109), std::nullopt);
  EXPECT_EQ(watchdog.ignored(1110), "first");
  watchdog.closed(&open);
  EXPECT_EQ(watchdog.ignored(2000), std::nullopt);

  Watchdog off(0);
  off.failed(&open, "first", 1000);
  EXPECT_EQ(off.ignored(1'000'000), std::nullopt);
}

// ---- connections inside a process ----

TEST(NetLocalQueue, MessagesArriveInOrderAndAreTakenInAnyOrder) {
  LocalQueue queue;
  std::array<std::byte, 4> target{};
  const std::array source{std::byte{1}, std::byte{2}};
  EXPECT_EQ(queue.send(source).value(), std::nullopt);  // no receive
  EXPECT_EQ(queue.receive(std::span(target).first(2)).value(), 0U);
  EXPECT_EQ(queue.receive(std::span(target).last(2)).value(), 1U);
  EXPECT_EQ(queue.received(0).value(), std::nullopt);
  EXPECT_EQ(queue.send(source).value(), 0U);
  EXPECT_EQ(queue.send(std::span(source).first(1)).value(), 1U);
  EXPECT_EQ(queue.received(1).value(), 1U);
  EXPECT_EQ(queue.received(0).value(), 2U);
  EXPECT_EQ(target, (std::array{std::byte{1}, std::byte{2}, std::byte{1}, std::byte{0}}));
}

TEST(NetLocalQueue, MemoryIsInUseUntilItsMessageIsThere) {
  LocalQueue queue;
  std::array<std::byte, 2> target{};
  const std::array<std::byte, 2> other{};
  ASSERT_TRUE(queue.receive(target).ok());
  EXPECT_TRUE(queue.uses(target));
  EXPECT_FALSE(queue.uses(other));
  ASSERT_TRUE(queue.send(other).ok());
  EXPECT_FALSE(queue.uses(target));
}

TEST(NetLocalQueue, MessagesUnderWayAreLimited) {
  LocalQueue queue;
  for (std::uint64_t number = 0; number < most_posted; ++number)
    EXPECT_EQ(queue.receive({}).value(), number);
  EXPECT_EQ(queue.receive({}).value(), std::nullopt);
  for (std::uint64_t number = 0; number < most_posted; ++number) {
    EXPECT_EQ(queue.send({}).value(), number);
    EXPECT_EQ(queue.received(number).value(), 0U);
  }
  EXPECT_EQ(queue.receive({}).value(), most_posted);
  EXPECT_EQ(queue.send({}).value(), std::nullopt);  // no send is finished
  EXPECT_TRUE(queue.finish_send());
  EXPECT_EQ(queue.send({}).value(), most_posted);
}

TEST(NetLocalQueue, ALargeMessageAndAClosedEndAreErrorsAtBothEnds) {
  const std::array<std::byte, 2> source{};
  std::array<std::byte, 2> target{};
  LocalQueue large;
  ASSERT_TRUE(large.receive(std::span(target).first(1)).ok());
  EXPECT_EQ(large.send(source).take_status().code(), ErrorCode::invalid_argument);
  EXPECT_EQ(large.received(0).take_status().code(), ErrorCode::invalid_argument);

  LocalQueue closed;
  ASSERT_TRUE(closed.receive(target).ok());
  ASSERT_TRUE(closed.receive(target).ok());
  ASSERT_TRUE(closed.send(source).ok());
  closed.close();
  EXPECT_EQ(closed.received(0).value(), 2U);  // the message was there
  EXPECT_EQ(closed.received(1).take_status().code(), ErrorCode::peer_closed);
  EXPECT_EQ(closed.send(source).take_status().code(), ErrorCode::peer_closed);
}

TEST(NetLocalQueue, TwoThreadsExchangeMessages) {
  LocalQueue queue;
  constexpr std::uint64_t count = 20'000;
  std::thread sender([&queue] {
    for (std::uint64_t number = 0; number < count;) {
      const auto sent = queue.send(std::as_bytes(std::span(&number, 1))).value();
      if (!sent) continue;
      while (!queue.finish_send()) {
      }
      ++number;
    }
  });
  std::uint64_t wrong = 0;
  std::uint64_t target = 0;
  for (std::uint64_t number = 0; number < count; ++number) {
    std::optional<std::uint64_t> posted;
    while (!posted) posted = queue.receive(std::as_writable_bytes(std::span(&target, 1))).value();
    while (!queue.received(*posted).value()) std::this_thread::yield();
    if (target != number) ++wrong;
  }
  sender.join();
  EXPECT_EQ(wrong, 0U);
}

}  // namespace
}  // namespace r2ccl::net
