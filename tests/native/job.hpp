// A job in a single process, for tests of the real engine: an engine per rank, on loopback
// addresses.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "drivers/fake_link_monitor.hpp"
#include "drivers/fake_verbs.hpp"
#include "engine/communicator.hpp"
#include "engine/engine.hpp"
#include "eventually.hpp"
#include "journal/journal.hpp"

namespace r2ccl::testing {

// Returns the records of a journal in storage order: oldest first, unless the ring has wrapped.
std::vector<JournalRecord> records_in(const std::string& bytes);

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

  explicit Job(const Options& options);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  std::vector<std::unique_ptr<Communicator>> make_communicators(std::uint64_t id);

  // Returns the communicator of `rank` in a subset of ranks.  Each rank is a node, in the given
  // order.
  std::unique_ptr<Communicator> make_part(std::uint64_t id, const std::vector<int>& ranks,
                                          int rank);

  // Returns the rank's journal entry of communicator `id`, if there is one.
  [[nodiscard]] std::optional<JournalGroup> group(std::size_t rank, std::uint64_t id) const;
  // Returns whether a call of the rank's communicator `id` is running, according to the journal.
  [[nodiscard]] bool in_call(std::size_t rank, std::uint64_t id) const;
  [[nodiscard]] bool in_call(std::size_t rank) const { return in_call(rank, base_); }

  // Waits until every rail is UP at both ends; the constructor waits for a rail of each link only.
  [[nodiscard]] ::testing::AssertionResult all_up() const;

  // Runs body(rank, communicator) in a thread per rank.
  void run(const std::function<void(int, Communicator&)>& body);

  // Returns the rank's journal records; see records_in().
  [[nodiscard]] std::vector<JournalRecord> records(std::size_t rank) const;
  [[nodiscard]] TimeNs longest_stall(std::size_t rank) const;

  static int ifindex(int rail) { return rail + 1; }
  static std::string verbs_device(int rank, int rail);
  static std::string address(int rail);

  std::shared_ptr<FakeVerbs> verbs;
  std::vector<std::shared_ptr<Engine>> engines;
  std::vector<FakeLinkMonitor*> monitors;             // per rank, only with `devices`
  std::vector<std::vector<std::uint16_t>> listeners;  // port numbers by rank and rail
  std::vector<std::unique_ptr<Communicator>> communicators;

 private:
  [[nodiscard]] std::string device(int rail) const;
  [[nodiscard]] std::string address_of(int rank, int rail) const;
  std::unique_ptr<LinkMonitor> monitor(int rank);
  void add_peer(std::uint32_t base, int rank, int peer);

  const Options options_;
  std::uint32_t base_ = 0;
};

}  // namespace r2ccl::testing
