// How a call waits for its peers: it looks, lets others run, and sleeps in the end.
#include <algorithm>
#include <numeric>

#include "base/clock.hpp"
#include "engine/communicator.hpp"

namespace r2ccl {
namespace {

// Other rails, other peers and deadlines are looked at once in so many rounds, or so often: a round
// lasts long where others have the core.
constexpr unsigned rounds_per_check = 16;
constexpr TimeNs check_interval_ns = 100'000;
// A yield that takes as long has let somebody else run.
constexpr TimeNs switched_ns = 3000;

}  // namespace

Status Communicator::wait(int awaited, const std::function<std::uint64_t()>& come,
                          std::uint64_t goal) {
  if (failed()) return failure();
  std::uint64_t had = come();
  if (had >= goal) return {};
  Peer& peer = *peer_of(awaited);
  const TimeNs spin = engine_->config().spin_us * 1000;
  TimeNs now = now_ns();
  const TimeNs began = now;
  TimeNs last_arrival = began;  // of what is waited for
  TimeNs last_byte = began;     // of anything, so that it pays to look again soon
  std::uint64_t disturbances = disturbances_before(peer);
  TimeNs checked = began;
  for (unsigned round = 0;; ++round, now = now_ns()) {
    looked_ = now;
    const bool check =
        round % rounds_per_check == rounds_per_check - 1 || now - checked >= check_interval_ns;
    if (check) checked = now;
    // At first only where it is likely to come.
    const bool everywhere = check || (bulk_ && round > 0);
    if (engine_->progress(peer, now, everywhere)) last_byte = now;
    if (everywhere) {
      for (Peer* other : others_)
        if (other != &peer) engine_->progress(*other, now, /*all_rails=*/true);
      engine_->tick_if_due(now);
    }
    // Not whatever comes: probes are answered all the time, and who waits for data may be told
    // meanwhile that earlier messages were delivered.
    if (const std::uint64_t has = come(); has != had) {
      had = has;
      // The time since the last of it came counts as a stall if a rail event lies in it.
      if (disturbances != peer.link.disturbances()) stalled_ += now - last_arrival;
      disturbances = disturbances_before(peer);
      last_arrival = now;
    }
    if (failed()) return failure();
    if (had >= goal) return {};
    if (now - std::max(last_arrival, last_byte) < spin) {
      if (check) R2CCL_TRY(check_liveness(awaited, began));
      if (round % rounds_per_yield_ == rounds_per_yield_ - 1) give_way();
      continue;
    }
    R2CCL_TRY(check_liveness(awaited, began));
    engine_->block(bulk_ ? others_ : std::vector<Peer*>{&peer});
  }
}

// Where others want this core, it is better given away at once: what is waited for may be theirs.
void Communicator::give_way() {
  const TimeNs before = now_ns();
  engine_->yield();
  const bool crowded = now_ns() - before >= switched_ns;
  rounds_per_yield_ = crowded ? 1 : std::min(rounds_per_check, 2 * rounds_per_yield_);
}

// The rail events that what is waited for from now on cannot be stalled by.  A link without rails
// stalls it whenever it lost them: in the pause between two calls, or before the last arrival.
std::uint64_t Communicator::disturbances_before(const Peer& peer) {
  return peer.link.dark() ? 0 : peer.link.disturbances();
}

void Communicator::linger(TimeNs limit, const std::function<bool()>& done) {
  const auto sum = [this](const auto& of) {
    return std::accumulate(
        others_.begin(), others_.end(), std::uint64_t{0},
        [&of](std::uint64_t total, const Peer* peer) { return total + of(*peer); });
  };
  const std::uint64_t before = sum(disturbances_before);
  const TimeNs began = now_ns();
  while (!done() && now_ns() < began + limit) {
    for (Peer* peer : others_) engine_->progress(*peer, now_ns(), /*all_rails=*/true);
    engine_->tick_if_due(now_ns());
    if (!done()) engine_->block(others_);
  }
  looked_ = now_ns();
  // A call that waits until a lost rail lets go of its memory is stalled by that.
  const std::uint64_t after = sum([](const Peer& peer) { return peer.link.disturbances(); });
  if (stalled_ > 0 || before != after) stalled_ += looked_ - began;
}

}  // namespace r2ccl
