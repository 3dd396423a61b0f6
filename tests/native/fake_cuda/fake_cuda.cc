// A CUDA driver without a GPU: a library loaded in place of libcuda.so.1. Device memory is host
// memory. Streams are threads; the default stream is the calling thread. Kernels are the bodies of
// kernels.cu compiled for the host. Streams can be captured into graphs; a replay uses the
// arguments of the capture.
//
// All blocks of a grid run at the same time, with 2 threads per block and real barriers.
//
// The driver has a single device, of compute capability 9.0. Calls fail here if a real driver would
// refuse them.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "../work_queue.hpp"
#include "device/direct_bodies.hpp"
#include "device/exchange_bodies.hpp"
#include "entry_points.hpp"
#include "grids.hpp"

namespace {

using namespace r2ccl::device;
using fake_cuda::held_blocks;
using fake_cuda::run_grid;
using fake_cuda::ThreadBlock;
using r2ccl::cuda::IpcHandle;

enum Code : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  invalid_image = 200,
  invalid_context = 201,
  no_binary_for_gpu = 209,
  unsupported_ptx_version = 222,
  not_found = 500,
  not_ready = 600,
  launch_failure = 719,
  not_supported = 801,
  capture_unsupported = 900,
};

using Work = r2ccl::testing::WorkQueue::Work;
using Graph = std::vector<Work>;

class Stream {
 public:
  void add(Work work) {
    const std::lock_guard guard(mutex_);
    if (captured_ != nullptr)
      captured_->push_back(std::move(work));
    else
      queue_.add(std::move(work));
  }
  void begin_capture() {
    const std::lock_guard guard(mutex_);
    captured_ = std::make_unique<Graph>();
  }
  [[nodiscard]] bool idle() { return queue_.idle(); }
  [[nodiscard]] bool capturing() {
    const std::lock_guard guard(mutex_);
    return captured_ != nullptr;
  }
  std::unique_ptr<Graph> end_capture() {
    const std::lock_guard guard(mutex_);
    return std::move(captured_);
  }
  void synchronise() { queue_.synchronise(); }

 private:
  std::mutex mutex_;                 // guards captured_
  std::unique_ptr<Graph> captured_;  // null: no capture
  r2ccl::testing::WorkQueue queue_;
};

// Device memory, exportable to other processes.
struct Given {
  int file = -1;
  std::size_t bytes = 0;
};
// Content of an IPC handle.
struct Handle {
  pid_t process = 0;
  int file = -1;
  std::size_t bytes = 0;
  void* memory = nullptr;
};

struct Driver {
  std::mutex mutex;
  std::set<void*> memory;              // host memory
  std::map<void*, Given> device;       // device memory
  std::map<void*, std::size_t> taken;  // opened from other processes
  std::map<Stream*, std::shared_ptr<Stream>> streams;
  std::map<std::string, int> failing;                   // by entry point: result of its next call
  std::pair<unsigned long long, std::size_t> broken{};  // copies from this range fail
  std::map<int, int> attributes{{75, 9}, {76, 0}, {124, 1}, {117, 1}, {118, 0}};
  int version = 13000;  // 1000 * major + 10 * minor
  int flushes = 0;
  int copies = 0;
};

// Never destroyed: streams may still run while the process ends.
Driver& driver() {
  static auto* made = new Driver;
  return *made;
}

thread_local int contexts = 0;  // depth of this thread's context stack
int context = 0;                // the only context, identified by its address

int told(const char* entry) {
  const std::lock_guard guard(driver().mutex);
  const auto found = driver().failing.find(entry);
  if (found == driver().failing.end()) return success;
  const int code = found->second;
  driver().failing.erase(found);
  return code;
}

int allocate(void** memory, std::size_t bytes, const char* entry) {
  if (contexts == 0) return invalid_context;
  if (const int code = told(entry); code != success) return code;
  if (bytes == 0) return invalid_value;
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*memory == nullptr) return out_of_memory;
  const std::lock_guard guard(driver().mutex);
  driver().memory.insert(*memory);
  return success;
}

