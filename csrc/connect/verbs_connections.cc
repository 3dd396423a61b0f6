#include "connect/verbs_connections.hpp"

#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "drivers/detached.hpp"

namespace r2ccl {
namespace {

// Limit of queue pairs still closing on a hanging device.  Each holds a thread and locked memory.
constexpr std::ptrdiff_t most_unfinished = 4;
// A queue pair not closed after this time counts as hanging.
constexpr TimeNs hangs_after_ns = 100 * ns_per_ms;

template <typename Task, typename Body>
void run(const std::shared_ptr<Task>& task, Body body) {
  const bool runs = run_detached("r2ccl-connect", [task, body = std::move(body)] {
    body(*task);
    task->done.store(true, std::memory_order_release);
  });
  if (runs) return;
  task->error = "cannot start a thread for the RDMA device";
  task->done.store(true);
}

// Returns a random first packet number (24 bits), to separate packets of different epochs.  The
// number is not a secret, so a failure of getrandom() is ignored.
std::uint32_t random_packet_number() {
  std::uint32_t number = 0;
  (void)!::getrandom(&number, sizeof(number), 0);
  return number & 0xFFFFFFU;
}

}  // namespace

VerbsConnections::~VerbsConnections() {
  for (Pending& pending : pending_) (void)give_up(pending, "", 0);
  // A hanging device keeps its thread.  The memory within reach of the device must not be freed.
  for (Closing& closing : closing_) {
    const bool working = closing.task && !closing.task->done.load(std::memory_order_acquire);
    if (working || !closing.session->fenced()) closing.session->abandon_memory();
  }
}

void VerbsConnections::begin(EstablishedRail rail, bool connector, const VerbsPortName& port,
                             const IpAddress& local, TimeNs now, TimeNs deadline) {
  (void)withdraw(rail.peer, rail.rail, now);
  Pending& pending = pending_.emplace_back();
  pending.session = std::make_unique<VerbsSession>(port.device, devices_.pool(),
                                                   static_cast<std::uint32_t>(config_.chunk_bytes));
  pending.exchange = std::make_unique<VerbsExchange>(rail.channel_key, connector);
  pending.rail = std::move(rail);
  pending.deadline = deadline;
  start_creating(pending, port, local, now);
}

void VerbsConnections::close(std::unique_ptr<VerbsSession> session, TimeNs now) {
  session->begin_fence(now);
  closing_.push_back({std::move(session), nullptr, now});
}

Epoch VerbsConnections::withdraw(std::uint32_t peer, RailId rail, TimeNs now) {
  for (auto same = pending_.begin(); same != pending_.end(); ++same) {
    if (same->rail.peer != peer || same->rail.rail != rail) continue;
    const Epoch epoch = same->rail.epoch;
    (void)give_up(*same, "", now);
    pending_.erase(same);
    return epoch;
  }
  return 0;
}

void VerbsConnections::start_creating(Pending& pending, const VerbsPortName& port,
                                      const IpAddress& local, TimeNs now) {
  pending.task = std::make_shared<QueuePairTask>();
  auto device = devices_.find(port.device);
  const auto unfinished = std::ranges::count_if(closing_, [&](const Closing& closing) {
    return closing.session->device() == port.device && now - closing.since >= hangs_after_ns;
  });
  if (device == nullptr) {
    pending.task->error = "RDMA device " + port.device + " is gone";
  } else if (unfinished >= most_unfinished) {
    pending.task->error = "RDMA device " + port.device +
                          " does not respond: " + std::to_string(unfinished) +
                          " of its queue pairs are still closing";
  } else if (const Status status = pending.session->reserve(); !status.ok()) {
    pending.task->error = status.message();
  }
  if (!pending.task->error.empty()) {
    pending.task->done.store(true);
    return;
  }
  VerbsPath path;
  path.port = port.port;
  path.timeout = static_cast<std::uint8_t>(config_.verbs_timeout);
  path.retry_count = static_cast<std::uint8_t>(config_.verbs_retry_count);
  path.traffic_class = static_cast<std::uint8_t>(config_.traffic_class);
  path.service_level = static_cast<std::uint8_t>(config_.service_level);
  path.pkey_index = static_cast<std::uint16_t>(config_.pkey_index);
  path.rnr_timer = static_cast<std::uint8_t>(config_.verbs_rnr_timer);
  path.rnr_retry = static_cast<std::uint8_t>(config_.verbs_rnr_retry);
  pending.task->device = device;
  run(pending.task,
      [device = std::move(device), path, local, memory = pending.session->to_register(),
       wanted = static_cast<int>(config_.gid_index)](QueuePairTask& task) {
        if (!memory.empty()) {
          auto registered = MemoryPool::register_with(*device, memory);
          if (!registered.ok()) {
            task.error = registered.take_status().message();
            return;
          }
          task.memory = std::move(registered.value());
        }
        auto attributes = device->port(path.port);
        task.answered = attributes.ok();
        if (!attributes.ok()) {
          task.error = attributes.take_status().message();
          return;
        }
        const VerbsPort& found = attributes.value();
        auto gid = choose_gid(found, local, wanted);
        if (!gid.ok()) {
          task.error = gid.take_status().message();
          return;
        }
        auto pair = device->create_queue_pair(path.port, path.pkey_index, VerbsSession::depth());
        if (!pair.ok()) {
          task.error = pair.take_status().message();
          return;
        }
        task.path = path;
        task.path.gid_index = gid.value().index;
        task.pair = std::move(pair.value());
        task.address = {.queue_pair = task.pair->number(),
                        .first_packet = random_packet_number(),
                        .mtu = found.mtu,
                        .lid = found.ethernet ? std::uint16_t{0} : found.lid,
                        .gid = gid.value().gid};
      });
}

void VerbsConnections::start_connecting(Pending& pending) {
  pending.phase = Phase::connecting;
  pending.task->done.store(false);
  run(pending.task, [peer = pending.session->peer.address](QueuePairTask& task) {
    int error = task.pair->connect(task.address, peer, task.path);
    if (error == 0)
      error = task.pair->post_receives(request_id(VerbsRequest::receive, 0),
                                       VerbsSession::depth().receives - 1);
    if (error != 0) task.error = std::string("connecting a queue pair: ") + std::strerror(error);
  });
}

void VerbsConnections::add_poll_fds(std::vector<pollfd>& fds) const {
  for (const Pending& pending : pending_) {
    const bool writes = !pending.exchange->output().empty();
    fds.push_back(
        {pending.rail.socket.get(), static_cast<short>(writes ? POLLIN | POLLOUT : POLLIN), 0});
  }
}

void VerbsConnections::progress(TimeNs now) {
  for (auto pending = pending_.begin(); pending != pending_.end();)
    pending = advance(*pending, now) ? pending_.erase(pending) : std::next(pending);
  for (auto closing = closing_.begin(); closing != closing_.end();) {
    const bool working = closing->task && !closing->task->done.load(std::memory_order_acquire);
    if (!working && closing->task) {
      (void)take_memory(*closing->session, *closing->task);
      closing->session->pair = std::move(closing->task->pair);
      closing->session->begin_fence(now);
      closing->task.reset();
    }
    const bool over = working ? closing->session->withdrawn() : closing->session->fenced();
    if (!over) closing->session->judge_device(closing->since, now);
    closing = over ? closing_.erase(closing) : std::next(closing);
  }
}

bool VerbsConnections::advance(Pending& pending, TimeNs now) {
  if (!exchange(pending)) return give_up(pending, "the peer closed the connection", now);
  if (pending.task->done.load(std::memory_order_acquire)) {
    if (const auto answered = std::exchange(pending.task->answered, {}); answered.has_value())
      devices_.note_answer(pending.session->device(), *answered);
    if (!pending.task->error.empty()) return give_up(pending, pending.task->error, now);
    if (pending.phase == Phase::creating) {
      if (const std::string why = take_memory(*pending.session, *pending.task); !why.empty())
        return give_up(pending, why, now);
      pending.exchange->send_endpoint(pending.session->endpoint(pending.task->address));
      pending.phase = Phase::waiting_for_peer;
    }
    if (pending.phase == Phase::waiting_for_peer && pending.exchange->peer().has_value()) {
      pending.session->peer = *pending.exchange->peer();
      start_connecting(pending);
    } else if (pending.phase == Phase::connecting) {
      pending.exchange->send_connected();
      pending.phase = Phase::finishing;
    }
  }
  if (!exchange(pending)) return give_up(pending, "the peer closed the connection", now);
  if (pending.phase == Phase::finishing && pending.exchange->peer_connected() &&
      pending.exchange->output().empty()) {
    pending.session->pair = std::move(pending.task->pair);
    pending.session->own = pending.task->address;
    callbacks_.connected(std::move(pending.rail), std::move(pending.session));
    return true;
  }
  return now >= pending.deadline && give_up(pending, "timed out", now);
}

bool VerbsConnections::exchange(Pending& pending) {
  VerbsExchange& talk = *pending.exchange;
  const int socket = pending.rail.socket.get();
  if (!pending.rail.leftover.empty() && !talk.feed(std::exchange(pending.rail.leftover, {})))
    return false;
  while (!talk.output().empty()) {
    const auto data = talk.output();
    const ssize_t sent = ::send(socket, data.data(), data.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EINTR) break;
      return false;
    }
    talk.sent(static_cast<std::size_t>(sent));
  }
  std::array<std::byte, 256> buffer;
  for (;;) {
    const ssize_t got = ::recv(socket, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got == 0) return false;
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (!talk.feed({buffer.data(), static_cast<std::size_t>(got)})) return false;
  }
}

std::string VerbsConnections::take_memory(VerbsSession& session, QueuePairTask& task) {
  if (task.device == nullptr) return "";  // the task never started
  return session.attach(*task.device, std::move(task.memory)).message();
}

// Moves the connection attempt to the closing list and reports the failure if `why` is not empty.
// Always returns true.
bool VerbsConnections::give_up(Pending& pending, const std::string& why, TimeNs now) {
  closing_.push_back({std::move(pending.session), std::move(pending.task), now});
  if (!why.empty()) callbacks_.failed(pending.rail, why, now >= pending.deadline);
  return true;
}

}  // namespace r2ccl
