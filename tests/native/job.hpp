// A job in a single process, for tests of the real engine: an engine per rank, on loopback
// addresses.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "drivers/fake_link_monitor.hpp"
#include "drivers/fake_verbs.hpp"
#include "engine/communicator.hpp"
#include "engine/engine.hpp"
#include "eventually.hpp"
#include "journal/journal.hpp"

namespace r2ccl::testing {

class Job {
 public:
  struct Options {
    int ranks = 2;
    int rails = 2;
    bool shm = false;      // all ranks on the same node, instead of a node per rank
    int per_node = 1;      // ranks per node in the reduction tree; links are unaffected
    bool devices = false;  // rail i uses a device known only to the rank's fake monitor
    int verbs = 0;         // number of RDMA rails; they come first
    bool posted = false;   // links for posted messages, and no communicators
    std::shared_ptr<VerbsDriver> driver = {};                     // null: Job::verbs
    std::function<std::string(int rank, int rail)> address = {};  // null: loopback
    std::function<std::string(int rank, int rail)> rdma = {};     // RDMA device of `driver`
    std::function<std::uint8_t(int rail)> distance = {};          // null: all rails are equal
    std::function<bool(int rank, int rail)> bare = {};  // the device has no address at the start
    Config config;
    std::function<void(Job&)> listening = {};  // all ranks listen, no peers yet
  };

  explicit Job(const Options& options) : options_(options) {
    static std::atomic<std::uint32_t> next_process{100};
    const auto base = next_process.fetch_add(1000);
    for (int rank = 0; rank < options.ranks; ++rank)
      for (int rail = 0; rail < options.verbs && !options.driver; ++rail)
        verbs->add_device(verbs_device(rank, rail));
    for (int rank = 0; rank < options.ranks; ++rank) {
      auto engine = Engine::create(options.config, base + static_cast<std::uint32_t>(rank),
                                   monitor(rank), options.driver ? options.driver : verbs);
      EXPECT_TRUE(engine.ok());
      listeners.emplace_back();
      if (options.shm) {
        auto port = engine.value()->listen(
            {.kind = RailKind::shm, .device = "", .address = unix_name(base, rank)});
        EXPECT_TRUE(port.ok()) << port.take_status().message();
      }
      for (int rail = 0; rail < options.rails; ++rail) {
        auto port = engine.value()->listen(
            {.kind = RailKind::tcp, .device = device(rail), .address = address_of(rank, rail)});
        EXPECT_TRUE(port.ok()) << port.take_status().message();
        listeners.back().push_back(port.value());
      }
      engines.push_back(engine.value());
    }
    if (options.listening) options.listening(*this);
    for (int rank = 0; rank < options.ranks; ++rank)
      for (int peer = 0; peer < options.ranks; ++peer)
        if (peer != rank) add_peer(base, rank, peer);
    std::vector<std::thread> connecting;
    for (int rank = 0; rank < options.ranks; ++rank) {
      connecting.emplace_back([&, rank] {
        std::vector<std::uint32_t> peers;
        for (int peer = 0; peer < options.ranks; ++peer)
          if (peer != rank) peers.push_back(base + static_cast<std::uint32_t>(peer));
        const Status status = engines[static_cast<std::size_t>(rank)]->connect(peers, patience_s);
        EXPECT_TRUE(status.ok()) << status.message();
      });
    }
    for (std::thread& thread : connecting) thread.join();
    base_ = base;
    if (!options.posted) communicators = make_communicators(base);
  }

  ~Job() {
    communicators.clear();
    for (auto& engine : engines) engine->close(0.0);
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  std::vector<std::unique_ptr<Communicator>> make_communicators(std::uint64_t id) {
    std::vector<std::unique_ptr<Communicator>> made;
    std::vector<Communicator::Member> members;
    for (int rank = 0; rank < options_.ranks; ++rank)
      members.push_back(
          {base_ + static_cast<std::uint32_t>(rank), options_.shm ? 0 : rank / options_.per_node});
    for (int rank = 0; rank < options_.ranks; ++rank) {
      auto communicator =
          Communicator::create(engines[static_cast<std::size_t>(rank)], id,
                               "test:" + std::to_string(id), rank, members, best_simd());
      EXPECT_TRUE(communicator.ok()) << communicator.take_status().message();
      made.push_back(std::move(communicator.value()));
    }
    return made;
  }

  // Returns the communicator of `rank` in a subset of ranks.  Each rank is a node, in the given
  // order.
  std::unique_ptr<Communicator> make_part(std::uint64_t id, const std::vector<int>& ranks,
                                          int rank) {
    std::vector<Communicator::Member> members;
    for (const int each : ranks)
      members.push_back({base_ + static_cast<std::uint32_t>(each), each});
    const auto own = std::ranges::find(ranks, rank) - ranks.begin();
    auto made = Communicator::create(engines[static_cast<std::size_t>(rank)], id,
                                     "test:" + std::to_string(id), static_cast<int>(own), members,
                                     best_simd());
    EXPECT_TRUE(made.ok()) << made.take_status().message();
    return std::move(made.value());
  }

  // Returns the rank's journal entry of communicator `id`, if there is one.
  [[nodiscard]] std::optional<JournalGroup> group(std::size_t rank, std::uint64_t id) const {
    const std::string bytes = engines[rank]->journal_bytes();
    JournalHeader header;
    std::memcpy(&header, bytes.data(), sizeof(header));
    const std::size_t groups = sizeof(header) + header.rail_capacity * sizeof(JournalRail);
    for (std::size_t i = 0; i < header.group_count; ++i) {
      JournalGroup group;
      std::memcpy(&group, bytes.data() + groups + i * sizeof(group), sizeof(group));
      if (group.id == id) return group;
    }
    return std::nullopt;
  }
  // Returns whether a call of the rank's communicator `id` is running, according to the journal.
  [[nodiscard]] bool in_call(std::size_t rank, std::uint64_t id) const {
    const auto found = group(rank, id);
    return found.has_value() && found->call_began_ns != 0;
  }
  [[nodiscard]] bool in_call(std::size_t rank) const { return in_call(rank, base_); }

  // Waits until every rail is UP at both ends; the constructor waits for a rail of each link only.
  [[nodiscard]] ::testing::AssertionResult all_up() const {
    return eventually(
        [&] {
          return std::ranges::all_of(engines, [](const auto& engine) {
            return std::ranges::all_of(
                engine->rails(), [](const auto& rail) { return rail.state == RailState::up; });
          });
        },
        "every rail is UP at both ends");
  }

  // Runs body(rank, communicator) in a thread per rank.
  void run(const std::function<void(int, Communicator&)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < options_.ranks; ++rank)
      threads.emplace_back(
          [&, rank] { body(rank, *communicators[static_cast<std::size_t>(rank)]); });
    for (std::thread& thread : threads) thread.join();
  }

