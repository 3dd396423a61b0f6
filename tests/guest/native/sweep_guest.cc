// An all-reduce over real queue pairs, with a queue pair driven into the error state at every step:
// at each post and at each completion, at either end.  Runs in the guest.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../native/job.hpp"
#include "drivers/ibverbs.hpp"

namespace r2ccl {
namespace {

using testing::Job;

// Counts the steps of an end's queue pairs, and fails the queue pair at step `strike_at`.
struct Sweep {
  std::string devices;  // prefix of the device names
  std::atomic<int> steps{0};
  std::atomic<int> strike_at{-1};
  std::atomic<int> strikes{0};

  [[nodiscard]] bool step(const std::string& of) {
    if (!of.starts_with(devices) || steps.fetch_add(1) != strike_at) return false;
    ++strikes;
    return true;
  }
};

class SweptPair final : public VerbsQueuePair {
 public:
  SweptPair(std::unique_ptr<VerbsQueuePair> pair, std::string device, Sweep& sweep)
      : pair_(std::move(pair)), device_(std::move(device)), sweep_(sweep) {}

  [[nodiscard]] std::uint32_t number() const override { return pair_->number(); }
  [[nodiscard]] std::uint32_t inline_bytes() const override { return pair_->inline_bytes(); }
  int connect(const VerbsAddress& own, const VerbsAddress& peer, const VerbsPath& path) override {
    return pair_->connect(own, peer, path);
  }
  int fail() override { return pair_->fail(); }
  int destroy() override { return pair_->destroy(); }
  int post(std::span<const VerbsWrite> writes) override {
    strike();
    return pair_->post(writes);
  }
  int post_receives(std::uint64_t id, std::uint32_t count) override {
    strike();
    return pair_->post_receives(id, count);
  }
  int poll(std::span<VerbsCompletion> completions) override {
    // Polls a single completion, so that each completion is a step.
    const int got = pair_->poll(completions.first(1));
    if (got > 0) strike();
    return got;
  }
  [[nodiscard]] int fd() const override { return pair_->fd(); }
  int arm() override { return pair_->arm(); }

 private:
  void strike() {
    if (sweep_.step(device_)) (void)pair_->fail();
  }

  const std::unique_ptr<VerbsQueuePair> pair_;
  const std::string device_;
  Sweep& sweep_;
};

class SweptDevice final : public VerbsDevice {
 public:
  SweptDevice(std::unique_ptr<VerbsDevice> device, Sweep& sweep)
      : device_(std::move(device)), sweep_(sweep) {}

  [[nodiscard]] const std::string& name() const override { return device_->name(); }
  Result<VerbsPort> port(std::uint8_t number) override { return device_->port(number); }
  Result<std::unique_ptr<VerbsMemory>> share(std::span<std::byte> memory,
                                             bool relaxed_ordering) override {
    return device_->share(memory, relaxed_ordering);
  }
  Result<std::unique_ptr<VerbsMemory>> share_dma_buf(int dma_buf, std::span<std::byte> addresses,
                                                     bool relaxed_ordering) override {
    return device_->share_dma_buf(dma_buf, addresses, relaxed_ordering);
  }
  Result<std::unique_ptr<VerbsQueuePair>> create_queue_pair(std::uint8_t port,
                                                            std::uint16_t pkey_index,
                                                            const VerbsDepth& depth) override {
    auto pair = device_->create_queue_pair(port, pkey_index, depth);
    if (!pair.ok()) return pair.take_status();
    return std::unique_ptr<VerbsQueuePair>(
        std::make_unique<SweptPair>(std::move(pair.value()), name(), sweep_));
  }
  [[nodiscard]] int event_fd() const override { return device_->event_fd(); }
  std::optional<VerbsEvent> next_event() override { return device_->next_event(); }

 private:
  const std::unique_ptr<VerbsDevice> device_;
  Sweep& sweep_;
};

class SweptVerbs final : public VerbsDriver {
 public:
  explicit SweptVerbs(std::shared_ptr<VerbsDriver> driver) : driver_(std::move(driver)) {}

  std::vector<std::string> devices() override { return driver_->devices(); }
  Result<std::unique_ptr<VerbsDevice>> open(const std::string& device) override {
    auto opened = driver_->open(device);
    if (!opened.ok()) return opened.take_status();
    return std::unique_ptr<VerbsDevice>(
        std::make_unique<SweptDevice>(std::move(opened.value()), sweep));
  }

  Sweep sweep;

