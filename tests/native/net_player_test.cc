// The network plugin under a player of NCCL's proxy: processes over three loopback rails.
#include "net_player.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>

#include "net_journal.hpp"

namespace r2ccl {
namespace {

using net::NcclResult;
using testing::JournalFile;
using testing::JournalFolder;
using testing::Player;
using testing::Rank;

constexpr int outstanding = 32;

// Bytes of a message: a part of a fixed random table, so that neighbours differ.
class Pattern {
 public:
  explicit Pattern(std::size_t most) : table_(most + shifts) {
    std::mt19937_64 random(most);
    for (std::byte& byte : table_) byte = static_cast<std::byte>(random());
  }
  [[nodiscard]] const std::byte* of(std::uint64_t message) const {
    return table_.data() + message * 59 % shifts;
  }

 private:
  static constexpr std::size_t shifts = 4096;
  std::vector<std::byte> table_;
};

std::size_t size_of(std::uint64_t message, std::size_t most) {
  std::mt19937_64 random(message);
  switch (random() % 8) {
    case 0: return 0;
    case 1: return most;
    case 2: return random() % most;
    default: return random() % 512;
  }
}

// Both directions of a ring at once: `count` messages with up to 32 of them under way.
void exchange(Rank& rank, const Rank::Ends& ends, std::uint64_t count, std::size_t most) {
  const Pattern pattern(most);
  std::vector<std::byte> sources(outstanding * most);
  std::vector<std::byte> targets(outstanding * most, std::byte{0xEE});
  void* const source_memory = rank.memory(ends.sender, sources.data(), sources.size());
  void* const target_memory = rank.memory(ends.receiver, targets.data(), targets.size());
  const auto source = [&](std::uint64_t message) {
    return sources.data() + message % outstanding * most;
  };
  const auto target = [&](std::uint64_t message) {
    return targets.data() + message % outstanding * most;
  };
  std::deque<void*> sends;
  std::deque<void*> receives;
  std::uint64_t sent = 0;      // begun
  std::uint64_t received = 0;  // begun
  std::uint64_t sends_done = 0;
  std::uint64_t receives_done = 0;
  while (sends_done < count || receives_done < count) {
    while (received < count && receives.size() < outstanding) {
      // NCCL's hint that the completion is optional: every call must overwrite it.
      void* request = reinterpret_cast<void*>(std::uintptr_t{1});
      // The receive may be larger than the message.
      R2CCL_RANK_CHECK(rank.net->receive(ends.receiver, target(received), most, target_memory,
                                         &request) == NcclResult::success);
      if (request == nullptr) break;
      receives.push_back(request);
      ++received;
    }
    while (sent < count && sends.size() < outstanding) {
      const std::size_t bytes = size_of(sent, most);
      std::copy_n(pattern.of(sent), bytes, source(sent));
      void* request = reinterpret_cast<void*>(std::uintptr_t{1});
      R2CCL_RANK_CHECK(rank.net->send(ends.sender, source(sent), bytes, source_memory, &request) ==
                       NcclResult::success);
      if (request == nullptr) break;
      sends.push_back(request);
      ++sent;
    }
    for (; !receives.empty(); receives.pop_front(), ++receives_done) {
      std::size_t bytes = 0;
      if (!rank.done(receives.front(), &bytes)) break;
      R2CCL_RANK_CHECK(bytes == size_of(receives_done, most));
      R2CCL_RANK_CHECK(std::memcmp(target(receives_done), pattern.of(receives_done), bytes) == 0);
      std::fill_n(target(receives_done), bytes, std::byte{0xEE});
    }
    for (; !sends.empty(); sends.pop_front(), ++sends_done) {
      std::size_t bytes = 0;
      if (!rank.done(sends.front(), &bytes)) break;
      R2CCL_RANK_CHECK(bytes == size_of(sends_done, most));
      std::fill_n(source(sends_done), bytes, std::byte{0xDD});  // the source is the caller's again
    }
    std::this_thread::yield();
  }
  R2CCL_RANK_CHECK(rank.net->deregister_memory(ends.sender, source_memory) == NcclResult::success);
  R2CCL_RANK_CHECK(rank.net->deregister_memory(ends.receiver, target_memory) ==
                   NcclResult::success);
}

void close(Rank& rank, const Rank::Ends& ends) {
  R2CCL_RANK_CHECK(rank.net->close_send(ends.sender) == NcclResult::success);
  R2CCL_RANK_CHECK(rank.net->close_receive(ends.receiver) == NcclResult::success);
}

// A ring all-reduce of 32-bit integers over send and receive, in place.
class RingAllReduce {
 private:
  Rank& rank_;
  const Rank::Ends ends_;

