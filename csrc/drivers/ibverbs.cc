#include "drivers/ibverbs.hpp"

#include <string>

#if R2CCL_IBVERBS

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

#include "base/fork.hpp"
#include "drivers/ibverbs_attributes.hpp"
#include "drivers/ibverbs_library.hpp"

namespace r2ccl {
namespace {

constexpr std::size_t batch = 16;  // work requests or completions per call
// Entries read from a GID table.  The kernel interface limits the table to 64 KiB, and an entry
// takes 32 bytes.
constexpr std::size_t most_gids = 1024;
constexpr int shared_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

Status failed(const std::string& what, int error) {
  return {ErrorCode::internal, what + ": " + std::strerror(error)};
}

// An open device.  Queue pairs and memory regions hold a shared pointer, so they keep the device
// open.
struct Context {
  const IbverbsLibrary& library;
  ibv_context* verbs;
  ibv_pd* domain;

  Context(const IbverbsLibrary& of, ibv_context* opened, ibv_pd* allocated)
      : library(of),
        verbs(opened),
        domain(allocated),
        commands(opened->cmd_fd),
        events(opened->async_fd) {}
  // Spreads completion queues round-robin over the completion vectors, so interrupts do not all hit
  // a single CPU.
  int next_vector() { return static_cast<int>(vectors++ % vector_count()); }
  [[nodiscard]] unsigned vector_count() const {
    return verbs->num_comp_vectors > 0 ? static_cast<unsigned>(verbs->num_comp_vectors) : 1U;
  }
  std::atomic<unsigned> vectors{0};
  // Set by IBV_EVENT_DEVICE_FATAL: the kernel has released all resources of the device.  Later
  // calls fail with EIO; the user-space handles remain, and nothing can free them.
  std::atomic<bool> fatal{false};
  // The kernel keeps the objects of a device until all copies of its descriptor are closed.
  ClosedInChild commands;
  ClosedInChild events;
  [[nodiscard]] bool ended_by_kernel(int error) const { return error == EIO && fatal.load(); }

  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() {
    library.dealloc_pd(domain);
    commands = {};
    events = {};
    library.close_device(verbs);
  }
};

VerbsGidType type_of(std::uint32_t type) {
  switch (type) {
    case IBV_GID_TYPE_ROCE_V1: return VerbsGidType::roce_v1;
    case IBV_GID_TYPE_ROCE_V2: return VerbsGidType::roce_v2;
    default: return VerbsGidType::infiniband;
  }
}

class Memory final : public VerbsMemory {
 public:
  Memory(std::shared_ptr<Context> context, ibv_mr* region)
      : context_(std::move(context)), region_(region) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() override { (void)deregister(); }

  [[nodiscard]] std::uint32_t local_key() const override { return region_->lkey; }
  [[nodiscard]] std::uint32_t remote_key() const override { return region_->rkey; }
  int deregister() override {
    if (region_ == nullptr) return 0;
    const int error = context_->library.dereg_mr(region_);
    if (error != 0 && !context_->ended_by_kernel(error)) return error;
    region_ = nullptr;
    return 0;
  }

 private:
  const std::shared_ptr<Context> context_;
  ibv_mr* region_;
};

class QueuePair final : public VerbsQueuePair {
 public:
  QueuePair(std::shared_ptr<Context> context, ibv_comp_channel* channel, ibv_cq* completions)
      : context_(std::move(context)), channel_(channel), completions_(completions) {}
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;
  ~QueuePair() override {
    (void)destroy();
    if (events_ > 0) library().ack_cq_events(completions_, events_);
    if (completions_ != nullptr) library().destroy_cq(completions_);
    inherited_ = {};
    library().destroy_comp_channel(channel_);
  }

