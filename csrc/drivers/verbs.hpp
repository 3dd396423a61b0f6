// Interface to RDMA verbs. ibverbs.hpp implements the interface for real devices, fake_verbs.hpp
// for tests.
#pragma once

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/errors.hpp"

namespace r2ccl {

using VerbsGid = std::array<std::byte, 16>;  // network order

enum class VerbsGidType : std::uint8_t { infiniband, roce_v1, roce_v2 };

struct VerbsGidEntry {
  std::uint8_t index = 0;
  VerbsGidType type = VerbsGidType::infiniband;
  VerbsGid gid{};
};

// Current state of a port.
struct VerbsPort {
  bool active = false;
  bool ethernet = true;   // true: RoCE; false: InfiniBand
  std::uint16_t lid = 0;  // InfiniBand only
  std::uint32_t mtu = 0;  // payload bytes per packet
  std::vector<VerbsGidEntry> gids;
};

// Address of a queue pair, as needed by the peer to connect.
struct VerbsAddress {
  std::uint32_t queue_pair = 0;
  std::uint32_t first_packet = 0;  // first packet sequence number (PSN), 24 bits
  std::uint32_t mtu = 0;           // bytes
  std::uint16_t lid = 0;
  VerbsGid gid{};
};

// Sending parameters of a connection; see ibv_qp_attr and ibv_ah_attr in libibverbs.
struct VerbsPath {
  std::uint8_t port = 1;  // numbered from 1
  std::uint8_t gid_index = 0;
  std::uint8_t timeout = 14;     // retransmission timeout: 4.096 us * 2^timeout
  std::uint8_t retry_count = 6;  // retransmissions before the queue pair fails
  // RNR (receiver not ready) timer: delay of a peer's retry while no receive is posted here, in
  // codes of ibv_modify_qp(3); 12 = 0.64 ms
  std::uint8_t rnr_timer = 12;
  std::uint8_t rnr_retry = 7;  // RNR retries while the peer has no posted receive; 7 = unlimited
  std::uint8_t traffic_class = 0;
  std::uint8_t service_level = 0;
  std::uint16_t pkey_index = 0;
};

// Capacity of the queues of a queue pair, in work requests.
struct VerbsDepth {
  std::uint32_t sends = 0;
  std::uint32_t receives = 0;
  // Requested bytes of an inline write.  The device may grant more, or 0 if its limit is lower.
  std::uint32_t inline_bytes = 0;
};

struct VerbsCompletion {
  std::uint64_t id = 0;
  bool ok = false;
  bool flushed = false;  // failed because the queue pair is in the error state
  bool receive = false;
  std::optional<std::uint32_t> immediate = {};
  std::uint32_t bytes = 0;       // receives only
  std::string_view status = {};  // error text of a failed completion
};

struct VerbsEvent {
  enum class Kind : std::uint8_t {
    port_active,
    port_error,
    port_changed,  // LID, partitions or subnet manager
    gid_changed,
    device_fatal,
    queue_pair_fatal,
    completion_queue_error,  // overrun
    other,
  };
  Kind kind = Kind::other;
  std::uint8_t port = 0;         // port and GID events
  std::uint32_t queue_pair = 0;  // queue pair and completion queue events
  std::string_view text = {};    // name of the event
};

// A memory region registered with a device: readable by the device, writable by peers.
class VerbsMemory {
 public:
  virtual ~VerbsMemory() = default;
  [[nodiscard]] virtual std::uint32_t local_key() const = 0;
  [[nodiscard]] virtual std::uint32_t remote_key() const = 0;
  // Ends the access of the device and of all peers to the memory.  Returns 0 or an errno; after 0
  // only the destructor may follow.  This call and the destructor block as long as the device
  // takes.
  virtual int deregister() = 0;
};

struct VerbsSource {
  const std::byte* data = nullptr;
  std::uint32_t bytes = 0;
  std::uint32_t local_key = 0;  // unused for inline writes
};

// An RDMA WRITE.  An optional immediate consumes a receive of the peer.
struct VerbsWrite {
  std::uint64_t id = 0;
  VerbsSource source;
  std::uint64_t remote_address = 0;
  std::uint32_t remote_key = 0;
  std::optional<std::uint32_t> immediate = {};
  bool signaled = false;
  bool inlined = false;  // the source may be reused at once
};

// A reliable connection (RC) with a private completion queue.
class VerbsQueuePair {
 public:
  virtual ~VerbsQueuePair() = default;

