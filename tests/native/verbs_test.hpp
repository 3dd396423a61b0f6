// The real engine over fake RDMA devices: two ranks, and their rails.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "eventually.hpp"
#include "job.hpp"

namespace r2ccl::testing {

class VerbsTest : public ::testing::Test {
 protected:
  static Config config() {
    Config config;
    config.rejoin_backoff_min_ms = 1;
    config.rejoin_backoff_max_ms = 50;
    config.flap_half_life_s = 0;
    config.link_timeout_s = 20.0;
    return config;
  }
  static Job::Options options(int rails = 2, int verbs = 2, const Config& with = config()) {
    return {.ranks = 2,
            .rails = rails,
            .shm = false,
            .devices = false,
            .verbs = verbs,
            .config = with,
            .listening = {}};
  }
  // Checks after every test: receives were posted in time, and no queue overran.
  void TearDown() override {
    if (job == nullptr) return;
    EXPECT_EQ(job->verbs->not_ready(), 0U);
    EXPECT_EQ(job->verbs->overruns(), 0U);
  }

  Engine::RailInfo info(int rank, int rail) {
    return job->engines[static_cast<std::size_t>(rank)]->rails()[static_cast<std::size_t>(rail)];
  }
  // Epochs of the rails of rank 0.  A start may need several attempts.
  std::array<Epoch, 2> epochs() { return {info(0, 0).epoch, info(0, 1).epoch}; }
  bool all_up() {
    for (const int rank : {0, 1})
      for (const auto& rail : job->engines[static_cast<std::size_t>(rank)]->rails())
        if (rail.state != RailState::up) return false;
    return true;
  }
  ::testing::AssertionResult rejoined() {
    return eventually([this] { return all_up(); }, "all rails are UP");
  }
  // Waits until rail 0 of rank 0 has left the state UP.
  ::testing::AssertionResult lost() {
    return eventually([this] { return info(0, 0).state != RailState::up; }, "rail 0 is not UP");
  }

  // Runs `count` all-reduces of `floats` elements with changing values, and checks the results.
  void steps(int count, std::size_t floats, const std::function<void(int step)>& between = {}) {
    job->run([&](int rank, Communicator& communicator) {
      std::vector<float> data(floats);
      auto* bytes = reinterpret_cast<std::byte*>(data.data());
      for (int step = 0; step < count; ++step) {
        if (rank == 0 && between) between(step);
        for (std::size_t i = 0; i < floats; ++i)
          data[i] = static_cast<float>((i * 7 + static_cast<std::size_t>(step)) % 1000) *
                    static_cast<float>(rank + 1);
        const Status status = communicator.all_reduce(bytes, bytes, floats, DType::f32,
                                                      ReduceOp::sum, Algorithm::automatic);
        ASSERT_TRUE(status.ok()) << status.message();
        for (std::size_t i = 0; i < floats; ++i)
          ASSERT_EQ(data[i],
                    static_cast<float>((i * 7 + static_cast<std::size_t>(step)) % 1000) * 3)
              << "step " << step << " element " << i;
      }
    });
  }
  // Injects `fault` into rail 0 under traffic. The rail must go down by `cause`, another rail must
  // take over, and the rail must rejoin. `healing` runs beside the traffic from the fault on.
  void expect_failover(const std::function<void()>& fault, RailCause cause,
                       const std::function<void()>& healing = {}) {
    ASSERT_TRUE(rejoined());
    const Epoch epoch = info(0, 0).epoch;
    std::thread beside;
    steps(60, 3000, [&](int step) {
      if (step != 20) return;
      fault();
      if (healing) beside = std::thread(healing);
    });
    EXPECT_TRUE(
        eventually([&] { return saw(cause, 0) && info(0, 0).epoch > epoch && all_up(); },
                   "the loss by " + std::string(name_of(cause)) + " and the rejoin of the rail"));
    if (beside.joinable()) beside.join();
    steps(10, 3000);
  }
  // Whether the journal of either rank has the cause. The rank with the first evidence notifies the
  // other.
  bool saw(RailCause cause, int rail) { return saw_at(0, cause, rail) || saw_at(1, cause, rail); }
  bool saw_at(std::size_t rank, RailCause cause, int rail) {
    return std::ranges::any_of(job->records(rank), [&](const JournalRecord& record) {
      return record.kind == JournalKind::rail_state &&
             record.rail == static_cast<std::uint32_t>(rail) &&
             record.to == static_cast<std::uint8_t>(RailState::down) &&
             record.cause == static_cast<std::uint8_t>(cause);
    });
  }
  // Whether a log line of the rank contains `text`. Removes the lines from the log.
  bool logged(std::size_t rank, const std::string& text) {
    const auto lines = job->engines[rank]->log().take();
    return lines.has_value() && std::ranges::any_of(*lines, [&](const LogLine& line) {
             return line.text.find(text) != std::string::npos;
           });
  }
  // Time at which rail 0 of rank 0 entered the state after `since`, from the journal; 0: never.
  // Attempts to connect also end in DOWN; only the loss of a rail in use counts.
  TimeNs entered(RailState state, TimeNs since = 0) {
    for (const JournalRecord& record : job->records(0))
      if (record.kind == JournalKind::rail_state && record.rail == 0 && record.time_ns > since &&
          record.to == static_cast<std::uint8_t>(state) &&
          (state != RailState::down || record.value == 1))
        return record.time_ns;
    return 0;
  }
  // Waits until rail 0 has gone down.  The rail must not return before the end of the patience with
  // a device, 2 s.  Between the begin of the patience and the record, the thread may pause.
  void expect_kept_down() {
    ASSERT_TRUE(eventually([&] { return entered(RailState::down) != 0; }, "rail 0 is DOWN"));
    const TimeNs lost_at = entered(RailState::down);
    const TimeNs returned = entered(RailState::probation, lost_at);
    EXPECT_TRUE(returned == 0 || returned - lost_at >= 1000 * ns_per_ms) << returned - lost_at;
  }
  static std::string device(int rank, int rail = 0) { return Job::verbs_device(rank, rail); }

  std::unique_ptr<Job> job = std::make_unique<Job>(options());
};

}  // namespace r2ccl::testing
