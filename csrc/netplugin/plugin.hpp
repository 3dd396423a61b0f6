// The plugin of a process: its NICs, its engine, and the exchange.  Made at the first init() of
// NCCL.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/errors.hpp"
#include "engine/engine.hpp"
#include "netplugin/abi.hpp"
#include "netplugin/exchange.hpp"
#include "netplugin/nics.hpp"
#include "netplugin/watchdog.hpp"

namespace r2ccl::net {

class Plugin {
 public:
  ~Plugin();
  Plugin(const Plugin&) = delete;
  Plugin& operator=(const Plugin&) = delete;

  // Adds a user to the plugin of this process, and makes the plugin if there is none.  A forked
  // child gets a plugin of its own.  `log`: the first logger counts.  `ends`: the user is a
  // communicator of NCCL 2.28 or later, which calls remove_user().  The engine ends with the last
  // user, unless an earlier NCCL has initialised the plugin, which never tells its end.
  static Status add_user(NcclLogger log, bool ends);
  static void remove_user();
  // Returns the plugin if there is one.
  static std::shared_ptr<Plugin> current();

  [[nodiscard]] const std::vector<Nic>& nics() const { return nics_; }
  [[nodiscard]] Exchange& exchange() { return *exchange_; }
  [[nodiscard]] Watchdog& watchdog() { return *watchdog_; }
  [[nodiscard]] const std::shared_ptr<Engine>& engine() const { return engine_; }

 private:
  explicit Plugin(NcclLogger log) : log_(log) {}
  Status start();
  void watch();

  NcclLogger log_;
  std::vector<Nic> nics_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<Exchange> exchange_;
  std::unique_ptr<Watchdog> watchdog_;
  std::thread watcher_;  // writes the log, and ends a process that ignores an error
};

// Reports an error to NCCL's log, keeps the first for r2ccl_net_state(), and returns NCCL's code.
NcclResult report(const Status& status);
void set_logger(NcclLogger log);

}  // namespace r2ccl::net
