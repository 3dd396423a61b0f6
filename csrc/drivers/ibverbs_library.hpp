// libibverbs, loaded at run time.  Only ibverbs.cc uses this header, in builds with
// infiniband/verbs.h.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>

#include "base/errors.hpp"

#undef ibv_query_port  // macros that hide the functions to load
#undef ibv_reg_mr

namespace r2ccl {

// Entry points of libibverbs, except its inline functions.
struct IbverbsLibrary {
  static Result<const IbverbsLibrary*> load();  // loads the library once

  decltype(&::ibv_fork_init) fork_init = nullptr;
  decltype(&::ibv_get_device_list) get_device_list = nullptr;
  decltype(&::ibv_free_device_list) free_device_list = nullptr;
  decltype(&::ibv_get_device_name) get_device_name = nullptr;
  decltype(&::ibv_open_device) open_device = nullptr;
  decltype(&::ibv_close_device) close_device = nullptr;
  decltype(&::ibv_query_port) query_port = nullptr;
  decltype(&::_ibv_query_gid_table) query_gid_table = nullptr;
  decltype(&::ibv_alloc_pd) alloc_pd = nullptr;
  decltype(&::ibv_dealloc_pd) dealloc_pd = nullptr;
  decltype(&::ibv_reg_mr) reg_mr = nullptr;
  decltype(&::ibv_reg_mr_iova2) reg_mr_iova2 = nullptr;
  decltype(&::ibv_dereg_mr) dereg_mr = nullptr;
  decltype(&::ibv_create_comp_channel) create_comp_channel = nullptr;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel = nullptr;
  decltype(&::ibv_create_cq) create_cq = nullptr;
  decltype(&::ibv_destroy_cq) destroy_cq = nullptr;
  decltype(&::ibv_get_cq_event) get_cq_event = nullptr;
  decltype(&::ibv_ack_cq_events) ack_cq_events = nullptr;
  decltype(&::ibv_create_qp) create_qp = nullptr;
  decltype(&::ibv_modify_qp) modify_qp = nullptr;
  decltype(&::ibv_destroy_qp) destroy_qp = nullptr;
  decltype(&::ibv_get_async_event) get_async_event = nullptr;
  decltype(&::ibv_ack_async_event) ack_async_event = nullptr;
  decltype(&::ibv_event_type_str) event_type_str = nullptr;
  decltype(&::ibv_wc_status_str) wc_status_str = nullptr;

  // ibv_reg_dmabuf_mr() exists since rdma-core 34; null in older libraries.  The signature is
  // declared here, because the header of the build may be older as well.
  using RegDmabufMr = ibv_mr* (*)(ibv_pd* domain, std::uint64_t offset, std::size_t length,
                                  std::uint64_t iova, int fd, int access);
  RegDmabufMr reg_dmabuf_mr = nullptr;
};

}  // namespace r2ccl