  // Returns the rank's journal records in storage order: oldest first, unless the ring has wrapped.
  [[nodiscard]] std::vector<JournalRecord> records(std::size_t rank) const {
    const std::string bytes = engines[rank]->journal_bytes();
    JournalHeader header;
    std::memcpy(&header, bytes.data(), sizeof(header));
    std::vector<JournalRecord> found;
    for (std::size_t at = sizeof(header) + header.rail_capacity * sizeof(JournalRail) +
                          header.group_capacity * sizeof(JournalGroup);
         at + sizeof(JournalRecord) <= bytes.size(); at += sizeof(JournalRecord)) {
      JournalRecord record;
      std::memcpy(&record, bytes.data() + at, sizeof(record));
      if (record.sequence != 0) found.push_back(record);
    }
    return found;
  }
  [[nodiscard]] TimeNs longest_stall(std::size_t rank) const {
    TimeNs longest = 0;
    for (const JournalRecord& record : records(rank))
      if (record.kind == JournalKind::stall)
        longest = std::max(longest, static_cast<TimeNs>(record.value));
    return longest;
  }

  static int ifindex(int rail) { return rail + 1; }
  static std::string verbs_device(int rank, int rail) {
    return "rdma" + std::to_string(rank) + "_" + std::to_string(rail);
  }
  static std::string address(int rail) { return "127.0.0." + std::to_string(rail + 1); }

  std::shared_ptr<FakeVerbs> verbs = std::make_shared<FakeVerbs>();
  std::vector<std::shared_ptr<Engine>> engines;
  std::vector<FakeLinkMonitor*> monitors;             // per rank, only with `devices`
  std::vector<std::vector<std::uint16_t>> listeners;  // port numbers by rank and rail
  std::vector<std::unique_ptr<Communicator>> communicators;

 private:
  [[nodiscard]] std::string device(int rail) const {
    return options_.devices ? "no-port" + std::to_string(rail) : "";
  }
  [[nodiscard]] std::string address_of(int rank, int rail) const {
    return options_.address ? options_.address(rank, rail) : address(rail);
  }
  std::unique_ptr<LinkMonitor> monitor(int rank) {
    if (!options_.devices) return nullptr;
    auto made = std::make_unique<FakeLinkMonitor>();
    for (int rail = 0; rail < options_.rails; ++rail) {
      made->set_link(ifindex(rail), device(rail), true);
      if (!options_.bare || !options_.bare(rank, rail))
        made->add_address(ifindex(rail), IpAddress::parse(address(rail)).value());
    }
    monitors.push_back(made.get());
    return made;
  }
  static std::string unix_name(std::uint32_t base, int rank) {
    return "r2ccl-test-" + std::to_string(::getpid()) + "-" + std::to_string(base) + "-" +
           std::to_string(rank);
  }

  void add_peer(std::uint32_t base, int rank, int peer) {
    PeerDescription description;
    description.process = base + static_cast<std::uint32_t>(peer);
    description.label = "rank " + std::to_string(peer);
    description.secret.resize(32, std::byte{7});
    description.posted = options_.posted;
    if (options_.shm)
      description.rails.push_back({.kind = RailKind::shm,
                                   .name = "shm@node0",
                                   .device = "",
                                   .local_address = "",
                                   .remote_address = unix_name(base, peer),
                                   .remote_port = 0,
                                   .verbs = {}});
    else
      for (int rail = 0; rail < options_.rails; ++rail)
        description.rails.push_back(
            {.kind = rail < options_.verbs ? RailKind::verbs : RailKind::tcp,
             .name = "rail" + std::to_string(rail) + "@node" + std::to_string(rank),
             .device = device(rail),
             .local_address = address_of(rank, rail),
             .remote_address = address_of(peer, rail),
             .remote_port =
                 listeners[static_cast<std::size_t>(peer)][static_cast<std::size_t>(rail)],
             .verbs = {.device =
                           options_.rdma ? options_.rdma(rank, rail) : verbs_device(rank, rail),
                       .port = 1},
             .distance = options_.distance ? options_.distance(rail) : std::uint8_t{0},
             .remote_device = device(rail)});
    const Status status = engines[static_cast<std::size_t>(rank)]->add_peer(description);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  const Options options_;
  std::uint32_t base_ = 0;
};

}  // namespace r2ccl::testing
