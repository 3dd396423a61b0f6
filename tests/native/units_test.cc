// Units of redundancy as peers name them: their numbers in the journal, and too many of them.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "journal/journal.hpp"

namespace r2ccl {
namespace {

constexpr std::uint32_t own = 1;
constexpr std::uint32_t first_peer = 2;

RailDescription rail_of(int index) {
  const std::string address = "127.0.0." + std::to_string(index + 1);
  return {.kind = RailKind::tcp,
          .name = "rail" + std::to_string(index) + "@node1",
          .device = "",
          .local_address = address,
          .remote_address = address,
          .remote_port = 0,
          .verbs = {}};
}

PeerDescription peer_of(std::uint32_t process, std::vector<RailDescription> rails) {
  PeerDescription peer{.process = process,
                       .label = "rank " + std::to_string(process),
                       .secret = {},
                       .rails = std::move(rails)};
  peer.secret.resize(32, std::byte{7});
  return peer;
}

TEST(Units, AreNumberedPerProcess) {
  const auto engine = Engine::create(Config(), own).value();
  std::vector<RailDescription> rails{rail_of(0), rail_of(1), rail_of(2), rail_of(3)};
  rails[0].unit = rails[2].unit = "a";
  rails[1].unit = "b";
  ASSERT_TRUE(engine->add_peer(peer_of(first_peer, rails)).ok());
  const std::string bytes = engine->journal_bytes();
  std::vector<int> units;
  for (std::size_t rail = 0; rail < rails.size(); ++rail) {
    JournalRail entry;
    std::memcpy(&entry, bytes.data() + sizeof(JournalHeader) + rail * sizeof(entry), sizeof(entry));
    units.push_back(entry.unit);
  }
  EXPECT_EQ(units, (std::vector<int>{1, 2, 1, 0}));
  EXPECT_EQ(engine->rails()[2].unit, "a");
}

TEST(Units, TooManyAreAnError) {
  const auto engine = Engine::create(Config(), own).value();
  Status status;
  for (int peer = 0; peer < 4; ++peer) {
    std::vector<RailDescription> rails;
    for (int i = 0; i < 64; ++i) {
      rails.push_back(rail_of(i));
      rails.back().unit = "unit " + std::to_string(64 * peer + i);
    }
    ASSERT_TRUE(status.ok()) << peer;
    status = engine->add_peer(peer_of(first_peer + static_cast<std::uint32_t>(peer), rails));
  }
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("'unit 255' is the 256th"), std::string::npos);
}

}  // namespace
}  // namespace r2ccl
