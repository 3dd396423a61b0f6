#include "netplugin/pairing.hpp"

#include <algorithm>
#include <compare>
#include <optional>
#include <tuple>

#include "link/shape.hpp"

namespace r2ccl::net {
namespace {

enum class Way : std::uint8_t { network, route };

// A possible rail.  The order of members is the order of preference.
struct Candidate {
  Way way;
  bool unequal;       // the NICs differ in speed
  std::size_t apart;  // distance of both NICs in their orders
  std::size_t low;
  std::size_t high;
  friend auto operator<=>(const Candidate&, const Candidate&) = default;
};

bool contains(const RailListener& network, const IpAddress& address) {
  if (network.prefix == 0) return false;  // unknown
  const auto& own = network.place.address.bytes;
  const std::size_t whole = network.prefix / 8U;
  if (!std::equal(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(whole),
                  address.bytes.begin()))
    return false;
  const unsigned rest = network.prefix % 8U;
  if (rest == 0) return true;
  const auto mask = static_cast<std::byte>(0xFF00U >> rest);
  return ((own[whole] ^ address.bytes[whole]) & mask) == std::byte{0};
}

// Empty: a rail between both cannot work.
std::optional<Way> way_between(const RailListener& one, const RailListener& other) {
  const IpAddress& a = one.place.address;
  const IpAddress& b = other.place.address;
  if (a.family != b.family || a.scope() != b.scope()) return std::nullopt;
  if (a.is_loopback()) return Way::network;
  if (a == b) return std::nullopt;
  if (a.scope() == AddressScope::link) return Way::network;
  return contains(one, b) && contains(other, a) ? Way::network : Way::route;
}

bool unequal(const RailListener& one, const RailListener& other) {
  return one.mbit_s != 0 && other.mbit_s != 0 && one.mbit_s != other.mbit_s;
}

std::vector<Candidate> candidates_of(std::span<const RailListener> lower,
                                     std::span<const RailListener> higher) {
  std::vector<Candidate> found;
  for (std::size_t low = 0; low < lower.size(); ++low)
    for (std::size_t high = 0; high < higher.size(); ++high)
      if (const auto way = way_between(lower[low], higher[high]))
        found.push_back({*way, unequal(lower[low], higher[high]),
                         std::max(low, high) - std::min(low, high), low, high});
  std::ranges::sort(found);
  return found;
}

}  // namespace

std::vector<std::pair<std::size_t, std::size_t>> pair_nics(std::span<const RailListener> lower,
                                                           std::span<const RailListener> higher) {
  const std::vector<Candidate> candidates = candidates_of(lower, higher);
  std::vector<std::size_t> low_rails(lower.size());
  std::vector<std::size_t> high_rails(higher.size());
  std::vector<std::pair<std::size_t, std::size_t>> pairs;
  const auto join = [&](const Candidate& pair) {
    pairs.emplace_back(pair.low, pair.high);
    ++low_rails[pair.low];
    ++high_rails[pair.high];
  };
  for (const Candidate& pair : candidates)
    if (low_rails[pair.low] == 0 && high_rails[pair.high] == 0) join(pair);
  // Joins a NIC without a rail to the other end.
  const auto join_lonely = [&](std::size_t Candidate::*own, std::size_t nic,
                               std::size_t Candidate::*other, const auto& other_rails) {
    const Candidate* best = nullptr;
    const auto rank = [&](const Candidate& pair) {
      return std::tuple(pair.way, pair.unequal, other_rails[pair.*other], pair.low, pair.high);
    };
    for (const Candidate& pair : candidates)
      if (pair.*own == nic && (best == nullptr || rank(pair) < rank(*best))) best = &pair;
    if (best != nullptr) join(*best);
  };
  for (std::size_t low = 0; low < lower.size(); ++low)
    if (low_rails[low] == 0) join_lonely(&Candidate::low, low, &Candidate::high, high_rails);
  for (std::size_t high = 0; high < higher.size(); ++high)
    if (high_rails[high] == 0) join_lonely(&Candidate::high, high, &Candidate::low, low_rails);
  std::ranges::sort(pairs, {}, [](const auto& pair) {
    return std::tuple(std::max(pair.first, pair.second), pair.first, pair.second);
  });
  if (pairs.size() > max_rails_per_link) pairs.resize(max_rails_per_link);
  return pairs;
}

bool is_reserve(std::span<const RailListener> nics, std::size_t nic) {
  constexpr std::uint32_t least_share = 8;
  const std::uint32_t fastest = std::ranges::max(nics, {}, &RailListener::mbit_s).mbit_s;
  return nics[nic].mbit_s != 0 && nics[nic].mbit_s < fastest / least_share;
}

}  // namespace r2ccl::net
