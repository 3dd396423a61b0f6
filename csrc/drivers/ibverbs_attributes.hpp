// Connection attributes of a queue pair, as structures of libibverbs.
#pragma once

#if R2CCL_IBVERBS

#include <infiniband/verbs.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "drivers/verbs.hpp"

namespace r2ccl {

inline std::uint32_t bytes_of(ibv_mtu mtu) { return 128U << static_cast<unsigned>(mtu); }

// Returns the largest MTU not above `bytes`, and IBV_MTU_256 for smaller values.
inline ibv_mtu mtu_of(std::uint32_t bytes) {
  ibv_mtu mtu = IBV_MTU_4096;
  while (mtu > IBV_MTU_256 && bytes_of(mtu) > bytes) mtu = static_cast<ibv_mtu>(mtu - 1);
  return mtu;
}

// Returns the attributes of the transition to RTR (ready to receive).
inline ibv_qp_attr receiving_attributes(const VerbsAddress& own, const VerbsAddress& peer,
                                        const VerbsPath& path) {
  ibv_qp_attr receive{};
  receive.qp_state = IBV_QPS_RTR;
  receive.path_mtu = mtu_of(std::min(own.mtu, peer.mtu));
  receive.dest_qp_num = peer.queue_pair;
  receive.rq_psn = peer.first_packet;
  receive.max_dest_rd_atomic = 0;  // peers issue no RDMA READ or atomic
  receive.min_rnr_timer = path.rnr_timer;
  receive.ah_attr.dlid = peer.lid;
  receive.ah_attr.sl = path.service_level;
  receive.ah_attr.port_num = path.port;
  const bool infiniband = own.lid != 0 && peer.lid != 0;
  const bool same_subnet = std::equal(own.gid.begin(), own.gid.begin() + 8, peer.gid.begin());
  if (!infiniband || !same_subnet) {
    receive.ah_attr.is_global = 1;
    std::memcpy(receive.ah_attr.grh.dgid.raw, peer.gid.data(), peer.gid.size());
    receive.ah_attr.grh.sgid_index = path.gid_index;
    receive.ah_attr.grh.hop_limit = 64;
    receive.ah_attr.grh.traffic_class = path.traffic_class;
  }
  return receive;
}

// Returns the attributes of the transition to RTS (ready to send).
inline ibv_qp_attr sending_attributes(const VerbsAddress& own, const VerbsPath& path) {
  ibv_qp_attr send{};
  send.qp_state = IBV_QPS_RTS;
  send.sq_psn = own.first_packet;
  send.timeout = path.timeout;
  send.retry_cnt = path.retry_count;
  send.rnr_retry = path.rnr_retry;
  send.max_rd_atomic = 0;
  return send;
}

}  // namespace r2ccl

#endif
