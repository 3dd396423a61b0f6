#include "base/cpus.hpp"

#include <charconv>
#include <mutex>
#include <system_error>

namespace r2ccl {

// A fork waits for the lock, so a child meets whole sets.
struct BackgroundCpus {
  static inline constinit std::mutex lock;
  static inline constinit CpuSet first;   // of the process, at its start
  static inline constinit CpuSet chosen;  // empty: first

  static void prepare() { lock.lock(); }
  static void in_parent() { lock.unlock(); }
  static void in_child() {
    first = CpuSet::of_this_thread();
    lock.unlock();
  }
  static int record() {
    first = CpuSet::of_this_thread();
    return ::pthread_atfork(prepare, in_parent, in_child);
  }

  static const int recorded;
};

const int BackgroundCpus::recorded = BackgroundCpus::record();

namespace {

std::optional<std::size_t> parse_cpu(std::string_view text) {
  std::size_t cpu = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, cpu);
  if (text.empty() || error != std::errc() || stopped != end) return std::nullopt;
  return cpu;
}

}  // namespace

std::optional<CpuSet> CpuSet::parse(std::string_view text) {
  CpuSet set;
  for (bool more = true; more;) {
    const std::size_t comma = text.find(',');
    const std::string_view range = text.substr(0, comma);
    more = comma != std::string_view::npos;
    if (more) text.remove_prefix(comma + 1);
    const std::size_t dash = range.find('-');
    const auto first = parse_cpu(range.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : parse_cpu(range.substr(dash + 1));
    if (!first || !last || *first > *last || *last >= most) return std::nullopt;
    for (std::size_t cpu = *first; cpu <= *last; ++cpu)
      CPU_SET_S(cpu, sizeof(set.masks_), set.masks_.data());
  }
  return set;
}

CpuSet CpuSet::of(pthread_t thread) {
  CpuSet set;
  if (::pthread_getaffinity_np(thread, sizeof(set.masks_), set.masks_.data()) != 0) return {};
  return set;
}

CpuSet CpuSet::of_this_thread() {
  CpuSet set;
  if (::sched_getaffinity(0, sizeof(set.masks_), set.masks_.data()) != 0) return {};
  return set;
}

bool CpuSet::has(std::size_t cpu) const { return CPU_ISSET_S(cpu, sizeof(masks_), masks_.data()); }

std::string CpuSet::text() const {
  std::string text;
  for (std::size_t cpu = 0; cpu < most; ++cpu) {
    if (!has(cpu)) continue;
    const std::size_t first = cpu;
    while (cpu + 1 < most && has(cpu + 1)) ++cpu;
    if (!text.empty()) text += ',';
    text += std::to_string(first);
    if (cpu > first) text += '-' + std::to_string(cpu);
  }
  return text;
}

int CpuSet::move(pthread_t thread) const {
  return ::pthread_setaffinity_np(thread, sizeof(masks_), masks_.data());
}

bool operator==(const CpuSet& one, const CpuSet& other) {
  return CPU_EQUAL_S(sizeof(one.masks_), one.masks_.data(), other.masks_.data()) != 0;
}

void set_background_cpus(const CpuSet& cpus) {
  const std::lock_guard guard(BackgroundCpus::lock);
  BackgroundCpus::chosen = cpus;
}

CpuSet background_cpus() {
  const std::lock_guard guard(BackgroundCpus::lock);
  return BackgroundCpus::chosen.empty() ? BackgroundCpus::first : BackgroundCpus::chosen;
}

int move_to_background_cpus(pthread_t thread) noexcept {
  const CpuSet wanted = background_cpus();
  if (wanted.empty() || CpuSet::of(thread) == wanted) return 0;
  return wanted.move(thread);
}

}  // namespace r2ccl