  [[nodiscard]] virtual std::uint32_t number() const = 0;
  [[nodiscard]] virtual std::uint32_t inline_bytes() const = 0;

  // Connects to the peer's queue pair.  All functions up to post_receives() return 0 or an errno.
  // connect() and fail() may block for seconds.
  virtual int connect(const VerbsAddress& own, const VerbsAddress& peer, const VerbsPath& path) = 0;
  virtual int fail() = 0;  // enters the error state, which flushes everything
  // Destroys the queue pair.  Success is a fence: no work request of this side or of the peer
  // touches memory any more.  After an error, the call may be repeated; after success, only the
  // destructor may follow.  On a removed device, the call succeeds only after next_event() has
  // returned device_fatal, because the kernel cleans up until then.
  virtual int destroy() = 0;
  // Posts the writes in order.  After an error, some of the writes may be posted.
  virtual int post(std::span<const VerbsWrite> writes) = 0;
  // Posts `count` receives without memory, all with this id.  A write with immediate consumes one.
  virtual int post_receives(std::uint64_t id, std::uint32_t count) = 0;

  // Returns the number of completions stored, or a negative errno.
  virtual int poll(std::span<VerbsCompletion> completions) = 0;

  // Returns a descriptor that becomes readable at the first completion after arm().
  [[nodiscard]] virtual int fd() const = 0;
  virtual int arm() = 0;
};

class VerbsDevice {
 public:
  virtual ~VerbsDevice() = default;

  [[nodiscard]] virtual const std::string& name() const = 0;
  // Returns true once a call has failed because the device is gone or dead.  The handle then stays
  // unusable, also after the device returns.  The event device_fatal may come later.
  [[nodiscard]] bool gone() const { return gone_.load(std::memory_order_relaxed); }
  // Queries a port; ports are numbered from 1.
  virtual Result<VerbsPort> port(std::uint8_t number) = 0;
  // Registers memory, which the device may then read and peers may write.  `relaxed_ordering`: PCIe
  // relaxed ordering, if the device supports it.
  virtual Result<std::unique_ptr<VerbsMemory>> share(std::span<std::byte> memory,
                                                     bool relaxed_ordering) = 0;
  // Registers the first `addresses.size()` bytes of a dma-buf, memory of another device.  Work
  // requests and peers refer to the bytes by `addresses`, which must start on a page boundary.  The
  // CPU never accesses `addresses`, so the range need not be mapped.
  virtual Result<std::unique_ptr<VerbsMemory>> share_dma_buf(int dma_buf,
                                                             std::span<std::byte> addresses,
                                                             bool relaxed_ordering) = 0;
  virtual Result<std::unique_ptr<VerbsQueuePair>> create_queue_pair(std::uint8_t port,
                                                                    std::uint16_t pkey_index,
                                                                    const VerbsDepth& depth) = 0;
  // Returns a descriptor that is readable while events are pending.
  [[nodiscard]] virtual int event_fd() const = 0;
  // Returns the next pending event; empty if none is pending.  Does not block.
  virtual std::optional<VerbsEvent> next_event() = 0;

 protected:
  // Records the error of a call, an errno.  Errors of a removed device are ENODEV and ENXIO, those
  // of a device in reset or after a PCIe error EIO.
  void note_error(int error) {
    if (error == EIO || error == ENODEV || error == ENXIO)
      gone_.store(true, std::memory_order_relaxed);
  }

 private:
  std::atomic<bool> gone_{false};
};

class VerbsDriver {
 public:
  virtual ~VerbsDriver() = default;
  // Returns the names of all present devices; empty if the kernel has no verbs support.
  virtual std::vector<std::string> devices() = 0;
  virtual Result<std::unique_ptr<VerbsDevice>> open(const std::string& device) = 0;
};

}  // namespace r2ccl