int give_back(void* memory) {
  if (contexts == 0) return invalid_context;
  {
    const std::lock_guard guard(driver().mutex);
    if (driver().memory.erase(memory) == 0) return invalid_value;
  }
  std::free(memory);
  return success;
}

int allocate_device(void** memory, std::size_t bytes) {
  if (contexts == 0) return invalid_context;
  if (const int code = told("cuMemAlloc"); code != success) return code;
  if (bytes == 0) return invalid_value;
  const int file = ::memfd_create("fake_cuda", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) return out_of_memory;
  *memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (*memory == MAP_FAILED) return out_of_memory;
  const std::lock_guard guard(driver().mutex);
  driver().device[*memory] = {file, bytes};
  return success;
}

int give_back_device(void* memory) {
  if (contexts == 0) return invalid_context;
  const std::lock_guard guard(driver().mutex);
  const auto found = driver().device.find(memory);
  if (found == driver().device.end()) return invalid_value;
  ::munmap(memory, found->second.bytes);
  ::close(found->second.file);
  driver().device.erase(found);
  return success;
}

std::shared_ptr<Stream> stream_at(void* handle) {
  const std::lock_guard guard(driver().mutex);
  const auto found = driver().streams.find(static_cast<Stream*>(handle));
  return found == driver().streams.end() ? nullptr : found->second;
}

int enqueue(void* handle, Work work) {
  if (handle == nullptr) {
    work();
    return success;
  }
  const std::shared_ptr<Stream> stream = stream_at(handle);
  if (stream == nullptr) return invalid_value;
  stream->add(std::move(work));
  return success;
}

// Capture mode of the thread (0 global, 1 thread-local, 2 relaxed). During a capture, calls that
// might add work to the graph fail on threads in a mode other than relaxed.
thread_local int capture_mode = 0;  // global

bool may_run_beside_captures() {
  if (capture_mode == 2) return true;  // relaxed
  const std::lock_guard guard(driver().mutex);
  return std::ranges::none_of(driver().streams,
                              [](const auto& each) { return each.second->capturing(); });
}

// ---- kernels ----

using Kernel = Work (*)(unsigned blocks, void** arguments);

// Returns the work of a launch: `body` for every block, with a copy of the arguments.
template <typename... Arguments, typename Body>
Work work_of(unsigned blocks, void** given, Body body) {
  std::tuple<Arguments...> arguments{};
  std::apply([&](Arguments&... each) { (std::memcpy(&each, *given++, sizeof each), ...); },
             arguments);
  return [=] {
    run_grid(blocks, [&](const ThreadPosition& at, const ThreadBlock& block, Shared& shared) {
      std::apply([&](const Arguments&... each) { body(at, block, shared, each...); }, arguments);
    });
  };
}

using Source = const std::byte*;
using Target = std::byte*;

