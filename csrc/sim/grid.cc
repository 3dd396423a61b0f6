#include "sim/grid.hpp"

namespace r2ccl::sim {
namespace {

constexpr TimeNs latency = 30'000;        // upper bound of a read across the bus
constexpr TimeNs time_slice = ns_per_ms;  // upper bound

}  // namespace

bool Grid::wait(const std::function<bool()>& ready) {
  stopped_ = !world_.wait(ready).ok() || stopped_;
  return !stopped_;
}

bool Grid::meet(const std::function<void()>& then) {
  if (++come_ == blocks_) {
    come_ = 0;
    then();
    ++meetings_;
    world_.touched(rank_);
    return !stopped_;
  }
  const std::uint64_t mine = meetings_;
  return wait([&] { return meetings_ != mine; });
}

bool Grid::pause() {
  const TimeNs most = random_.below(8) == 0 ? time_slice : latency;
  const TimeNs until =
      world_.now() + static_cast<TimeNs>(random_.below(static_cast<std::uint64_t>(most)));
  world_.events().at(until, [this] { world_.touched(rank_); });
  return wait([&] { return world_.now() >= until; });
}

}  // namespace r2ccl::sim
