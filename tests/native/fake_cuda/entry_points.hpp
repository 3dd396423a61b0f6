// Declares the entry points with the types of the core's table of the driver. A definition with
// other types does not compile.
#pragma once

#include <type_traits>

#include "drivers/cuda_library.hpp"

namespace fake_cuda {

// Function type of a field of the table.
template <typename Field>
using TypeOf = std::remove_pointer_t<Field>;
using Table = r2ccl::cuda::Library;

}  // namespace fake_cuda

extern "C" {

fake_cuda::TypeOf<decltype(fake_cuda::Table::init)> cuInit;
fake_cuda::TypeOf<decltype(fake_cuda::Table::driver_version)> cuDriverGetVersion;
fake_cuda::TypeOf<decltype(fake_cuda::Table::error_name)> cuGetErrorName;
fake_cuda::TypeOf<decltype(fake_cuda::Table::error_string)> cuGetErrorString;
fake_cuda::TypeOf<decltype(fake_cuda::Table::device_count)> cuDeviceGetCount;
fake_cuda::TypeOf<decltype(fake_cuda::Table::device_get)> cuDeviceGet;
fake_cuda::TypeOf<decltype(fake_cuda::Table::device_name)> cuDeviceGetName;
fake_cuda::TypeOf<decltype(fake_cuda::Table::device_attribute)> cuDeviceGetAttribute;
fake_cuda::TypeOf<decltype(fake_cuda::Table::retain_primary_context)> cuDevicePrimaryCtxRetain;
fake_cuda::TypeOf<decltype(fake_cuda::Table::release_primary_context)> cuDevicePrimaryCtxRelease_v2;
fake_cuda::TypeOf<decltype(fake_cuda::Table::push_context)> cuCtxPushCurrent_v2;
fake_cuda::TypeOf<decltype(fake_cuda::Table::pop_context)> cuCtxPopCurrent_v2;
fake_cuda::TypeOf<decltype(fake_cuda::Table::synchronise_context)> cuCtxSynchronize;
fake_cuda::TypeOf<decltype(fake_cuda::Table::allocate)> cuMemAlloc_v2;
fake_cuda::TypeOf<decltype(fake_cuda::Table::free)> cuMemFree_v2;
fake_cuda::TypeOf<decltype(fake_cuda::Table::fill)> cuMemsetD8_v2;
fake_cuda::TypeOf<decltype(fake_cuda::Table::allocate_host)> cuMemHostAlloc;
fake_cuda::TypeOf<decltype(fake_cuda::Table::free_host)> cuMemFreeHost;
fake_cuda::TypeOf<decltype(fake_cuda::Table::device_address_of)> cuMemHostGetDevicePointer_v2;
fake_cuda::TypeOf<decltype(fake_cuda::Table::export_memory)> cuIpcGetMemHandle;
fake_cuda::TypeOf<decltype(fake_cuda::Table::import_memory)> cuIpcOpenMemHandle_v2;
fake_cuda::TypeOf<decltype(fake_cuda::Table::close_imported)> cuIpcCloseMemHandle;
fake_cuda::TypeOf<decltype(fake_cuda::Table::load_module)> cuModuleLoadData;
fake_cuda::TypeOf<decltype(fake_cuda::Table::unload_module)> cuModuleUnload;
fake_cuda::TypeOf<decltype(fake_cuda::Table::find_function)> cuModuleGetFunction;
fake_cuda::TypeOf<decltype(fake_cuda::Table::function_attribute)> cuFuncGetAttribute;
fake_cuda::TypeOf<decltype(fake_cuda::Table::launch)> cuLaunchKernel;
fake_cuda::TypeOf<decltype(fake_cuda::Table::is_capturing)> cuStreamIsCapturing;
fake_cuda::TypeOf<decltype(fake_cuda::Table::create_stream)> cuStreamCreate;
fake_cuda::TypeOf<decltype(fake_cuda::Table::destroy_stream)> cuStreamDestroy_v2;
fake_cuda::TypeOf<decltype(fake_cuda::Table::query_stream)> cuStreamQuery;
fake_cuda::TypeOf<decltype(fake_cuda::Table::copy)> cuMemcpyAsync;
fake_cuda::TypeOf<decltype(fake_cuda::Table::exchange_capture_mode)>
    cuThreadExchangeStreamCaptureMode;
fake_cuda::TypeOf<decltype(fake_cuda::Table::handle_of_range)> cuMemGetHandleForAddressRange;
fake_cuda::TypeOf<decltype(fake_cuda::Table::flush_writes)> cuFlushGPUDirectRDMAWrites;

}  // extern "C"
