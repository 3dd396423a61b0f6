// Measures the network plugin for NCCL beside a raw TCP socket, on loopback rails: two processes
// load the library as NCCL does.  Prints a line of JSON for each point; asserts nothing about
// times.
//
//   net_bench [ROUNDS [FAULTS]]
//
// One way: half of a round trip, with the receive posted before its message, as NCCL does.  Floor:
// the same over a socket with TCP_NODELAY, and both ends spin.  Plugin and floor take turns.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <fstream>

#include "net_player.hpp"

namespace {

using namespace r2ccl::testing;  // NOLINT(google-build-using-namespace)
using Clock = std::chrono::steady_clock;
using r2ccl::net::NcclResult;

constexpr std::size_t most_bytes = std::size_t{1} << 20U;

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

double quantile(std::vector<double> values, double part) {
  std::ranges::sort(values);
  const double last = static_cast<double>(values.size() - 1);
  return values[static_cast<std::size_t>(part * last + 0.5)];
}

// ---- the floor ----

class Floor {
 public:
  // Rank 0 listens, rank 1 connects.
  explicit Floor(Rank& rank) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    const int made = ::socket(AF_INET, SOCK_STREAM, 0);
    if (rank.rank == 0) {
      R2CCL_RANK_CHECK(::bind(made, generic, size) == 0 && ::listen(made, 1) == 0);
      R2CCL_RANK_CHECK(::getsockname(made, generic, &size) == 0);
      rank.board.words[0].store(address.sin_port);
      rank.barrier();
      socket_ = ::accept(made, nullptr, nullptr);
      ::close(made);
    } else {
      rank.barrier();
      address.sin_port = static_cast<in_port_t>(rank.board.words[0].load());
      R2CCL_RANK_CHECK(::connect(made, generic, size) == 0);
      socket_ = made;
    }
    const int on = 1;
    R2CCL_RANK_CHECK(::setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0);
  }
  ~Floor() { ::close(socket_); }
  Floor(const Floor&) = delete;
  Floor& operator=(const Floor&) = delete;

  void send(const std::byte* data, std::size_t bytes) const {
    while (bytes > 0) {
      const ssize_t sent = ::send(socket_, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
      R2CCL_RANK_CHECK(sent > 0 || errno == EAGAIN);
      if (sent > 0) data += sent, bytes -= static_cast<std::size_t>(sent);
    }
  }
  void receive(std::byte* data, std::size_t bytes) const {
    while (bytes > 0) {
      const ssize_t got = ::recv(socket_, data, bytes, MSG_DONTWAIT);
      R2CCL_RANK_CHECK(got > 0 || (got < 0 && errno == EAGAIN));
      if (got > 0) data += got, bytes -= static_cast<std::size_t>(got);
    }
  }

 private:
  int socket_ = -1;
};

// ---- the plugin ----

// A connection in each direction between two ranks.
class Pair {
 public:
  Pair(Rank& rank, const Rank::Ends& ends) : rank_(rank), ends_(ends), out_(most_bytes) {
    in_.resize(depth * most_bytes);
    out_memory_ = rank.memory(ends.sender, out_.data(), out_.size());
    in_memory_ = rank.memory(ends.receiver, in_.data(), in_.size());
  }
  static constexpr std::size_t depth = 8;  // steps of NCCL

  void post() {
    void* request = nullptr;
    std::byte* const into = in_.data() + posted_++ % depth * most_bytes;
    while (request == nullptr)
      R2CCL_RANK_CHECK(rank_.net->receive(ends_.receiver, into, most_bytes, in_memory_, &request) ==
                       NcclResult::success);
    receives_.push_back(request);
  }
  void wait_received() {
    while (!rank_.done(receives_.front())) reap();
    receives_.pop_front();
  }
  void send(std::size_t bytes) {
    while (sends_.size() >= depth) reap();
    void* request = nullptr;
    while (request == nullptr) {
      R2CCL_RANK_CHECK(rank_.net->send(ends_.sender, out_.data(), bytes, out_memory_, &request) ==
                       NcclResult::success);
      if (request == nullptr) reap();
    }
    sends_.push_back(request);
  }
  void finish() {
    while (!sends_.empty()) reap();
  }
  // A test with nothing new.
  [[nodiscard]] bool idle_test() { return rank_.done(receives_.front()); }

 private:
  void reap() {
    if (!sends_.empty() && rank_.done(sends_.front())) sends_.pop_front();
  }

