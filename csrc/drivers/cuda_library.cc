#include "drivers/cuda_library.hpp"

#include <map>
#include <memory>
#include <mutex>

#include "drivers/dynamic_library.hpp"

namespace r2ccl::cuda {
namespace {

bool find_all(void* from, Library& to, std::string& missing) {
  return find_entry(from, "cuInit", to.init, missing) &&
         find_entry(from, "cuDriverGetVersion", to.driver_version, missing) &&
         find_entry(from, "cuGetErrorName", to.error_name, missing) &&
         find_entry(from, "cuGetErrorString", to.error_string, missing) &&
         find_entry(from, "cuDeviceGetCount", to.device_count, missing) &&
         find_entry(from, "cuDeviceGet", to.device_get, missing) &&
         find_entry(from, "cuDeviceGetName", to.device_name, missing) &&
         find_entry(from, "cuDeviceGetAttribute", to.device_attribute, missing) &&
         find_entry(from, "cuDevicePrimaryCtxRetain", to.retain_primary_context, missing) &&
         find_entry(from, "cuDevicePrimaryCtxRelease_v2", to.release_primary_context, missing) &&
         find_entry(from, "cuCtxPushCurrent_v2", to.push_context, missing) &&
         find_entry(from, "cuCtxPopCurrent_v2", to.pop_context, missing) &&
         find_entry(from, "cuCtxSynchronize", to.synchronise_context, missing) &&
         find_entry(from, "cuMemAlloc_v2", to.allocate, missing) &&
         find_entry(from, "cuMemFree_v2", to.free, missing) &&
         find_entry(from, "cuMemsetD8_v2", to.fill, missing) &&
         find_entry(from, "cuMemHostAlloc", to.allocate_host, missing) &&
         find_entry(from, "cuMemFreeHost", to.free_host, missing) &&
         find_entry(from, "cuMemHostGetDevicePointer_v2", to.device_address_of, missing) &&
         find_entry(from, "cuIpcGetMemHandle", to.export_memory, missing) &&
         find_entry(from, "cuIpcOpenMemHandle_v2", to.import_memory, missing) &&
         find_entry(from, "cuIpcCloseMemHandle", to.close_imported, missing) &&
         find_entry(from, "cuModuleLoadData", to.load_module, missing) &&
         find_entry(from, "cuModuleUnload", to.unload_module, missing) &&
         find_entry(from, "cuModuleGetFunction", to.find_function, missing) &&
         find_entry(from, "cuFuncGetAttribute", to.function_attribute, missing) &&
         find_entry(from, "cuLaunchKernel", to.launch, missing) &&
         find_entry(from, "cuStreamIsCapturing", to.is_capturing, missing) &&
         find_entry(from, "cuStreamCreate", to.create_stream, missing) &&
         find_entry(from, "cuStreamDestroy_v2", to.destroy_stream, missing) &&
         find_entry(from, "cuStreamQuery", to.query_stream, missing) &&
         find_entry(from, "cuMemcpyAsync", to.copy, missing) &&
         find_entry(from, "cuThreadExchangeStreamCaptureMode", to.exchange_capture_mode, missing);
}

void find_newer(void* from, Library& to) {
  std::string missing;
  (void)find_entry(from, "cuMemGetHandleForAddressRange", to.handle_of_range, missing);
  (void)find_entry(from, "cuFlushGPUDirectRDMAWrites", to.flush_writes, missing);
}

// Opens the driver and resolves the entry points.  The library is never unloaded: driver resources
// may be in use until the process exits.
Result<const Library*> open(const std::string& path) {
  void* const loaded = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr)
    return Status(ErrorCode::internal, "no CUDA driver: " + std::string(::dlerror()));
  auto library = std::make_unique<Library>();
  std::string missing;
  if (!find_all(loaded, *library, missing))
    return Status(ErrorCode::internal,
                  path + " is not a driver for CUDA 11.0 or later: missing symbol " + missing);
  find_newer(loaded, *library);
  if (Status status = library->check("cuInit", library->init(0)); !status.ok()) return status;
  return library.release();
}

}  // namespace

Result<const Library*> Library::load(const std::string& path) {
  static std::mutex mutex;
  // Never freed: threads may outlive static objects.
  static auto& loaded = *new std::map<std::string, const Library*>;
  const std::lock_guard guard(mutex);
  const auto cached = loaded.find(path);
  if (cached != loaded.end()) return cached->second;
  auto library = open(path);
  if (library.ok()) loaded[path] = library.value();
  return library;
}

Status Library::check(const char* what, Code code) const {
  if (code == 0) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  if (error_name(code, &name) != 0 || name == nullptr) name = "unknown error";
  if (error_string(code, &text) != 0 || text == nullptr) text = "";
  return {ErrorCode::internal,
          std::string(what) + ": " + name + " (" + std::to_string(code) + ") " + text};
}

std::string Library::version() const {
  int version = 0;
  if (driver_version(&version) != 0) return "?";
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace r2ccl::cuda
