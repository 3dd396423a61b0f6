// Plays NCCL against the network plugin: each rank is a process that loads the library as NCCL
// does.  Handles travel over shared memory in place of NCCL's bootstrap.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "eventually.hpp"
#include "netplugin/abi.hpp"

namespace r2ccl::testing {

// Ends the process of a rank with a message.
#define R2CCL_RANK_CHECK(condition)                                                  \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      ::_exit(1);                                                                    \
    }                                                                                \
  } while (false)

inline constexpr int most_ranks = 8;
inline constexpr int most_channels = 4;

// Shared by all ranks of a job.
struct Board {
  struct Slot {
    std::array<std::byte, net::nccl_handle_bytes> handle;
    std::atomic<bool> there;
  };
  Slot slots[most_ranks][most_ranks][most_channels];  // [receiver][sender][channel]
  std::atomic<int> arrived;
  std::atomic<int> words[8];  // of the test
};

// Counts log lines of this process that contain a text.
inline std::atomic<const char*> counted_text{nullptr};
inline std::atomic<int> counted_lines{0};

inline void log_of_player(net::NcclLogLevel, unsigned long, const char*, int, const char* format,
                          ...) {
  static const bool shown = std::getenv("R2CCL_PLAYER_LOG") != nullptr;
  std::array<char, 1000> line{};
  std::va_list rest;
  va_start(rest, format);
  std::vsnprintf(line.data(), line.size(), format, rest);
  va_end(rest);
  const char* const counted = counted_text.load();
  if (counted != nullptr && std::strstr(line.data(), counted) != nullptr) ++counted_lines;
  if (shown) std::fprintf(stderr, "[%d] %s\n", static_cast<int>(::getpid()), line.data());
}

// The plugin by a version of the interface.
class AnyNet {
 public:
  virtual ~AnyNet() = default;
  virtual net::NcclResult init() = 0;
  virtual int devices() = 0;
  virtual net::NcclResult listen(int nic, void* handle, void** listener) = 0;
  virtual net::NcclResult connect(int nic, void* handle, void** sender) = 0;
  virtual net::NcclResult send(void* sender, void* data, std::size_t bytes, void* memory,
                               void** request) = 0;
  virtual net::NcclResult receive(void* receiver, void* data, std::size_t bytes, void* memory,
                                  void** request) = 0;
  virtual void finalize() = 0;
  // The same in all versions.
  net::Accept accept;
  net::RegisterMemory register_memory;
  net::DeregisterMemory deregister_memory;
  net::Test test;
  net::Close close_send, close_receive, close_listen;
};

template <typename Net>
class VersionedNet final : public AnyNet {
 public:
  explicit VersionedNet(const void* symbol) : net_(*static_cast<const Net*>(symbol)) {
    accept = net_.accept;
    register_memory = net_.register_memory;
    deregister_memory = net_.deregister_memory;
    test = net_.test;
    close_send = net_.close_send;
    close_receive = net_.close_receive;
    close_listen = net_.close_listen;
  }
  net::NcclResult init() override {
    if constexpr (requires { net_.finalize; })
      return net_.init(&context_, 1, nullptr, log_of_player, nullptr);
    else if constexpr (requires { net_.init(log_of_player, nullptr); })
      return net_.init(log_of_player, nullptr);
    else
      return net_.init(log_of_player);
  }
  int devices() override {
    int count = 0;
    return net_.devices(&count) == net::NcclResult::success ? count : -1;
  }
  net::NcclResult listen(int nic, void* handle, void** listener) override {
    if constexpr (requires { net_.finalize; })
      return net_.listen(context_, nic, handle, listener);
    else
      return net_.listen(nic, handle, listener);
  }
  net::NcclResult connect(int nic, void* handle, void** sender) override {
    if constexpr (requires { net_.finalize; })
      return net_.connect(context_, nic, handle, sender, nullptr);
    else if constexpr (requires { net_.connect(nic, nullptr, handle, sender, nullptr); })
      return net_.connect(nic, nullptr, handle, sender, nullptr);
    else
      return net_.connect(nic, handle, sender, nullptr);
  }
  net::NcclResult send(void* sender, void* data, std::size_t bytes, void* memory,
                       void** request) override {
    if constexpr (requires { net_.send(sender, data, bytes, 0, memory, nullptr, request); })
      return net_.send(sender, data, bytes, 0, memory, nullptr, request);
    else if constexpr (std::is_same_v<Net, net::NetV8>)
      return net_.send(sender, data, static_cast<int>(bytes), 0, memory, request);
    else
      return net_.send(sender, data, bytes, 0, memory, request);
  }
  net::NcclResult receive(void* receiver, void* data, std::size_t bytes, void* memory,
                          void** request) override {
    int tag = 0;
    if constexpr (requires {
                    net_.receive(receiver, 1, &data, &bytes, &tag, &memory, nullptr, request);
                  })
      return net_.receive(receiver, 1, &data, &bytes, &tag, &memory, nullptr, request);
    else if constexpr (std::is_same_v<Net, net::NetV8>) {
      int size = static_cast<int>(bytes);
      return net_.receive(receiver, 1, &data, &size, &tag, &memory, request);
    } else {
      return net_.receive(receiver, 1, &data, &bytes, &tag, &memory, request);
    }
  }
  void finalize() override {
    if constexpr (requires { net_.finalize; }) (void)net_.finalize(context_);
  }