  Rank& rank_;
  const Rank::Ends ends_;
  std::vector<std::byte> out_;
  std::vector<std::byte> in_;
  void* out_memory_;
  void* in_memory_;
  std::deque<void*> sends_;
  std::deque<void*> receives_;
  std::size_t posted_ = 0;
};

// Returns round trips in us at rank 0.
std::vector<double> round_trips(Rank& rank, Pair& pair, std::size_t bytes, int rounds) {
  std::vector<double> times;
  if (rank.rank == 1) pair.post();
  rank.barrier();
  for (int round = 0; round < rounds; ++round) {
    if (rank.rank == 0) {
      pair.post();
      const auto begin = Clock::now();
      pair.send(bytes);
      pair.wait_received();
      times.push_back(us_since(begin));
    } else {
      pair.wait_received();
      if (round + 1 < rounds) pair.post();
      pair.send(bytes);
    }
  }
  pair.finish();
  rank.barrier();
  return times;
}

std::vector<double> round_trips(Rank& rank, const Floor& floor, std::size_t bytes, int rounds) {
  std::vector<std::byte> buffer(bytes);
  std::vector<double> times;
  rank.barrier();
  for (int round = 0; round < rounds; ++round) {
    const auto begin = Clock::now();
    if (rank.rank == 0) floor.send(buffer.data(), bytes);
    floor.receive(buffer.data(), bytes);
    if (rank.rank == 1) floor.send(buffer.data(), bytes);
    times.push_back(us_since(begin));
  }
  return times;
}

void measure_latency(Rank& rank, Pair& pair, const Floor& floor, int rounds) {
  for (const std::size_t bytes : {8U, 1024U, 4096U, 16'384U, 65'536U}) {
    std::vector<double> plugin;
    std::vector<double> raw;
    for (int turn = 0; turn < 10; ++turn) {
      for (const double time : round_trips(rank, pair, bytes, rounds / 10)) plugin.push_back(time);
      for (const double time : round_trips(rank, floor, bytes, rounds / 10)) raw.push_back(time);
    }
    if (rank.rank != 0) continue;
    const double own = quantile(plugin, 0.5) / 2;
    const double least = quantile(raw, 0.5) / 2;
    std::printf(
        R"({"what": "one_way", "bytes": %zu, "plugin_us": %.2f, "plugin_p99_us": %.2f, "floor_us": %.2f, "target_us": %.2f})"
        "\n",
        bytes, own, quantile(plugin, 0.99) / 2, least, 1.25 * least + 1);
  }
}

void measure_bandwidth(Rank& rank, Pair& pair, const Floor& floor, int messages) {
  std::vector<std::byte> buffer(most_bytes);
  std::vector<double> plugin;
  std::vector<double> raw;
  const auto mib_s = [&](Clock::time_point begin) { return messages / us_since(begin) * 1e6; };
  for (int turn = 0; turn < 5; ++turn) {
    for (std::size_t i = 0; rank.rank == 1 && i < Pair::depth; ++i) pair.post();
    rank.barrier();
    auto begin = Clock::now();
    for (int message = 0; message < messages; ++message) {
      if (rank.rank == 0) {
        pair.send(most_bytes);
      } else {
        pair.wait_received();
        if (message + static_cast<int>(Pair::depth) < messages) pair.post();
      }
    }
    pair.finish();
    rank.barrier();
    plugin.push_back(mib_s(begin));
    begin = Clock::now();
    for (int message = 0; message < messages; ++message) {
      if (rank.rank == 0)
        floor.send(buffer.data(), most_bytes);
      else
        floor.receive(buffer.data(), most_bytes);
    }
    rank.barrier();
    raw.push_back(mib_s(begin));
  }
  if (rank.rank != 0) return;
  const double own = quantile(plugin, 0.5);
  const double most = quantile(raw, 0.5);
  std::printf(
      R"({"what": "bandwidth", "bytes": %zu, "plugin_mib_s": %.0f, "floor_mib_s": %.0f, "ratio": %.2f})"
      "\n",
      most_bytes, own, most, own / most);
}

// Both ranks are idle, with a receive posted.
void measure_idle(Rank& rank, Pair& pair, const char* kind) {
  constexpr int calls = 100'000;
  pair.post();
  rank.barrier();
  if (rank.rank == 0) {
    const auto begin = Clock::now();
    for (int call = 0; call < calls; ++call) R2CCL_RANK_CHECK(!pair.idle_test());
    std::printf(R"({"what": "idle_test", "rail": "%s", "ns": %.0f})"
                "\n",
                kind, us_since(begin) * 1000 / calls);
  }
  rank.barrier();
  pair.send(8);
  pair.wait_received();
  pair.finish();
}

long resident_kib() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word)
    if (word == "VmRSS:") break;
  long kib = 0;
  status >> kib;
  return kib;
}