 private:
  const std::shared_ptr<VerbsDriver> driver_;
};

class GuestSweep : public ::testing::TestWithParam<std::pair<int, std::size_t>> {
 protected:
  static Job::Options options(const std::shared_ptr<SweptVerbs>& driver) {
    Config config;
    config.rejoin_backoff_min_ms = 1;
    config.rejoin_backoff_max_ms = 50;
    config.flap_half_life_s = 0;
    config.ack_deadline_floor_ms = 500;
    config.dead_deadline_ms = 10'000;  // no other cause may take a rail down
    config.handshake_timeout_ms = 20'000;
    Job::Options made;
    made.rails = made.verbs = 2;
    made.config = config;
    made.driver = driver;
    made.address = [](int rank, int rail) {
      return "10." + std::to_string(rail) + ".0." + std::to_string(rank + 1);
    };
    made.rdma = [](int rank, int rail) {
      return "rxe_n" + std::to_string(rank) + "r" + std::to_string(rail);
    };
    return made;
  }
  static std::shared_ptr<SweptVerbs> real() {
    auto driver = load_ibverbs();
    if (!driver.ok()) throw std::runtime_error(driver.take_status().message());
    return std::make_shared<SweptVerbs>(std::move(driver.value()));
  }
  bool all_up() {
    return std::ranges::all_of(job.engines, [](const auto& engine) {
      const auto rails = engine->rails();
      return std::ranges::all_of(rails,
                                 [](const auto& rail) { return rail.state == RailState::up; });
    });
  }
  // Waits up to 30 s for all rails to be UP.  A strike not noticed yet still counts as UP.
  bool whole_again() {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (std::chrono::steady_clock::now() < limit) {
      if (all_up()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return false;
  }
  void all_reduce(std::size_t floats) {
    job.run([floats](int rank, Communicator& communicator) {
      std::vector<float> in(floats);
      std::vector<float> out(floats);
      for (std::size_t i = 0; i < floats; ++i)
        in[i] = static_cast<float>(i % 997) * static_cast<float>(rank + 1);
      const Status status = communicator.all_reduce(
          reinterpret_cast<const std::byte*>(in.data()), reinterpret_cast<std::byte*>(out.data()),
          floats, DType::f32, ReduceOp::sum, Algorithm::automatic);
      ASSERT_TRUE(status.ok()) << status.message();
      for (std::size_t i = 0; i < floats; ++i)
        ASSERT_EQ(out[i], static_cast<float>(i % 997) * 3) << "element " << i;
    });
  }

  std::shared_ptr<SweptVerbs> driver = real();
  Job job{options(driver)};
};

TEST_P(GuestSweep, SurvivesAQueuePairErrorAtEachStep) {
  const auto [end, floats] = GetParam();
  Sweep& sweep = driver->sweep;
  sweep.devices = "rxe_n" + std::to_string(end);
  ASSERT_TRUE(whole_again());
  all_reduce(floats);  // exchanges the addresses of memory
  sweep.steps = 0;
  all_reduce(floats);
  const int steps = sweep.steps;
  ASSERT_GT(steps, 0);
  const char* const parts = std::getenv("R2SERVE_SWEEP_PARTS");
  const auto stride =
      static_cast<unsigned>(parts == nullptr ? 1 : std::max(1, steps / std::atoi(parts)));
  const char* const seed = std::getenv("R2SERVE_SWEEP_SEED");
  const int first =
      seed == nullptr ? 0 : static_cast<int>(std::strtoul(seed, nullptr, 10) % stride);
  int runs = 0;
  // The number of steps depends on the timing of completions, so at least 12 steps are tried.
  const int last = std::max(steps, 12);
  for (int at = first; at < last; at += static_cast<int>(stride), ++runs) {
    sweep.steps = 0;
    sweep.strike_at = at;
    all_reduce(floats);
    sweep.strike_at = -1;
    ASSERT_FALSE(HasFatalFailure()) << "struck at step " << at;
    ASSERT_TRUE(whole_again()) << "after a strike at step " << at;
  }
  std::uint64_t sent = 0;
  for (const auto& rail : job.engines[static_cast<std::size_t>(end)]->rails()) {
    EXPECT_EQ(rail.kind, RailKind::verbs);
    sent += rail.counters.data_tx_bytes;
  }
  EXPECT_GE(sent, floats * sizeof(float) * static_cast<std::size_t>(runs));
  EXPECT_GT(sweep.strikes, 0);
  std::printf("SWEEP end %d, %zu KiB: %d steps, %d runs from step %d, %d strikes\n", end,
              floats * sizeof(float) >> 10U, steps, runs, first, sweep.strikes.load());
}

INSTANTIATE_TEST_SUITE_P(Ends, GuestSweep,
                         ::testing::Values(std::pair{0, std::size_t{4096}},
                                           std::pair{1, std::size_t{4096}},
                                           std::pair{0, std::size_t{100'000}},
                                           std::pair{1, std::size_t{100'000}}));

}  // namespace
}  // namespace r2ccl
