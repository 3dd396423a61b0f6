// The real engine over loopback, with address changes of its ports.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "eventually.hpp"
#include "job.hpp"

namespace r2ccl {
namespace {

using testing::Job;

constexpr int accepting = 0;  // the rank with the lower number accepts
constexpr int connecting = 1;

class Addresses : public ::testing::Test {
 protected:
  static Config config() {
    Config config;
    config.rejoin_backoff_min_ms = 1;
    config.rejoin_backoff_max_ms = 100;
    config.handshake_timeout_ms = 500;
    return config;
  }

  static Job::Options options() {
    return {
        .ranks = 2, .rails = 2, .shm = false, .devices = true, .config = config(), .listening = {}};
  }
  static IpAddress ip(const std::string& text) { return IpAddress::parse(text).value(); }

  void replace(int rank, int rail, const std::string& old, const std::string& by) {
    replace(*job, rank, rail, old, by);
  }
  static void replace(const Job& of, int rank, int rail, const std::string& old,
                      const std::string& by) {
    FakeLinkMonitor& monitor = *of.monitors[static_cast<std::size_t>(rank)];
    monitor.remove_address(Job::ifindex(rail), ip(old));
    monitor.add_address(Job::ifindex(rail), ip(by));
  }

  Engine::RailInfo info(int rank, int rail) {
    return job->engines[static_cast<std::size_t>(rank)]->rails()[static_cast<std::size_t>(rail)];
  }

  // Number of times the rail went DOWN because its port lost its address, from the journal.
  long address_losses(int rank, std::uint32_t rail) {
    const auto kept = job->records(static_cast<std::size_t>(rank));
    return std::ranges::count_if(kept, [&](const JournalRecord& record) {
      return record.kind == JournalKind::rail_state && record.rail == rail &&
             static_cast<RailState>(record.to) == RailState::down &&
             static_cast<RailCause>(record.cause) == RailCause::address_loss;
    });
  }

  // Waits until both ends of the rail are UP between these addresses.
  ::testing::AssertionResult joined(int rail, const std::string& accepts,
                                    const std::string& connects) {
    std::string text;
    const auto is_joined = [&] {
      bool right = true;
      text.clear();
      for (const int rank : {accepting, connecting}) {
        const auto rail_info = info(rank, rail);
        const std::string& local = rank == accepting ? accepts : connects;
        const std::string& remote = rank == accepting ? connects : accepts;
        right = right && rail_info.state == RailState::up &&
                rail_info.local.starts_with(local + ":") &&
                rail_info.remote.starts_with(remote + ":");
        text += std::string(name_of(rail_info.state)) + " " + rail_info.local + " to " +
                rail_info.remote + "; ";
      }
      return right;
    };
    auto waited = testing::eventually(
        is_joined, "rail " + std::to_string(rail) + " is UP from " + connects + " to " + accepts);
    return waited ? waited : waited << "; at " << text;
  }

  void steps() {
    job->run([](int, Communicator& communicator) {
      std::vector<float> data(1000, 1.0F);
      auto* bytes = reinterpret_cast<std::byte*>(data.data());
      for (int i = 0; i < 20; ++i) {
        const Status status = communicator.all_reduce(bytes, bytes, data.size(), DType::f32,
                                                      ReduceOp::max, Algorithm::automatic);
        ASSERT_TRUE(status.ok()) << status.message();
      }
    });
  }

