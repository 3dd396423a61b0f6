// Common parts of the native contenders: pinning, the control channel and the timed loop.
//
// A worker connects to the coordinator's Unix socket, sends `hello <rank>`, and then blocks in
// read() until the next command. A waiting worker uses no CPU time. Commands and answers:
//   prepare <op> <dtype> <bytes> <algorithm>   allocate, run once, check the result -> `ok`, or
//                                                 `wrong <details>`
//   run <warmup> <iterations>                  -> `times <cpu ns> <ns> <ns> ...`: the CPU time of
//                                                 this process, then the time of each iteration
//   soak <ms>      all-reduces for <ms>        -> `soak <start ns> <ns> <ns> ...`: start of the
//                                                 first call (CLOCK_MONOTONIC), time of each call
//   rails          -> `rails <name>,<state>,<bytes sent> ...`
//   quit
// The answer to an unsupported or failed command is `error <reason>`.
#pragma once

#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace r2serve::bench {

struct Request {
  std::string op;
  std::string dtype;
  std::size_t bytes = 0;
  std::string algorithm;
};

// Thrown by a collective under test for a wrong result.
struct WrongResult : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The collective under test. `prepare` returns an empty string, or the reason for a refusal, and
// throws WrongResult. `once` throws std::runtime_error when the peer is lost. A collective with
// support for `soak` overrides `first_value` and `rails`.
class Collective {
 public:
  Collective() = default;
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;
  virtual ~Collective() = default;
  virtual std::string prepare(const Request& request) = 0;
  virtual void once() = 0;
  virtual float* first_value() { return nullptr; }
  virtual std::string rails() { return {}; }
};

inline void die(const char* what) {
  std::perror(what);
  std::exit(1);
}

// Pins rank r to the r-th allowed core, modulo the number of cores, as in every contender.
inline void pin_rank(int rank) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) die("sched_getaffinity");
  std::vector<std::size_t> cores;
  for (std::size_t core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  cpu_set_t mine;
  CPU_ZERO(&mine);
  CPU_SET(cores[static_cast<std::size_t>(rank) % cores.size()], &mine);
  if (sched_setaffinity(0, sizeof mine, &mine) != 0) die("sched_setaffinity");
}

class Control {
 public:
  Control(const std::string& path, int rank) : fd_(::socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (fd_ < 0 || path.size() >= sizeof address.sun_path) die("control socket");
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    if (::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      die("connect to the coordinator");
    }
    reply("hello " + std::to_string(rank));
  }
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;
  ~Control() { ::close(fd_); }

  void reply(std::string line) const {
    line += '\n';
    for (std::size_t done = 0; done < line.size();) {
      const ssize_t n = ::send(fd_, line.data() + done, line.size() - done, MSG_NOSIGNAL);
      if (n <= 0) die("reply to the coordinator");
      done += static_cast<std::size_t>(n);
    }
  }

  // Returns the next command, or nullopt when the coordinator has closed the connection.
  std::optional<std::string> next() {
    for (;;) {
      if (const auto end = buffer_.find('\n'); end != std::string::npos) {
        std::string line = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        return line;
      }
      char piece[512];
      const ssize_t n = ::read(fd_, piece, sizeof piece);
      if (n <= 0) return std::nullopt;
      buffer_.append(piece, static_cast<std::size_t>(n));
    }
  }

 private:
  int fd_;
  std::string buffer_;
};

// Returns the user and system time of this process so far (all threads), in ns.
inline std::int64_t cpu_ns() {
  timespec spent{};
  if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent) != 0) die("clock_gettime");
  return std::int64_t{spent.tv_sec} * 1'000'000'000 + spent.tv_nsec;
}

// Runs back-to-back collectives, and returns the `times` answer. A single clock reading ends a
// call and starts the next call.
inline std::string timed(Collective& collective, long warmup, long iterations) {
  using Clock = std::chrono::steady_clock;
  std::vector<std::int64_t> times(static_cast<std::size_t>(iterations));
  for (long i = 0; i < warmup; ++i) collective.once();
  const std::int64_t cpu_before = cpu_ns();
  auto before = Clock::now();
  for (auto& time : times) {
    collective.once();
    const auto after = Clock::now();
    time = std::chrono::duration_cast<std::chrono::nanoseconds>(after - before).count();
    before = after;
  }
  std::ostringstream out;
  out << "times " << cpu_ns() - cpu_before;
  for (const auto time : times) out << ' ' << time;
  return out.str();
}

// Runs all-reduces for `duration_ms`, and returns the `soak` answer, like soak in ../worker.py.
// Rank 0 puts a 1 into the first element after the deadline; the sum carries the 1 to every rank,
// so that all ranks stop after the same call.
inline std::string soak(Collective& collective, int rank, long duration_ms) {
  float* first = collective.first_value();
  if (first == nullptr) return "error this contender does not support soak";
  const auto now = [] {
    timespec time{};
    if (clock_gettime(CLOCK_MONOTONIC, &time) != 0) die("clock_gettime");
    return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  };
  auto before = now();
  const std::int64_t deadline = before + std::int64_t{duration_ms} * 1'000'000;
  std::ostringstream out;
  out << "soak " << before;
  while (*first == 0) {
    if (rank == 0 && before >= deadline) *first = 1;
    collective.once();
    const auto after = now();
    out << ' ' << after - before;
    before = after;
  }
  *first = 0;
  return out.str();
}

inline std::string answer(const std::string& line, Collective& collective, int rank) {
  std::istringstream words(line);
  std::string command;
  words >> command;
  if (command == "prepare") {
    Request request;
    words >> request.op >> request.dtype >> request.bytes >> request.algorithm;
    const std::string refused = collective.prepare(request);
    return refused.empty() ? "ok" : "error " + refused;
  }
  if (command == "run") {
    long warmup = 0;
    long iterations = 0;
    words >> warmup >> iterations;
    return timed(collective, warmup, iterations);
  }
  if (command == "soak") {
    long duration_ms = 0;
    words >> duration_ms;
    return soak(collective, rank, duration_ms);
  }
  if (command == "rails") return "rails" + collective.rails();
  return "error unknown command " + command;
}

inline int serve(Control& control, Collective& collective, int rank) {
  while (auto line = control.next()) {
    if (*line == "quit") return 0;
    try {
      control.reply(answer(*line, collective, rank));
    } catch (const WrongResult& error) {
      control.reply(std::string("wrong ") + error.what());
    } catch (const std::runtime_error& error) {
      control.reply(std::string("error ") + error.what());
    }
  }
  return 0;
}

}  // namespace r2serve::bench
