// The RDMA devices used by rails of this process, and the memory shared by them.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "drivers/ip_address.hpp"
#include "drivers/verbs.hpp"
#include "rails/verbs/memory_pool.hpp"

namespace r2ccl {

// Chooses the GID for connections of a port, by the first rule that applies:
//   1. index `wanted`, if `wanted` is 0 or more; an error if the port has no GID there
//   2. InfiniBand: the first GID
//   3. RoCE: the GID of the rail's own address, RoCE v2 preferred
//   4. RoCE: the first RoCE v2 GID
//   5. the first GID
Result<VerbsGidEntry> choose_gid(const VerbsPort& port, const IpAddress& local, int wanted);

// Not thread-safe.
class VerbsDevices {
 public:
  using OnEvent = std::function<void(const std::string& device, const VerbsEvent& event)>;
  using OnPort =
      std::function<void(const std::string& device, std::uint8_t port, Result<VerbsPort> now)>;

  // A null `driver` stands for libibverbs, loaded when the first device is opened.
  VerbsDevices(std::shared_ptr<VerbsDriver> driver, LogQueue& log)
      : driver_(std::move(driver)), log_(log) {}

  // Opens a device and registers the memory of the pool with the device.  No effect if open.
  Status open(const std::string& device);
  // Returns true for open devices and for lost devices under search.
  [[nodiscard]] bool knows(const std::string& device) const { return entries_.contains(device); }
  // Returns the open device; null if unknown or lost.
  [[nodiscard]] std::shared_ptr<VerbsDevice> find(const std::string& device) const;
  [[nodiscard]] MemoryPool& pool() { return pool_; }

  void add_poll_fds(std::vector<pollfd>& fds) const;
  // Records whether a device answered a port query.  A device that refuses 3 times in a row is
  // distrusted: progress() closes and reopens the device.
  void note_answer(const std::string& device, bool answered);
  // Queries the current state of a port on a thread; progress() delivers the answer.
  void query_port(const std::string& device, std::uint8_t port);
  // Delivers device events and port answers, and looks for lost devices.
  void progress(TimeNs now, const OnEvent& on_event, const OnPort& on_port);
  // Called after fork() in the child: leaks all devices, which belong to the parent.
  void abandon();

 private:
  // A port query on a thread, because a device may take long to answer.
  struct PortQuery {
    std::shared_ptr<VerbsDevice> device;
    std::uint8_t port = 0;
    std::optional<Result<VerbsPort>> answer;
    std::atomic<bool> done{false};
  };
  struct PendingQuery {
    std::shared_ptr<PortQuery> query;
    bool again = false;  // queried again since the start
  };
  // A lost device being reopened on a thread, with registration of all memory: both may take long.
  struct Reopening {
    std::atomic<bool> done{false};
    std::shared_ptr<VerbsDevice> device;  // null: still missing
    std::vector<MemoryPool::Registration> memory;
  };
  struct Entry {
    std::shared_ptr<VerbsDevice> device;   // null: lost
    std::shared_ptr<Reopening> reopening;  // set while a thread looks for a lost device
    TimeNs looked_at = 0;                  // last search for a lost device
    unsigned refusals = 0;                 // consecutive refusals
  };

  void look_for(const std::string& name, Entry& entry, TimeNs now);
  // Closes the current handle of the device; look_for() reopens the device later.
  void let_go(const std::string& name, Entry& entry, TimeNs now);
  // Closes distrusted devices without a device_fatal event.
  void let_go_distrusted(TimeNs now, const OnEvent& on_event);
  static std::shared_ptr<PortQuery> start_query(std::shared_ptr<VerbsDevice> device,
                                                std::uint8_t port);
  void hand_on_answers(const OnPort& on_port);

  std::shared_ptr<VerbsDriver> driver_;
  LogQueue& log_;
  MemoryPool pool_;
  std::map<std::string, Entry> entries_;
  std::map<std::pair<std::string, std::uint8_t>, PendingQuery> pending_queries_;
  // A closed device without a device_fatal event so far.  Fences wait for the event, or until all
  // memory is withdrawn from the device.
  struct DrainingDevice {
    std::shared_ptr<VerbsDevice> device;
    MemoryPool::Withdrawal withdrawn;
  };
  std::list<DrainingDevice> draining_;
};

}  // namespace r2ccl
