// A fake NVML, loaded instead of libnvidia-ml.so.1: a single device, like fake_cuda's device.
// The library has only the functions called by vLLM's copy of pynvml at the start of an engine.
#include <cstdio>

namespace {
int device = 0;  // the handle is the address of this variable
constexpr int success = 0;
constexpr int not_found = 6;
}  // namespace

extern "C" {

int nvmlInitWithFlags(unsigned /*flags*/) { return success; }
int nvmlShutdown() { return success; }
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 1;
  return success;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  *handle = &device;
  return index == 0 ? success : not_found;
}
int nvmlDeviceGetCudaComputeCapability(void* /*handle*/, int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return success;
}
int nvmlDeviceGetName(void* /*handle*/, char* name, unsigned size) {
  std::snprintf(name, size, "fake GPU");
  return success;
}
// `sizes` gets the total, free and used memory in bytes.
int nvmlDeviceGetMemoryInfo(void* /*handle*/, unsigned long long* sizes) {
  sizes[0] = sizes[1] = 80ULL << 30;
  sizes[2] = 0;
  return success;
}
const char* nvmlErrorString(int /*code*/) { return "fake NVML has no such device"; }

}  // extern "C"
