#include "job.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "eventually.hpp"

namespace r2ccl::testing {
namespace {

std::string unix_name(std::uint32_t base, int rank) {
  return "r2ccl-test-" + std::to_string(::getpid()) + "-" + std::to_string(base) + "-" +
         std::to_string(rank);
}

}  // namespace

Job::Job(const Options& options) : verbs(std::make_shared<FakeVerbs>()), options_(options) {
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

Job::~Job() {
  communicators.clear();
  for (auto& engine : engines) engine->close(0.0);
}

std::vector<std::unique_ptr<Communicator>> Job::make_communicators(std::uint64_t id) {
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

std::unique_ptr<Communicator> Job::make_part(std::uint64_t id, const std::vector<int>& ranks,
                                             int rank) {
  std::vector<Communicator::Member> members;
  for (const int each : ranks) members.push_back({base_ + static_cast<std::uint32_t>(each), each});
  const auto own = std::ranges::find(ranks, rank) - ranks.begin();
  auto made = Communicator::create(engines[static_cast<std::size_t>(rank)], id,
                                   "test:" + std::to_string(id), static_cast<int>(own), members,
                                   best_simd());
  EXPECT_TRUE(made.ok()) << made.take_status().message();
  return std::move(made.value());
}

std::optional<JournalGroup> Job::group(std::size_t rank, std::uint64_t id) const {
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

bool Job::in_call(std::size_t rank, std::uint64_t id) const {
  const auto found = group(rank, id);
  return found.has_value() && found->call_began_ns != 0;
}

::testing::AssertionResult Job::all_up() const {
  return eventually(
      [&] {
        return std::ranges::all_of(engines, [](const auto& engine) {
          return std::ranges::all_of(engine->rails(),
                                     [](const auto& rail) { return rail.state == RailState::up; });
        });
      },
      "every rail is UP at both ends");
}

void Job::run(const std::function<void(int, Communicator&)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options_.ranks; ++rank)
    threads.emplace_back([&, rank] { body(rank, *communicators[static_cast<std::size_t>(rank)]); });
  for (std::thread& thread : threads) thread.join();
}

std::vector<JournalRecord> Job::records(std::size_t rank) const {
  return records_in(engines[rank]->journal_bytes());
}

std::vector<JournalRecord> records_in(const std::string& bytes) {
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

TimeNs Job::longest_stall(std::size_t rank) const {
  TimeNs longest = 0;
  for (const JournalRecord& record : records(rank))
    if (record.kind == JournalKind::stall)
      longest = std::max(longest, static_cast<TimeNs>(record.value));
  return longest;
}

std::string Job::verbs_device(int rank, int rail) {
  return "rdma" + std::to_string(rank) + "_" + std::to_string(rail);
}

std::string Job::address(int rail) { return "127.0.0." + std::to_string(rail + 1); }

std::string Job::device(int rail) const {
  return options_.devices ? "no-port" + std::to_string(rail) : "";
}

std::string Job::address_of(int rank, int rail) const {
  return options_.address ? options_.address(rank, rail) : address(rail);
}

std::unique_ptr<LinkMonitor> Job::monitor(int rank) {
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

void Job::add_peer(std::uint32_t base, int rank, int peer) {
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
           .remote_port = listeners[static_cast<std::size_t>(peer)][static_cast<std::size_t>(rail)],
           .verbs = {.device = options_.rdma ? options_.rdma(rank, rail) : verbs_device(rank, rail),
                     .port = 1},
           .distance = options_.distance ? options_.distance(rail) : std::uint8_t{0},
           .remote_device = device(rail)});
  const Status status = engines[static_cast<std::size_t>(rank)]->add_peer(description);
  EXPECT_TRUE(status.ok()) << status.message();
}

}  // namespace r2ccl::testing