  std::unique_ptr<Job> job = std::make_unique<Job>(options());
  const std::string given = Job::address(0);
};

TEST_F(Addresses, MayChangeAtEitherEndAndTheRailRejoins) {
  ASSERT_TRUE(job->all_up());
  const Epoch other = info(accepting, 1).epoch;  // a start may need several attempts
  std::string accepts = given;
  std::string connects = given;
  for (int round = 0; round < 3; ++round) {
    const std::string next = "127.0.2." + std::to_string(round + 1);
    replace(accepting, 0, accepts, next);
    ASSERT_TRUE(joined(0, next, connects));
    accepts = next;
    steps();
    replace(connecting, 0, connects, next);
    ASSERT_TRUE(joined(0, accepts, next));
    connects = next;
    steps();
  }
  replace(accepting, 0, accepts, given);
  replace(connecting, 0, connects, given);
  ASSERT_TRUE(joined(0, given, given));
  EXPECT_EQ(info(accepting, 1).epoch, other);
}

TEST_F(Addresses, MayChangeAtBothEndsAtOnce) {
  replace(accepting, 0, given, "127.0.3.1");
  replace(connecting, 0, given, "127.0.3.2");
  ASSERT_TRUE(joined(0, "127.0.3.1", "127.0.3.2"));
  // The addresses of the second rail change, too; the first rail carries the notice.
  replace(accepting, 1, Job::address(1), "127.0.3.3");
  replace(connecting, 1, Job::address(1), "127.0.3.4");
  ASSERT_TRUE(joined(1, "127.0.3.3", "127.0.3.4"));
  steps();
}

TEST_F(Addresses, AreWatchedAfterAChangeLikeBefore) {
  for (const int rank : {accepting, connecting}) {
    FakeLinkMonitor& monitor = *job->monitors[static_cast<std::size_t>(rank)];
    const std::string next = "127.0.4." + std::to_string(rank + 1);
    replace(rank, 0, given, next);
    ASSERT_TRUE(joined(0, "127.0.4.1", rank == accepting ? given : next));
    const Epoch epoch = info(rank, 0).epoch;
    // The address in use counts, not another address added or removed beside it.
    monitor.add_address(Job::ifindex(0), ip("127.0.4.9"));
    monitor.remove_address(Job::ifindex(0), ip("127.0.4.9"));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_EQ(info(rank, 0).epoch, epoch);
    // Loopback accepts connections from any address, so the rail may rejoin before a check of its
    // state. The journal keeps the loss.
    const auto losses = address_losses(rank, 0);
    monitor.remove_address(Job::ifindex(0), ip(next));
    EXPECT_TRUE(testing::eventually([&] { return address_losses(rank, 0) > losses; },
                                    "the loss of the address"));
    monitor.add_address(Job::ifindex(0), ip(next));
    ASSERT_TRUE(joined(0, "127.0.4.1", rank == accepting ? given : next));
    EXPECT_GT(info(rank, 0).epoch, epoch);
  }
}

TEST_F(Addresses, MayChangeBeforeThePeersAreKnown) {
  Job::Options late = options();
  late.listening = [](Job& made) {
    for (const int rank : {accepting, connecting})
      replace(made, rank, 0, Job::address(0), "127.0.5." + std::to_string(rank + 1));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // engines see the change
  };
  job.reset();
  job = std::make_unique<Job>(late);
  ASSERT_TRUE(joined(0, "127.0.5.1", "127.0.5.2"));
  steps();
}

TEST_F(Addresses, MayComeAfterTheStart) {
  for (const int late_rank : {accepting, connecting}) {
    Job::Options late = options();
    late.address = [late_rank](int rank, int rail) {
      return rank == late_rank && rail == 1 ? "0.0.0.0" : Job::address(rail);
    };
    job.reset();
    job = std::make_unique<Job>(late);
    // The monitor of the fake knows the address; the description of the rail does not.
    ASSERT_TRUE(joined(1, Job::address(1), Job::address(1))) << "late rank " << late_rank;
    steps();
    replace(late_rank, 1, Job::address(1), "127.0.7.1");
    const std::string accepts = late_rank == accepting ? "127.0.7.1" : Job::address(1);
    const std::string connects = late_rank == connecting ? "127.0.7.1" : Job::address(1);
    ASSERT_TRUE(joined(1, accepts, connects)) << "late rank " << late_rank;
  }
}

// Both ends guess which late ports belong together.  The addresses show that the guess was wrong.
TEST_F(Addresses, OfLatePortsDecideThePairs) {
  for (const int late_rank : {accepting, connecting}) {
    Job::Options late = options();
    late.rails = 3;
    late.bare = [](int, int rail) { return rail > 0; };
    late.address = [late_rank](int rank, int rail) -> std::string {
      if (rail == 0) return Job::address(0);
      if (rank == late_rank) return "0.0.0.0";
      return "127.0." + std::to_string(10 + rail) + ".1";
    };
    job.reset();
    job = std::make_unique<Job>(late);
    const auto give = [&](int rank, int rail, const std::string& address) {
      job->monitors[static_cast<std::size_t>(rank)]->add_address(Job::ifindex(rail), ip(address),
                                                                 24);
    };
    const int other = late_rank == accepting ? connecting : accepting;
    // A carrier without an address is no news: its announcement would end the rail that carries it.
    const Epoch first = info(connecting, 0).epoch;
    FakeLinkMonitor& without = *job->monitors[static_cast<std::size_t>(late_rank)];
    for (const bool carrier : {false, true}) without.set_link(Job::ifindex(1), "no-port1", carrier);
    give(other, 1, "127.0.11.1");
    give(other, 2, "127.0.12.1");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the engine sees its networks
    give(late_rank, 1, "127.0.12.2");
    give(late_rank, 2, "127.0.11.2");
    // The rail keeps the port of the accepting end.
    const bool accepts_late = late_rank == accepting;
    ASSERT_TRUE(joined(1, accepts_late ? "127.0.12.2" : "127.0.11.1",
                       accepts_late ? "127.0.12.1" : "127.0.11.2"))
        << "late rank " << late_rank;
    ASSERT_TRUE(joined(2, accepts_late ? "127.0.11.2" : "127.0.12.1",
                       accepts_late ? "127.0.11.1" : "127.0.12.2"))
        << "late rank " << late_rank;
    EXPECT_EQ(info(connecting, 1).device, "no-port2");
    // The accepting end knows which listener a rail leads to: probes would ask a stranger
    // otherwise.
    const std::vector<std::uint16_t>& there = job->listeners[connecting];
    for (const auto& [rail, listener] : {std::pair(1, there[2]), std::pair(2, there[1])})
      EXPECT_TRUE(info(accepting, rail).remote.ends_with(":" + std::to_string(listener)))
          << info(accepting, rail).remote << ", wanted " << listener;
    EXPECT_EQ(info(connecting, 0).epoch, first);
    steps();
  }
}

TEST_F(Addresses, MayChangeQuicklyAndTheLastWins) {
  std::string accepts = given;
  for (int i = 1; i < 100; ++i) {
    const std::string next = "127.0.6." + std::to_string(i);
    replace(accepting, 0, accepts, next);
    accepts = next;
    if (i % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
  ASSERT_TRUE(joined(0, accepts, given));
  steps();
}

}  // namespace
}  // namespace r2ccl
