// An NVML without a GPU, loaded in the place of libnvidia-ml.so.1: one device like the one of
// fake_cuda.  It has what vLLM's copy of pynvml asks while an engine starts, and nothing else.
#include <cstdio>

namespace {
int device = 0;  // its address is the handle
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
// Bytes: total, free, used.
int nvmlDeviceGetMemoryInfo(void* /*handle*/, unsigned long long* sizes) {
  sizes[0] = sizes[1] = 80ULL << 30;
  sizes[2] = 0;
  return success;
}
const char* nvmlErrorString(int /*code*/) { return "fake NVML has no such device"; }

}  // extern "C"