Work stage_kernel(unsigned blocks, void** given) {
  return work_of<Mailbox*, DeviceState*, Staging, Source, Rows, std::uint32_t, bool>(
      blocks, given,
      [](const ThreadPosition& at, const ThreadBlock& block, Shared& shared, Mailbox* mailbox,
         DeviceState* state,
         const auto&... rest) { stage(at, block, shared, *mailbox, *state, rest...); });
}
Work deliver_kernel(unsigned blocks, void** given) {
  return work_of<const Mailbox*, const DeviceState*, Staging, Target, Rows, std::uint32_t>(
      blocks, given,
      [](const ThreadPosition& at, const ThreadBlock& block, Shared& shared, const Mailbox* mailbox,
         const DeviceState* state,
         const auto&... rest) { deliver(at, block, shared, *mailbox, *state, rest...); });
}
Work publish_input_kernel(unsigned blocks, void** given) {
  return work_of<Exchange, Source, Rows, bool>(blocks, given,
                                               [](auto&... all) { publish_input(all...); });
}
Work local_reduce_scatter_kernel(unsigned blocks, void** given) {
  return work_of<Exchange, Rows, r2ccl::DType, r2ccl::ReduceOp, std::uint32_t, bool>(
      blocks, given, [](auto&... all) { local_reduce_scatter(all...); });
}
Work stage_in_place_kernel(unsigned blocks, void** given) {
  return work_of<Exchange, Source, std::uint64_t, std::uint64_t, std::uint32_t>(
      blocks, given, [](auto&... all) { stage_in_place(all...); });
}
Work publish_result_kernel(unsigned blocks, void** given) {
  return work_of<Exchange, std::uint64_t, Reduction, std::uint32_t>(
      blocks, given, [](auto&... all) { publish_result(all...); });
}
Work local_all_gather_kernel(unsigned blocks, void** given) {
  return work_of<Exchange, OutputRows, Target, std::uint32_t, bool>(
      blocks, given, [](auto&... all) { local_all_gather(all...); });
}
Work deliver_shard_kernel(unsigned blocks, void** given) {
  return work_of<Exchange, Target, std::uint64_t, Reduction, std::uint32_t>(
      blocks, given, [](auto&... all) { deliver_shard(all...); });
}
Work reduce_and_deliver_kernel(unsigned blocks, void** given) {
  return work_of<const Mailbox*, const DeviceState*, Staging, Target, std::uint64_t, Reduction,
                 std::uint32_t>(
      blocks, given,
      [](const ThreadPosition& at, const ThreadBlock& block, Shared& shared, const Mailbox* mailbox,
         const DeviceState* state, const auto&... rest) {
        reduce_and_deliver(at, block, shared, *mailbox, *state, rest...);
      });
}
Work reduce_and_post_kernel(unsigned blocks, void** given) {
  return work_of<Mailbox*, DeviceState*, Staging, const Inbox*, std::uint64_t, std::uint64_t,
                 Reduction, std::uint32_t>(
      blocks, given,
      [](const ThreadPosition& at, const ThreadBlock& block, Shared& shared, Mailbox* mailbox,
         DeviceState* state,
         const auto&... rest) { reduce_and_post(at, block, shared, *mailbox, *state, rest...); });
}
Work quiesce_kernel(unsigned /*blocks*/, void** given) {
  return work_of<Exchange>(
      1, given,
      [](const ThreadPosition& at, const ThreadBlock& block, Shared&, const auto& exchange) {
        if (at.thread == 0) quiesce(block, exchange);
      });
}

struct NamedKernel {
  std::string_view name;
  Kernel kernel;
};

const NamedKernel kernels[] = {
    {"r2ccl_stage", &stage_kernel},
    {"r2ccl_deliver", &deliver_kernel},
    {"r2ccl_publish_input", &publish_input_kernel},
    {"r2ccl_local_reduce_scatter", &local_reduce_scatter_kernel},
    {"r2ccl_stage_in_place", &stage_in_place_kernel},
    {"r2ccl_publish_result", &publish_result_kernel},
    {"r2ccl_local_all_gather", &local_all_gather_kernel},
    {"r2ccl_deliver_shard", &deliver_shard_kernel},
    {"r2ccl_quiesce", &quiesce_kernel},
    {"r2ccl_reduce_and_deliver", &reduce_and_deliver_kernel},
    {"r2ccl_reduce_and_post", &reduce_and_post_kernel},
};

}  // namespace

