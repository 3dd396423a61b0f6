#include "netplugin/plugin.hpp"

#include <poll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "base/clock.hpp"
#include "base/threads.hpp"
#include "netplugin/options.hpp"

namespace r2ccl::net {
namespace {

constexpr int exit_status = 70;  // as of other processes of r2serve that have lost a peer

// A process may call the plugin while it ends, so the state is never destroyed.
struct State {
  std::mutex mutex;  // protects the plugin and its users
  std::shared_ptr<Plugin> plugin;
  std::uint64_t users = 0;
  bool kept = false;
  std::atomic<NcclLogger> log{nullptr};
  std::mutex error_mutex;  // protects the first error
  NcclResult first_error = NcclResult::success;
  std::string first_text;
};

State& state() {
  static State* const made = new State;
  return *made;
}

// Peers learn at once of the end of this process.
void close_at_exit() {
  const std::shared_ptr<Plugin> plugin = Plugin::current();
  if (plugin) plugin->engine()->close(0);
}

NcclLogLevel level_of(LogLevel level) {
  switch (level) {
    case LogLevel::debug: return NcclLogLevel::trace;
    case LogLevel::info: return NcclLogLevel::info;
    case LogLevel::warning:
    case LogLevel::error: return NcclLogLevel::warn;
  }
  return NcclLogLevel::info;
}

NcclResult result_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::ok: return NcclResult::success;
    case ErrorCode::invalid_argument:
    case ErrorCode::order_mismatch: return NcclResult::invalid_argument;
    case ErrorCode::peer_lost:
    case ErrorCode::peer_closed:
    case ErrorCode::aborted:
    case ErrorCode::timeout: return NcclResult::remote_error;
    case ErrorCode::internal: return NcclResult::internal_error;
  }
  return NcclResult::internal_error;
}

}  // namespace

void set_logger(NcclLogger log) { state().log.store(log); }

NcclResult report(const Status& status) {
  if (status.ok()) return NcclResult::success;
  State& own = state();
  const NcclResult result = result_of(status.code());
  if (const NcclLogger log = own.log.load(); log != nullptr)
    log(NcclLogLevel::warn, nccl_log_net, "r2ccl", 0, "NET/r2ccl: %s", status.message().c_str());
  const std::lock_guard guard(own.error_mutex);
  if (own.first_error == NcclResult::success) {
    own.first_error = result;
    own.first_text = status.message();
  }
  return result;
}

Status Plugin::add_user(NcclLogger log, bool ends) {
  State& own = state();
  set_logger(log);
  const std::lock_guard guard(own.mutex);
  if (own.plugin && own.plugin->engine()->foreign()) {
    // The threads and sockets are the parent's: the object stays as it is.
    (void)new std::shared_ptr<Plugin>(std::move(own.plugin));
    own.users = 0;
  }
  if (!own.plugin) {
    std::shared_ptr<Plugin> made(new Plugin(log));
    R2CCL_TRY(made->start());
    static const int registered = std::atexit(close_at_exit);
    (void)registered;
    own.plugin = std::move(made);
  }
  // Under the same lock, or another thread might remove the last user in between.
  if (ends)
    ++own.users;
  else
    own.kept = true;
  return {};
}

std::shared_ptr<Plugin> Plugin::current() {
  State& own = state();
  const std::lock_guard guard(own.mutex);
  return own.plugin;
}

void Plugin::remove_user() {
  State& own = state();
  std::shared_ptr<Plugin> last;
  const std::lock_guard guard(own.mutex);
  if (own.users > 0 && --own.users == 0 && !own.kept) last = std::move(own.plugin);
}

Status Plugin::start() {
  auto options = options_from_environment();
  if (!options.ok()) return options.take_status();
  auto nics = find_nics(options.value().rails, options.value().management);
  if (!nics.ok()) return nics.take_status();
  nics_ = std::move(nics.value());
  auto node = identity_of_node(options.value().node);
  if (!node.ok()) return node.take_status();
  std::uint32_t process = 0;
  while (process == 0) R2CCL_TRY(fill_random(std::as_writable_bytes(std::span(&process, 1))));
  auto engine = Engine::create(options.value().core, process);
  if (!engine.ok()) return engine.take_status();
  engine_ = std::move(engine.value());
  engine_->set_serving_engine("nccl");  // readers expect it with the label
  engine_->set_label("process " + std::to_string(process));
  auto exchange = Exchange::open(engine_, nics_, node.value(), std::move(options.value().key));
  if (!exchange.ok()) return exchange.take_status();
  exchange_ = std::move(exchange.value());
  watchdog_ = std::make_unique<Watchdog>(static_cast<TimeNs>(options.value().exit_s * 1e9));
  return start_thread(watcher_, "r2ccl-nccl", "the log thread of the plugin", [this] { watch(); });
}

Plugin::~Plugin() {
  if (!engine_) return;
  if (engine_->foreign()) {  // the thread is the parent's
    if (watcher_.joinable()) watcher_.detach();
    return;
  }
  exchange_.reset();
  engine_->close(1.0);
  if (watcher_.joinable()) watcher_.join();
}

void Plugin::watch() {
  constexpr int interval_ms = 500;
  pollfd ready{engine_->log().fd(), POLLIN, 0};
  for (;;) {
    (void)::poll(&ready, 1, interval_ms);
    const auto lines = engine_->log().take();
    if (!lines) return;
    for (const LogLine& line : *lines)
      if (log_ != nullptr)
        log_(level_of(line.level), nccl_log_net, "r2ccl", 0, "NET/r2ccl: %s", line.text.c_str());
    if (const auto why = watchdog_->ignored(now_ns())) {
      std::fprintf(stderr,
                   "NET/r2ccl: this process ends with status %d, because NCCL ignores an error "
                   "(R2CCL_NCCL_EXIT_S): %s\n",
                   exit_status, why->c_str());
      engine_->close(0);  // peers learn at once of the end
      std::_Exit(exit_status);
    }
  }
}

}  // namespace r2ccl::net

// Returns NCCL's code of the first error of a connection or of the start, 0 while there is none.
// Writes its text, cut to `bytes`, with a final zero.  For programs whose NCCL loses the errors of
// a plugin (2.26 and 2.27).
extern "C" int r2ccl_net_state(char* text, std::size_t bytes) {
  auto& own = r2ccl::net::state();
  const std::lock_guard guard(own.error_mutex);
  if (text != nullptr && bytes > 0) {
    const std::size_t copied = own.first_text.copy(text, bytes - 1);
    text[copied] = '\0';
  }
  return static_cast<int>(own.first_error);
}