  int create(std::uint8_t port, std::uint16_t pkey_index, const VerbsDepth& depth) {
    ibv_qp_init_attr wanted{};
    wanted.qp_type = IBV_QPT_RC;
    wanted.send_cq = wanted.recv_cq = completions_;
    wanted.cap = {.max_send_wr = depth.sends,
                  .max_recv_wr = depth.receives,
                  .max_send_sge = 1,
                  .max_recv_sge = 1,
                  .max_inline_data = depth.inline_bytes};
    pair_ = library().create_qp(context_->domain, &wanted);
    if (pair_ == nullptr && depth.inline_bytes > 0) {  // perhaps beyond the device's limit
      wanted.cap.max_inline_data = 0;
      pair_ = library().create_qp(context_->domain, &wanted);
    }
    if (pair_ == nullptr) return errno;
    inline_bytes_ = wanted.cap.max_inline_data;
    completions_->cq_context = reinterpret_cast<void*>(std::uintptr_t{pair_->qp_num});
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = port;
    attributes.pkey_index = pkey_index;
    attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    return library().modify_qp(
        pair_, &attributes, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS);
  }

  [[nodiscard]] std::uint32_t number() const override { return pair_->qp_num; }
  [[nodiscard]] std::uint32_t inline_bytes() const override { return inline_bytes_; }