 private:
  const Net& net_;
  void* context_ = nullptr;
};

inline std::unique_ptr<AnyNet> load_net(void* library, int version) {
  const void* const symbol =
      ::dlsym(library, ("ncclNetPlugin_v" + std::to_string(version)).c_str());
  R2CCL_RANK_CHECK(symbol != nullptr);
  switch (version) {
    case 8: return std::make_unique<VersionedNet<net::NetV8>>(symbol);
    case 9: return std::make_unique<VersionedNet<net::NetV9>>(symbol);
    case 10: return std::make_unique<VersionedNet<net::NetV10>>(symbol);
    case 11: return std::make_unique<VersionedNet<net::NetV11>>(symbol);
    case 12: return std::make_unique<VersionedNet<net::NetV12>>(symbol);
    default: return nullptr;
  }
}

// A rank, in its own process.
class Rank {
 public:
  Rank(int index, int count, int version, Board& shared, std::string fault_file)
      : rank(index), ranks(count), board(shared), fault_file_(std::move(fault_file)) {
    ::setenv("R2CCL_FAULT_FILE", fault_file_.c_str(), 1);
    void* const library = ::dlopen(R2CCL_NETPLUGIN, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) std::fprintf(stderr, "%s\n", ::dlerror());
    R2CCL_RANK_CHECK(library != nullptr);
    net = load_net(library, version);
    state_ = reinterpret_cast<State*>(::dlsym(library, "r2ccl_net_state"));
    R2CCL_RANK_CHECK(state_ != nullptr);
    R2CCL_RANK_CHECK(net->init() == net::NcclResult::success);
  }

  void barrier() {
    const int goal = (board.arrived.fetch_add(1) / ranks + 1) * ranks;
    while (board.arrived.load() < goal) std::this_thread::yield();
  }
  // Injects a fault into a rail of this process, to all peers.
  void fault(const std::string& line) { std::ofstream(fault_file_, std::ios::app) << line << "\n"; }

  struct Ends {
    void* sender = nullptr;    // to the next rank
    void* receiver = nullptr;  // from the rank before
  };
  using Handle = std::array<std::byte, net::nccl_handle_bytes>;
  // Connects a ring of all ranks.  `spoil` changes the handle before its use.
  Ends ring(int channel = 0, int nic = 0, const std::function<void(Handle&)>& spoil = {}) {
    const int next = (rank + 1) % ranks;
    const int before = (rank + ranks - 1) % ranks;
    Board::Slot& own = board.slots[rank][before][channel];
    Board::Slot& other = board.slots[next][rank][channel];
    void* listener = nullptr;
    R2CCL_RANK_CHECK(net->listen(nic, own.handle.data(), &listener) == net::NcclResult::success);
    own.there.store(true);
    while (!other.there.load()) std::this_thread::yield();
    Handle handle = other.handle;
    if (spoil) spoil(handle);
    Ends ends;
    while (ends.sender == nullptr || ends.receiver == nullptr) {
      if (ends.sender == nullptr)
        R2CCL_RANK_CHECK(net->connect(nic, handle.data(), &ends.sender) ==
                         net::NcclResult::success);
      if (ends.receiver == nullptr)
        R2CCL_RANK_CHECK(net->accept(listener, &ends.receiver, nullptr) ==
                         net::NcclResult::success);
      std::this_thread::yield();
    }
    R2CCL_RANK_CHECK(net->close_listen(listener) == net::NcclResult::success);
    return ends;
  }

