// The CUDA driver, loaded at run time: the build needs neither the CUDA header nor the library.
// The types below follow the driver's binary interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/errors.hpp"

namespace r2ccl::cuda {

using Code = int;                    // CUresult
using Address = unsigned long long;  // CUdeviceptr
using Stream = void*;
using Context = void*;
using Module = void*;
using Function = void*;

inline constexpr unsigned host_memory_portable = 1;
inline constexpr unsigned host_memory_mapped = 2;
inline constexpr int capture_none = 0;
inline constexpr unsigned lazy_peer_access = 1;
inline constexpr unsigned stream_non_blocking = 1;
inline constexpr int capture_relaxed = 2;
inline constexpr Code not_ready = 600;
inline constexpr int handle_dma_buf = 1;
inline constexpr unsigned long long mapped_by_pcie = 1;

// Handle of device memory for other processes of this machine (CUipcMemHandle).
struct IpcHandle {
  char bytes[64];
};

// Values of CUdevice_attribute.
enum Attribute : int {
  compute_capability_major = 75,
  compute_capability_minor = 76,
  flush_writes_options = 117,  // ways to flush NIC writes; bit 0: by the host
  writes_ordering = 118,       // ordering of NIC writes; writes_ordered or more: no flush is needed
  dma_buf_supported = 124,
};
inline constexpr int writes_ordered = 100;
inline constexpr int host_flushes = 1;

// Entry points of the driver.  The comment `_v2` marks the version bound where the driver exports
// several versions.
struct Library {
  // Loads the library once per path.  `path` is a file, or a name resolved by the dynamic loader.
  static Result<const Library*> load(const std::string& path);

  Code (*init)(unsigned flags) = nullptr;
  Code (*driver_version)(int* version) = nullptr;
  Code (*error_name)(Code, const char** name) = nullptr;
  Code (*error_string)(Code, const char** text) = nullptr;
  Code (*device_count)(int* count) = nullptr;
  Code (*device_get)(int* device, int ordinal) = nullptr;
  Code (*device_name)(char* name, int size, int device) = nullptr;
  Code (*device_attribute)(int* value, int attribute, int device) = nullptr;
  Code (*retain_primary_context)(Context*, int device) = nullptr;
  Code (*release_primary_context)(int device) = nullptr;  // _v2
  Code (*push_context)(Context) = nullptr;                // _v2
  Code (*pop_context)(Context*) = nullptr;                // _v2
  Code (*synchronise_context)() = nullptr;
  Code (*allocate)(Address*, std::size_t bytes) = nullptr;  // _v2
  Code (*free)(Address) = nullptr;                          // _v2
  Code (*fill)(Address, unsigned char, std::size_t bytes) = nullptr;
  Code (*allocate_host)(void**, std::size_t bytes, unsigned flags) = nullptr;
  Code (*free_host)(void*) = nullptr;
  Code (*device_address_of)(Address*, void* host, unsigned flags) = nullptr;  // _v2
  Code (*export_memory)(IpcHandle*, Address) = nullptr;
  Code (*import_memory)(Address*, IpcHandle, unsigned flags) = nullptr;  // _v2
  Code (*close_imported)(Address) = nullptr;
  Code (*load_module)(Module*, const void* image) = nullptr;
  Code (*unload_module)(Module) = nullptr;
  Code (*find_function)(Function*, Module, const char* name) = nullptr;
  Code (*function_attribute)(int* value, int attribute, Function) = nullptr;
  Code (*launch)(Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                 unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream,
                 void** arguments, void** extra) = nullptr;
  Code (*is_capturing)(Stream, int* status) = nullptr;
  Code (*create_stream)(Stream*, unsigned flags) = nullptr;
  Code (*destroy_stream)(Stream) = nullptr;  // _v2
  Code (*query_stream)(Stream) = nullptr;
  Code (*copy)(Address to, Address from, std::size_t bytes, Stream) = nullptr;
  Code (*exchange_capture_mode)(int* mode) = nullptr;
  // The next two entry points are null in drivers older than the CUDA version given beside each.
  Code (*handle_of_range)(void* handle, Address, std::size_t bytes, int type,
                          unsigned long long flags) = nullptr;  // CUDA 11.7
  Code (*flush_writes)(int target, int scope) = nullptr;        // CUDA 11.3

  // Turns the result code of the entry point `what` into a Status with the driver's error text.
  [[nodiscard]] Status check(const char* what, Code code) const;
  // Returns the newest CUDA version supported by the driver, such as "12.4", or "?" if unknown.
  [[nodiscard]] std::string version() const;
};

}  // namespace r2ccl::cuda
