// Injection of a seed's faults while the job runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "sim/campaign.hpp"
#include "sim/job.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {

class Faults {
 public:
  Faults(World& world, const Job& job, std::uint64_t seed, SeedResult& result)
      : world_(world), job_(job), random_(seed), result_(result) {}

  void begin() {
    for (std::uint64_t i = 0; i < job_.fault_count; ++i) {
      const TimeNs after = random_time(job_.fault_span);
      world_.events().after(after, [this, first = i == 0] {
        if (over_) return;
        const FaultKind any = job_.enabled[random_.below(job_.enabled.size())];
        strike(first && job_.due.has_value() ? *job_.due : any);
      });
    }
  }

  // Prevents further faults and heals everything that can heal.
  void end() {
    over_ = true;
    for (int rank = 0; rank < ranks(); ++rank)
      for (RailId rail = 0; rail < rails(); ++rail) {
        for (int peer = 0; peer < ranks(); ++peer)
          if (peer != rank && !isolated(rank, peer) && world_.is_disturbed(rank, peer, rail))
            world_.disturb(rank, peer, rail, [](Port& port) {
              const bool carrier = port.carrier;
              port = {};
              port.carrier = carrier;
            });
        bool carrier = true;
        for (int peer = 0; peer < ranks(); ++peer)
          carrier = carrier && (peer == rank || world_.has_carrier(rank, peer, rail));
        if (!world_.dead(rank) && !carrier) world_.restore(rank, rail);
      }
  }

  // Starts the long outages after the last call.  Returns true if there are any.
  bool begin_outage() {
    for (const auto& [rank, peer, rail] : outages_)
      for (const auto& [from, to] : {std::pair{rank, peer}, std::pair{peer, rank}})
        world_.disturb(from, to, rail, [](Port& port) { port.black_hole = true; });
    return !outages_.empty();
  }

  [[nodiscard]] bool isolated(int rank, int peer) const {
    return isolated_ == std::pair{std::min(rank, peer), std::max(rank, peer)};
  }
  // Returns the time since which `members` cannot work together; 0 = the members still can.
  [[nodiscard]] TimeNs lost_since(const std::vector<int>& members) const {
    const auto has = [&](int rank) {
      return std::find(members.begin(), members.end(), rank) != members.end();
    };
    if (dead_ >= 0 && has(dead_)) return lost_at_;
    if (isolated_.first >= 0 && has(isolated_.first) && has(isolated_.second)) return lost_at_;
    return 0;
  }
  // Returns true if a fence never completes, which may cost a communicator all its slots.
  [[nodiscard]] bool endless() const { return endless_; }

 private:
  // The port of `rank` towards `peer`, on a rail.
  struct Target {
    int rank;
    int peer;
    RailId rail;
  };

  [[nodiscard]] int ranks() const { return job_.world.ranks; }
  [[nodiscard]] RailId rails() const { return static_cast<RailId>(job_.world.rails.size()); }
  TimeNs random_time(TimeNs limit) {
    return static_cast<TimeNs>(random_.below(static_cast<std::uint64_t>(limit)));
  }
  int pick(int below) { return static_cast<int>(random_.below(static_cast<std::uint64_t>(below))); }
  // Returns a duration from 0.1 ms, shorter than every deadline of a rail, to 80 ms, longer than
  // all deadlines.
  TimeNs duration() { return random_.between(100'000, 80 * ns_per_ms); }

  void after(TimeNs delay, std::function<void()> what) {
    world_.events().after(delay, [this, act = std::move(what)] {
      if (!over_) act();
    });
  }

  void for_a_while(int from, int to, RailId rail, const std::function<void(Port&)>& change,
                   const std::function<void(Port&)>& back) {
    world_.disturb(from, to, rail, change);
    after(duration(), [this, from, to, rail, back] {
      if (!isolated(from, to)) world_.disturb(from, to, rail, back);
    });
  }

  // Cuts a rail until the calls are over.  Rail 0 and control rails are never cut.
  void lose_for_good(int rank, RailId rail) {
    if (spare_rail_ && rail != 0 && world_.options().rails[rail] != RailKind::control)
      world_.cut(rank, rail);
  }

  void flap(int rank, RailId rail, int times) {
    if (times == 0 || over_) return;
    world_.cut(rank, rail);
    after(random_.between(50'000, 8 * ns_per_ms), [this, rank, rail, times] {
      world_.restore(rank, rail);
      after(random_.between(50'000, 8 * ns_per_ms),
            [this, rank, rail, times] { flap(rank, rail, times - 1); });
    });
  }

  void strike(FaultKind kind);
  void hole_both_ways(const Target& at);
  void refuse_egress(const Target& at);
  void drop_large(const Target& at);
  void delay_packets(const Target& at);
  void slow_down(const Target& at);
  void acknowledge_late(const Target& at);
  void acknowledge_by_middlebox(const Target& at);
  void drill_reset(const Target& at);
  void land_late(const Target& at);
  void succeed_falsely(const Target& at);
  void lose_notices(const Target& at);
  void kill(int rank);
  void isolate(int rank, int peer);
  void carrier(int rank, RailId rail, TimeNs notice) {
    world_.cut(rank, rail, notice);
    after(duration(), [this, rank, rail] { world_.restore(rank, rail); });
  }

  World& world_;
  const Job& job_;
  Random random_;
  SeedResult& result_;
  bool over_ = false;
  int dead_ = -1;
  std::pair<int, int> isolated_{-1, -1};
  TimeNs lost_at_ = 0;
  bool endless_ = false;
  // There is a data rail besides rail 0.
  const bool spare_rail_ =
      std::count(job_.world.rails.begin(), job_.world.rails.end(), RailKind::control) + 1 <
      static_cast<std::ptrdiff_t>(rails());
  std::vector<std::tuple<int, int, RailId>> outages_;
};

}  // namespace r2ccl::sim
