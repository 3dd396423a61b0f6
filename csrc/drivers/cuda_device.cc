#include "drivers/cuda_device.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

namespace r2ccl::cuda {
namespace {

constexpr int oldest_compute_capability = 8;  // major; the oldest target of the kernels
constexpr std::chrono::seconds patience{5};   // time limit of a copy
constexpr int binary_version = 6;             // CU_FUNC_ATTRIBUTE_BINARY_VERSION
// Errors of cuModuleLoadData for kernels in a form unknown to the driver or GPU:
// CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, JIT_COMPILER_NOT_FOUND,
// UNSUPPORTED_PTX_VERSION.
constexpr std::array form_not_taken{200, 209, 218, 221, 222};

}  // namespace

class Device::ScopedContext {
 public:
  explicit ScopedContext(const Device& device)
      : cuda_(device.cuda_),
        status_(cuda_.check("cuCtxPushCurrent", cuda_.push_context(device.context_))),
        pushed_(status_.ok()) {}
  ~ScopedContext() {
    Context popped = nullptr;
    if (pushed_) (void)cuda_.pop_context(&popped);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

  Status take_status() { return std::move(status_); }

 private:
  const Library& cuda_;
  Status status_;
  const bool pushed_;
};

Result<std::vector<Description>> describe_all(const std::string& library) {
  auto loaded = Library::load(library);
  if (!loaded.ok()) return loaded.take_status();
  const Library& cuda = *loaded.value();
  int count = 0;
  R2CCL_TRY(cuda.check("cuDeviceGetCount", cuda.device_count(&count)));
  std::vector<Description> found;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    R2CCL_TRY(cuda.check("cuDeviceGet", cuda.device_get(&device, ordinal)));
    std::array<char, 256> name{};
    R2CCL_TRY(cuda.check("cuDeviceGetName",
                         cuda.device_name(name.data(), static_cast<int>(name.size()), device)));
    Description made{.name = name.data()};
    int dma_buf = 0;
    for (const auto& [attribute, value] :
         {std::pair{compute_capability_major, &made.major},
          std::pair{compute_capability_minor, &made.minor}, std::pair{dma_buf_supported, &dma_buf}})
      R2CCL_TRY(
          cuda.check("cuDeviceGetAttribute", cuda.device_attribute(value, attribute, device)));
    made.dma_buf = dma_buf != 0;
    found.push_back(std::move(made));
  }
  return found;
}

Memory::~Memory() {
  if (device_ != nullptr) device_->free(*this);
}

Memory& Memory::operator=(Memory&& other) noexcept {
  if (device_ != nullptr) device_->free(*this);
  device_ = std::exchange(other.device_, nullptr);
  address_ = std::exchange(other.address_, 0);
  host_ = std::exchange(other.host_, nullptr);
  imported_ = std::exchange(other.imported_, false);
  return *this;
}

Result<std::unique_ptr<Device>> Device::open(const std::string& library, int ordinal,
                                             const Image& image) {
  if (image.empty())
    return Status(ErrorCode::invalid_argument,
                  "this build of r2serve has no kernels: install r2serve where nvcc is in PATH");
  auto loaded = Library::load(library);
  if (!loaded.ok()) return loaded.take_status();
  const Library& cuda = *loaded.value();
  int count = 0;
  R2CCL_TRY(cuda.check("cuDeviceGetCount", cuda.device_count(&count)));
  if (ordinal < 0 || ordinal >= count)
    return Status(ErrorCode::invalid_argument, "device: " + std::to_string(ordinal) +
                                                   "; the number of GPUs is " +
                                                   std::to_string(count) + ", counted from 0");
  int device = 0;
  R2CCL_TRY(cuda.check("cuDeviceGet", cuda.device_get(&device, ordinal)));
  int major = 0;
  R2CCL_TRY(cuda.check("cuDeviceGetAttribute",
                       cuda.device_attribute(&major, compute_capability_major, device)));
  if (major < oldest_compute_capability)
    return Status(ErrorCode::invalid_argument,
                  "device: GPU " + std::to_string(ordinal) + " has compute capability " +
                      std::to_string(major) + ".x; 8.0 or later is needed");
  std::unique_ptr<Device> made(new Device(cuda, device));
  R2CCL_TRY(
      cuda.check("cuDevicePrimaryCtxRetain", cuda.retain_primary_context(&made->context_, device)));
  R2CCL_TRY(made->load(image));
  return made;
}

Status Device::load(const Image& image) {
  ScopedContext current(*this);
  R2CCL_TRY(current.take_status());
  const Code code = cuda_.load_module(&module_, image.binary.data());
  Status binary = cuda_.check("cuModuleLoadData", code);
  if (std::ranges::find(form_not_taken, code) == form_not_taken.end()) return binary;
  Status text;
  if (!image.text.empty()) {
    text = cuda_.check("cuModuleLoadData of PTX", cuda_.load_module(&module_, image.text.data()));
    if (text.ok()) return {};
  }
  auto major = attribute(compute_capability_major);
  if (!major.ok()) return major.take_status();
  auto minor = attribute(compute_capability_minor);
  if (!minor.ok()) return minor.take_status();
  return {ErrorCode::internal,
          "the CUDA driver rejects r2ccl's kernels: " + binary.message() +
              (text.ok() ? "" : "; " + text.message()) + "; the driver supports CUDA " +
              cuda_.version() + ", the GPU has compute capability " +
              std::to_string(major.value()) + "." + std::to_string(minor.value()) +
              "; a driver for CUDA 11.0 or later and a GPU of 8.0 or later are needed"};
}

// Errors of the clean-up are ignored: at process exit the driver reports every resource as gone.
Device::~Device() {
  if (context_ == nullptr || foreign()) return;
  if (module_ != nullptr) {
    const ScopedContext current(*this);
    (void)cuda_.unload_module(module_);
  }
  (void)cuda_.release_primary_context(device_);
}

Result<Memory> Device::allocate(std::size_t bytes) const {
  ScopedContext current(*this);
  if (Status status = current.take_status(); !status.ok()) return status;
  Memory made;
  if (Status status = cuda_.check("cuMemAlloc", cuda_.allocate(&made.address_, bytes));
      !status.ok())
    return status;
  made.device_ = this;
  if (Status status = cuda_.check("cuMemsetD8", cuda_.fill(made.address_, 0, bytes)); !status.ok())
    return status;
  // cuMemsetD8 is asynchronous, and the caller's streams do not wait for the fill.
  if (Status status = cuda_.check("cuCtxSynchronize", cuda_.synchronise_context()); !status.ok())
    return status;
  return made;
}

Result<Memory> Device::allocate_pinned(std::size_t bytes) const {
  ScopedContext current(*this);
  if (Status status = current.take_status(); !status.ok()) return status;
  void* host = nullptr;
  if (Status status =
          cuda_.check("cuMemHostAlloc",
                      cuda_.allocate_host(&host, bytes, host_memory_portable | host_memory_mapped));
      !status.ok())
    return status;
  Memory made;
  made.device_ = this;
  made.host_ = static_cast<std::byte*>(host);
  std::fill_n(made.host_, bytes, std::byte{0});
  if (Status status = cuda_.check("cuMemHostGetDevicePointer",
                                  cuda_.device_address_of(&made.address_, host, 0));
      !status.ok())
    return status;
  return made;
}

void Device::free(const Memory& memory) const {
  if (foreign()) return;
  const ScopedContext current(*this);
  if (memory.imported_)
    (void)cuda_.close_imported(memory.address_);
  else
    (void)(memory.host_ != nullptr ? cuda_.free_host(memory.host_) : cuda_.free(memory.address_));
}

Result<IpcHandle> Device::export_ipc(const Memory& memory) const {
  ScopedContext current(*this);
  if (Status status = current.take_status(); !status.ok()) return status;
  IpcHandle made{};
  if (Status status = cuda_.check("cuIpcGetMemHandle", cuda_.export_memory(&made, memory.address_));
      !status.ok())
    return status;
  return made;
}

Result<Memory> Device::import_ipc(const IpcHandle& handle) const {
  ScopedContext current(*this);
  if (Status status = current.take_status(); !status.ok()) return status;
  Memory made;
  if (Status status = cuda_.check("cuIpcOpenMemHandle",
                                  cuda_.import_memory(&made.address_, handle, lazy_peer_access));
      !status.ok())
    return status;
  made.device_ = this;
  made.imported_ = true;
  return made;
}

Result<Function> Device::kernel(const char* name) const {
  ScopedContext current(*this);
  if (Status status = current.take_status(); !status.ok()) return status;
  Function found = nullptr;
  if (Status status = cuda_.check(name, cuda_.find_function(&found, module_, name)); !status.ok())
    return status;
  int version = 0;  // the query loads the kernel, even with lazy module loading
  if (Status status = cuda_.check(name, cuda_.function_attribute(&version, binary_version, found));
      !status.ok())
    return status;
  return found;
}

Status Device::launch(Function kernel, unsigned blocks, unsigned threads, Stream stream,
                      void** arguments) const {
  ScopedContext current(*this);
  R2CCL_TRY(current.take_status());
  return cuda_.check("cuLaunchKernel", cuda_.launch(kernel, blocks, 1, 1, threads, 1, 1, 0, stream,
                                                    arguments, nullptr));
}

Result<bool> Device::capturing(Stream stream) const {
  ScopedContext current(*this);
  if (Status status = current.take_status(); !status.ok()) return status;
  int status = capture_none;
  if (Status failed = cuda_.check("cuStreamIsCapturing", cuda_.is_capturing(stream, &status));
      !failed.ok())
    return failed;
  return status != capture_none;
}

Result<int> Device::attribute(Attribute asked) const {
  int value = 0;
  if (Status status =
          cuda_.check("cuDeviceGetAttribute", cuda_.device_attribute(&value, asked, device_));
      !status.ok())
    return status;
  return value;
}

Status Device::synchronise() const {
  ScopedContext current(*this);
  R2CCL_TRY(current.take_status());
  return cuda_.check("cuCtxSynchronize", cuda_.synchronise_context());
}

// ---- for NICs ----

Result<FileDescriptor> Device::export_dma_buf(const Memory& memory, std::size_t bytes) const {
  auto supported = attribute(dma_buf_supported);
  if (!supported.ok()) return supported.take_status();
  if (supported.value() == 0 || cuda_.handle_of_range == nullptr)
    return Status(ErrorCode::invalid_argument,
                  "the CUDA driver gives no memory out as a dma-buf: NVIDIA's open kernel modules, "
                  "515 or later, are needed");
  ScopedContext current(*this);
  if (Status status = current.take_status(); !status.ok()) return status;
  Code over_pcie = 0;
  Code code = 0;
  FileDescriptor exported = FileDescriptor::made_by([&] {
    int fd = -1;
    // NICs reach this memory over PCIe, even where the CPU has a faster path.  The second call,
    // without the PCIe flag, serves drivers that reject the flag.
    code = cuda_.handle_of_range(&fd, memory.address(), bytes, handle_dma_buf, mapped_by_pcie);
    over_pcie = code;
    if (code != 0) code = cuda_.handle_of_range(&fd, memory.address(), bytes, handle_dma_buf, 0);
    return code == 0 ? fd : -1;
  });
  if (code == 0) return exported;
  const char* const entry = "cuMemGetHandleForAddressRange";
  return Status(ErrorCode::internal,
                cuda_.check(entry, over_pcie).message() +
                    "; without the PCIe flag: " + cuda_.check(entry, code).message());
}

Result<bool> Device::needs_flush() const {
  auto ordering = attribute(writes_ordering);
  if (!ordering.ok()) return ordering.take_status();
  if (ordering.value() >= writes_ordered) return false;
  auto options = attribute(flush_writes_options);
  if (!options.ok()) return options.take_status();
  if ((options.value() & host_flushes) != 0 && cuda_.flush_writes != nullptr) return true;
  return Status(ErrorCode::invalid_argument,
                "the CUDA driver neither orders nor flushes NIC writes to GPU memory");
}

class Device::RelaxedCapture {
 public:
  explicit RelaxedCapture(const Library& cuda) : cuda_(cuda) {
    (void)cuda_.exchange_capture_mode(&mode_);
  }
  ~RelaxedCapture() { (void)cuda_.exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Library& cuda_;
  int mode_ = capture_relaxed;
};

Status Device::flush_writes() const {
  ScopedContext current(*this);
  R2CCL_TRY(current.take_status());
  const RelaxedCapture relaxed(cuda_);
  return cuda_.check("cuFlushGPUDirectRDMAWrites", cuda_.flush_writes(0, writes_ordered));
}

Result<std::unique_ptr<Copier>> Device::make_copier() const {
  auto made = std::make_unique<Copier>(*this);
  if (Status status = made->open(); !status.ok()) return status;
  return made;
}

Copier::~Copier() {
  if (stream_ == nullptr || device_.foreign()) return;
  const Device::ScopedContext current(device_);
  (void)device_.cuda_.destroy_stream(stream_);
}

Status Copier::open() {
  Device::ScopedContext current(device_);
  R2CCL_TRY(current.take_status());
  return device_.cuda_.check("cuStreamCreate",
                             device_.cuda_.create_stream(&stream_, stream_non_blocking));
}

Status Copier::copy(Address to, Address from, std::size_t bytes) {
  const Library& cuda = device_.cuda_;
  const std::lock_guard guard(mutex_);
  Device::ScopedContext current(device_);
  R2CCL_TRY(current.take_status());
  const Device::RelaxedCapture relaxed(cuda);
  R2CCL_TRY(cuda.check("cuMemcpyAsync", cuda.copy(to, from, bytes, stream_)));
  // Polls the stream: a blocking wait of the driver might wait for more than this copy.
  Code code = not_ready;
  const auto limit = std::chrono::steady_clock::now() + patience;
  while (code == not_ready) {
    if (std::chrono::steady_clock::now() > limit)
      return {ErrorCode::internal, "a copy of GPU memory did not finish within 5 s"};
    code = cuda.query_stream(stream_);
  }
  return cuda.check("cuStreamQuery", code);
}

}  // namespace r2ccl::cuda
