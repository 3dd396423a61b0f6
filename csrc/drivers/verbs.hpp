// What r2ccl needs of RDMA verbs.  ibverbs.hpp has real devices, fake_verbs.hpp those of tests.
#pragma once

#include <array>
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

// A port as it is now.
struct VerbsPort {
  bool active = false;
  bool ethernet = true;   // RoCE; else InfiniBand
  std::uint16_t lid = 0;  // InfiniBand
  std::uint32_t mtu = 0;  // bytes of payload in a packet
  std::vector<VerbsGidEntry> gids;
};

// What the peer must know of a queue pair to reach it.
struct VerbsAddress {
  std::uint32_t queue_pair = 0;
  std::uint32_t first_packet = 0;  // 24 bits
  std::uint32_t mtu = 0;           // bytes
  std::uint16_t lid = 0;
  VerbsGid gid{};
};

// How a connection sends; libibverbs' ibv_qp_attr and ibv_ah_attr say more of each.
struct VerbsPath {
  std::uint8_t port = 1;
  std::uint8_t gid_index = 0;
  std::uint8_t timeout = 14;  // 4.096 us * 2^timeout until a packet is sent again
  std::uint8_t retry_count = 6;
  std::uint8_t rnr_timer = 12;  // as the peer is told to wait for a receive; 12: 0.64 ms
  std::uint8_t rnr_retry = 7;   // times that we wait for one of the peer's; 7: for ever
  std::uint8_t traffic_class = 0;
  std::uint8_t service_level = 0;
  std::uint16_t pkey_index = 0;
};

struct VerbsDepth {
  std::uint32_t sends = 0;
  std::uint32_t receives = 0;
  std::uint32_t inline_bytes = 0;  // at least, if the device has as much
};

struct VerbsCompletion {
  std::uint64_t id = 0;
  bool ok = false;
  bool flushed = false;  // not ok because the queue pair is in the error state
  bool receive = false;
  std::optional<std::uint32_t> immediate = {};
  std::uint32_t bytes = 0;       // of a receive
  std::string_view status = {};  // in words, of one that is not ok
};

struct VerbsEvent {
  enum class Kind : std::uint8_t {
    port_active,
    port_error,
    port_changed,  // its LID, partitions or subnet manager
    gid_changed,
    device_fatal,
    queue_pair_fatal,
    completion_queue_error,  // overrun
    other,
  };
  Kind kind = Kind::other;
  std::uint8_t port = 0;         // of port and GID events
  std::uint32_t queue_pair = 0;  // of queue pair and completion queue events
  std::string_view text = {};
};

// Memory that a device may read, and its peers write.
class VerbsMemory {
 public:
  virtual ~VerbsMemory() = default;
  [[nodiscard]] virtual std::uint32_t local_key() const = 0;
  [[nodiscard]] virtual std::uint32_t remote_key() const = 0;
  // 0: the device reaches the memory no more, for us or for any peer, and only the destructor may
  // follow.  Else an errno.  May block for as long as the device likes, as the destructor may.
  virtual int deregister() = 0;
};

struct VerbsSource {
  const std::byte* data = nullptr;
  std::uint32_t bytes = 0;
  std::uint32_t local_key = 0;  // not of inline writes
};

// An RDMA WRITE, with an immediate that takes a receive of the peer, or without.
struct VerbsWrite {
  std::uint64_t id = 0;
  VerbsSource source;
  std::uint64_t remote_address = 0;
  std::uint32_t remote_key = 0;
  std::optional<std::uint32_t> immediate = {};
  bool signaled = false;
  bool inlined = false;  // the source may be reused at once
};

// A reliable connection with a completion queue of its own.
class VerbsQueuePair {
 public:
  virtual ~VerbsQueuePair() = default;

  [[nodiscard]] virtual std::uint32_t number() const = 0;
  [[nodiscard]] virtual std::uint32_t inline_bytes() const = 0;

  // All return 0 or an errno.  connect() and fail() may block for seconds.
  virtual int connect(const VerbsAddress& own, const VerbsAddress& peer, const VerbsPath& path) = 0;
  virtual int fail() = 0;  // into the error state, in which everything is flushed
  // A fence: nothing that was posted here or by the peer touches memory any more.  On an error it
  // may be tried again; once it has worked only the destructor may follow.  Of a device that is
  // gone it works once next_event() has said device_fatal: until then the kernel is at it.
  virtual int destroy() = 0;
  virtual int post(std::span<const VerbsWrite> writes) = 0;  // all or, on an error, some
  virtual int post_receives(std::uint64_t id, std::uint32_t count) = 0;

  // How many completions there were, or a negative errno.
  virtual int poll(std::span<VerbsCompletion> completions) = 0;

  // Readable once a completion comes after arm().
  [[nodiscard]] virtual int fd() const = 0;
  virtual int arm() = 0;
};

class VerbsDevice {
 public:
  virtual ~VerbsDevice() = default;

  [[nodiscard]] virtual const std::string& name() const = 0;
  virtual Result<VerbsPort> port(std::uint8_t number) = 0;
  virtual Result<std::unique_ptr<VerbsMemory>> share(std::span<std::byte> memory,
                                                     bool relaxed_ordering) = 0;
  // Memory of another device, given out as a dma-buf: as much of it, from its begin, as there are
  // addresses.  Posts and peers know it by these, which begin a page, and which the CPU need not be
  // able to touch: nothing is read or written there.
  virtual Result<std::unique_ptr<VerbsMemory>> share_dma_buf(int dma_buf,
                                                             std::span<std::byte> addresses,
                                                             bool relaxed_ordering) = 0;
  virtual Result<std::unique_ptr<VerbsQueuePair>> create_queue_pair(std::uint8_t port,
                                                                    std::uint16_t pkey_index,
                                                                    const VerbsDepth& depth) = 0;
  // Readable while there are events.
  [[nodiscard]] virtual int event_fd() const = 0;
  virtual std::optional<VerbsEvent> next_event() = 0;
};

class VerbsDriver {
 public:
  virtual ~VerbsDriver() = default;
  virtual std::vector<std::string> devices() = 0;
  virtual Result<std::unique_ptr<VerbsDevice>> open(const std::string& device) = 0;
};

}  // namespace r2ccl
