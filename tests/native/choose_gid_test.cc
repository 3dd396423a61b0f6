// choose_gid(): the GID that a verbs connection uses.
#include <gtest/gtest.h>

#include <string_view>

#include "connect/verbs_devices.hpp"

namespace r2ccl {
namespace {

constexpr int any = -1;

VerbsGidEntry entry(std::uint8_t index, VerbsGidType type, std::byte last) {
  VerbsGidEntry made{.index = index, .type = type, .gid = {}};
  made.gid[10] = made.gid[11] = std::byte{0xff};  // 10.0.0.last
  made.gid[12] = std::byte{10};
  made.gid[15] = last;
  return made;
}

IpAddress address(std::string_view text) { return IpAddress::parse(text).value(); }

VerbsPort roce() {
  VerbsPort port;
  port.gids = {
      entry(0, VerbsGidType::roce_v1, std::byte{1}), entry(1, VerbsGidType::roce_v2, std::byte{1}),
      entry(2, VerbsGidType::roce_v1, std::byte{2}), entry(5, VerbsGidType::roce_v2, std::byte{3})};
  return port;
}

int chosen(const VerbsPort& port, const IpAddress& local, int wanted) {
  auto gid = choose_gid(port, local, wanted);
  return gid.ok() ? gid.value().index : -1;
}

TEST(ChooseGid, PrefersRoceV2WithTheRailsAddress) {
  EXPECT_EQ(chosen(roce(), address("10.0.0.1"), any), 1);
  EXPECT_EQ(chosen(roce(), address("10.0.0.3"), any), 5);
}

TEST(ChooseGid, PrefersTheRailsAddressOnRoceV1ToAnotherOnRoceV2) {
  EXPECT_EQ(chosen(roce(), address("10.0.0.2"), any), 2);
}

TEST(ChooseGid, TakesTheFirstRoceV2EntryIfNoneHasTheRailsAddress) {
  EXPECT_EQ(chosen(roce(), address("10.0.0.9"), any), 1);
  EXPECT_EQ(chosen(roce(), IpAddress(), any), 1);
}

TEST(ChooseGid, TakesTheFirstInfinibandEntry) {
  VerbsPort port = roce();
  port.ethernet = false;
  for (VerbsGidEntry& gid : port.gids) gid.type = VerbsGidType::infiniband;
  EXPECT_EQ(chosen(port, address("10.0.0.3"), any), 0);
}

TEST(ChooseGid, TakesTheConfiguredIndex) { EXPECT_EQ(chosen(roce(), address("10.0.0.1"), 2), 2); }

TEST(ChooseGid, ReportsAMissingGid) {
  auto absent = choose_gid(roce(), address("10.0.0.1"), 3);
  ASSERT_FALSE(absent.ok());
  EXPECT_NE(absent.take_status().message().find("R2CCL_GID_INDEX) is 3"), std::string::npos);
  EXPECT_FALSE(choose_gid(VerbsPort(), address("10.0.0.1"), any).ok());
}

}  // namespace
}  // namespace r2ccl
