// Simulated RDMA devices for tests, all on one wire.  Writes land at once, or on command of the
// script.  The script can provoke every failure of a device.  Script functions may run on another
// thread than the user of the devices.
#pragma once

#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "drivers/fake_wire.hpp"
#include "drivers/verbs.hpp"

namespace r2ccl {

class FakeVerbs final : public VerbsDriver,
                        private FakeWire,
                        public std::enable_shared_from_this<FakeVerbs> {
 public:
  static constexpr std::uint16_t pkeys = 4;  // size of a port's P_Key table

  // ---- the script ----
  // Adds a device with a single port, number 1, and a RoCE v2 GID at index 1.
  void add_device(const std::string& name) {
    const std::lock_guard lock(mutex_);
    Device& device = devices_[name];
    device.gid.back() = static_cast<std::byte>(devices_.size());
  }
  // hold() keeps all writes on the wire. let_go() lands the held writes; later writes land at once.
  void hold() { set_holding(true); }
  void let_go() { set_holding(false); }
  // Lands writes of the queue pairs in random order from now on, a single write per turn.
  void shuffle(unsigned seed) {
    const std::lock_guard lock(mutex_);
    random_.seed(seed);
    shuffled_ = true;
  }
  // Holds back all traffic from and to this device, without an error.  Unmuting delivers the
  // traffic.
  void mute(const std::string& name, bool muted) {
    const std::lock_guard lock(mutex_);
    devices_[name].muted = muted;
    if (!muted) land();
  }
  // Mutes the device at its first write with a source inside `memory`, before the write lands.
  void mute_at(const std::string& name, std::span<const std::byte> memory) {
    const std::lock_guard lock(mutex_);
    devices_[name].mutes_at = memory;
  }
  // Fails each queue pair of the device that has pending writes: retries exhausted.  Returns false
  // if the device has no pending write.
  bool exhaust_retries(const std::string& name) {
    const std::lock_guard lock(mutex_);
    bool any = false;
    for (auto& [number, pair] : pairs_) {
      if (pair.device != name || pair.waiting.empty()) continue;
      break_pair(pair, "retries exhausted");
      any = true;
    }
    return any;
  }
  // Moves the newest queue pair of the device into the error state without any event.
  void flush_newest(const std::string& name) {
    const std::lock_guard lock(mutex_);
    if (Pair* pair = newest(name); pair != nullptr) flush(*pair);
  }
  [[nodiscard]] std::uint32_t queue_pair_of(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const Pair* pair = newest(name);
    return pair == nullptr ? 0 : pair->number;
  }
  void post_event(const std::string& name, const VerbsEvent& event) {
    const std::lock_guard lock(mutex_);
    Device& device = devices_[name];
    device.events.push_back(event);
    ::eventfd_write(device.event_fd.get(), 1);
  }
  // Adds an unsolicited completion to the newest queue pair of the device.
  void inject_completion(const std::string& name, const VerbsCompletion& completion) {
    const std::lock_guard lock(mutex_);
    if (Pair* pair = newest(name); pair != nullptr) complete(*pair, completion);
  }
  // Moves the RoCE v2 GID to `index`, and sets the last byte of the GID.
  void set_gid(const std::string& name, std::uint8_t index, std::byte last) {
    const std::lock_guard lock(mutex_);
    devices_[name].gid_index = index;
    devices_[name].gid.back() = last;
  }
  void set_port_active(const std::string& name, bool active) {
    const std::lock_guard lock(mutex_);
    devices_[name].active = active;
  }
  void remove(const std::string& name) {  // every later call fails
    const std::lock_guard lock(mutex_);
    devices_[name].removed = true;
    ++devices_[name].removals;  // handles opened earlier stay unusable
    devices_[name].fatal_reported = false;
    for (auto& [number, pair] : pairs_)
      if (pair.device == name) pair.dead = true;
  }
  // Makes a removed device available again; its old handles stay unusable.
  void plug_in(const std::string& name) {
    const std::lock_guard lock(mutex_);
    devices_[name].removed = false;
  }
  void fail_posts(const std::string& name, int error) {  // 0 = succeed again
    const std::lock_guard lock(mutex_);
    devices_[name].post_error = error;
  }
  void fail_sharing(const std::string& name, int error) {  // 0 = succeed again
    const std::lock_guard lock(mutex_);
    devices_[name].share_error = error;
  }
  // Accepts dma-buf registrations, but fails every write into a dma-buf.
  void break_dma_bufs(const std::string& name) {
    const std::lock_guard lock(mutex_);
    devices_[name].dma_bufs_break = true;
  }
  void refuse_dma_bufs(const std::string& name, int error) {  // 0 = accept again
    const std::lock_guard lock(mutex_);
    devices_[name].dma_buf_error = error;
  }
  // Blocks VerbsQueuePair::fail() until hang(false).
  void hang(const std::string& name, bool hanging) {
    const std::lock_guard lock(mutex_);
    devices_[name].hanging = hanging;
    changed_.notify_all();
  }
  // Blocks port queries until hang_ports(false).
  void hang_ports(const std::string& name, bool hanging) {
    const std::lock_guard lock(mutex_);
    devices_[name].ports_hang = hanging;
    changed_.notify_all();
  }
  // Blocks the deregistration of memory until hang_freeing(false).
  void hang_freeing(const std::string& name, bool hanging) {
    const std::lock_guard lock(mutex_);
    devices_[name].freeing_hangs = hanging;
    changed_.notify_all();
  }
  // Makes destroy() of the device's queue pairs fail until refuse_destroy(false).
  void refuse_destroy(const std::string& name, bool refusing) {
    const std::lock_guard lock(mutex_);
    devices_[name].undying = refusing;
  }
  [[nodiscard]] std::size_t queue_pairs() const {
    const std::lock_guard lock(mutex_);
    return pairs_.size();
  }
  [[nodiscard]] std::size_t queue_pairs_of(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    for (const auto& [number, pair] : pairs_) count += pair.device == name ? 1U : 0U;
    return count;
  }
  [[nodiscard]] std::size_t shared_regions() const {
    const std::lock_guard lock(mutex_);
    return regions_.size();
  }
  // Returns the number of bytes written by peers into regions registered at exactly this address.
  [[nodiscard]] std::size_t written(const void* memory) const {
    const std::lock_guard lock(mutex_);
    std::size_t bytes = 0;
    for (const auto& [key, region] : regions_)
      if (region.memory.data() == memory) bytes += region.written;
    return bytes;
  }
  [[nodiscard]] std::uint64_t writes(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    return devices_.at(name).writes;
  }

  // not_ready() counts writes with immediate that found no posted receive. overruns() counts
  // completions beyond the capacity of their completion queue.
  [[nodiscard]] std::size_t not_ready() const {
    const std::lock_guard lock(mutex_);
    return not_ready_;
  }
  [[nodiscard]] std::size_t overruns() const {
    const std::lock_guard lock(mutex_);
    return overruns_;
  }
  // Attributes of the creation and connection of a device's newest queue pair.
  struct QueuePairAttributes {
    VerbsAddress own;
    VerbsPath path;
    std::uint16_t pkey_index = 0;
    VerbsDepth depth;
  };
  [[nodiscard]] QueuePairAttributes newest_of(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const Pair* pair = newest(name);
    return pair == nullptr
               ? QueuePairAttributes{}
               : QueuePairAttributes{pair->own, pair->path, pair->pkey_index, pair->depth};
  }
  // Blocks memory registration until hang_sharing(false).
  void hang_sharing(const std::string& name, bool hanging) {
    const std::lock_guard lock(mutex_);
    devices_[name].sharing_hangs = hanging;
    changed_.notify_all();
  }

  // ---- VerbsDriver ----
  std::vector<std::string> devices() override {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> names;
    for (const auto& [name, device] : devices_)
      if (!device.removed) names.push_back(name);
    return names;
  }
  Result<std::unique_ptr<VerbsDevice>> open(const std::string& name) override {
    const std::lock_guard lock(mutex_);
    const auto found = devices_.find(name);
    if (found == devices_.end() || found->second.removed)
      return Status(ErrorCode::internal, "RDMA device " + name + ": No such device");
    return std::unique_ptr<VerbsDevice>(
        std::make_unique<Handle>(shared_from_this(), name, found->second.removals));
  }

 private:
  class SharedMemory final : public VerbsMemory {
   public:
    SharedMemory(std::shared_ptr<FakeVerbs> verbs, std::uint32_t key)
        : verbs_(std::move(verbs)), key_(key) {}
    ~SharedMemory() override { (void)deregister(); }
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;
    [[nodiscard]] std::uint32_t local_key() const override { return key_; }
    [[nodiscard]] std::uint32_t remote_key() const override { return key_; }
    int deregister() override {
      std::unique_lock lock(verbs_->mutex_);
      const auto region = verbs_->regions_.find(key_);
      if (region == verbs_->regions_.end()) return 0;
      const Device& device = verbs_->devices_[region->second.device];
      verbs_->changed_.wait(lock, [&] { return !device.freeing_hangs; });
      verbs_->regions_.erase(key_);
      return 0;
    }

   private:
    const std::shared_ptr<FakeVerbs> verbs_;
    const std::uint32_t key_;
  };

  class QueuePair final : public VerbsQueuePair {
   public:
    QueuePair(std::shared_ptr<FakeVerbs> verbs, std::uint32_t number)
        : verbs_(std::move(verbs)), number_(number) {}
    ~QueuePair() override { (void)destroy(); }
    QueuePair(const QueuePair&) = delete;
    QueuePair& operator=(const QueuePair&) = delete;

    [[nodiscard]] std::uint32_t number() const override { return number_; }
    [[nodiscard]] std::uint32_t inline_bytes() const override {
      const std::lock_guard lock(verbs_->mutex_);
      return verbs_->pairs_.at(number_).depth.inline_bytes;
    }
    int connect(const VerbsAddress& own, const VerbsAddress& peer, const VerbsPath& path) override {
      const std::lock_guard lock(verbs_->mutex_);
      Pair& pair = self();
      if (pair.dead) return EIO;
      pair.own = own;
      pair.path = path;
      if (!verbs_->devices_[pair.device].active) return ETIMEDOUT;
      pair.peer = peer.queue_pair;
      return 0;
    }
    int fail() override {
      std::unique_lock lock(verbs_->mutex_);
      const std::string device = self().device;
      verbs_->changed_.wait(lock, [&] { return !verbs_->devices_[device].hanging; });
      if (self().dead) return EIO;
      verbs_->flush(self());
      return 0;
    }
    int destroy() override {
      const std::lock_guard lock(verbs_->mutex_);
      const auto pair = verbs_->pairs_.find(number_);
      if (pair == verbs_->pairs_.end()) return 0;
      const Device& device = verbs_->devices_[pair->second.device];
      if (device.undying) return EBUSY;
      if (device.removed && !device.fatal_reported) return EIO;  // removal still in progress
      verbs_->flush(pair->second);
      verbs_->pairs_.erase(pair);
      return 0;
    }
    int post(std::span<const VerbsWrite> writes) override {
      const std::lock_guard lock(verbs_->mutex_);
      return verbs_->post(self(), writes);
    }
    int post_receives(std::uint64_t id, std::uint32_t count) override {
      const std::lock_guard lock(verbs_->mutex_);
      Pair& pair = self();
      if (pair.dead) return EIO;
      if (pair.receives.size() + count > pair.depth.receives) return ENOMEM;
      for (std::uint32_t i = 0; i < count; ++i) pair.receives.push_back(id);
      if (pair.failed) verbs_->flush(pair);
      verbs_->land();
      return 0;
    }
    int poll(std::span<VerbsCompletion> completions) override {
      const std::lock_guard lock(verbs_->mutex_);
      Pair& pair = self();
      if (pair.dead) return -EIO;
      std::size_t taken = 0;
      for (; taken < completions.size() && !pair.completions.empty(); ++taken) {
        completions[taken] = pair.completions.front();
        pair.completions.pop_front();
      }
      return static_cast<int>(taken);
    }
    [[nodiscard]] int fd() const override {
      const std::lock_guard lock(verbs_->mutex_);
      return verbs_->pairs_.at(number_).fd.get();
    }
    int arm() override {
      const std::lock_guard lock(verbs_->mutex_);
      eventfd_t count = 0;
      (void)::eventfd_read(self().fd.get(), &count);
      self().armed = true;
      return 0;
    }

   private:
    Pair& self() { return verbs_->pairs_.at(number_); }
    const std::shared_ptr<FakeVerbs> verbs_;
    const std::uint32_t number_;
  };

  class Handle final : public VerbsDevice {
   public:
    Handle(std::shared_ptr<FakeVerbs> verbs, std::string name, unsigned removals)
        : verbs_(std::move(verbs)), name_(std::move(name)), removals_(removals) {}
    [[nodiscard]] const std::string& name() const override { return name_; }
    Result<VerbsPort> port(std::uint8_t number) override {
      std::unique_lock lock(verbs_->mutex_);
      const Device& device = verbs_->devices_[name_];
      if (is_removed(device)) note_error(ENODEV);
      if (is_removed(device) || number != 1)
        return Status(ErrorCode::internal, name_ + " port " + std::to_string(number) + ": gone");
      VerbsPort port;
      port.active = device.active;
      port.mtu = 4096;
      port.gids.push_back({0, VerbsGidType::roce_v1, device.gid});
      port.gids.push_back({device.gid_index, VerbsGidType::roce_v2, device.gid});
      verbs_->changed_.wait(lock, [&] { return !device.ports_hang; });
      return port;  // state from before the wait
    }
    Result<std::unique_ptr<VerbsMemory>> share(std::span<std::byte> memory,
                                               bool /*relaxed_ordering*/) override {
      return take(memory, [](const Device& device, Region&) { return device.share_error; });
    }
    Result<std::unique_ptr<VerbsMemory>> share_dma_buf(int dma_buf, std::span<std::byte> addresses,
                                                       bool /*relaxed_ordering*/) override {
      return take(addresses, [dma_buf](const Device& device, Region& region) {
        return device.dma_buf_error != 0 ? device.dma_buf_error : map(dma_buf, region);
      });
    }
    Result<std::unique_ptr<VerbsQueuePair>> create_queue_pair(std::uint8_t /*port*/,
                                                              std::uint16_t pkey_index,
                                                              const VerbsDepth& depth) override {
      const std::lock_guard lock(verbs_->mutex_);
      if (is_removed(verbs_->devices_[name_]))
        return Status(ErrorCode::internal, "a queue pair of " + name_ + ": gone");
      if (pkey_index >= pkeys)
        return Status(ErrorCode::internal, "a queue pair of " + name_ + ": Invalid argument");
      const std::uint32_t number = ++verbs_->next_pair_;
      Pair& pair = verbs_->pairs_[number];
      pair.device = name_;
      pair.number = number;
      pair.depth = depth;
      pair.pkey_index = pkey_index;
      return std::unique_ptr<VerbsQueuePair>(std::make_unique<QueuePair>(verbs_, number));
    }
    [[nodiscard]] int event_fd() const override {
      const std::lock_guard lock(verbs_->mutex_);
      return verbs_->devices_.at(name_).event_fd.get();
    }
    std::optional<VerbsEvent> next_event() override {
      const std::lock_guard lock(verbs_->mutex_);
      Device& device = verbs_->devices_[name_];
      if (device.events.empty()) return std::nullopt;
      const VerbsEvent event = device.events.front();
      device.events.pop_front();
      if (event.kind == VerbsEvent::Kind::device_fatal) device.fatal_reported = true;
      eventfd_t count = 0;
      if (device.events.empty()) (void)::eventfd_read(device.event_fd.get(), &count);
      return event;
    }

   private:
    [[nodiscard]] bool is_removed(const Device& device) const {
      return device.removed || device.removals != removals_;
    }
    // Registers a region after `prepare`, which returns 0 or an errno.
    template <typename Prepare>
    Result<std::unique_ptr<VerbsMemory>> take(std::span<std::byte> memory, Prepare prepare) {
      std::unique_lock lock(verbs_->mutex_);
      const Device& device = verbs_->devices_[name_];
      verbs_->changed_.wait(lock, [&] { return !device.sharing_hangs; });
      Region region{.device = name_, .memory = memory};
      const int error = is_removed(device) ? ENODEV : prepare(device, region);
      note_error(error);
      if (error != 0)
        return Status(ErrorCode::internal, "registering " + std::to_string(memory.size()) +
                                               " bytes with " + name_ + ": " +
                                               std::strerror(error));
      const std::uint32_t key = ++verbs_->next_key_;
      verbs_->regions_[key] = std::move(region);
      return std::unique_ptr<VerbsMemory>(std::make_unique<SharedMemory>(verbs_, key));
    }

    const std::shared_ptr<FakeVerbs> verbs_;
    const std::string name_;
    const unsigned removals_;
  };
};

}  // namespace r2ccl