// Entry points, under the names of the real driver.
extern "C" {

// Test control: the next call of `entry` fails with `code`.
int fake_cuda_fail(const char* entry, int code) {
  const std::lock_guard guard(driver().mutex);
  driver().failing[entry] = code;
  return success;
}
// Test control: copies from this memory fail.
int fake_cuda_fail_copies_from(unsigned long long address, std::size_t bytes) {
  const std::lock_guard guard(driver().mutex);
  driver().broken = {address, bytes};
  return success;
}
// Test control: returns the number of live allocations.
int fake_cuda_live_memory() {
  const std::lock_guard guard(driver().mutex);
  return static_cast<int>(driver().memory.size() + driver().device.size() + driver().taken.size());
}

// Test control: blocks from `first` on, of any grid, do not begin until a later call allows them.
int fake_cuda_hold_blocks(unsigned first) {
  held_blocks().hold_from(first);
  return success;
}
// Test control: plants a bug of link/mutants.hpp in the kernels, if built with R2CCL_MUTANTS.
int fake_cuda_plant(const char* name) {
#if defined(R2CCL_MUTANTS)
  const auto found = std::ranges::find(r2ccl::mutant_names, std::string_view(name));
  if (found == r2ccl::mutant_names.end()) return invalid_value;
  r2ccl::planted_mutant = static_cast<r2ccl::Mutant>(found - r2ccl::mutant_names.begin());
  return success;
#else
  (void)name;
  return not_supported;
#endif
}

// Test control: sets the driver version. An old driver refuses binaries of a newer compiler.
int fake_cuda_set_version(int version) {
  const std::lock_guard guard(driver().mutex);
  driver().version = version;
  return success;
}
int fake_cuda_set_attribute(int attribute, int value) {
  const std::lock_guard guard(driver().mutex);
  driver().attributes[attribute] = value;
  return success;
}
// Test control: return the number of flushes of NIC writes, and the number of copies.
int fake_cuda_flushes() {
  const std::lock_guard guard(driver().mutex);
  return driver().flushes;
}
int fake_cuda_copies() {
  const std::lock_guard guard(driver().mutex);
  return driver().copies;
}

int cuInit(unsigned flags) { return flags == 0 ? told("cuInit") : invalid_value; }
int cuDriverGetVersion(int* version) {
  const std::lock_guard guard(driver().mutex);
  *version = driver().version;
  return success;
}
int cuGetErrorName(int code, const char** name) {
  *name = code == out_of_memory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_FAKE";
  return success;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == out_of_memory ? "out of memory" : "injected by the test";
  return success;
}
int cuDeviceGetCount(int* count) {
  *count = 1;
  return told("cuDeviceGetCount");
}
int cuDeviceGet(int* device, int ordinal) {
  *device = 0;
  return ordinal == 0 ? success : invalid_value;
}
int cuDeviceGetName(char* name, int size, int /*device*/) {
  std::snprintf(name, static_cast<std::size_t>(size), "Fake");
  return success;
}
int cuDeviceGetAttribute(int* value, int attribute, int /*device*/) {
  {
    const std::lock_guard guard(driver().mutex);
    const auto found = driver().attributes.find(attribute);
    *value = found == driver().attributes.end() ? 0 : found->second;
  }
  return told("cuDeviceGetAttribute");
}
int cuDevicePrimaryCtxRetain(void** retained, int /*device*/) {
  *retained = &context;
  return success;
}
int cuDevicePrimaryCtxRelease_v2(int /*device*/) { return success; }
int cuCtxPushCurrent_v2(void* pushed) {
  if (pushed != &context) return invalid_context;
  ++contexts;
  return success;
}
int cuCtxPopCurrent_v2(void** popped) {
  if (contexts == 0) return invalid_context;
  --contexts;
  *popped = &context;
  return success;
}
int cuCtxSynchronize() {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    const std::lock_guard guard(driver().mutex);
    for (const auto& [handle, stream] : driver().streams) streams.push_back(stream);
  }
  for (const auto& stream : streams) stream->synchronise();
  return success;
}
int cuMemAlloc_v2(unsigned long long* address, std::size_t bytes) {
  void* memory = nullptr;
  const int code = allocate_device(&memory, bytes);
  *address = reinterpret_cast<std::uintptr_t>(memory);
  return code;
}
int cuMemFree_v2(unsigned long long address) {
  return give_back_device(reinterpret_cast<void*>(address));
}
int cuIpcGetMemHandle(IpcHandle* handle, unsigned long long address) {
  if (const int code = told("cuIpcGetMemHandle"); code != success) return code;
  auto* memory = reinterpret_cast<void*>(address);
  const std::lock_guard guard(driver().mutex);
  const auto found = driver().device.find(memory);
  if (found == driver().device.end()) return invalid_value;
  const Handle made{::getpid(), found->second.file, found->second.bytes, memory};
  *handle = {};
  static_assert(sizeof made <= sizeof handle->bytes);
  std::memcpy(handle->bytes, &made, sizeof made);
  return success;
}
// Unlike a real driver, also accepts a handle of the same process, because ranks may be threads.
int cuIpcOpenMemHandle_v2(unsigned long long* address, IpcHandle given, unsigned /*flags*/) {
  if (contexts == 0) return invalid_context;
  if (const int code = told("cuIpcOpenMemHandle"); code != success) return code;
  Handle handle;
  std::memcpy(&handle, given.bytes, sizeof handle);
  void* memory = handle.memory;
  if (handle.process != ::getpid()) {
    const std::string path =
        "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return invalid_value;
    memory = ::mmap(nullptr, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    if (memory == MAP_FAILED) return out_of_memory;
    const std::lock_guard guard(driver().mutex);
    driver().taken[memory] = handle.bytes;
  }
  *address = reinterpret_cast<std::uintptr_t>(memory);
  return success;
}
int cuIpcCloseMemHandle(unsigned long long address) {
  const std::lock_guard guard(driver().mutex);
  const auto found = driver().taken.find(reinterpret_cast<void*>(address));
  if (found == driver().taken.end()) return success;
  ::munmap(found->first, found->second);
  driver().taken.erase(found);
  return success;
}
int cuMemsetD8_v2(unsigned long long address, unsigned char value, std::size_t bytes) {
  std::memset(reinterpret_cast<void*>(address), value, bytes);
  return success;
}
// Exports the file behind the memory as the dma-buf.
int cuMemGetHandleForAddressRange(void* handle, unsigned long long address, std::size_t bytes,
                                  int type, unsigned long long flags) {
  if (contexts == 0) return invalid_context;
  if (flags != 0) return not_supported;  // as without a coherent CPU link
  if (const int code = told("cuMemGetHandleForAddressRange"); code != success) return code;
  const std::size_t page = 4096;
  const std::lock_guard guard(driver().mutex);
  const auto found = driver().device.find(reinterpret_cast<void*>(address));
  if (type != 1 || found == driver().device.end() || bytes % page != 0 ||
      bytes > found->second.bytes)
    return invalid_value;
  const int given = ::fcntl(found->second.file, F_DUPFD_CLOEXEC, 0);
  std::memcpy(handle, &given, sizeof given);
  return given < 0 ? invalid_value : success;
}
int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  if (contexts == 0) return invalid_context;
  if (target != 0 || scope != 100) return invalid_value;
  {
    const std::lock_guard guard(driver().mutex);
    ++driver().flushes;
  }
  return told("cuFlushGPUDirectRDMAWrites");
}
int cuMemHostAlloc(void** memory, std::size_t bytes, unsigned /*flags*/) {
  return allocate(memory, bytes, "cuMemHostAlloc");
}
int cuMemFreeHost(void* memory) { return give_back(memory); }
int cuMemHostGetDevicePointer_v2(unsigned long long* address, void* memory, unsigned flags) {
  *address = reinterpret_cast<std::uintptr_t>(memory);
  return flags == 0 ? success : invalid_value;
}
int cuModuleLoadData(void** module, const void* image) {
  if (image == nullptr) return invalid_image;
  {
    const std::lock_guard guard(driver().mutex);
    const bool is_text = *static_cast<const char*>(image) == '/';  // PTX begins with a comment
    if (is_text && driver().version < 11000) return unsupported_ptx_version;
    if (!is_text && driver().version < 13000) return no_binary_for_gpu;
  }
  *module = &context;
  return told("cuModuleLoadData");
}
int cuModuleUnload(void* /*module*/) { return success; }
int cuModuleGetFunction(void** function, void* /*module*/, const char* name) {
  for (const NamedKernel& kernel : kernels) {
    if (kernel.name != name) continue;
    *function = reinterpret_cast<void*>(kernel.kernel);
    return success;
  }
  return not_found;
}
int cuFuncGetAttribute(int* value, int /*attribute*/, void* /*function*/) {
  *value = 90;
  return success;
}
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned /*shared*/,
                   void* stream, void** arguments, void** extra) {
  if (contexts == 0) return invalid_context;
  if (const int code = told("cuLaunchKernel"); code != success) return code;
  const bool flat = grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1;
  if (!flat || grid_x == 0 || block_x == 0 || block_x > 1024 || extra != nullptr)
    return invalid_value;
  return enqueue(stream, reinterpret_cast<Kernel>(function)(grid_x, arguments));
}

