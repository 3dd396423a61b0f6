// Queue pair attributes of InfiniBand and RoCE connections.
#include "drivers/ibverbs_attributes.hpp"

#include <gtest/gtest.h>

#if R2CCL_IBVERBS

namespace r2ccl {
namespace {

VerbsAddress address(std::uint32_t number, std::uint16_t lid, std::uint8_t subnet) {
  VerbsAddress made{.queue_pair = number, .first_packet = number + 1, .mtu = 4096, .lid = lid};
  made.gid[7] = std::byte{subnet};
  made.gid[15] = static_cast<std::byte>(number);
  return made;
}

constexpr VerbsPath path{.port = 2,
                         .gid_index = 5,
                         .timeout = 15,
                         .retry_count = 4,
                         .rnr_timer = 9,
                         .rnr_retry = 3,
                         .traffic_class = 104,
                         .service_level = 6,
                         .pkey_index = 1};

TEST(Attributes, RoceAttributesUseThePeersGid) {
  const ibv_qp_attr told = receiving_attributes(address(7, 0, 1), address(8, 0, 1), path);
  EXPECT_EQ(told.qp_state, IBV_QPS_RTR);
  EXPECT_EQ(told.dest_qp_num, 8U);
  EXPECT_EQ(told.rq_psn, 9U);
  EXPECT_EQ(told.min_rnr_timer, 9);
  EXPECT_EQ(told.ah_attr.is_global, 1);
  EXPECT_EQ(told.ah_attr.grh.dgid.raw[15], 8);
  EXPECT_EQ(told.ah_attr.grh.sgid_index, 5);
  EXPECT_EQ(told.ah_attr.grh.traffic_class, 104);
  EXPECT_EQ(told.ah_attr.sl, 6);
  EXPECT_EQ(told.ah_attr.port_num, 2);
}

TEST(Attributes, InfinibandAttributesUseTheLidAndAcrossSubnetsTheGid) {
  const ibv_qp_attr near = receiving_attributes(address(7, 11, 1), address(8, 12, 1), path);
  EXPECT_EQ(near.ah_attr.dlid, 12);
  EXPECT_EQ(near.ah_attr.is_global, 0);
  const ibv_qp_attr far = receiving_attributes(address(7, 11, 1), address(8, 12, 2), path);
  EXPECT_EQ(far.ah_attr.is_global, 1);
  EXPECT_EQ(far.ah_attr.grh.dgid.raw[7], 2);
}

TEST(Attributes, UseTheSmallerMtu) {
  VerbsAddress small = address(7, 0, 1);
  for (const std::uint32_t mtu : {256U, 512U, 1024U, 2048U, 4096U}) {
    small.mtu = mtu;
    EXPECT_EQ(bytes_of(receiving_attributes(small, address(8, 0, 1), path).path_mtu), mtu);
    EXPECT_EQ(bytes_of(receiving_attributes(address(8, 0, 1), small, path).path_mtu), mtu);
  }
}

TEST(Attributes, SendingAttributesContainTheRetries) {
  const ibv_qp_attr told = sending_attributes(address(7, 0, 1), path);
  EXPECT_EQ(told.qp_state, IBV_QPS_RTS);
  EXPECT_EQ(told.sq_psn, 8U);
  EXPECT_EQ(told.timeout, 15);
  EXPECT_EQ(told.retry_cnt, 4);
  EXPECT_EQ(told.rnr_retry, 3);
}

}  // namespace
}  // namespace r2ccl

#endif