 public:
  std::vector<std::uint32_t> data;

  RingAllReduce(Rank& rank, const Rank::Ends& ends, std::size_t count)
      : rank_(rank), ends_(ends), data(count), incoming_(count) {
    send_memory_ = rank.memory(ends.sender, data.data(), count * sizeof(std::uint32_t));
    data_memory_ = rank.memory(ends.receiver, data.data(), count * sizeof(std::uint32_t));
    incoming_memory_ = rank.memory(ends.receiver, incoming_.data(), count * sizeof(std::uint32_t));
  }
  ~RingAllReduce() {
    (void)rank_.net->deregister_memory(ends_.sender, send_memory_);
    (void)rank_.net->deregister_memory(ends_.receiver, data_memory_);
    (void)rank_.net->deregister_memory(ends_.receiver, incoming_memory_);
  }
  void run() {
    const int ranks = rank_.ranks;
    for (int step = 0; step < 2 * (ranks - 1); ++step) {
      const auto out = part(rank_.rank - step);
      const auto in = part(rank_.rank - step - 1);
      const bool reduces = step < ranks - 1;
      move(out, reduces ? incoming_ : data, reduces ? incoming_memory_ : data_memory_, in);
      if (!reduces) continue;
      for (std::size_t i = in.first; i < in.second; ++i) data[i] += incoming_[i];
    }
  }

 private:
  using Part = std::pair<std::size_t, std::size_t>;

  [[nodiscard]] Part part(int index) const {
    const auto ranks = static_cast<std::size_t>(rank_.ranks);
    const auto at = static_cast<std::size_t>((index % rank_.ranks + rank_.ranks)) % ranks;
    return {data.size() * at / ranks, data.size() * (at + 1) / ranks};
  }
  void move(Part out, std::vector<std::uint32_t>& into, void* memory, Part in) {
    void* sending = nullptr;
    void* receiving = nullptr;
    bool sent = false;
    bool received = false;
    constexpr std::size_t item = sizeof(std::uint32_t);
    while (!sent || !received) {
      if (receiving == nullptr)
        R2CCL_RANK_CHECK(rank_.net->receive(ends_.receiver, into.data() + in.first,
                                            (in.second - in.first) * item, memory,
                                            &receiving) == NcclResult::success);
      if (sending == nullptr)
        R2CCL_RANK_CHECK(rank_.net->send(ends_.sender, data.data() + out.first,
                                         (out.second - out.first) * item, send_memory_,
                                         &sending) == NcclResult::success);
      received = received || (receiving != nullptr && rank_.done(receiving));
      sent = sent || (sending != nullptr && rank_.done(sending));
      std::this_thread::yield();
    }
  }

