// Engine: creation.  A missing observer, such as the journal's file or the kernel's events, costs a
// warning; it is no reason not to start.
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/cpus.hpp"
#include "base/threads.hpp"
#include "drivers/netlink_link_monitor.hpp"
#include "drivers/silent_link_monitor.hpp"
#include "engine/engine.hpp"

namespace r2ccl {
namespace {

std::unique_ptr<LinkMonitor> open_monitor(std::vector<std::string>& warnings) {
  auto netlink = NetlinkLinkMonitor::open();
  if (netlink.ok()) return std::move(netlink.value());
  warnings.push_back(netlink.take_status().message() +
                     ": carrier events are missing, so a lost port is noticed only by the "
                     "deadlines of its rails; allow AF_NETLINK for this process");
  return std::make_unique<SilentLinkMonitor>();
}

// Opens a journal without a file if the folder is unusable, and sets `why`.
Result<Journal> open_journal(const std::string& folder, std::uint32_t engine, std::string& why) {
  auto journal = Journal::open(folder, engine);
  if (journal.ok()) return journal;
  why = journal.take_status().message();
  return Journal::open("", engine);
}

}  // namespace

Result<std::shared_ptr<Engine>> Engine::create(const Config& config, std::uint32_t process,
                                               std::unique_ptr<LinkMonitor> monitor,
                                               std::shared_ptr<VerbsDriver> verbs) {
  if (!PortWindow::parse(config.ports))
    return Status(ErrorCode::invalid_argument, "ports (R2CCL_PORTS) is '" + config.ports +
                                                   "': must be a port or a range of ports, as in "
                                                   "40000-40050");
  const std::string& list = config.background_cpus;
  const auto cpus = list.empty() ? CpuSet() : CpuSet::parse(list);
  if (!cpus)
    return Status(ErrorCode::invalid_argument, "background_cpus (R2CCL_BACKGROUND_CPUS) is '" +
                                                   list + "': must be a list of CPUs, as in 0-3,8");
  set_background_cpus(*cpus);
  std::vector<std::string> warnings;
  if (monitor == nullptr) monitor = open_monitor(warnings);
  std::string no_journal;
  auto journal = open_journal(config.journal_dir, process, no_journal);
  if (!journal.ok()) return journal.take_status();
  if (!no_journal.empty())
    warnings.push_back(no_journal +
                       ": this process serves without a journal, and r2serve's commands and "
                       "sidecar do not see its rails");
  std::shared_ptr<Engine> engine(new Engine(config, process, std::move(journal.value()),
                                            std::move(monitor), std::move(verbs)));
  R2CCL_TRY(start_thread(engine->background_, "r2ccl-progress",
                         "the background thread of the engine",
                         [made = engine.get()] { made->run_background(); }));
  const pthread_t background = engine->background_.native_handle();
  if (const int error = move_to_background_cpus(background); error != 0)
    warnings.push_back("background threads stay on CPUs " + CpuSet::of(background).text() +
                       " of the thread that makes the engine, instead of " +
                       background_cpus().text() + ": " + std::generic_category().message(error));
  engine->no_journal_ = std::move(no_journal);
  for (std::string& warning : warnings) engine->log_.add(LogLevel::warning, std::move(warning));
  return engine;
}

}  // namespace r2ccl
