// The only source of randomness in the simulated world.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace r2ccl::sim {

// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  }

  // Returns a number from 0 to bound-1, or 0 for bound 0.
  std::uint64_t below(std::uint64_t bound) { return bound == 0 ? 0 : next() % bound; }
  double unit() { return static_cast<double>(next() >> 11U) * 0x1p-53; }  // 0 <= x < 1
  bool chance(double probability) { return unit() < probability; }
  // Returns a log-uniform value: every order of magnitude is equally likely.
  std::int64_t between(std::int64_t low, std::int64_t high) {
    const double ratio = static_cast<double>(high) / static_cast<double>(low);
    return static_cast<std::int64_t>(static_cast<double>(low) * std::pow(ratio, unit()));
  }
  template <typename T, std::size_t count>
  T one_of(const std::array<T, count>& values) {
    return values[below(count)];
  }

 private:
  std::uint64_t state_;
};

}  // namespace r2ccl::sim