  std::vector<std::uint32_t> incoming_;
  void* send_memory_;
  void* data_memory_;
  void* incoming_memory_;
};

std::uint32_t input(int rank, int round, std::size_t at) {
  return static_cast<std::uint32_t>((at + 1) * 2654435761U + static_cast<unsigned>(rank) * 97U +
                                    static_cast<unsigned>(round) * 31U);
}

void all_reduce_checked(Rank& rank, RingAllReduce& ring, int round) {
  for (std::size_t i = 0; i < ring.data.size(); ++i) ring.data[i] = input(rank.rank, round, i);
  ring.run();
  for (std::size_t i = 0; i < ring.data.size(); ++i) {
    std::uint32_t sum = 0;
    for (int from = 0; from < rank.ranks; ++from) sum += input(from, round, i);
    R2CCL_RANK_CHECK(ring.data[i] == sum);
  }
}

// ---- messages ----

class NetVersions : public ::testing::TestWithParam<int> {};

TEST_P(NetVersions, MessagesOfAllSizesArriveInOrder) {
  EXPECT_TRUE(Player({.ranks = 2, .version = GetParam()}).play([](Rank& rank) {
    const Rank::Ends ends = rank.ring();
    exchange(rank, ends, 300, 20'000);
    exchange(rank, ends, 10, 1'200'000);
    rank.barrier();
    close(rank, ends);
  }));
}

// 1,000,000 messages over both directions, in rings of several sizes.
TEST_P(NetVersions, AMillionMessagesLong) {
  const int ranks = std::array{2, 3, 4, 6, 8}[static_cast<std::size_t>(GetParam() - 8)];
  const Player player{.ranks = ranks, .version = GetParam(), .limit_s = 1500};
  EXPECT_TRUE(player.play([](Rank& rank) {
    const Rank::Ends ends = rank.ring();
    exchange(rank, ends, 1'000'000 / static_cast<std::uint64_t>(rank.ranks), 4096);
    rank.barrier();
    close(rank, ends);
  }));
}

INSTANTIATE_TEST_SUITE_P(All, NetVersions, ::testing::Values(8, 9, 10, 11, 12));

TEST(NetPlayer, RanksOfANodeUseSharedMemory) {
  const Player player{.ranks = 2, .environment = {{"R2CCL_NODE", ""}}};
  EXPECT_TRUE(player.play([](Rank& rank) {
    const Rank::Ends ends = rank.ring();
    exchange(rank, ends, 300, 20'000);
    rank.barrier();
    close(rank, ends);
  }));
}

TEST(NetPlayer, RanksOfAProcessConnectToEachOther) {
  EXPECT_TRUE(Player({.ranks = 1}).play([](Rank& rank) {
    const Rank::Ends ends = rank.ring();
    exchange(rank, ends, 300, 20'000);
    close(rank, ends);
  }));
}

TEST(NetPlayer, ConnectionsOfSeveralNicsShareALink) {
  EXPECT_TRUE(Player({.ranks = 3}).play([](Rank& rank) {
    std::vector<Rank::Ends> rings;
    for (int channel = 0; channel < 3; ++channel) rings.push_back(rank.ring(channel, channel));
    for (const Rank::Ends& ends : rings) exchange(rank, ends, 100, 20'000);
    rank.barrier();
    for (const Rank::Ends& ends : rings) close(rank, ends);
  }));
}

TEST(NetPlayer, AMessageAfterALongSleepArrives) {
  EXPECT_TRUE(Player({.ranks = 2}).play([](Rank& rank) {
    const Rank::Ends ends = rank.ring();
    for (int round = 0; round < 3; ++round) {
      exchange(rank, ends, 40, 1000);
      std::this_thread::sleep_for(std::chrono::milliseconds(700));
    }
    rank.barrier();
    close(rank, ends);
  }));
}

// ---- starts ----

TEST(NetPlayer, AStartNeedsNoParticularNic) {
  EXPECT_TRUE(Player({.ranks = 2}).play([](Rank& rank) {
    // The first two addresses have no listener.  The fields of an address: version, port, bytes.
    const Rank::Ends ends = rank.ring(0, 0, [](Rank::Handle& handle) {
      for (const std::size_t place : {40U, 60U}) {
        handle[place + 2] = std::byte{1};
        handle[place + 3] = std::byte{0};
      }
    });
    exchange(rank, ends, 40, 1000);
    rank.barrier();
    close(rank, ends);
  }));
}

TEST(NetPlayer, AHandleOfAnotherNetworkIsAnError) {
  EXPECT_TRUE(Player({.ranks = 2}).play([](Rank& rank) {
    Rank::Handle handle{};
    void* sender = &handle;
    R2CCL_RANK_CHECK(rank.net->connect(0, handle.data(), &sender) == NcclResult::invalid_argument);
    R2CCL_RANK_CHECK(sender == nullptr);
  }));
}

// Gives each rank a file with its key.
Player with_keys(const std::vector<std::string>& keys) {
  return {.ranks = static_cast<int>(keys.size()), .before = [keys](int rank) {
            const std::string path = ::testing::TempDir() + "net-key-" + std::to_string(::getpid());
            R2CCL_RANK_CHECK(std::ofstream(path) << keys[static_cast<std::size_t>(rank)]);
            R2CCL_RANK_CHECK(::chmod(path.c_str(), 0600) == 0);
            ::setenv("R2CCL_SECRET_FILE", path.c_str(), 1);
          }};
}

TEST(NetPlayer, RanksWithTheSameKeyConnect) {
  EXPECT_TRUE(with_keys({std::string(32, 'a'), std::string(32, 'a')}).play([](Rank& rank) {
    std::remove(std::getenv("R2CCL_SECRET_FILE"));
    const Rank::Ends ends = rank.ring();
    exchange(rank, ends, 40, 1000);
    rank.barrier();
    close(rank, ends);
  }));
}

TEST(NetPlayer, RanksWithDifferentKeysHearOfIt) {
  EXPECT_TRUE(with_keys({std::string(32, 'a'), std::string(32, 'b')}).play([](Rank& rank) {
    std::remove(std::getenv("R2CCL_SECRET_FILE"));
    Rank::Handle handle{};
    void* listener = nullptr;
    R2CCL_RANK_CHECK(rank.net->listen(0, handle.data(), &listener) == NcclResult::success);
    rank.board.slots[rank.rank][0][0].handle = handle;
    rank.barrier();
    handle = rank.board.slots[1 - rank.rank][0][0].handle;
    void* sender = nullptr;
    R2CCL_RANK_CHECK(rank.net->connect(0, handle.data(), &sender) == NcclResult::invalid_argument);
    R2CCL_RANK_CHECK(rank.state().find("R2CCL_SECRET_FILE") != std::string::npos);
    R2CCL_RANK_CHECK(rank.net->close_listen(listener) == NcclResult::success);
  }));
}

TEST(NetPlayer, AForkedChildGetsAPluginOfItsOwn) {
  EXPECT_TRUE(Player({.ranks = 2}).play([](Rank& rank) {
    const Rank::Ends ends = rank.ring();
    exchange(rank, ends, 40, 1000);
    const pid_t child = ::fork();
    if (child == 0) {
      std::byte source{1};
      void* request = nullptr;
      R2CCL_RANK_CHECK(rank.net->send(ends.sender, &source, 1, nullptr, &request) ==
                       NcclResult::invalid_argument);
      R2CCL_RANK_CHECK(rank.net->init() == NcclResult::success);
      R2CCL_RANK_CHECK(rank.net->devices() == 3);
      rank.net->finalize();
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    R2CCL_RANK_CHECK(status == 0);
    exchange(rank, ends, 40, 1000);
    rank.barrier();
    close(rank, ends);
  }));
}

// ---- ends ----

TEST(NetPlayer, ClosingWithMessagesUnderWayIsAnErrorAtThePeer) {
  EXPECT_TRUE(Player({.ranks = 2}).play([](Rank& rank) {
    const Rank::Ends ends = rank.ring();
    std::vector<std::byte> target(1000);
    void* const memory = rank.memory(ends.receiver, target.data(), target.size());
    void* request = nullptr;
    while (request == nullptr)
      R2CCL_RANK_CHECK(rank.net->receive(ends.receiver, target.data(), target.size(), memory,
                                         &request) == NcclResult::success);
    rank.barrier();
    if (rank.rank == 0) {
      R2CCL_RANK_CHECK(rank.net->close_receive(ends.receiver) == NcclResult::success);
    } else {
      void* sending = nullptr;
      NcclResult result = NcclResult::success;
      while (result == NcclResult::success) {
        if (sending == nullptr) {
          result = rank.net->send(ends.sender, target.data(), 8, nullptr, &sending);
        } else {
          int done = 0;
          result = rank.net->test(sending, &done, nullptr);
          if (done != 0) sending = nullptr;  // rank 0 had not closed yet
        }
      }
      R2CCL_RANK_CHECK(result == NcclResult::remote_error);
    }
  }));
}

TEST(NetPlayer, AMessageThatDoesNotFitIsAnErrorAtBothEnds) {
  EXPECT_TRUE(Player({.ranks = 2}).play([](Rank& rank) {
    const Rank::Ends ends = rank.ring();
    std::array<std::byte, 16> bytes{};
    NcclResult result = NcclResult::success;
    if (rank.rank == 0) {
      void* sending = nullptr;
      R2CCL_RANK_CHECK(rank.net->send(ends.sender, bytes.data(), std::size_t{1} << 31U, nullptr,
                                      &sending) == NcclResult::invalid_argument);
      while (result == NcclResult::success) {
        result = rank.net->send(ends.sender, bytes.data(), 11, nullptr, &sending);
        R2CCL_RANK_CHECK(sending == nullptr);
        std::this_thread::yield();
      }
    } else {
      void* const memory = rank.memory(ends.receiver, bytes.data(), bytes.size());
      void* receiving = nullptr;
      while (receiving == nullptr)
        R2CCL_RANK_CHECK(rank.net->receive(ends.receiver, bytes.data(), 10, memory, &receiving) ==
                         NcclResult::success);
      while (result == NcclResult::success) {
        int done = 0;
        result = rank.net->test(receiving, &done, nullptr);
        R2CCL_RANK_CHECK(done == 0);
        std::this_thread::yield();
      }
    }
    R2CCL_RANK_CHECK(result == NcclResult::invalid_argument);
    R2CCL_RANK_CHECK(rank.rank == 0 ||
                     rank.state().find("larger than its receive of 10") != std::string::npos);
    rank.barrier();
    close(rank, ends);
  }));
}

// A rank may abort its communicator between two messages, and live on.
TEST(NetPlayer, AWaitForAnEndThatWasClosedIdleIsAnError) {
  EXPECT_TRUE(Player({.ranks = 2}).play([](Rank& rank) {
    const Rank::Ends ends = rank.ring();
    exchange(rank, ends, 10, 1000);
    std::vector<std::byte> target(1000);
    void* const memory = rank.memory(ends.receiver, target.data(), target.size());
    void* receiving = nullptr;
    if (rank.rank == 0) rank.barrier();  // the receive of rank 1 is posted
    while (rank.rank == 1 && receiving == nullptr)
      R2CCL_RANK_CHECK(rank.net->receive(ends.receiver, target.data(), target.size(), memory,
                                         &receiving) == NcclResult::success);
    if (rank.rank == 1) rank.barrier();
    if (rank.rank == 0) return close(rank, ends);
    NcclResult result = NcclResult::success;
    int done = 0;
    while (result == NcclResult::success) {
      result = rank.net->test(receiving, &done, nullptr);
      R2CCL_RANK_CHECK(done == 0);
      std::this_thread::yield();
    }
    R2CCL_RANK_CHECK(result == NcclResult::remote_error);
    void* sending = nullptr;
    do {
      result = rank.net->send(ends.sender, target.data(), 8, nullptr, &sending);
      R2CCL_RANK_CHECK(sending == nullptr);
      std::this_thread::yield();
    } while (result == NcclResult::success);
    R2CCL_RANK_CHECK(result == NcclResult::remote_error);
    R2CCL_RANK_CHECK(rank.state().find("clos") != std::string::npos);
    close(rank, ends);
  }));
}

TEST(NetPlayer, MemoryWithoutAMessageMayBeRemovedWhileOthersWait) {
  EXPECT_TRUE(Player({.ranks = 2}).play([](Rank& rank) {
    const Rank::Ends ends = rank.ring();
    std::array<std::byte, 64> target{};
    std::array<std::byte, 64> source{};
    std::array<std::byte, 64> other{};
    void* const memory = rank.memory(ends.receiver, target.data(), target.size());
    void* const other_in = rank.memory(ends.receiver, other.data(), other.size());
    void* const other_out = rank.memory(ends.sender, other.data(), other.size());
    void* receiving = nullptr;
    while (receiving == nullptr)
      R2CCL_RANK_CHECK(rank.net->receive(ends.receiver, target.data(), target.size(), memory,
                                         &receiving) == NcclResult::success);
    rank.barrier();
    R2CCL_RANK_CHECK(rank.net->deregister_memory(ends.receiver, other_in) == NcclResult::success);
    void* sending = nullptr;
    while (sending == nullptr)
      R2CCL_RANK_CHECK(rank.net->send(ends.sender, source.data(), source.size(), nullptr,
                                      &sending) == NcclResult::success);
    R2CCL_RANK_CHECK(rank.net->deregister_memory(ends.sender, other_out) == NcclResult::success);
    while (!rank.done(receiving)) std::this_thread::yield();
    while (!rank.done(sending)) std::this_thread::yield();
    R2CCL_RANK_CHECK(rank.net->deregister_memory(ends.receiver, memory) == NcclResult::success);
    rank.barrier();
    close(rank, ends);
  }));
}

// NCCL loads and unloads the library with its first and its last communicator.
void play_unloading(int rounds) {
  EXPECT_TRUE(Player({.ranks = 2}).play([rounds](Rank& rank) {
    const Rank::Ends ends = rank.ring();
    for (int round = 0; round < rounds; ++round) {
      void* const library = ::dlopen(R2CCL_NETPLUGIN, RTLD_NOW | RTLD_LOCAL);
      R2CCL_RANK_CHECK(library != nullptr);
      ::dlclose(library);
      ::dlclose(library);  // the handle of the rank, too
      R2CCL_RANK_CHECK(::dlopen(R2CCL_NETPLUGIN, RTLD_NOW | RTLD_LOCAL) != nullptr);
    }
    exchange(rank, ends, 100, 1000);
    rank.barrier();
    close(rank, ends);
  }));
}

TEST(NetPlayer, TheLibraryMayBeUnloadedWhileItsThreadsRun) { play_unloading(100); }

TEST(NetPlayer, TheLibraryMayBeUnloaded1000TimesLong) { play_unloading(1000); }

// The label of journals and metrics.
TEST(NetPlayer, TheJournalNamesNcclAsTheEngine) {
  const JournalFolder folder;
  const Player player{.ranks = 1, .environment = {{"R2CCL_JOURNAL_DIR", folder.path}}};
  EXPECT_TRUE(player.play([&folder](Rank&) {
    const JournalFile journal(folder.path, ::getpid());
    R2CCL_RANK_CHECK(journal.exists());
    R2CCL_RANK_CHECK(std::string(journal.header().serving_engine) == "nccl");
  }));
}

// ---- faults ----

const std::vector<std::pair<std::string, std::string>> quick_rejoin{
    {"R2CCL_REJOIN_BACKOFF_MIN_MS", "1"}, {"R2CCL_REJOIN_BACKOFF_MAX_MS", "50"}};

// Each fault hits the home rail of the ring that is in use.  The fault begins during a round or
// after, and lasts for the whole next round.  There are four rounds a fault.
void play_ring_under(Fault kind, int faults) {
  const std::string fault(name_of(kind));
  const JournalFolder folder;
  Player player{.ranks = 3, .environment = quick_rejoin, .limit_s = 1500};
  player.environment.emplace_back("R2CCL_JOURNAL_DIR", folder.path);
  EXPECT_TRUE(player.play([&](Rank& rank) {
    constexpr int nics = 3;
    testing::counted_text = "DOWN (injected)";
    JournalFile journal(folder.path, ::getpid());
    std::size_t counted = 0;  // faults that this rank has injected, a record for each of two peers
    std::vector<Rank::Ends> ends;
    for (int nic = 0; nic < nics; ++nic) ends.push_back(rank.ring(nic, nic));
    {
      std::deque<RingAllReduce> rings;
      for (const Rank::Ends& each : ends) rings.emplace_back(rank, each, std::size_t{30'011});
      // The core reads the file of faults every 5 ms.
      constexpr std::chrono::milliseconds injected(10);
      for (int round = 0; round < 4 * faults; ++round) {
        const int rail = round / 4 % nics;
        const bool injects = rank.rank == 0;
        if (injects && round % 4 == 1) rank.fault(std::to_string(rail) + " " + fault);
        if (injects && round % 4 == 2) std::this_thread::sleep_for(injected);
        if (injects && round % 4 == 3) rank.fault(std::to_string(rail) + " heal");
        all_reduce_checked(rank, rings[static_cast<std::size_t>(rail)], round);
        counted += journal.new_faults(kind);
      }
    }
    const std::size_t all = rank.rank == 0 ? static_cast<std::size_t>(2 * faults) : 0;
    const auto all_counted = [&] {
      counted += journal.new_faults(kind);
      return counted >= all;
    };
    R2CCL_RANK_CHECK(testing::eventually(all_counted, "all faults"));
    R2CCL_RANK_CHECK(counted == all);
    if (rank.rank == 0 && kind == Fault::carrier_loss)
      R2CCL_RANK_CHECK(testing::eventually([] { return testing::counted_lines >= nics; },
                                           "a line of each rail"));
    rank.barrier();
    for (const Rank::Ends& each : ends) close(rank, each);
  }));
}

TEST(NetPlayer, ARingAllReduceSurvivesCutRails) { play_ring_under(Fault::carrier_loss, 3); }

TEST(NetPlayer, ARingAllReduceSurvivesBlackHoles) { play_ring_under(Fault::black_hole, 3); }

TEST(NetPlayer, ARingAllReduceSurvives500CutRailsLong) {
  play_ring_under(Fault::carrier_loss, 500);
}

TEST(NetPlayer, ARingAllReduceSurvives500BlackHolesLong) {
  play_ring_under(Fault::black_hole, 500);
}

TEST(NetPlayer, AnIgnoredErrorEndsTheProcess) {
  const Player player{.ranks = 2, .environment = {{"R2CCL_NCCL_EXIT_S", "0.1"}}, .status = 70};
  EXPECT_TRUE(player.play([](Rank& rank) {
    const Rank::Ends ends = rank.ring();
    std::array<std::byte, 8> target{};
    void* const memory = rank.memory(ends.receiver, target.data(), target.size());
    void* request = nullptr;
    while (request == nullptr)
      R2CCL_RANK_CHECK(rank.net->receive(ends.receiver, target.data(), target.size(), memory,
                                         &request) == NcclResult::success);
    rank.barrier();
    // Both ranks end a connection with a receive under way, and hear of the other end.
    R2CCL_RANK_CHECK(rank.net->deregister_memory(ends.receiver, memory) == NcclResult::success);
    // A test while another thread has the engine's lock answers "not yet".
    NcclResult result = NcclResult::success;
    while (result == NcclResult::success) {
      int done = 0;
      result = rank.net->test(request, &done, nullptr);
    }
    R2CCL_RANK_CHECK(result == NcclResult::remote_error);
    std::this_thread::sleep_for(std::chrono::minutes(10));
  }));
}

TEST(NetPlayer, PeersLearnAtOnceOfAProcessThatEndsByAnIgnoredError) {
  const Player player{
      .ranks = 2,
      .environment = {{"R2CCL_LINK_TIMEOUT_S", "20"}},
      .status = 70,
      .before = [](int rank) { ::setenv("R2CCL_NCCL_EXIT_S", rank == 0 ? "0.1" : "0", 1); }};
  EXPECT_TRUE(player.play([](Rank& rank) {
    const Rank::Ends ignored = rank.ring(0);
    const Rank::Ends other = rank.ring(1);
    void* const receiver = rank.rank == 0 ? ignored.receiver : other.receiver;
    std::array<std::byte, 8> target{};
    void* const memory = rank.memory(receiver, target.data(), target.size());
    void* request = nullptr;
    while (request == nullptr)
      R2CCL_RANK_CHECK(rank.net->receive(receiver, target.data(), target.size(), memory,
                                         &request) == NcclResult::success);
    if (rank.rank == 0)
      R2CCL_RANK_CHECK(rank.net->deregister_memory(receiver, memory) == NcclResult::success);
    NcclResult result = NcclResult::success;
    while (result == NcclResult::success) {
      int done = 0;
      result = rank.net->test(request, &done, nullptr);
      R2CCL_RANK_CHECK(done == 0);
      std::this_thread::yield();
    }
    R2CCL_RANK_CHECK(result == NcclResult::remote_error);
    if (rank.rank == 0) std::this_thread::sleep_for(std::chrono::minutes(10));
    R2CCL_RANK_CHECK(rank.state().find("has ended") != std::string::npos);
    ::_exit(70);
  }));
}

TEST(NetPlayer, TheLossOfAllRailsIsAnErrorAtBothEnds) {
  int slowest_ms = 0;
  Player player{.ranks = 2, .environment = {{"R2CCL_LINK_TIMEOUT_S", "1"}}};
  player.after = [&slowest_ms](const testing::Board& board) {
    slowest_ms = std::max(board.words[0].load(), board.words[1].load());
  };
  EXPECT_TRUE(player.play([](Rank& rank) {
    const Rank::Ends ends = rank.ring();
    exchange(rank, ends, 10, 1000);
    rank.barrier();
    std::vector<std::byte> target(1000);
    void* const memory = rank.memory(ends.receiver, target.data(), target.size());
    void* request = nullptr;
    while (request == nullptr)
      R2CCL_RANK_CHECK(rank.net->receive(ends.receiver, target.data(), target.size(), memory,
                                         &request) == NcclResult::success);
    const auto began = std::chrono::steady_clock::now();
    rank.barrier();
    for (int rail = 0; rail < 3 && rank.rank == 0; ++rail)
      rank.fault(std::to_string(rail) + " carrier_loss");
    // No rank sends: both receives wait, and the error is the only end.
    NcclResult result = NcclResult::success;
    while (result == NcclResult::success) {
      int done = 0;
      result = rank.net->test(request, &done, nullptr);
      R2CCL_RANK_CHECK(done == 0);
      std::this_thread::yield();
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    R2CCL_RANK_CHECK(result == NcclResult::remote_error);
    R2CCL_RANK_CHECK(took.count() >= 1);  // a shorter loss is none
    rank.board.words[rank.rank].store(static_cast<int>(took.count() * 1000));
    R2CCL_RANK_CHECK(rank.state().find("no rail within the link timeout") != std::string::npos);
    // The sending ends have the same error at their next call.
    void* sending = nullptr;
    do {
      result = rank.net->send(ends.sender, target.data(), 8, nullptr, &sending);
    } while (result == NcclResult::success);
    R2CCL_RANK_CHECK(result == NcclResult::remote_error);
    (void)rank.net->deregister_memory(ends.receiver, memory);
    (void)rank.net->close_send(ends.sender);
    (void)rank.net->close_receive(ends.receiver);
  }));
  EXPECT_LE(slowest_ms, 2000) << "late: an error more than 1 s after the link timeout";
}

}  // namespace
}  // namespace r2ccl
