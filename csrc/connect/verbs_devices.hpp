// The RDMA devices that this process has rails on, and the memory that they share.
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

// The GID that a connection of this port uses: the one asked for; else, on InfiniBand, the first;
// else that of the rail's own address, by RoCE v2 where there is a choice; else the first of RoCE
// v2; else the first of all.  `wanted` below 0: none is asked for.
Result<VerbsGidEntry> choose_gid(const VerbsPort& port, const IpAddress& local, int wanted);

class VerbsDevices {
 public:
  using OnEvent = std::function<void(const std::string& device, const VerbsEvent& event)>;
  using OnPort =
      std::function<void(const std::string& device, std::uint8_t port, Result<VerbsPort> now)>;

  // No driver: libibverbs, loaded when the first device is opened.
  VerbsDevices(std::shared_ptr<VerbsDriver> driver, LogQueue& log)
      : driver_(std::move(driver)), log_(log) {}

  Status open(const std::string& device);
  // Open, or gone and looked for.
  [[nodiscard]] bool knows(const std::string& device) const { return entries_.contains(device); }
  // Null: not open, or gone.
  [[nodiscard]] std::shared_ptr<VerbsDevice> find(const std::string& device) const;
  [[nodiscard]] MemoryPool& pool() { return pool_; }

  void add_poll_fds(std::vector<pollfd>& fds) const;
  // Whether it said what its port is.  One that does not, again and again, is let go of.
  void note_answer(const std::string& device, bool answered);
  // What a port is now; progress() hands on the answer.
  void query_port(const std::string& device, std::uint8_t port);
  // Hands on what devices have to say, and looks for those that are gone.
  void progress(TimeNs now, const OnEvent& on_event, const OnPort& on_port);
  // Of a fork: the devices are the parent's.
  void abandon();

 private:
  // Asked on a thread: a device may take long to answer.
  struct PortQuery {
    std::shared_ptr<VerbsDevice> device;
    std::uint8_t port = 0;
    std::optional<Result<VerbsPort>> answer;
    std::atomic<bool> done{false};
  };
  struct PendingQuery {
    std::shared_ptr<PortQuery> query;
    bool again = false;  // asked anew since
  };
  // A device that was gone is opened, and told of all memory, on a thread: that may take long.
  struct Reopening {
    std::atomic<bool> done{false};
    std::shared_ptr<VerbsDevice> device;  // null: it is not back
    std::vector<MemoryPool::Registration> memory;
  };
  struct Entry {
    std::shared_ptr<VerbsDevice> device;   // null: gone
    std::shared_ptr<Reopening> reopening;  // while gone: somebody is looking
    TimeNs looked_at = 0;                  // while gone
    unsigned refusals = 0;                 // in a row
  };

  void look_for(const std::string& name, Entry& entry, TimeNs now);
  // It is of no use any more, as it is open now.
  void let_go(const std::string& name, Entry& entry, TimeNs now);
  // Those of no use which have not said that they are gone.
  void let_go_distrusted(TimeNs now, const OnEvent& on_event);
  static std::shared_ptr<PortQuery> start_query(std::shared_ptr<VerbsDevice> device,
                                                std::uint8_t port);
  void hand_on_answers(const OnPort& on_port);

  std::shared_ptr<VerbsDriver> driver_;
  LogQueue& log_;
  MemoryPool pool_;
  std::map<std::string, Entry> entries_;
  std::map<std::pair<std::string, std::uint8_t>, PendingQuery> pending_queries_;
  // Let go of, but not told to be gone: fences wait for that word, or for the memory.
  struct DrainingDevice {
    std::shared_ptr<VerbsDevice> device;
    MemoryPool::Withdrawal withdrawn;
  };
  std::list<DrainingDevice> draining_;
};

}  // namespace r2ccl
