// Two relays in a process, with a prefix each in place of a network namespace each: a client at the
// mirror of one relay reaches a listener of the other over real rails.
#include "relay/relay.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#include "drivers/socket_address.hpp"
#include "eventually.hpp"
#include "job.hpp"

namespace r2ccl {
namespace {

using testing::eventually;
using testing::Job;

// A socket with blocking calls that end after a minute.
class Socket {
 public:
  explicit Socket(FileDescriptor socket) : socket_(std::move(socket)) {
    const timeval limit{.tv_sec = 60, .tv_usec = 0};
    ::fcntl(fd(), F_SETFL, ::fcntl(fd(), F_GETFL) & ~O_NONBLOCK);
    ::setsockopt(fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    ::setsockopt(fd(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  }
  static Socket to(const LoopbackEnd& end) {
    Socket socket(FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
    const sockaddr_in address = end.get();
    if (::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
      socket.socket_.reset();
    return socket;
  }
  [[nodiscard]] bool valid() const { return socket_.valid(); }
  [[nodiscard]] int fd() const { return socket_.get(); }
  void send(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      ASSERT_GT(sent, 0) << std::strerror(errno);
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
  }
  // Returns `count` bytes, or fewer at the end of the stream.
  [[nodiscard]] std::string receive(std::size_t count) const {
    std::string all(count, '\0');
    std::size_t have = 0;
    while (have < count) {
      const ssize_t got = ::recv(fd(), all.data() + have, count - have, 0);
      if (got <= 0) break;
      have += static_cast<std::size_t>(got);
    }
    all.resize(have);
    return all;
  }
  // Returns errno of a read that fails; 0 at the end of the stream; -1 after bytes.
  [[nodiscard]] int read_error() const {
    char byte = 0;
    const ssize_t got = ::recv(fd(), &byte, 1, 0);
    return got < 0 ? errno : got == 0 ? 0 : -1;
  }
  void finish() const { ::shutdown(fd(), SHUT_WR); }
  void reset() { close_with_reset(socket_); }

 private:
  FileDescriptor socket_;
};

std::string text_of(std::size_t bytes) {
  std::string text(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i * 31 + i / 257);
  return text;
}

// Makes a system call of the calling thread fail if an argument has a value.
void refuse(std::uint32_t call, std::size_t argument, std::uint32_t value, std::uint32_t error) {
  const auto at = static_cast<std::uint32_t>(offsetof(seccomp_data, args) + 8 * argument);
  std::array<sock_filter, 6> program{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter{.len = program.size(), .filter = program.data()};
  EXPECT_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  EXPECT_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0) << std::strerror(errno);
}

class Relays : public ::testing::Test {
 protected:
  void SetUp() override {
    static std::uint32_t count = 0;
    for (std::uint32_t node = 0; node < 2; ++node) {
      const auto pid = static_cast<std::uint32_t>(::getpid());
      prefixes_[node] = 127U << 24U | (128 + pid % 100) << 16U | (2 * count + node) << 8U;
      ASSERT_EQ(::pipe2(parents_[node].data(), O_CLOEXEC), 0);
    }
    ++count;
    for (std::uint32_t node = 0; node < 2; ++node) {
      RelayOptions options;
      options.node = node;
      options.prefix = prefixes_[node];
      options.parent = parents_[node][0];
      options.peers_may_end = peers_may_end();
      options.link_timeout_ns = 120'000 * ns_per_ms;
      options.peers.push_back({.process = job_.engines[1 - node]->process(), .node = 1 - node});
      auto relay = Relay::create(job_.engines[node], options);
      ASSERT_TRUE(relay.ok()) << relay.take_status().message();
      relays_[node] = std::move(relay.value());
      threads_[node] = std::thread([this, node] {
        prepare(node);
        outcomes_[node] = relays_[node]->run();
      });
    }
  }
  void TearDown() override {
    for (std::uint32_t node = 0; node < 2; ++node) end_parent(node);
    for (std::thread& thread : threads_)
      if (thread.joinable()) thread.join();
    for (const auto& ends : parents_) ::close(ends[0]);
  }
  [[nodiscard]] virtual bool peers_may_end() const { return false; }
  // Called in the thread of a relay before it runs.
  virtual void prepare(std::uint32_t /*node*/) {}
  void end_parent(std::uint32_t node) {
    if (parents_[node][1] >= 0) ::close(parents_[node][1]);
    parents_[node][1] = -1;
  }

  // Listens at the virtual address of node 0.  Port 0: any.
  Socket listen(std::uint16_t port = 0) {
    auto listener = listen_at({virtual_address(prefixes_[0], 0), port}, true);
    EXPECT_TRUE(listener.ok());
    sockaddr_in bound{};
    socklen_t size = sizeof(bound);
    ::getsockname(listener.value().get(), reinterpret_cast<sockaddr*>(&bound), &size);
    port_ = ntohs(bound.sin_port);
    return Socket(std::move(listener.value()));
  }
  [[nodiscard]] LoopbackEnd mirror() const { return {virtual_address(prefixes_[1], 0), port_}; }
  static Socket accept_from(const Socket& listener) {
    return Socket(FileDescriptor(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC)));
  }
  [[nodiscard]] std::string sync(std::uint32_t node) const {
    Socket socket(FileDescriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)));
    auto name = SocketAddress::abstract_unix(sync_socket_name(prefixes_[node], node));
    EXPECT_EQ(::connect(socket.fd(), name.value().get(), name.value().size), 0);
    return socket.receive(1000);
  }

  Job job_{{.ranks = 2, .rails = 3, .shm = false, .config = {}}};
  std::array<std::uint32_t, 2> prefixes_{};
  std::array<std::array<int, 2>, 2> parents_{};
  std::array<std::unique_ptr<Relay>, 2> relays_;
  std::array<std::thread, 2> threads_;
  std::array<Status, 2> outcomes_;
  std::uint16_t port_ = 0;
};

TEST_F(Relays, ConnectionsCarryBytesBothWaysAndEndInOrder) {
  const Socket listener = listen();
  ASSERT_EQ(sync(0), "ok\n");
  const Socket client = Socket::to(mirror());
  ASSERT_TRUE(client.valid()) << "SYNC was answered before the mirror was there";
  const Socket server = accept_from(listener);
  const std::string large = text_of(5'000'000);
  std::thread writer([&] {
    client.send(large);
    client.finish();
  });
  EXPECT_EQ(server.receive(large.size()), large);
  writer.join();
  EXPECT_EQ(server.read_error(), 0);
  server.send("the other direction is open");
  EXPECT_EQ(client.receive(27), "the other direction is open");
  server.finish();
  EXPECT_EQ(client.read_error(), 0);
  EXPECT_TRUE(eventually([&] { return relays_[0]->connections() == 0; }, "no connection is left"));
}

TEST_F(Relays, AListenerThatEndsLosesItsMirror) {
  {
    const Socket listener = listen();
    ASSERT_EQ(sync(0), "ok\n");
  }
  EXPECT_TRUE(eventually([&] { return !Socket::to(mirror()).valid(); }, "the mirror is gone"));
}

TEST_F(Relays, AResetIsCarriedAsAReset) {
  const Socket listener = listen();
  ASSERT_EQ(sync(0), "ok\n");
  const Socket client = Socket::to(mirror());
  Socket server = accept_from(listener);
  client.send("x");
  ASSERT_EQ(server.receive(1), "x");
  server.reset();
  EXPECT_EQ(client.read_error(), ECONNRESET);
}

TEST_F(Relays, ATakenPortIsSaidAtSync) {
  auto stranger = listen_at(mirror(), false);
  ASSERT_TRUE(stranger.ok());
  sockaddr_in bound{};
  socklen_t size = sizeof(bound);
  ::getsockname(stranger.value().get(), reinterpret_cast<sockaddr*>(&bound), &size);
  const Socket listener = listen(ntohs(bound.sin_port));
  EXPECT_EQ(sync(0), "taken " + std::to_string(port_) + " node 1\n");
}

TEST_F(Relays, TheLossOfAllRailsButOneIsNotSeen) {
  const Socket listener = listen();
  ASSERT_EQ(sync(0), "ok\n");
  const Socket client = Socket::to(mirror());
  const Socket server = accept_from(listener);
  for (int round = 0; round < 30; ++round) {
    if (round == 10) {
      ASSERT_TRUE(job_.engines[0]->inject(0, Fault::carrier_loss).ok());
    }
    if (round == 20) {
      ASSERT_TRUE(job_.engines[1]->inject(1, Fault::black_hole).ok());
    }
    const std::string text = text_of(round % 5 == 0 ? 200'000 : 500);
    std::thread writer([&] { client.send(text); });
    EXPECT_EQ(server.receive(text.size()), text);
    writer.join();
    server.send(text);
    EXPECT_EQ(client.receive(text.size()), text);
  }
  for (const RailId rail : {RailId{0}, RailId{1}})
    for (const auto& engine : job_.engines) ASSERT_TRUE(engine->inject(rail, Fault::none).ok());
}

TEST_F(Relays, AReaderThatStopsDoesNotHoldUpOthers) {
  const Socket listener = listen();
  ASSERT_EQ(sync(0), "ok\n");
  const Socket stopped = Socket::to(mirror());
  const Socket its_server = accept_from(listener);
  const std::string large = text_of(30'000'000);  // beyond all buffers
  std::thread writer([&] { stopped.send(large); });
  const Socket client = Socket::to(mirror());
  const Socket server = accept_from(listener);
  for (int round = 0; round < 20; ++round) {
    client.send("question");
    ASSERT_EQ(server.receive(8), "question");
    server.send("answer");
    ASSERT_EQ(client.receive(6), "answer");
  }
  EXPECT_EQ(its_server.receive(large.size()), large);
  writer.join();
}

TEST_F(Relays, TheEndOfAParentEndsBothRelays) {
  end_parent(0);
  threads_[0].join();
  EXPECT_TRUE(outcomes_[0].ok()) << outcomes_[0].message();
  job_.engines[0]->close(1.0);
  threads_[1].join();
  EXPECT_EQ(outcomes_[1].code(), ErrorCode::peer_closed) << outcomes_[1].message();
}

TEST_F(Relays, AParentThatEndsDoesNotWaitForAReaderThatStops) {
  const Socket listener = listen();
  ASSERT_EQ(sync(0), "ok\n");
  const Socket client = Socket::to(mirror());
  const Socket server = accept_from(listener);
  std::thread writer([&] {  // until the reset
    const std::string text = text_of(1'000'000);
    while (::send(client.fd(), text.data(), text.size(), MSG_NOSIGNAL) > 0) continue;
  });
  end_parent(1);
  threads_[1].join();
  EXPECT_TRUE(outcomes_[1].ok()) << outcomes_[1].message();
  relays_[1].reset();
  writer.join();
}

class RelaysOfACommand : public Relays {
 protected:
  [[nodiscard]] bool peers_may_end() const override { return true; }
};

// The last bytes of a node are in sockets and queues when its relay is told to end.
TEST_F(RelaysOfACommand, BytesSentBeforeTheEndOfAParentArrive) {
  const Socket listener = listen();
  ASSERT_EQ(sync(0), "ok\n");
  const std::string text = text_of(3'000'000);  // beyond the window of a stream
  std::string received;
  std::thread reader;
  {
    const Socket client = Socket::to(mirror());
    ASSERT_TRUE(client.valid());
    reader = std::thread([&] { received = accept_from(listener).receive(text.size()); });
    client.send(text);
  }
  end_parent(1);
  threads_[1].join();
  EXPECT_TRUE(outcomes_[1].ok()) << outcomes_[1].message();
  reader.join();
  EXPECT_EQ(received, text);
}

// The process of the other relay ends while this one waits for a reader there.
TEST_F(RelaysOfACommand, AParentThatEndsDoesNotWaitForAProcessThatIsGone) {
  const Socket listener = listen();
  ASSERT_EQ(sync(0), "ok\n");
  const Socket client = Socket::to(mirror());
  const Socket server = accept_from(listener);
  const timeval stuck{.tv_sec = 0, .tv_usec = 500'000};
  ::setsockopt(client.fd(), SOL_SOCKET, SO_SNDTIMEO, &stuck, sizeof(stuck));
  const std::string text = text_of(1'000'000);
  while (::send(client.fd(), text.data(), text.size(), MSG_NOSIGNAL) > 0) continue;
  end_parent(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the relay sees the end
  job_.engines[1]->carry_streams([](std::uint32_t, Link& link, TimeNs) { link.set_peer_gone(); });
  threads_[1].join();
  for (const LogLine& line : job_.engines[1]->log().take().value_or(std::deque<LogLine>()))
    EXPECT_EQ(line.text.find("not all bytes"), std::string::npos) << line.text;
}

TEST_F(RelaysOfACommand, ANodeThatIsDoneEndsItsConnectionsAlone) {
  const Socket listener = listen();
  ASSERT_EQ(sync(0), "ok\n");
  const Socket open = Socket::to(mirror());
  const Socket its_server = accept_from(listener);
  const std::string text = text_of(3'000'000);
  std::thread writer([&] {
    const Socket client = Socket::to(mirror());
    client.send(text);
  });
  const Socket server = accept_from(listener);
  EXPECT_EQ(server.receive(1), text.substr(0, 1));
  std::thread end([&] {
    writer.join();
    end_parent(1);
    threads_[1].join();
    job_.engines[1]->close(10.0);
  });
  // The connection that was at its end ends in order, the open one by a reset.
  EXPECT_EQ(server.receive(text.size() - 1), text.substr(1));
  EXPECT_EQ(server.read_error(), 0);
  EXPECT_EQ(its_server.read_error(), ECONNRESET);
  end.join();
  EXPECT_TRUE(eventually([&] { return relays_[0]->connections() == 0; }, "no connection is left"));
  EXPECT_EQ(sync(0), "ok\n");
  end_parent(0);
  threads_[0].join();
  EXPECT_TRUE(outcomes_[0].ok()) << outcomes_[0].message();
}

// All descriptors of this process up to its limit.
class AllDescriptors {
 public:
  AllDescriptors() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit few{.rlim_cur = 512, .rlim_max = before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    for (int fd = ::dup(0); fd >= 0; fd = ::dup(0)) taken_.emplace_back(fd);
    EXPECT_EQ(errno, EMFILE);
  }
  ~AllDescriptors() { EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before_), 0); }
  AllDescriptors(const AllDescriptors&) = delete;
  AllDescriptors& operator=(const AllDescriptors&) = delete;

 private:
  rlimit before_{};
  std::vector<FileDescriptor> taken_;
};

TEST_F(Relays, WithoutADescriptorAConnectionIsReset) {
  const Socket listener = listen();
  ASSERT_EQ(sync(0), "ok\n");
  {
    const Socket refused(FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
    const AllDescriptors all;
    const sockaddr_in address = mirror().get();
    ASSERT_EQ(::connect(refused.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
              0);
    EXPECT_EQ(refused.read_error(), ECONNRESET);
  }
  const Socket client = Socket::to(mirror());
  const Socket server = accept_from(listener);
  client.send("x");
  EXPECT_EQ(server.receive(1), "x");
}

// The limit of watches (fs.epoll.max_user_watches) is reached on the node of the parameter.
class RelaysWithoutWatches : public Relays, public ::testing::WithParamInterface<std::uint32_t> {
 protected:
  void prepare(std::uint32_t node) override {
    if (node == GetParam()) refuse(SYS_epoll_ctl, 1, EPOLL_CTL_ADD, ENOSPC);
  }
};

TEST_P(RelaysWithoutWatches, AListenerHasNoMirrorOrAConnectionIsReset) {
  const Socket listener = listen();
  if (GetParam() == 1) {
    EXPECT_EQ(sync(0), "taken " + std::to_string(port_) + " node 1\n");
    EXPECT_FALSE(Socket::to(mirror()).valid());
    return;
  }
  ASSERT_EQ(sync(0), "ok\n");
  const Socket client = Socket::to(mirror());
  ASSERT_TRUE(client.valid());
  EXPECT_EQ(client.read_error(), ECONNRESET);
}

INSTANTIATE_TEST_SUITE_P(Nodes, RelaysWithoutWatches, ::testing::Values(0, 1));

TEST_F(Relays, ConnectionsOfOtherUsersAreReset) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  const Socket listener = listen();
  ASSERT_EQ(sync(0), "ok\n");
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setresuid(65534, 65534, 65534) != 0) ::_exit(1);
    const int stranger = ::socket(AF_INET, SOCK_STREAM, 0);
    const sockaddr_in address = mirror().get();
    if (::connect(stranger, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
      ::_exit(2);
    char byte = 0;
    ::_exit(::recv(stranger, &byte, 1, 0) < 0 && errno == ECONNRESET ? 0 : 3);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// Any user of the network namespace can connect to an abstract socket, so the relay checks the uid.
TEST_F(Relays, SyncIsRefusedToOtherUsers) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  auto name = SocketAddress::abstract_unix(sync_socket_name(prefixes_[0], 0));
  ASSERT_TRUE(name.ok());
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setresuid(65534, 65534, 65534) != 0) ::_exit(1);
    const int stranger = ::socket(AF_UNIX, SOCK_STREAM, 0);
    if (::connect(stranger, name.value().get(), name.value().size) != 0) ::_exit(2);
    char byte = 0;
    ::_exit(::recv(stranger, &byte, 1, 0) == 0 ? 0 : 3);  // the end, without an answer
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  bool logged = false;
  for (const LogLine& line : job_.engines[0]->log().take().value_or(std::deque<LogLine>()))
    logged = logged || line.text.find("refused SYNC of user 65534") != std::string::npos;
  EXPECT_TRUE(logged);
  EXPECT_EQ(sync(0), "ok\n") << "the own user is refused, too";
}

// ---- parts ----

TEST(Relay, APrefixIsHeldByOneRelayOfAHost) {
  const std::uint32_t prefix = 127U << 24U | 250U << 16U | 9U << 8U;
  auto first = hold_prefix(prefix);
  ASSERT_TRUE(first.ok()) << first.take_status().message();
  auto second = hold_prefix(prefix);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.take_status().message().find("127.250.9.0 is in use"), std::string::npos);
  first.value().reset();
  EXPECT_TRUE(hold_prefix(prefix).ok());
}

TEST(Relay, APrefixIsALoopbackNetwork) {
  for (const std::uint32_t prefix :
       {10U << 24U, 127U << 24U | 1U << 8U, 127U << 24U | 1U << 16U | 1U}) {
    auto held = hold_prefix(prefix);
    ASSERT_FALSE(held.ok());
    EXPECT_NE(held.take_status().message().find("must be 127.x.y.0"), std::string::npos);
  }
}

TEST(SocketTable, FindsListenersAndOwners) {
  auto table = SocketTable::open();
  ASSERT_TRUE(table.ok()) << table.take_status().message();
  const std::uint32_t address = 127U << 24U | 250U << 16U | 10U << 8U | 1U;
  auto listener = listen_at({address, 0}, false);
  ASSERT_TRUE(listener.ok());
  auto wildcard = listen_at({0, 0}, false);
  ASSERT_TRUE(wildcard.ok());
  sockaddr_in bound{};
  socklen_t size = sizeof(bound);
  ::getsockname(listener.value().get(), reinterpret_cast<sockaddr*>(&bound), &size);
  const std::uint16_t port = ntohs(bound.sin_port);
  EXPECT_EQ(table.value().listeners(address, ::geteuid()).value(), std::vector{port});
  EXPECT_TRUE(table.value().listeners(address, ::geteuid() + 1).value().empty());
  EXPECT_FALSE(table.value().owner({address, 1}, {address, port}).value().has_value());
}

// torch connects to an IPv4 address by an IPv6 socket.
TEST(SocketTable, FindsOwnersOfIpv6SocketsWithAndWithoutNetlink) {
  const std::uint32_t address = 127U << 24U | 250U << 16U | 11U << 8U | 1U;
  auto listener = listen_at({address, 0}, false);
  ASSERT_TRUE(listener.ok());
  sockaddr_in bound{};
  socklen_t size = sizeof(bound);
  ::getsockname(listener.value().get(), reinterpret_cast<sockaddr*>(&bound), &size);
  const LoopbackEnd remote{address, ntohs(bound.sin_port)};
  const FileDescriptor client(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!client.valid()) GTEST_SKIP() << "no IPv6";
  sockaddr_in6 to{};
  to.sin6_family = AF_INET6;
  to.sin6_port = bound.sin_port;
  ASSERT_EQ(::inet_pton(AF_INET6, "::ffff:127.250.11.1", &to.sin6_addr), 1);
  ASSERT_EQ(::connect(client.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  sockaddr_in6 from{};
  size = sizeof(from);
  ::getsockname(client.get(), reinterpret_cast<sockaddr*>(&from), &size);
  std::uint32_t mapped = 0;
  std::memcpy(&mapped, &from.sin6_addr.s6_addr[12], sizeof(mapped));
  const LoopbackEnd local{ntohl(mapped), ntohs(from.sin6_port)};
  const auto check = [&] {
    auto table = SocketTable::open();
    ASSERT_TRUE(table.ok()) << table.take_status().message();
    EXPECT_EQ(table.value().owner(local, remote).value(), ::geteuid());
    EXPECT_EQ(table.value().listeners(address, ::geteuid()).value(), std::vector{remote.port});
  };
  check();
  std::thread([&] {
    refuse(SYS_socket, 0, AF_NETLINK, EAFNOSUPPORT);
    check();
  }).join();
}

// The first process of a node without an API server never tells that its engine has started.
TEST(RelayLook, BecomesRareWithoutChanges) {
  constexpr TimeNs second = 1000 * ns_per_ms;
  EXPECT_EQ(look_interval(0, /*started=*/true), second);
  EXPECT_EQ(look_interval(0, false), 100 * ns_per_ms);
  EXPECT_EQ(look_interval(10 * second, false), 100 * ns_per_ms);
  EXPECT_EQ(look_interval(50 * second, false), 500 * ns_per_ms);
  EXPECT_EQ(look_interval(3600 * second, false), second);
}

}  // namespace
}  // namespace r2ccl
