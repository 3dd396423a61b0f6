#include "drivers/netlink_link_monitor.hpp"

// clang-format off: glibc and Linux define the same names, and agree only in this order.
#include <net/if.h>
// clang-format on

#include <errno.h>
#include <linux/if.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/clock.hpp"

namespace r2ccl {
namespace {

// Upper bound of a dump message, from netlink(7).
constexpr std::size_t netlink_buffer_bytes = 32 * 1024;
// Limit of datagrams per poll(), so that an event storm cannot hold the caller.
constexpr int datagrams_per_poll = 128;
constexpr int dump_attempts = 3;
// Pause after a full read.  On a host of containers, interfaces come and go during every read, and
// a read of hundreds of interfaces at each event would take a core.
constexpr TimeNs resync_pause_ns = 500 * ns_per_ms;

template <typename T>
std::optional<T> read_as(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

// Calls visit(type, payload) for each attribute; stops at the first malformed attribute.
template <typename Visit>
void for_each_attribute(std::span<const std::byte> bytes, Visit visit) {
  while (const auto header = read_as<rtattr>(bytes)) {
    if (header->rta_len < sizeof(rtattr) || header->rta_len > bytes.size()) return;
    visit(static_cast<int>(header->rta_type & NLA_TYPE_MASK),
          bytes.subspan(sizeof(rtattr), header->rta_len - sizeof(rtattr)));
    bytes = bytes.subspan(std::min<std::size_t>(RTA_ALIGN(header->rta_len), bytes.size()));
  }
}

// Calls visit(header, payload) for each message until visit() returns false.
template <typename Visit>
void for_each_message(std::span<const std::byte> bytes, Visit visit) {
  while (const auto header = read_as<nlmsghdr>(bytes)) {
    if (header->nlmsg_len < sizeof(nlmsghdr) || header->nlmsg_len > bytes.size()) return;
    if (!visit(*header, bytes.subspan(sizeof(nlmsghdr), header->nlmsg_len - sizeof(nlmsghdr)))) {
      return;
    }
    bytes = bytes.subspan(std::min<std::size_t>(NLMSG_ALIGN(header->nlmsg_len), bytes.size()));
  }
}

Status system_error(const char* what) {
  return Status(ErrorCode::internal,
                std::string(what) + " of a netlink socket failed: " + std::strerror(errno));
}

int open_socket() {
  return ::socket(AF_NETLINK, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, NETLINK_ROUTE);
}

struct Received {
  ssize_t bytes;  // -1: see errno
  bool usable;    // complete and sent by the kernel; any process may send to a netlink port
};

Received receive(int fd, std::span<std::byte> buffer) {
  sockaddr_nl from{};
  iovec part{.iov_base = buffer.data(), .iov_len = buffer.size()};
  msghdr message{};
  message.msg_name = &from;
  message.msg_namelen = sizeof(from);
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  ssize_t got;
  do {
    got = ::recvmsg(fd, &message, 0);
  } while (got < 0 && errno == EINTR);
  return {got, got >= 0 && from.nl_pid == 0 && (message.msg_flags & MSG_TRUNC) == 0};
}

}  // namespace

Result<std::unique_ptr<NetlinkLinkMonitor>> NetlinkLinkMonitor::open(int receive_buffer_bytes) {
  FileDescriptor events = FileDescriptor::made_by(open_socket);
  FileDescriptor query = FileDescriptor::made_by(open_socket);
  if (!events.valid() || !query.valid()) return system_error("creation");
  if (::setsockopt(events.get(), SOL_SOCKET, SO_RCVBUF, &receive_buffer_bytes,
                   sizeof(receive_buffer_bytes)) != 0) {
    return system_error("sizing");
  }
  sockaddr_nl address{};
  address.nl_family = AF_NETLINK;
  address.nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR;
  if (::bind(events.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return system_error("bind");
  }
  return std::unique_ptr<NetlinkLinkMonitor>(
      new NetlinkLinkMonitor(std::move(events), std::move(query)));
}

NetlinkLinkMonitor::NetlinkLinkMonitor(FileDescriptor events, FileDescriptor query)
    : events_(std::move(events)), query_(std::move(query)), buffer_(netlink_buffer_bytes) {}

void NetlinkLinkMonitor::watch(int ifindex) { table_.watch(ifindex, pending_); }

void NetlinkLinkMonitor::watch(const std::string& name) { table_.watch(name, pending_); }

void NetlinkLinkMonitor::poll(const Callback& callback) {
  const bool drained = read_events();
  // Runs after read_events(): events older than the dump must not be applied on top of the dump.
  if (resync_wanted_ && now_ns() >= resync_at_) {
    resync();
  } else if (events_lost_ && drained) {
    read_watched();
  }
  for (const LinkEvent& event : std::exchange(pending_, {})) callback(event);
}

// Returns true if no event is left.
bool NetlinkLinkMonitor::read_events() {
  for (int i = 0; i < datagrams_per_poll; ++i) {
    const Received received = receive(events_.get(), buffer_);
    if (received.bytes < 0) {
      if (errno == EAGAIN) return true;
      // ENOBUFS means lost events.  The kernel reports the loss once; queued events remain
      // readable.  A full resync repairs this error and any other.
      resync_wanted_ = events_lost_ = true;
      if (errno != ENOBUFS) return false;
      continue;
    }
    if (!received.usable) {
      resync_wanted_ = true;
      continue;
    }
    for_each_message(std::span(buffer_).first(static_cast<std::size_t>(received.bytes)),
                     [this](const nlmsghdr& header, std::span<const std::byte> payload) {
                       handle(header.nlmsg_type, payload);
                       return true;
                     });
  }
  return false;
}

// An incomplete read is worth its entries: only the removal of interfaces needs a complete read.
// Later reads of an unsteady host are a single attempt each.
void NetlinkLinkMonitor::resync() {
  events_lost_ = false;
  const int attempts = resync_at_ == 0 ? dump_attempts : 1;
  for (int attempt = 0; attempt < attempts && resync_wanted_; ++attempt) {
    table_.begin_resync();
    const bool links = dump(RTM_GETLINK);
    if (!dump(RTM_GETADDR) || !links) continue;
    table_.end_resync(pending_);
    resync_wanted_ = false;
    ++resyncs_;
  }
  resync_at_ = now_ns() + resync_pause_ns;
}

// Reads the state of each watched interface: lost events may concern our ports, and the next full
// read has to wait.  A full read finds lost addresses and removed interfaces.
void NetlinkLinkMonitor::read_watched() {
  events_lost_ = false;
  for (const int ifindex : table_.watched_links()) {
    struct {
      nlmsghdr header;
      ifinfomsg body;
    } request{};
    request.header.nlmsg_len = NLMSG_LENGTH(sizeof(request.body));
    request.header.nlmsg_type = RTM_GETLINK;
    request.header.nlmsg_flags = NLM_F_REQUEST;
    request.header.nlmsg_seq = ++sequence_;
    request.body.ifi_family = AF_UNSPEC;
    request.body.ifi_index = ifindex;
    // A single answer has no end mark: reading stops at the empty socket.
    if (send(std::as_bytes(std::span(&request, 1)))) (void)read_dump(sequence_);
  }
}

// Sends a request to the kernel.  Returns false on failure.
bool NetlinkLinkMonitor::send(std::span<const std::byte> request) {
  sockaddr_nl kernel{};
  kernel.nl_family = AF_NETLINK;
  ssize_t sent;
  do {
    sent = ::sendto(query_.get(), request.data(), request.size(), 0,
                    reinterpret_cast<const sockaddr*>(&kernel), sizeof(kernel));
  } while (sent < 0 && errno == EINTR);
  return sent >= 0;
}

// Requests a dump of all objects of one type and handles the reply.  Returns false if the reply is
// incomplete.
bool NetlinkLinkMonitor::dump(std::uint16_t request_type) {
  struct {
    nlmsghdr header;
    rtgenmsg body;
  } request{};
  request.header.nlmsg_len = NLMSG_LENGTH(sizeof(request.body));
  request.header.nlmsg_type = request_type;
  request.header.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
  request.header.nlmsg_seq = ++sequence_;
  request.body.rtgen_family = AF_UNSPEC;
  const auto bytes = std::as_bytes(std::span(&request, 1)).first(request.header.nlmsg_len);
  return send(bytes) && read_dump(sequence_);
}

bool NetlinkLinkMonitor::read_dump(std::uint32_t sequence) {
  bool done = false;
  bool complete = true;
  while (!done) {
    const Received received = receive(query_.get(), buffer_);
    // The kernel produces the next part of a dump while the previous part is read.  A missing part
    // means the kernel lacked memory; the next poll() tries again.
    if (received.bytes < 0) return false;
    if (!received.usable) continue;
    for_each_message(std::span(buffer_).first(static_cast<std::size_t>(received.bytes)),
                     [&](const nlmsghdr& header, std::span<const std::byte> payload) {
                       // An older sequence number: the rest of an aborted dump.
                       if (header.nlmsg_seq != sequence) return true;
                       // NLM_F_DUMP_INTR: the configuration changed between two parts of the dump.
                       if ((header.nlmsg_flags & NLM_F_DUMP_INTR) != 0) complete = false;
                       if (header.nlmsg_type == NLMSG_ERROR) complete = false;
                       done = header.nlmsg_type == NLMSG_DONE || header.nlmsg_type == NLMSG_ERROR;
                       if (!done) handle(header.nlmsg_type, payload);
                       return !done;
                     });
  }
  return complete;
}

void NetlinkLinkMonitor::handle(std::uint16_t type, std::span<const std::byte> payload) {
  switch (type) {
    case RTM_NEWLINK:
    case RTM_DELLINK: return handle_link(type, payload);
    case RTM_NEWADDR:
    case RTM_DELADDR: return handle_address(type, payload);
    default: return;
  }
}

void NetlinkLinkMonitor::handle_link(std::uint16_t type, std::span<const std::byte> payload) {
  const auto info = read_as<ifinfomsg>(payload);
  // AF_BRIDGE reports a change of a bridge port, not of the interface.
  if (!info || info->ifi_family != AF_UNSPEC) return;
  if (type == RTM_DELLINK) return table_.remove_link(info->ifi_index, pending_);
  LinkState state;
  // IFF_LOWER_UP is the carrier of an enabled interface.  The operational state IFF_RUNNING comes
  // later, after protocols like 802.1X.
  state.carrier_up = (info->ifi_flags & IFF_LOWER_UP) != 0;
  state.admin_up = (info->ifi_flags & IFF_UP) != 0;
  for_each_attribute(
      payload.subspan(std::min<std::size_t>(NLMSG_ALIGN(sizeof(*info)), payload.size())),
      [&](int attribute, std::span<const std::byte> value) {
        if (attribute != IFLA_IFNAME) return;
        const char* name = reinterpret_cast<const char*>(value.data());
        state.name.assign(name, ::strnlen(name, value.size()));
      });
  table_.set_link(info->ifi_index, state, pending_);
}

void NetlinkLinkMonitor::handle_address(std::uint16_t type, std::span<const std::byte> payload) {
  const auto info = read_as<ifaddrmsg>(payload);
  if (!info) return;
  std::uint32_t flags = info->ifa_flags;
  std::optional<IpAddress> address;
  std::optional<IpAddress> local;
  for_each_attribute(
      payload.subspan(std::min<std::size_t>(NLMSG_ALIGN(sizeof(*info)), payload.size())),
      [&](int attribute, std::span<const std::byte> value) {
        if (attribute == IFA_ADDRESS) {
          address = IpAddress::from_bytes(info->ifa_family, value);
        } else if (attribute == IFA_LOCAL) {
          local = IpAddress::from_bytes(info->ifa_family, value);
        } else if (attribute == IFA_FLAGS) {
          flags = read_as<std::uint32_t>(value).value_or(flags);
        }
      });
  // On a point-to-point interface, IFA_ADDRESS is the address of the remote end.
  if (local) address = local;
  if (!address) return;
  const int ifindex = static_cast<int>(info->ifa_index);
  const bool usable = (flags & IFA_F_DADFAILED) == 0 &&
                      ((flags & IFA_F_TENTATIVE) == 0 || (flags & IFA_F_OPTIMISTIC) != 0);
  if (type == RTM_NEWADDR && usable) {
    table_.add_address(ifindex, *address, pending_, info->ifa_prefixlen);
  } else {
    table_.remove_address(ifindex, *address, pending_);
  }
}

}  // namespace r2ccl