int cuStreamCreate(void** stream, unsigned /*flags*/) {
  if (const int code = told("cuStreamCreate"); code != success) return code;
  auto made = std::make_shared<Stream>();
  *stream = made.get();
  const std::lock_guard guard(driver().mutex);
  driver().streams.emplace(made.get(), std::move(made));
  return success;
}
int cuStreamQuery(void* handle) {
  if (!may_run_beside_captures()) return capture_unsupported;
  const std::shared_ptr<Stream> stream = stream_at(handle);
  if (stream == nullptr) return invalid_value;
  if (stream->capturing()) return capture_unsupported;
  return stream->idle() ? success : not_ready;
}
int cuMemcpyAsync(unsigned long long to, unsigned long long from, std::size_t bytes, void* stream) {
  if (contexts == 0) return invalid_context;
  if (!may_run_beside_captures()) return capture_unsupported;
  if (const int code = told("cuMemcpyAsync"); code != success) return code;
  {
    const std::lock_guard guard(driver().mutex);
    ++driver().copies;
    const auto [begin, size] = driver().broken;
    if (from >= begin && from - begin < size) return launch_failure;
  }
  return enqueue(stream, [=] {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  });
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  if (*mode < 0 || *mode > 2) return invalid_value;
  std::swap(*mode, capture_mode);
  return success;
}
int cuStreamDestroy_v2(void* handle) {
  // The last owner destroys the stream, outside the lock.
  const std::shared_ptr<Stream> stream = stream_at(handle);
  if (stream == nullptr) return invalid_value;
  const std::lock_guard guard(driver().mutex);
  driver().streams.erase(stream.get());
  return success;
}
int cuStreamSynchronize(void* handle) {
  if (handle == nullptr) return success;
  const std::shared_ptr<Stream> stream = stream_at(handle);
  if (stream == nullptr) return invalid_value;
  if (stream->capturing()) return capture_unsupported;
  stream->synchronise();
  return success;
}
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return enqueue(stream, [=] { function(data); });
}
int cuStreamIsCapturing(void* handle, int* status) {
  *status = 0;
  if (handle == nullptr) return success;
  const std::shared_ptr<Stream> stream = stream_at(handle);
  if (stream == nullptr) return invalid_value;
  *status = stream->capturing() ? 1 : 0;
  return success;
}
int cuStreamBeginCapture_v2(void* handle, int /*mode*/) {
  const std::shared_ptr<Stream> stream = stream_at(handle);
  if (stream == nullptr) return invalid_value;  // the default stream cannot be captured
  stream->begin_capture();
  return success;
}
int cuStreamEndCapture(void* handle, void** graph) {
  const std::shared_ptr<Stream> stream = stream_at(handle);
  if (stream == nullptr) return invalid_value;
  *graph = stream->end_capture().release();
  return *graph == nullptr ? invalid_value : success;
}
int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long /*flags*/) {
  *executable = new Graph(*static_cast<Graph*>(graph));
  return success;
}
int cuGraphLaunch(void* executable, void* stream) {
  for (const Work& work : *static_cast<Graph*>(executable))
    if (const int code = enqueue(stream, work); code != success) return code;
  return success;
}
int cuGraphExecDestroy(void* executable) {
  delete static_cast<Graph*>(executable);
  return success;
}
int cuGraphDestroy(void* graph) {
  delete static_cast<Graph*>(graph);
  return success;
}

}  // extern "C"
