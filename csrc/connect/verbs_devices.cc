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

// As a GID has it: IPv4 is mapped into IPv6.
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

std::shared_ptr<VerbsDevices::Question> VerbsDevices::ask(std::shared_ptr<VerbsDevice> device,
                                                          std::uint8_t port) {
  auto question = std::make_shared<Question>();
  question->device = std::move(device);
  question->port = port;
  const bool asked = run_detached([question] {
    question->answer.emplace(question->device->port(question->port));
    question->done.store(true, std::memory_order_release);
  });
  if (!asked) question->done.store(true);  // and is asked again
  return question;
}

void VerbsDevices::ask_port(const std::string& device, std::uint8_t port) {
  auto opened = find(device);
  if (opened == nullptr) return;  // its rails know
  Asked& asked = asked_[{device, port}];
  if (asked.question == nullptr || asked.question->device != opened)
    asked = {.question = ask(std::move(opened), port)};
  else
    asked.again = true;
}

void VerbsDevices::hand_on_answers(const OnPort& on_port) {
  for (auto next = asked_.begin(); next != asked_.end();) {
    const auto at = next++;
    auto& [question, again] = at->second;
    if (!question->done.load(std::memory_order_acquire)) continue;
    auto opened = find(at->first.first);
    const bool of_use = !again && question->answer.has_value();  // else it may be out of date
    if (!of_use && opened == question->device) {
      question = ask(std::move(opened), question->port);
      again = false;
      continue;
    }
    const auto answered = std::move(question);
    asked_.erase(at);
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
  hand_on_answers(on_port);  // after the events, which tell whether they are still true
}

void VerbsDevices::let_go_distrusted(TimeNs now, const OnEvent& on_event) {
  for (const std::string& name : pool_.take_distrusted()) {
    const auto found = entries_.find(name);
    if (found == entries_.end() || found->second.device == nullptr) continue;
    log_.add(LogLevel::warning, "RDMA device " + name +
                                    " does not do what it is asked: all memory is withdrawn from "
                                    "it, and it is opened anew");
    on_event(name, {.kind = VerbsEvent::Kind::device_fatal, .text = "withdrawn"});
    departed_.push_back({found->second.device, pool_.withdrawal_of(name)});
    let_go(name, found->second, now);
  }
  std::erase_if(departed_, [](const Departed& departed) {
    while (const auto event = departed.device->next_event())
      if (event->kind == VerbsEvent::Kind::device_fatal) return true;
    return departed.withdrawn->load(std::memory_order_acquire);
  });
}

void VerbsDevices::let_go(const std::string& name, Entry& entry, TimeNs now) {
  pool_.remove_device(name);
  entry.device.reset();
  entry.looked_at = now;
}

void VerbsDevices::look_for(const std::string& name, Entry& entry, TimeNs now) {
  if (entry.returning == nullptr) {
    if (now - entry.looked_at < look_interval_ns) return;
    entry.returning = std::make_shared<Return>();
    entry.returning->memory = pool_.known();
    const bool looks = run_detached([driver = driver_, name, back = entry.returning] {
      if (auto opened = driver->open(name); opened.ok()) {
        back->device = std::move(opened.value());
        MemoryPool::register_all(*back->device, back->memory);
      }
      back->done.store(true, std::memory_order_release);
    });
    if (!looks) entry.returning->done.store(true);
    return;
  }
  if (!entry.returning->done.load(std::memory_order_acquire)) return;
  const auto back = std::exchange(entry.returning, nullptr);
  entry.looked_at = now;
  if (back->device == nullptr) return;
  if (const Status status = pool_.add_device(back->device, std::move(back->memory)); status.ok()) {
    entry.device = back->device;
    log_.add(LogLevel::info, "RDMA device " + name + " is back");
  } else {
    log_.add(LogLevel::warning, "RDMA device " + name + " is back, but " + status.message());
  }
}

void VerbsDevices::abandon() {
  pool_.abandon();
  (void)new auto(std::move(entries_));  // kept on purpose
  (void)new auto(std::move(asked_));
  (void)new auto(std::move(departed_));
  entries_.clear();
  asked_.clear();
  departed_.clear();
}

}  // namespace r2ccl
