#include "drivers/cuda_library.hpp"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace r2ccl::cuda {
namespace {

template <typename Function>
bool find(void* library, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr) missing = name;
  return function != nullptr;
}

bool find_all(void* from, Library& to, std::string& missing) {
  return find(from, "cuInit", to.init, missing) &&
         find(from, "cuDriverGetVersion", to.driver_version, missing) &&
         find(from, "cuGetErrorName", to.error_name, missing) &&
         find(from, "cuGetErrorString", to.error_string, missing) &&
         find(from, "cuDeviceGetCount", to.device_count, missing) &&
         find(from, "cuDeviceGet", to.device_get, missing) &&
         find(from, "cuDeviceGetName", to.device_name, missing) &&
         find(from, "cuDeviceGetAttribute", to.device_attribute, missing) &&
         find(from, "cuDevicePrimaryCtxRetain", to.retain_primary_context, missing) &&
         find(from, "cuDevicePrimaryCtxRelease_v2", to.release_primary_context, missing) &&
         find(from, "cuCtxPushCurrent_v2", to.push_context, missing) &&
         find(from, "cuCtxPopCurrent_v2", to.pop_context, missing) &&
         find(from, "cuCtxSynchronize", to.synchronise_context, missing) &&
         find(from, "cuMemAlloc_v2", to.allocate, missing) &&
         find(from, "cuMemFree_v2", to.free, missing) &&
         find(from, "cuMemsetD8_v2", to.fill, missing) &&
         find(from, "cuMemHostAlloc", to.allocate_host, missing) &&
         find(from, "cuMemFreeHost", to.free_host, missing) &&
         find(from, "cuMemHostGetDevicePointer_v2", to.device_address_of, missing) &&
         find(from, "cuIpcGetMemHandle", to.export_memory, missing) &&
         find(from, "cuIpcOpenMemHandle_v2", to.import_memory, missing) &&
         find(from, "cuIpcCloseMemHandle", to.close_imported, missing) &&
         find(from, "cuModuleLoadData", to.load_module, missing) &&
         find(from, "cuModuleUnload", to.unload_module, missing) &&
         find(from, "cuModuleGetFunction", to.find_function, missing) &&
         find(from, "cuFuncGetAttribute", to.function_attribute, missing) &&
         find(from, "cuLaunchKernel", to.launch, missing) &&
         find(from, "cuStreamIsCapturing", to.is_capturing, missing) &&
         find(from, "cuStreamCreate", to.create_stream, missing) &&
         find(from, "cuStreamDestroy_v2", to.destroy_stream, missing) &&
         find(from, "cuStreamQuery", to.query_stream, missing) &&
         find(from, "cuMemcpyAsync", to.copy, missing) &&
         find(from, "cuThreadExchangeStreamCaptureMode", to.exchange_capture_mode, missing);
}

void find_newer(void* from, Library& to) {
  std::string missing;
  (void)find(from, "cuMemGetHandleForAddressRange", to.handle_of_range, missing);
  (void)find(from, "cuFlushGPUDirectRDMAWrites", to.flush_writes, missing);
}

// Never unloaded: what a process had of a driver lives as long as the process.
Result<const Library*> open(const std::string& path) {
  void* const loaded = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr)
    return Status(ErrorCode::internal, "no CUDA driver: " + std::string(::dlerror()));
  auto library = std::make_unique<Library>();
  std::string missing;
  if (!find_all(loaded, *library, missing))
    return Status(ErrorCode::internal,
                  path + " is no CUDA driver of 11.0 or later: it has no " + missing);
  find_newer(loaded, *library);
  if (Status status = library->check("cuInit", library->init(0)); !status.ok()) return status;
  return library.release();
}

}  // namespace

Result<const Library*> Library::load(const std::string& path) {
  static std::mutex mutex;
  static auto& loaded = *new std::map<std::string, const Library*>;  // threads outlive statics
  const std::lock_guard guard(mutex);
  const auto known = loaded.find(path);
  if (known != loaded.end()) return known->second;
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