  // Returns the text of the first error of this rank.
  [[nodiscard]] std::string state() const {
    std::array<char, 1000> text{};
    R2CCL_RANK_CHECK(state_(text.data(), text.size()) != 0);
    return text.data();
  }

  void* memory(void* connection, void* data, std::size_t bytes) {
    void* made = nullptr;
    R2CCL_RANK_CHECK(net->register_memory(connection, data, bytes, net::nccl_memory_host, &made) ==
                     net::NcclResult::success);
    R2CCL_RANK_CHECK(made != nullptr);
    return made;
  }
  // Returns true once done.
  bool done(void* request, std::size_t* bytes = nullptr) {
    int is_done = 0;
    int size = 0;
    R2CCL_RANK_CHECK(net->test(request, &is_done, &size) == net::NcclResult::success);
    if (is_done != 0 && bytes != nullptr) *bytes = static_cast<std::size_t>(size);
    return is_done != 0;
  }

  const int rank;
  const int ranks;
  Board& board;
  std::unique_ptr<AnyNet> net;

 private:
  using State = int(char* text, std::size_t bytes);
  State* state_ = nullptr;
  const std::string fault_file_;
};

struct Player {
  int ranks = 2;
  int version = 11;
  using Environment = std::vector<std::pair<std::string, std::string>>;
  Environment environment = {};
  int limit_s = 300;                             // for all of it
  int nics = 3;                                  // in R2CCL_RAILS
  int status = 0;                                // exit status of each rank
  std::function<void(int rank)> before = {};     // in the process of the rank, before the plugin
  std::function<void(const Board&)> after = {};  // once all ranks have ended well

  // Runs `body` in a process per rank.  Succeeds if all of them end without a failed check.
  [[nodiscard]] ::testing::AssertionResult play(const std::function<void(Rank&)>& body) const {
    void* const shared =
        ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return ::testing::AssertionFailure() << "mmap";
    Board& board = *new (shared) Board{};
    std::vector<pid_t> children;
    std::vector<std::string> files;
    for (int rank = 0; rank < ranks; ++rank) {
      files.push_back(::testing::TempDir() + "net-player-" + std::to_string(::getpid()) + "-" +
                      std::to_string(rank));
      const pid_t child = ::fork();
      if (child == 0) {
        ::setenv("R2CCL_RAILS", "127.0.0.1,127.0.0.2,127.0.0.3", 1);
        ::setenv("R2CCL_NODE", "per-rank", 1);
        for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
        if (before) before(rank);
        Rank own(rank, ranks, version, board, files.back());
        R2CCL_RANK_CHECK(own.net->devices() == nics);
        body(own);
        own.barrier();
        own.net->finalize();
        ::_exit(0);
      }
      children.push_back(child);
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(limit_s);
    std::string failed;
    std::size_t running = children.size();
    while (running > 0) {
      // The others wait for a rank that has failed.
      const bool over = !failed.empty() || std::chrono::steady_clock::now() >= deadline;
      for (std::size_t rank = 0; rank < children.size(); ++rank) {
        if (children[rank] == 0) continue;
        if (over) ::kill(children[rank], SIGKILL);
        int exited = 0;
        if (::waitpid(children[rank], &exited, over ? 0 : WNOHANG) == 0) continue;
        children[rank] = 0;
        --running;
        const bool right = WIFEXITED(exited) && WEXITSTATUS(exited) == status;
        if (!right)
          failed +=
              "rank " + std::to_string(rank) + ": wait status " + std::to_string(exited) + "; ";
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (const std::string& file : files) ::unlink(file.c_str());
    if (failed.empty() && after) after(board);
    ::munmap(shared, sizeof(Board));
    if (failed.empty()) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << failed;
  }
};

}  // namespace r2ccl::testing
