#include "connect/verbs_devices.hpp"

#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <utility>

#include "drivers/detached.hpp"
#include "drivers/ibverbs.hpp"

namespace r2ccl {
namespace {

constexpr TimeNs look_interval_ns = 1000 * ns_per_ms;
constexpr unsigned most_refusals = 3;

// Returns the GID form of an address; IPv4 is mapped into IPv6.
VerbsGid gid_of(const IpAddress& address) {
  VerbsGid gid{};
  if (address.family == AF_INET6) {
    std::copy(address.bytes.begin(), address.bytes.end(), gid.begin());
    return gid;
  }
  gid[10] = gid[11] = std::byte{0xff};
  std::copy_n(address.bytes.begin(), 4, gid.begin() + 12);
  return gid;
}

}  // namespace

Result<VerbsGidEntry> choose_gid(const VerbsPort& port, const IpAddress& local, int wanted) {
  const VerbsGid own = gid_of(local);
  const VerbsGidEntry* best = nullptr;
  int best_rank = -1;
  for (const VerbsGidEntry& entry : port.gids) {
    if (wanted >= 0 && entry.index != wanted) continue;
    const bool v2 = entry.type == VerbsGidType::roce_v2;
    const bool is_own = local.family != AF_UNSPEC && entry.gid == own;
    const int rank = port.ethernet ? 2 * static_cast<int>(is_own) + static_cast<int>(v2) : 0;
    if (rank > best_rank) {
      best = &entry;
      best_rank = rank;
    }
  }
  if (best != nullptr) return *best;
  if (wanted < 0) return Status(ErrorCode::internal, "the port has no GID");
  return Status(ErrorCode::internal, "gid_index (R2CCL_GID_INDEX) is " + std::to_string(wanted) +
                                         ": the port has no GID there");
}

Status VerbsDevices::open(const std::string& device) {
  if (find(device) != nullptr) return {};
  if (driver_ == nullptr) {
    auto loaded = load_ibverbs();
    if (!loaded.ok()) return loaded.take_status();
    driver_ = std::move(loaded.value());
  }
  auto opened = driver_->open(device);
  if (!opened.ok()) return opened.take_status();
  Entry entry;
  entry.device = std::move(opened.value());
  R2CCL_TRY(pool_.add_device(entry.device));
  entries_[device] = std::move(entry);
  return {};
}

std::shared_ptr<VerbsDevice> VerbsDevices::find(const std::string& device) const {
  const auto found = entries_.find(device);
  return found == entries_.end() ? nullptr : found->second.device;
}

void VerbsDevices::add_poll_fds(std::vector<pollfd>& fds) const {
  for (const auto& [name, entry] : entries_)
    if (entry.device) fds.push_back({entry.device->event_fd(), POLLIN, 0});
}

void VerbsDevices::note_answer(const std::string& device, bool answered) {
  const auto found = entries_.find(device);
  if (found == entries_.end()) return;
  unsigned& refusals = found->second.refusals;
  refusals = answered ? 0 : refusals + 1;
  if (refusals < most_refusals) return;
  pool_.distrust(device);
  refusals = 0;
}

std::shared_ptr<VerbsDevices::PortQuery> VerbsDevices::start_query(
    std::shared_ptr<VerbsDevice> device, std::uint8_t port) {
  auto query = std::make_shared<PortQuery>();
  query->device = std::move(device);
  query->port = port;
  const bool started = run_detached("r2ccl-query", [query] {
    query->answer.emplace(query->device->port(query->port));
    query->done.store(true, std::memory_order_release);
  });
  if (!started) query->done.store(true);  // hand_on_answers() retries
  return query;
}

void VerbsDevices::query_port(const std::string& device, std::uint8_t port) {
  auto opened = find(device);
  if (opened == nullptr) return;  // rails were notified of the loss
  PendingQuery& pending = pending_queries_[{device, port}];
  if (pending.query == nullptr || pending.query->device != opened)
    pending = {.query = start_query(std::move(opened), port)};
  else
    pending.again = true;
}

void VerbsDevices::hand_on_answers(const OnPort& on_port) {
  for (auto next = pending_queries_.begin(); next != pending_queries_.end();) {
    const auto at = next++;
    auto& [query, again] = at->second;
    if (!query->done.load(std::memory_order_acquire)) continue;
    auto opened = find(at->first.first);
    const bool of_use = !again && query->answer.has_value();  // false: outdated or missing
    if (!of_use && opened == query->device) {
      query = start_query(std::move(opened), query->port);
      again = false;
      continue;
    }
    const auto answered = std::move(query);
    pending_queries_.erase(at);
    if (opened == answered->device)
      on_port(opened->name(), answered->port, std::move(*answered->answer));
  }
}

void VerbsDevices::progress(TimeNs now, const OnEvent& on_event, const OnPort& on_port) {
  for (auto& [name, entry] : entries_) {
    if (entry.device == nullptr) {
      look_for(name, entry, now);
      continue;
    }
    while (const auto event = entry.device->next_event()) {
      on_event(name, *event);
      if (event->kind != VerbsEvent::Kind::device_fatal) continue;
      let_go(name, entry, now);
      break;
    }
  }
  let_go_distrusted(now, on_event);
  hand_on_answers(on_port);  // after the events, which mark outdated answers
}

void VerbsDevices::let_go_distrusted(TimeNs now, const OnEvent& on_event) {
  for (const std::string& name : pool_.take_distrusted()) {
    const auto found = entries_.find(name);
    if (found == entries_.end() || found->second.device == nullptr) continue;
    log_.add(LogLevel::warning, "RDMA device " + name +
                                    " does not respond: all memory is withdrawn from it, and the "
                                    "device is reopened");
    on_event(name, {.kind = VerbsEvent::Kind::device_fatal, .text = "withdrawn"});
    draining_.push_back({found->second.device, pool_.withdrawal_of(name)});
    let_go(name, found->second, now);
  }
  std::erase_if(draining_, [](const DrainingDevice& draining) {
    while (const auto event = draining.device->next_event())
      if (event->kind == VerbsEvent::Kind::device_fatal) return true;
    return draining.withdrawn->load(std::memory_order_acquire);
  });
}

void VerbsDevices::let_go(const std::string& name, Entry& entry, TimeNs now) {
  pool_.remove_device(name);
  entry.device.reset();
  entry.looked_at = now;
}

void VerbsDevices::look_for(const std::string& name, Entry& entry, TimeNs now) {
  if (entry.reopening == nullptr) {
    if (now - entry.looked_at < look_interval_ns) return;
    entry.reopening = std::make_shared<Reopening>();
    entry.reopening->memory = pool_.registrations();
    const bool looks =
        run_detached("r2ccl-reopen", [driver = driver_, name, opening = entry.reopening] {
          if (auto opened = driver->open(name); opened.ok()) {
            opening->device = std::move(opened.value());
            MemoryPool::register_all(*opening->device, opening->memory);
          }
          opening->done.store(true, std::memory_order_release);
        });
    if (!looks) entry.reopening->done.store(true);
    return;
  }
  if (!entry.reopening->done.load(std::memory_order_acquire)) return;
  const auto opening = std::exchange(entry.reopening, nullptr);
  entry.looked_at = now;
  if (opening->device == nullptr) return;
  if (const Status status = pool_.add_device(opening->device, std::move(opening->memory));
      status.ok()) {
    entry.device = opening->device;
    log_.add(LogLevel::info, "RDMA device " + name + " is back");
  } else {
    log_.add(LogLevel::warning, "RDMA device " + name + " is back, but " + status.message());
  }
}

void VerbsDevices::abandon() {
  pool_.abandon();
  (void)new auto(std::move(entries_));  // leaked on purpose
  (void)new auto(std::move(pending_queries_));
  (void)new auto(std::move(draining_));
  entries_.clear();
  pending_queries_.clear();
  draining_.clear();
}

}  // namespace r2ccl
