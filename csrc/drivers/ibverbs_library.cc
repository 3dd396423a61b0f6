#if R2CCL_IBVERBS

#include "drivers/ibverbs_library.hpp"

#include <string>

#include "drivers/dynamic_library.hpp"

namespace r2ccl {
namespace {

bool find_all(void* from, IbverbsLibrary& to, std::string& missing) {
  return find_entry(from, "ibv_fork_init", to.fork_init, missing) &&
         find_entry(from, "ibv_get_device_list", to.get_device_list, missing) &&
         find_entry(from, "ibv_free_device_list", to.free_device_list, missing) &&
         find_entry(from, "ibv_get_device_name", to.get_device_name, missing) &&
         find_entry(from, "ibv_open_device", to.open_device, missing) &&
         find_entry(from, "ibv_close_device", to.close_device, missing) &&
         find_entry(from, "ibv_query_port", to.query_port, missing) &&
         find_entry(from, "_ibv_query_gid_table", to.query_gid_table, missing) &&
         find_entry(from, "ibv_alloc_pd", to.alloc_pd, missing) &&
         find_entry(from, "ibv_dealloc_pd", to.dealloc_pd, missing) &&
         find_entry(from, "ibv_reg_mr", to.reg_mr, missing) &&
         find_entry(from, "ibv_reg_mr_iova2", to.reg_mr_iova2, missing) &&
         find_entry(from, "ibv_dereg_mr", to.dereg_mr, missing) &&
         find_entry(from, "ibv_create_comp_channel", to.create_comp_channel, missing) &&
         find_entry(from, "ibv_destroy_comp_channel", to.destroy_comp_channel, missing) &&
         find_entry(from, "ibv_create_cq", to.create_cq, missing) &&
         find_entry(from, "ibv_destroy_cq", to.destroy_cq, missing) &&
         find_entry(from, "ibv_get_cq_event", to.get_cq_event, missing) &&
         find_entry(from, "ibv_ack_cq_events", to.ack_cq_events, missing) &&
         find_entry(from, "ibv_create_qp", to.create_qp, missing) &&
         find_entry(from, "ibv_modify_qp", to.modify_qp, missing) &&
         find_entry(from, "ibv_destroy_qp", to.destroy_qp, missing) &&
         find_entry(from, "ibv_get_async_event", to.get_async_event, missing) &&
         find_entry(from, "ibv_ack_async_event", to.ack_async_event, missing) &&
         find_entry(from, "ibv_event_type_str", to.event_type_str, missing) &&
         find_entry(from, "ibv_wc_status_str", to.wc_status_str, missing);
}

}  // namespace

Result<const IbverbsLibrary*> IbverbsLibrary::load() {
  static IbverbsLibrary library;
  static const std::string error = [] {
    void* const loaded = ::dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (loaded == nullptr) return std::string(::dlerror());
    std::string missing;
    if (!find_all(loaded, library, missing))
      return "libibverbs.so.1 is older than rdma-core 32: missing symbol " + missing;
    (void)find_entry(loaded, "ibv_reg_dmabuf_mr", library.reg_dmabuf_mr, missing);
    // Kernels before 5.12 give a writing parent new pages after fork(), while the device keeps the
    // old pages. ibv_fork_init() prevents the mismatch.  A failure is ignored: the process then
    // runs as without the call.
    (void)library.fork_init();
    return std::string();
  }();
  if (!error.empty()) return Status(ErrorCode::internal, error);
  return &library;
}

}  // namespace r2ccl

#endif
