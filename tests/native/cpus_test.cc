// CPUs and names of background threads.
#include "base/cpus.hpp"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "drivers/detached.hpp"
#include "eventually.hpp"
#include "job.hpp"

namespace r2ccl {
namespace {

using testing::eventually;
using testing::Job;

std::optional<std::string> parsed(std::string_view text) {
  const auto set = CpuSet::parse(text);
  return set ? std::optional(set->text()) : std::nullopt;
}

// The CPUs with which this program started.
const CpuSet at_start = CpuSet::of_this_thread();

// Returns the lowest CPU of `set`, and the others if `others`.
CpuSet lowest(const CpuSet& set, bool others = false) {
  const std::string text = set.text();
  const std::size_t end = text.find_first_of(",-");
  if (!others) return CpuSet::parse(text.substr(0, end)).value();
  unsigned cpu = 0;
  (void)std::from_chars(text.data(), text.data() + end, cpu);
  const std::string rest =
      text[end] == ',' ? text.substr(end + 1) : std::to_string(cpu + 1) + text.substr(end);
  return CpuSet::parse(rest).value();
}

bool several() { return at_start.text().find_first_of(",-") != std::string::npos; }

// Returns the CPUs of the threads of this process with names that begin with "r2ccl-", by name.
std::multimap<std::string, std::string> own_threads() {
  std::multimap<std::string, std::string> found;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (!name.starts_with("r2ccl-")) continue;
    std::ifstream status(task.path() / "status");
    for (std::string line; std::getline(status, line);)
      if (const std::string field = "Cpus_allowed_list:\t"; line.starts_with(field))
        found.emplace(name, line.substr(field.size()));
  }
  return found;
}

// Runs `body` in a thread that is pinned to the lowest CPU.
template <typename Body>
void pinned(Body body) {
  std::thread thread([&] {
    ASSERT_EQ(lowest(at_start).move(::pthread_self()), 0);
    body();
    EXPECT_EQ(CpuSet::of_this_thread(), lowest(at_start));
  });
  thread.join();
}

TEST(Cpus, AListIsReadAndWritten) {
  EXPECT_EQ(parsed("0"), "0");
  EXPECT_EQ(parsed("0-3,8"), "0-3,8");
  EXPECT_EQ(parsed("8,0,1,2,3"), "0-3,8");
  EXPECT_EQ(parsed("8191"), "8191");
  for (const auto* text : {"", ",", "0,", "3-1", "1-", "-1", "a", "0x1", "8192", "0 1", "1-2-3"})
    EXPECT_EQ(parsed(text), std::nullopt) << text;
}

TEST(Cpus, AThreadPinnedToACpuMakesAnEngineWithThreadsOnAllCpus) {
  if (!several()) GTEST_SKIP() << "one CPU";
  pinned([] {
    Job job({.ranks = 2, .config = {}});
    const auto threads = own_threads();
    EXPECT_EQ(threads.count("r2ccl-progress"), 2U);
    for (const auto& [name, cpus] : threads) EXPECT_EQ(cpus, at_start.text()) << name;
  });
}

TEST(Cpus, AnOptionPinsTheThreads) {
  if (!several()) GTEST_SKIP() << "one CPU";
  const CpuSet others = lowest(at_start, true);
  pinned([&] {
    Config config;
    config.background_cpus = others.text();
    Job job({.ranks = 2, .config = config});
    const auto threads = own_threads();
    EXPECT_EQ(threads.size(), 2U);
    for (const auto& [name, cpus] : threads) EXPECT_EQ(cpus, others.text()) << name;
    std::atomic<bool> looked{false};
    ASSERT_TRUE(run_detached("of-a-test", [&] {
      EXPECT_EQ(CpuSet::of_this_thread(), others);
      looked = true;
    }));
    EXPECT_TRUE(eventually([&] { return looked.load(); }, "a detached thread runs"));
  });
  set_background_cpus({});
}

// The C library takes a thread that has ended for the caller.
TEST(Cpus, AShortThreadMovesItsCreatorNowhere) {
  if (!several()) GTEST_SKIP() << "one CPU";
  set_background_cpus({});
  pinned([] {
    for (int thread = 0; thread < 200; ++thread) ASSERT_TRUE(run_detached("of-a-test", [] {}));
  });
}

TEST(Cpus, AWrongListIsRefused) {
  Config config;
  config.background_cpus = "0-";
  auto made = Engine::create(config, 1);
  ASSERT_FALSE(made.ok());
  const Status status = made.take_status();
  EXPECT_EQ(status.code(), ErrorCode::invalid_argument);
  EXPECT_EQ(status.message(),
            "background_cpus (R2CCL_BACKGROUND_CPUS) is '0-': must be a list of CPUs, as in 0-3,8");
}

// No machine of the tests has CPU 8191, so the kernel refuses the set.
TEST(Cpus, AnEngineWithoutItsCpusStartsWithAWarning) {
  Config config;
  config.background_cpus = "8191";
  auto made = Engine::create(config, 1);
  set_background_cpus({});
  ASSERT_TRUE(made.ok());
  std::string log;
  const auto lines = made.value()->log().take();
  ASSERT_TRUE(lines.has_value());
  for (const LogLine& line : *lines) log += line.text + "\n";
  EXPECT_NE(log.find("background threads stay on CPUs " + at_start.text() +
                     " of the thread that makes the engine, instead of 8191: Invalid argument"),
            std::string::npos)
      << log;
  made.value()->close(0.0);
}

TEST(Cpus, AForkedChildStartsWithTheCpusOfTheFork) {
  if (!several()) GTEST_SKIP() << "one CPU";
  pinned([] {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(background_cpus() == lowest(at_start) ? 0 : 1);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  });
  EXPECT_EQ(background_cpus(), at_start);
}

}  // namespace
}  // namespace r2ccl
