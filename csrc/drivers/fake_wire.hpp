// The wire between the simulated RDMA devices of a test: queue pairs, memory regions and writes in
// flight.
#pragma once

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.hpp"
#include "drivers/verbs.hpp"

#if defined(__SANITIZE_THREAD__)
#define R2CCL_UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define R2CCL_UNDER_TSAN 1
#endif
#endif
#if defined(R2CCL_UNDER_TSAN)
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace r2ccl {

// Makes ThreadSanitizer ignore the memory accesses of this thread during the object's lifetime.
// The accesses simulate DMA of a NIC, not work of the host.
struct TsanIgnore {
#if defined(R2CCL_UNDER_TSAN)
  TsanIgnore() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~TsanIgnore() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  TsanIgnore() {}  // NOLINT(modernize-use-equals-default): avoids unused-variable warnings
#endif
  TsanIgnore(const TsanIgnore&) = delete;
  TsanIgnore& operator=(const TsanIgnore&) = delete;
};

// All functions need `mutex_` locked, except set_holding(), which locks the mutex.
class FakeWire {
 protected:
  struct Region {
    std::string device;
    std::span<std::byte> memory;
    std::size_t written = 0;                  // bytes written by peers
    std::shared_ptr<std::byte> dma_buf = {};  // mapped dma-buf; null: host memory
  };
  struct Write {
    VerbsWrite request;
    std::vector<std::byte> inlined;
    std::uint32_t to = 0;
  };
  struct Pair {
    std::string device;
    std::uint32_t number = 0;
    std::uint32_t peer = 0;
    std::deque<std::uint64_t> receives;
    std::deque<Write> waiting;
    std::deque<VerbsCompletion> completions;
    VerbsDepth depth;
    VerbsAddress own;
    VerbsPath path;
    std::uint16_t pkey_index = 0;
    FileDescriptor fd{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
    bool armed = false;
    bool failed = false;  // in the error state
    bool dead = false;    // the device was removed
  };
  struct Device {
    VerbsGid gid{};
    std::uint8_t gid_index = 1;
    std::deque<VerbsEvent> events;
    FileDescriptor event_fd{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
    int post_error = 0;
    int share_error = 0;
    int dma_buf_error = 0;
    bool dma_bufs_break = false;  // writes into a dma-buf break the queue pair
    std::uint64_t writes = 0;
    std::span<const std::byte> mutes_at{};  // a write from here mutes the device
    bool active = true;
    bool muted = false;
    unsigned removals = 0;
    bool removed = false;
    bool fatal_reported = false;  // device_fatal was read since the removal
    bool sharing_hangs = false;
    bool hanging = false;
    bool ports_hang = false;
    bool freeing_hangs = false;
    bool undying = false;  // queue pairs cannot be destroyed
  };

  void set_holding(bool holding) {
    const std::lock_guard lock(mutex_);
    holding_ = holding;
    land();
  }

  Pair* newest(const std::string& device) {
    for (auto pair = pairs_.rbegin(); pair != pairs_.rend(); ++pair)
      if (pair->second.device == device) return &pair->second;
    return nullptr;
  }

  int post(Pair& pair, std::span<const VerbsWrite> writes) {
    Device& device = devices_[pair.device];
    if (pair.dead) return EIO;
    if (device.post_error != 0) return device.post_error;
    for (const VerbsWrite& request : writes) {
      if (pair.waiting.size() >= pair.depth.sends) return ENOMEM;
      ++device.writes;
      const auto& trigger = device.mutes_at;
      if (request.source.data >= trigger.data() &&
          request.source.data < trigger.data() + trigger.size())
        device.muted = true;
      Write write{request, {}, pair.peer};
      if (request.inlined && request.source.bytes > 0)
        write.inlined.assign(request.source.data, request.source.data + request.source.bytes);
      pair.waiting.push_back(std::move(write));
    }
    if (pair.failed) flush(pair);
    land();
    return 0;
  }

  void complete(Pair& pair, const VerbsCompletion& completion) {
    pair.completions.push_back(completion);
    if (pair.completions.size() > pair.depth.sends + pair.depth.receives) ++overruns_;
    if (std::exchange(pair.armed, false)) ::eventfd_write(pair.fd.get(), 1);
  }

  // Lands all deliverable writes: in order within a queue pair, in any order between queue pairs.
  void land() {
    if (holding_) return;
    std::vector<Pair*> order;
    for (auto& [number, pair] : pairs_)
      if (!pair.waiting.empty()) order.push_back(&pair);
    for (bool moved = true; moved;) {
      moved = false;
      if (shuffled_) std::ranges::shuffle(order, random_);
      for (Pair* pair : order) {
        const std::size_t most = shuffled_ ? 1 : pair->waiting.size();
        for (std::size_t i = 0; i < most && !pair->waiting.empty() && deliver(*pair); ++i)
          moved = true;
      }
    }
  }

  // Delivers the oldest waiting write.  Returns false if the write must wait or has failed.
  bool deliver(Pair& pair) {
    const auto found = pairs_.find(pair.peer);
    if (found == pairs_.end() || pair.dead) return false;
    Pair& peer = found->second;
    if (devices_[pair.device].muted || devices_[peer.device].muted || peer.failed || peer.dead ||
        peer.peer != pair.number)
      return false;
    const Write& write = pair.waiting.front();
    const bool immediate = write.request.immediate.has_value();
    if (immediate && peer.receives.empty()) {  // receiver not ready: retried later
      ++not_ready_;
      return false;
    }
    if (!put(write)) {
      break_pair(pair, "remote access error");
      return false;
    }
    if (immediate) {
      VerbsCompletion arrival;
      arrival.id = peer.receives.front();
      arrival.ok = arrival.receive = true;
      arrival.immediate = write.request.immediate;
      arrival.bytes = write.request.source.bytes;
      peer.receives.pop_front();
      complete(peer, arrival);
    }
    sent(pair);
    return true;
  }

  void sent(Pair& pair) {
    const VerbsWrite& request = pair.waiting.front().request;
    if (request.signaled) {
      VerbsCompletion done;
      done.id = request.id;
      done.ok = true;
      complete(pair, done);
    }
    pair.waiting.pop_front();
  }

  // Maps a dma-buf, a memory file in tests, into `region`.  Returns 0 or an errno.
  static int map(int dma_buf, Region& region) {
    struct stat file {};
    if (::fstat(dma_buf, &file) != 0) return errno;
    const std::size_t bytes = region.memory.size();
    const auto begin = reinterpret_cast<std::uintptr_t>(region.memory.data());
    if (static_cast<std::size_t>(file.st_size) < bytes || begin % 4096 != 0) return EINVAL;
    void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, dma_buf, 0);
    if (mapped == MAP_FAILED) return errno;
    region.dma_buf = {static_cast<std::byte*>(mapped),
                      [bytes](std::byte* gone) { ::munmap(gone, bytes); }};
    return 0;
  }

  // Returns the host address behind a device address; null if the range lies outside the region.
  static std::byte* bytes_at(const Region& region, std::uint64_t address, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(region.memory.data());
    if (address < begin || address + bytes > begin + region.memory.size()) return nullptr;
    std::byte* const base = region.dma_buf ? region.dma_buf.get() : region.memory.data();
    return base + (address - begin);
  }

  // Returns the source bytes of a write that is not inline, looked up by the local key.
  const std::byte* bytes_of(const VerbsSource& source) const {
    const auto found = regions_.find(source.local_key);
    if (found == regions_.end()) return nullptr;
    return bytes_at(found->second, reinterpret_cast<std::uintptr_t>(source.data), source.bytes);
  }

  bool put(const Write& write) {
    const VerbsWrite& request = write.request;
    if (request.source.bytes == 0) return true;
    const auto found = regions_.find(request.remote_key);
    if (found == regions_.end()) return false;
    std::byte* const at = bytes_at(found->second, request.remote_address, request.source.bytes);
    const std::byte* const from = request.inlined ? write.inlined.data() : bytes_of(request.source);
    if (at == nullptr || from == nullptr) return false;
    if (found->second.dma_buf && devices_[found->second.device].dma_bufs_break) return false;
    found->second.written += request.source.bytes;
    // A second attempt of a chunk may land while the host reads the message, or while TCP delivers
    // the same chunk.  The bytes are identical and change nothing.  Sanitizers do not see the
    // writes of a real NIC either.
    const TsanIgnore ignore;
    std::memcpy(at, from, request.source.bytes);
    return true;
  }

  void break_pair(Pair& pair, std::string_view why) {
    VerbsCompletion broken;
    broken.id = pair.waiting.front().request.id;
    broken.status = why;
    pair.waiting.pop_front();
    complete(pair, broken);
    flush(pair);
  }

  void flush(Pair& pair) {
    pair.failed = true;
    for (const Write& write : std::exchange(pair.waiting, {})) {
      VerbsCompletion flushed;
      flushed.id = write.request.id;
      flushed.flushed = true;
      flushed.status = "flushed";
      complete(pair, flushed);
    }
    for (const std::uint64_t id : std::exchange(pair.receives, {})) {
      VerbsCompletion flushed;
      flushed.id = id;
      flushed.flushed = true;
      flushed.status = "flushed";
      complete(pair, flushed);
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Device> devices_;
  std::map<std::uint32_t, Region> regions_;
  std::map<std::uint32_t, Pair> pairs_;
  std::uint32_t next_key_ = 100;
  std::uint32_t next_pair_ = 10;
  std::size_t not_ready_ = 0;
  std::size_t overruns_ = 0;
  std::mt19937 random_;
  bool shuffled_ = false;
  bool holding_ = false;
};

}  // namespace r2ccl