void measure_connections(Rank& rank, int rounds) {
  constexpr int count = 512;
  const Rank::Ends first = rank.ring();
  Pair pair(rank, first);
  const std::vector<double> alone = round_trips(rank, pair, 8, rounds);
  const long before = resident_kib();
  const auto begin = Clock::now();
  for (int made = 1; made < count; ++made) {
    rank.barrier();
    rank.board.slots[rank.rank][1 - rank.rank][0].there.store(false);
    rank.barrier();
    (void)rank.ring();
  }
  const double start_us = us_since(begin);
  const long grown = resident_kib() - before;
  const std::vector<double> times = round_trips(rank, pair, 8, rounds);
  if (rank.rank != 0) return;
  std::printf(
      R"({"what": "connections", "count": %d, "start_s": %.2f, "kib_each": %.1f, "one_way_us": %.2f, "alone_us": %.2f})"
      "\n",
      count, start_us / 1e6, static_cast<double>(grown) / (count - 1), quantile(times, 0.5) / 2,
      quantile(alone, 0.5) / 2);
}

// The longest round trip around each fault of the rail in use: the home rail of the pair.
void measure_faults(Rank& rank, const char* kind, int faults) {
  constexpr int rails = 3;
  constexpr std::size_t bytes = 65'536;
  constexpr int around = 400;  // round trips
  std::deque<Pair> pairs;
  for (int nic = 0; nic < rails; ++nic) pairs.emplace_back(rank, rank.ring(nic, nic));
  std::vector<double> stalls;
  for (int fault = 0; fault < faults; ++fault) {
    Pair& pair = pairs[static_cast<std::size_t>(fault % rails)];
    const std::string rail = std::to_string(fault % rails);
    if (rank.rank == 0 && *kind != '\0') rank.fault(rail + " " + kind);
    double longest = 0;
    for (const double time : round_trips(rank, pair, bytes, around))
      longest = std::max(longest, time);
    if (rank.rank == 0 && *kind != '\0') rank.fault(rail + " heal");
    for (const double time : round_trips(rank, pair, bytes, around))
      longest = std::max(longest, time);
    stalls.push_back(longest / 1000);
  }
  if (rank.rank != 0) return;
  std::printf(
      R"({"what": "stall", "fault": "%s", "faults": %d, "p50_ms": %.2f, "p99_ms": %.2f, "longest_ms": %.2f})"
      "\n",
      kind, faults, quantile(stalls, 0.5), quantile(stalls, 0.99), quantile(stalls, 1));
}

bool play(const Player& player, const std::function<void(Rank&)>& body) {
  const auto result = player.play([&body](Rank& rank) {
    body(rank);
    std::fflush(stdout);
  });
  if (!result) std::fprintf(stderr, "%s\n", result.message());
  return static_cast<bool>(result);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5000;
  const int faults = argc > 2 ? std::atoi(argv[2]) : 100;
  if (rounds < 10 || faults < 1) {
    std::fprintf(stderr, "usage: %s [ROUNDS [FAULTS]]: at least 10 rounds and 1 fault\n", argv[0]);
    return 2;
  }
  const Player::Environment one_rail{{"R2CCL_RAILS", "127.0.0.1"}};
  const Player::Environment quick{{"R2CCL_REJOIN_BACKOFF_MIN_MS", "1"},
                                  {"R2CCL_REJOIN_BACKOFF_MAX_MS", "50"}};
  const Player::Environment node{{"R2CCL_NODE", ""}};
  bool good = play({.environment = one_rail, .limit_s = 1500, .nics = 1}, [&](Rank& rank) {
    const Floor floor(rank);
    Pair pair(rank, rank.ring());
    measure_latency(rank, pair, floor, rounds);
    measure_bandwidth(rank, pair, floor, std::max(rounds / 10, 16));
    measure_idle(rank, pair, "tcp");
  });
  good = play({.environment = node},
              [&](Rank& rank) {
                Pair pair(rank, rank.ring());
                measure_idle(rank, pair, "shm");
              }) &&
         good;
  good = play({.limit_s = 1500}, [&](Rank& rank) { measure_connections(rank, rounds); }) && good;
  for (const char* kind : {"", "carrier_loss", "black_hole"})
    good = play({.environment = quick, .limit_s = 1500},
                [&](Rank& rank) { measure_faults(rank, kind, faults); }) &&
           good;
  return good ? 0 : 1;
}