  int connect(const VerbsAddress& own, const VerbsAddress& peer, const VerbsPath& path) override {
    ibv_qp_attr receive = receiving_attributes(own, peer, path);
    const int error =
        library().modify_qp(pair_, &receive,
                            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (error != 0) return error;
    ibv_qp_attr send = sending_attributes(own, path);
    return library().modify_qp(pair_, &send,
                               IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                   IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
  }

  int fail() override {
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_ERR;
    return library().modify_qp(pair_, &attributes, IBV_QP_STATE);
  }

  int destroy() override {
    if (pair_ == nullptr) return 0;
    const int error = library().destroy_qp(pair_);
    if (error != 0 && !context_->ended_by_kernel(error)) return error;
    pair_ = nullptr;
    return 0;
  }

  int post(std::span<const VerbsWrite> writes) override {
    for (std::size_t begin = 0; begin < writes.size(); begin += batch) {
      const auto part = writes.subspan(begin, std::min(batch, writes.size() - begin));
      std::array<ibv_sge, batch> sources{};
      std::array<ibv_send_wr, batch> requests{};
      for (std::size_t i = 0; i < part.size(); ++i) {
        const VerbsWrite& write = part[i];
        ibv_send_wr& request = requests[i];
        sources[i] = {reinterpret_cast<std::uintptr_t>(write.source.data), write.source.bytes,
                      write.source.local_key};
        request.wr_id = write.id;
        request.next = i + 1 < part.size() ? &requests[i + 1] : nullptr;
        request.sg_list = &sources[i];
        request.num_sge = write.source.bytes > 0 ? 1 : 0;
        request.opcode =
            write.immediate.has_value() ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
        request.send_flags = (write.signaled ? unsigned{IBV_SEND_SIGNALED} : 0U) |
                             (write.inlined ? unsigned{IBV_SEND_INLINE} : 0U);
        request.imm_data = htobe32(write.immediate.value_or(0));
        request.wr.rdma.remote_addr = write.remote_address;
        request.wr.rdma.rkey = write.remote_key;
      }
      ibv_send_wr* bad = nullptr;
      if (const int error = ::ibv_post_send(pair_, requests.data(), &bad); error != 0) return error;
    }
    return 0;
  }

  int post_receives(std::uint64_t id, std::uint32_t count) override {
    while (count > 0) {
      std::array<ibv_recv_wr, batch> requests{};
      const auto now = static_cast<std::uint32_t>(std::min<std::size_t>(batch, count));
      for (std::uint32_t i = 0; i < now; ++i) {
        requests[i].wr_id = id;
        requests[i].next = i + 1 < now ? &requests[i + 1] : nullptr;
      }
      ibv_recv_wr* bad = nullptr;
      if (const int error = ::ibv_post_recv(pair_, requests.data(), &bad); error != 0) return error;
      count -= now;
    }
    return 0;
  }

  int poll(std::span<VerbsCompletion> completions) override {
    std::array<ibv_wc, batch> raw;
    const auto most = static_cast<int>(std::min(batch, completions.size()));
    const int got = ::ibv_poll_cq(completions_, most, raw.data());
    for (int i = 0; i < got; ++i) {
      const ibv_wc& from = raw[static_cast<std::size_t>(i)];
      VerbsCompletion& to = completions[static_cast<std::size_t>(i)];
      to = {};
      to.id = from.wr_id;
      to.ok = from.status == IBV_WC_SUCCESS;
      if (!to.ok) {
        to.flushed = from.status == IBV_WC_WR_FLUSH_ERR;
        to.status = library().wc_status_str(from.status);
        continue;  // all other fields are invalid
      }
      to.receive = (from.opcode & IBV_WC_RECV) != 0;
      to.bytes = from.byte_len;
      if ((from.wc_flags & IBV_WC_WITH_IMM) != 0) to.immediate = be32toh(from.imm_data);
    }
    return got;
  }

  [[nodiscard]] int fd() const override { return channel_->fd; }

  int arm() override {
    ibv_cq* of = nullptr;
    void* unused = nullptr;
    while (library().get_cq_event(channel_, &of, &unused) == 0) ++events_;
    if (events_ >= 1024) {  // each acknowledgement takes a lock
      library().ack_cq_events(completions_, events_);
      events_ = 0;
    }
    return ::ibv_req_notify_cq(completions_, /*solicited_only=*/0);
  }

 private:
  [[nodiscard]] const IbverbsLibrary& library() const { return context_->library; }

  const std::shared_ptr<Context> context_;
  ibv_comp_channel* const channel_;
  ClosedInChild inherited_{channel_->fd};
  ibv_cq* const completions_;
  ibv_qp* pair_ = nullptr;
  std::uint32_t inline_bytes_ = 0;
  unsigned events_ = 0;  // received, not yet acknowledged
};

class Device final : public VerbsDevice {
 public:
  Device(std::shared_ptr<Context> context, std::string name)
      : context_(std::move(context)), name_(std::move(name)) {}

  [[nodiscard]] const std::string& name() const override { return name_; }

  Result<VerbsPort> port(std::uint8_t number) override {
    ibv_port_attr attributes{};
    const int error = library().query_port(context_->verbs, number,
                                           reinterpret_cast<_compat_ibv_port_attr*>(&attributes));
    const std::string what = name_ + " port " + std::to_string(number);
    if (error != 0) return refused(what, error);
    VerbsPort port;
    port.active = attributes.state == IBV_PORT_ACTIVE;
    port.ethernet = attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
    port.lid = attributes.lid;
    port.mtu = bytes_of(attributes.active_mtu);
    std::vector<ibv_gid_entry> entries(most_gids);
    const ssize_t count = library().query_gid_table(context_->verbs, entries.data(), entries.size(),
                                                    0, sizeof(ibv_gid_entry));
    if (count < 0) return refused("the GID table of " + what, static_cast<int>(-count));
    for (ssize_t i = 0; i < count; ++i) {
      const ibv_gid_entry& entry = entries[static_cast<std::size_t>(i)];
      if (entry.port_num != number || entry.gid_index > 255) continue;
      VerbsGidEntry& gid = port.gids.emplace_back();
      gid.index = static_cast<std::uint8_t>(entry.gid_index);
      gid.type = type_of(entry.gid_type);
      std::memcpy(gid.gid.data(), entry.gid.raw, gid.gid.size());
    }
    return port;
  }

  Result<std::unique_ptr<VerbsMemory>> share(std::span<std::byte> memory,
                                             bool relaxed_ordering) override {
    ibv_mr* region = nullptr;
    if (relaxed_ordering)  // devices without relaxed ordering ignore the flag
      region =
          library().reg_mr_iova2(context_->domain, memory.data(), memory.size(),
                                 reinterpret_cast<std::uintptr_t>(memory.data()),
                                 unsigned{shared_access} | unsigned{IBV_ACCESS_RELAXED_ORDERING});
    if (region == nullptr)
      region = library().reg_mr(context_->domain, memory.data(), memory.size(), shared_access);
    if (region == nullptr)
      return refused("registering " + std::to_string(memory.size()) + " bytes with " + name_,
                     errno);
    return std::unique_ptr<VerbsMemory>(std::make_unique<Memory>(context_, region));
  }

  Result<std::unique_ptr<VerbsMemory>> share_dma_buf(int dma_buf, std::span<std::byte> addresses,
                                                     bool relaxed_ordering) override {
    if (library().reg_dmabuf_mr == nullptr)
      return Status(ErrorCode::internal,
                    "libibverbs has no ibv_reg_dmabuf_mr: rdma-core 34 or later is needed");
    const auto share_with = [&](int access) {
      return library().reg_dmabuf_mr(context_->domain, 0, addresses.size(),
                                     reinterpret_cast<std::uintptr_t>(addresses.data()), dma_buf,
                                     access);
    };
    ibv_mr* region = nullptr;
    if (relaxed_ordering) region = share_with(shared_access | IBV_ACCESS_RELAXED_ORDERING);
    if (region == nullptr) region = share_with(shared_access);
    if (region != nullptr)
      return std::unique_ptr<VerbsMemory>(std::make_unique<Memory>(context_, region));
    const int error = errno;  // EPROTONOSUPPORT: kernels before 5.12
    const bool none = error == EOPNOTSUPP || error == ENOSYS || error == EPROTONOSUPPORT;
    return refused("registering " + std::to_string(addresses.size()) + " bytes of a dma-buf with " +
                       name_ + (none ? ", whose driver takes none" : "") + ": ibv_reg_dmabuf_mr",
                   error);
  }

  Result<std::unique_ptr<VerbsQueuePair>> create_queue_pair(std::uint8_t port,
                                                            std::uint16_t pkey_index,
                                                            const VerbsDepth& depth) override {
    const std::string what = "a queue pair of " + name_;
    ibv_comp_channel* const channel = library().create_comp_channel(context_->verbs);
    if (channel == nullptr) return refused("completion channel of " + what, errno);
    ibv_cq* const completions =
        library().create_cq(context_->verbs, static_cast<int>(depth.sends + depth.receives),
                            nullptr, channel, context_->next_vector());
    if (completions == nullptr) {
      const int error = errno;
      library().destroy_comp_channel(channel);
      return refused("completion queue of " + what, error);
    }
    auto pair = std::make_unique<QueuePair>(context_, channel, completions);
    ::fcntl(channel->fd, F_SETFL, ::fcntl(channel->fd, F_GETFL) | O_NONBLOCK);
    if (const int error = pair->create(port, pkey_index, depth); error != 0)
      return refused(what, error);
    return std::unique_ptr<VerbsQueuePair>(std::move(pair));
  }

  [[nodiscard]] int event_fd() const override { return context_->verbs->async_fd; }

  std::optional<VerbsEvent> next_event() override {
    ibv_async_event raw{};
    if (library().get_async_event(context_->verbs, &raw) != 0) return std::nullopt;
    VerbsEvent event;
    event.text = library().event_type_str(raw.event_type);
    using Kind = VerbsEvent::Kind;
    switch (raw.event_type) {
      case IBV_EVENT_PORT_ACTIVE: event.kind = Kind::port_active; break;
      case IBV_EVENT_PORT_ERR: event.kind = Kind::port_error; break;
      case IBV_EVENT_GID_CHANGE: event.kind = Kind::gid_changed; break;
      case IBV_EVENT_LID_CHANGE:
      case IBV_EVENT_PKEY_CHANGE:
      case IBV_EVENT_SM_CHANGE:
      case IBV_EVENT_CLIENT_REREGISTER: event.kind = Kind::port_changed; break;
      case IBV_EVENT_DEVICE_FATAL:
        event.kind = Kind::device_fatal;
        context_->fatal = true;
        break;
      case IBV_EVENT_QP_FATAL:
      case IBV_EVENT_QP_REQ_ERR:
      case IBV_EVENT_QP_ACCESS_ERR:
      case IBV_EVENT_PATH_MIG_ERR: event.kind = Kind::queue_pair_fatal; break;
      case IBV_EVENT_CQ_ERR: event.kind = Kind::completion_queue_error; break;
      default: break;
    }
    switch (event.kind) {
      case Kind::queue_pair_fatal: event.queue_pair = raw.element.qp->qp_num; break;
      case Kind::completion_queue_error:
        event.queue_pair = static_cast<std::uint32_t>(
            reinterpret_cast<std::uintptr_t>(raw.element.cq->cq_context));
        break;
      case Kind::port_active:
      case Kind::port_error:
      case Kind::port_changed:
      case Kind::gid_changed: event.port = static_cast<std::uint8_t>(raw.element.port_num); break;
      case Kind::device_fatal:
      case Kind::other: break;
    }
    library().ack_async_event(&raw);
    return event;
  }

 private:
  Status refused(const std::string& what, int error) {
    note_error(error);
    return failed(what, error);
  }
  [[nodiscard]] const IbverbsLibrary& library() const { return context_->library; }

  const std::shared_ptr<Context> context_;
  const std::string name_;
};

class Driver final : public VerbsDriver {
 public:
  explicit Driver(const IbverbsLibrary& library) : library_(library) {}

  std::vector<std::string> devices() override {
    std::vector<std::string> names;
    int count = 0;
    ibv_device** const list = library_.get_device_list(&count);
    if (list == nullptr) return names;  // the kernel has no verbs support
    for (int i = 0; i < count; ++i) names.emplace_back(library_.get_device_name(list[i]));
    library_.free_device_list(list);
    return names;
  }

  Result<std::unique_ptr<VerbsDevice>> open(const std::string& device) override {
    int count = 0;
    ibv_device** const list = library_.get_device_list(&count);
    if (list == nullptr) return failed("the list of RDMA devices", errno);
    ibv_context* opened = nullptr;
    errno = ENODEV;
    for (int i = 0; i < count && opened == nullptr; ++i)
      if (device == library_.get_device_name(list[i])) opened = library_.open_device(list[i]);
    const int error = errno;
    library_.free_device_list(list);
    if (opened == nullptr) return failed("RDMA device " + device, error);
    ibv_pd* const domain = library_.alloc_pd(opened);
    if (domain == nullptr) {
      const int why = errno;
      library_.close_device(opened);
      return failed("a protection domain of " + device, why);
    }
    ::fcntl(opened->async_fd, F_SETFL, ::fcntl(opened->async_fd, F_GETFL) | O_NONBLOCK);
    auto context = std::make_shared<Context>(library_, opened, domain);
    return std::unique_ptr<VerbsDevice>(std::make_unique<Device>(std::move(context), device));
  }

 private:
  const IbverbsLibrary& library_;
};

}  // namespace

Result<std::shared_ptr<VerbsDriver>> load_ibverbs() {
  auto loaded = IbverbsLibrary::load();
  if (!loaded.ok()) return loaded.take_status();
  return std::shared_ptr<VerbsDriver>(std::make_shared<Driver>(*loaded.value()));
}

}  // namespace r2ccl

#else

namespace r2ccl {

Result<std::shared_ptr<VerbsDriver>> load_ibverbs() {
  return Status(
      ErrorCode::internal,
      "this build of r2serve has no RDMA support: infiniband/verbs.h was missing at build time");
}

}  // namespace r2ccl

#endif
