// Cost of the journal in a worker: time of a record, of a counted call and of a clock reading.
//
//   journal_cost FOLDER ROUNDS
//
// Prints a JSON object with the median of each time over ROUNDS rounds, in ns.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "journal/journal.hpp"

namespace {

using namespace r2ccl;
using std::chrono::steady_clock;

constexpr int batch = 20'000;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             steady_clock::now().time_since_epoch())
      .count();
}

template <typename Body>
double median_ns(int rounds, Body body) {
  std::vector<double> each;
  for (int round = 0; round < rounds; ++round) {
    const std::int64_t began = now_ns();
    for (int i = 0; i < batch; ++i) body(i);
    each.push_back(static_cast<double>(now_ns() - began) / batch);
  }
  std::ranges::nth_element(each, each.begin() + rounds / 2);
  return each[static_cast<std::size_t>(rounds) / 2];
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) return 2;
  const int rounds = std::atoi(words[2]);
  auto opened = Journal::open(words[1], 1);
  if (rounds < 1 || !opened.ok()) {
    std::fprintf(stderr, "journal_cost: no rounds, or no journal in %s\n", words[1]);
    return 1;
  }
  Journal& journal = opened.value();
  JournalGroup* group = journal.add_group("tp:0", 1, 0, 2);
  volatile std::int64_t sink = 0;
  const double clock = median_ns(rounds, [&](int) { sink = now_ns(); });
  const double record = median_ns(rounds, [&](int i) {
    journal.record({.time_ns = i, .kind = JournalKind::replay, .value = 3});
  });
  const double call = median_ns(rounds, [&](int i) {
    note_call_begins(group, Collective::all_reduce, i);
    note_call_ends(group, 16384, i + 7000, false);
  });
  std::printf("{\"clock_ns\": %.2f, \"record_ns\": %.2f, \"call_ns\": %.2f}\n", clock, record,
              call);
  return 0;
}
