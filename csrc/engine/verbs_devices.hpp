// The RDMA devices that this process has rails on, and the memory that they share.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "drivers/ip_address.hpp"
#include "drivers/verbs.hpp"
#include "engine/log.hpp"
#include "link/shape.hpp"
#include "r2ccl/errors.hpp"
#include "rails/verbs/memory_pool.hpp"

namespace r2ccl {

// The GID that a connection of this port uses: the one asked for; else, on InfiniBand, the first;
// else that of the rail's own address, by RoCE v2 where there is a choice; else the first of RoCE
// v2; else the first of all.  `wanted` below 0: none is asked for.
Result<VerbsGidEntry> choose_gid(const VerbsPort& port, const IpAddress& local, int wanted);

class VerbsDevices {
 public:
  using OnEvent = std::function<void(const std::string& device, const VerbsEvent& event)>;

  // No driver: libibverbs, loaded when the first device is opened.
  VerbsDevices(std::shared_ptr<VerbsDriver> driver, LogQueue& log)
      : driver_(std::move(driver)), log_(log) {}

  Status open(const std::string& device);
  // Null: not open, or gone.
  [[nodiscard]] std::shared_ptr<VerbsDevice> find(const std::string& device) const;
  [[nodiscard]] MemoryPool& pool() { return pool_; }

  void add_poll_fds(std::vector<pollfd>& fds) const;
  // Hands on what devices have to say, and looks for those that are gone.
  void progress(TimeNs now, const OnEvent& on_event);
  // Of a fork: the devices are the parent's.
  void abandon();

 private:
  // A device that was gone is opened, and told of all memory, on a thread: that may take long.
  struct Return {
    std::atomic<bool> done{false};
    std::shared_ptr<VerbsDevice> device;  // null: it is not back
    std::vector<MemoryPool::Known> memory;
  };
  struct Entry {
    std::shared_ptr<VerbsDevice> device;  // null: gone
    std::shared_ptr<Return> returning;    // while gone: somebody is looking
    TimeNs looked_at = 0;                 // while gone
  };

  void look_for(const std::string& name, Entry& entry, TimeNs now);

  std::shared_ptr<VerbsDriver> driver_;
  LogQueue& log_;
  MemoryPool pool_;
  std::map<std::string, Entry> entries_;
};

}  // namespace r2ccl
