#include "netplugin/exchange.hpp"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/clock.hpp"

namespace r2ccl::net {
namespace {

// An address that does not answer may belong to a dead NIC; a process that does not answer may be
// busy.
constexpr TimeNs connect_limit_ns = 1000 * ns_per_ms;
constexpr TimeNs answer_limit_ns = 5000 * ns_per_ms;
constexpr TimeNs pause_ns = 50 * ns_per_ms;
constexpr TimeNs arrival_limit_ns = 10'000 * ns_per_ms;
// Accepted connections without proof of the secret.  Beyond, the oldest is dropped.
constexpr std::size_t most_strangers = 256;

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

std::string hex(std::span<const std::byte> bytes) {
  constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    text += digits[std::to_integer<unsigned>(byte) >> 4U];
    text += digits[std::to_integer<unsigned>(byte) & 15U];
  }
  return text;
}

std::string error_text(const char* what, int error) {
  return std::string(what) + ": " + std::strerror(error);
}

// Moves bytes between a socket and an end.  Returns false once the connection has ended.
bool pump(int socket, ExchangeEnd& end) {
  std::array<std::byte, 2048> buffer;
  for (;;) {
    while (!end.output().empty()) {
      const auto out = end.output();
      const ssize_t sent = ::send(socket, out.data(), out.size(), MSG_NOSIGNAL);
      if (sent < 0) return errno == EAGAIN || errno == EINTR;
      end.sent(static_cast<std::size_t>(sent));
    }
    if (end.state() != ExchangeState::in_progress) return true;
    const ssize_t got = ::recv(socket, buffer.data(), buffer.size(), 0);
    if (got == 0) return false;
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    end.feed({buffer.data(), static_cast<std::size_t>(got)});
    if (end.output().empty()) return true;  // the owner answers
  }
}

// Returns true once connected, and the error of a failure in `error`.
bool connect_done(int socket, int& error) {
  pollfd ready{socket, POLLOUT, 0};
  if (::poll(&ready, 1, 0) == 0) return false;
  socklen_t size = sizeof(error);
  ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
  return error == 0;
}

}  // namespace

Result<std::unique_ptr<Exchange>> Exchange::open(std::shared_ptr<Engine> engine,
                                                 const std::vector<Nic>& nics,
                                                 const NodeIdentity& node,
                                                 std::vector<std::byte> key) {
  Description own;
  Secret secret;
  R2CCL_TRY(fill_random(own.engine));
  R2CCL_TRY(fill_random(secret));
  own.process = engine->process();
  own.host = host_name();
  own.node = node;
  own.shm = "r2ccl-net-" + hex(own.engine);
  auto shm = engine->listen({.kind = RailKind::shm, .device = "", .address = own.shm});
  if (!shm.ok()) return shm.take_status();
  Listeners listeners(PortWindow::parse(engine->config().ports).value_or(PortWindow()));
  std::vector<Place> places;
  for (const Nic& nic : nics) {
    auto rail = engine->listen(
        {.kind = RailKind::tcp, .device = nic.device, .address = nic.address.to_string()});
    if (!rail.ok()) return rail.take_status();
    own.rails.push_back({.place = {nic.address, rail.value()},
                         .prefix = nic.prefix,
                         .mbit_s = static_cast<std::uint32_t>(nic.mbit_s)});
    // An exchange may use any path to the address, so the socket is not bound to the device.
    auto port = listeners.listen(SocketAddress::ip(nic.address, 0), "");
    if (!port.ok()) return port.take_status();
    places.push_back({nic.address, port.value()});
  }
  return std::unique_ptr<Exchange>(new Exchange(std::move(engine), nics, std::move(own), secret,
                                                std::move(key), std::move(listeners),
                                                std::move(places)));
}

Exchange::Exchange(std::shared_ptr<Engine> engine, const std::vector<Nic>& nics, Description own,
                   const Secret& secret, std::vector<std::byte> key, Listeners listeners,
                   std::vector<Place> places)
    : engine_(std::move(engine)),
      own_(std::move(own)),
      secret_(secret),
      key_(std::move(key)),
      nics_(nics),
      listeners_(std::move(listeners)),
      places_(std::move(places)) {}

// ---- listeners ----

std::uint64_t Exchange::listen(std::size_t nic, std::span<std::byte> to) {
  const std::lock_guard guard(mutex_);
  Handle handle;
  handle.process = own_.process;
  handle.listener = ++last_listener_;
  handle.key_check = check_of_key(secret_, key_);
  handle.secret = secret_;
  const std::size_t count = std::min(places_.size(), Handle::most_places);
  for (std::size_t i = 0; i < count; ++i)
    handle.places.push_back(places_[(nic + i) % places_.size()]);
  write(handle, to);
  listening_[handle.listener] = {.nic = nic, .ready = {}, .seen = {}};
  return handle.listener;
}

void Exchange::close_listener(std::uint64_t listener) {
  const std::lock_guard guard(mutex_);
  const auto found = listening_.find(listener);
  if (found == listening_.end()) return;
  for (const Ready& ready : found->second.ready)
    if (ready.end.local) ready.end.local->close();
  listening_.erase(found);
  // No call comes to drop them later, and each holds a descriptor.
  if (listening_.empty()) arrivals_.clear();
}

Result<Exchange::Incoming> Exchange::accepted(std::uint64_t listener) {
  const std::lock_guard guard(mutex_);
  progress(now_ns());
  auto& ready = listening_.at(listener).ready;
  for (auto next = ready.begin(); next != ready.end(); ++next) {
    auto connected = next->end.local ? Result<bool>(true) : engine_->connected(next->process);
    if (connected.ok() && !connected.value()) continue;
    Incoming taken = std::move(next->end);
    ready.erase(next);
    if (!connected.ok()) return connected.take_status();
    return taken;
  }
  return Incoming{};
}

// ---- progress ----

void Exchange::progress(TimeNs now) {
  accept_all(now);
  for (auto arrival = arrivals_.begin(); arrival != arrivals_.end();)
    arrival = advance(*arrival, now) ? std::next(arrival) : arrivals_.erase(arrival);
  for (auto& [number, dial] : dials_) {
    if (dial.done || !dial.failure.ok()) continue;
    advance(dial, now);
    if (dial.failure.ok()) continue;
    // NCCL may have given up, and never take the error.
    dial.socket.reset();
    dial.end.reset();
    dial.made = {};
  }
}

void Exchange::accept_all(TimeNs now) {
  listeners_.each_socket([&](int listener) {
    for (;;) {
      SocketAddress remote;
      remote.size = sizeof(remote.storage);
      FileDescriptor socket = FileDescriptor::made_by([listener, &remote] {
        return ::accept4(listener, remote.get(), &remote.size, SOCK_NONBLOCK | SOCK_CLOEXEC);
      });
      if (!socket.valid()) return tell_exhausted();
      exhausted_ = false;
      std::array<std::byte, 16> nonce;
      if (!fill_random(nonce).ok()) return;
      arrivals_.push_back({std::move(socket), ExchangeAcceptor(with_key(secret_, key_), nonce),
                           now + arrival_limit_ns, remote});
      // Most callers have sent their proof already, and are no strangers any more.
      if (!advance(arrivals_.back(), now))
        arrivals_.pop_back();
      else
        drop_stranger();
    }
  });
}

// Drops the oldest connection without proof if there are too many.
void Exchange::drop_stranger() {
  const auto strangers = std::ranges::count_if(arrivals_, &Arrival::stranger);
  if (static_cast<std::size_t>(strangers) <= most_strangers) return;
  arrivals_.erase(std::ranges::find_if(arrivals_, &Arrival::stranger));
}

// Called with the error of accept4() in errno.
void Exchange::tell_exhausted() {
  const int error = errno;
  if (error != EMFILE && error != ENFILE && error != ENOBUFS && error != ENOMEM) return;
  if (std::exchange(exhausted_, true)) return;
  engine_->log().add(
      LogLevel::error,
      error_text("accept", error) + "; peers cannot connect until descriptors or memory are free");
}

// Returns false once the arrival has ended.
bool Exchange::advance(Arrival& arrival, TimeNs now) {
  ExchangeAcceptor& end = arrival.end;
  for (;;) {
    const bool open = pump(arrival.socket.get(), end);
    if (end.wants() == ExchangeAcceptor::Wants::bytes) {
      const bool over =
          !open || (end.state() != ExchangeState::in_progress && end.output().empty());
      if (over && end.state() == ExchangeState::failed)
        engine_->log().add(LogLevel::warning,
                           "dropped an exchange with " + arrival.remote.text() + ": " + end.why());
      return !over && now < arrival.deadline;
    }
    answer(arrival);
  }
}

void Exchange::answer(Arrival& arrival) {
  ExchangeAcceptor& end = arrival.end;
  const Call& call = end.call();
  if (!listening_.contains(call.listener)) return end.refuse("the listener is closed");
  if (end.wants() == ExchangeAcceptor::Wants::answer) {
    auto key = key_for(call.process);
    if (!key.ok()) return end.refuse(key.take_status().message());
    return end.answer(own_, key.value());
  }
  const Status opened = open_receiver(end);
  if (!opened.ok()) return end.refuse(opened.message());
  end.accept();
}

Status Exchange::open_receiver(const ExchangeAcceptor& end) {
  const Call& call = end.call();
  Listening& listening = listening_.at(call.listener);
  if (listening.seen.contains(call.connection)) return {};
  R2CCL_TRY(learn(end.peer(), end.peer_key()));
  auto receiver = PostedReceiver::open(engine_, call.process, call.connection);
  if (!receiver.ok()) return receiver.take_status();
  listening.seen.insert(call.connection);
  listening.ready.push_back({.process = call.process,
                             .end = {.receiver = std::move(receiver.value()),
                                     .home = home_of(call.process, listening.nic, call.nic),
                                     .local = nullptr}});
  return engine_->begin_connect(call.process);
}

// ---- dials ----

Result<std::uint64_t> Exchange::dial(const Handle& handle, std::size_t nic) {
  const std::lock_guard guard(mutex_);
  if (handle.key_check != check_of_key(handle.secret, key_))
    return Status(ErrorCode::invalid_argument,
                  "R2CCL_SECRET_FILE: the ranks have different keys, or a rank has none; must be "
                  "the same key on every node");
  if (handle.secret == secret_) return dial_here(handle);
  std::array<std::byte, sizeof(ConnectionId)> random;
  R2CCL_TRY(fill_random(random));
  Dial dial;
  dial.to = handle;
  dial.nic = nic;
  std::memcpy(&dial.connection, random.data(), random.size());
  dial.connection = std::clamp<ConnectionId>(dial.connection, 1, streams_communicator - 1);
  const auto limit = static_cast<TimeNs>(engine_->config().connect_timeout_s * 1e9);
  dial.deadline = now_ns() + limit;
  dials_[++last_dial_] = std::move(dial);
  return last_dial_;
}

// Connects two ranks of this process.
Result<std::uint64_t> Exchange::dial_here(const Handle& handle) {
  const auto listening = listening_.find(handle.listener);
  if (listening == listening_.end())
    return Status(ErrorCode::invalid_argument, "the listener is closed");
  auto queue = std::make_shared<LocalQueue>();
  listening->second.ready.push_back(
      {.process = own_.process, .end = {.receiver = nullptr, .home = 0, .local = queue}});
  Dial& dial = dials_[++last_dial_];
  dial.made.local = std::move(queue);
  dial.done = true;
  return last_dial_;
}

Result<Exchange::Outgoing> Exchange::dialled(std::uint64_t number) {
  const std::lock_guard guard(mutex_);
  progress(now_ns());
  const auto found = dials_.find(number);
  if (found == dials_.end())
    return Status(ErrorCode::invalid_argument, "the handle names an attempt that has ended");
  Dial& dial = found->second;
  Status failure = std::move(dial.failure);
  if (failure.ok() && dial.done) {
    auto connected = dial.made.local ? Result<bool>(true) : engine_->connected(dial.to.process);
    if (connected.ok() && connected.value()) {
      Outgoing made = std::move(dial.made);
      dials_.erase(found);
      return made;
    }
    failure = connected.take_status();
  }
  if (failure.ok()) return Outgoing{};
  dials_.erase(found);
  return failure;
}

void Exchange::begin_attempt(Dial& dial, TimeNs now) {
  const Place& place = dial.to.places[dial.place++ % dial.to.places.size()];
  const SocketAddress remote = SocketAddress::ip(place.address, place.port);
  std::array<std::byte, 16> nonce;
  if (Status random = fill_random(nonce); !random.ok()) {
    dial.failure = std::move(random);
    return;
  }
  dial.socket = FileDescriptor::made_by([&remote] {
    return ::socket(remote.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  });
  const int fd = dial.socket.get();
  if (fd < 0 || (::connect(fd, remote.get(), remote.size) != 0 && errno != EINPROGRESS))
    return end_attempt(dial, error_text(remote.text().c_str(), errno), now);
  dial.connecting = true;
  dial.attempt_ends = now + connect_limit_ns;
  dial.end = std::make_unique<ExchangeConnector>(with_key(dial.to.secret, key_),
                                                 Call{.listener = dial.to.listener,
                                                      .connection = dial.connection,
                                                      .nic = static_cast<std::uint16_t>(dial.nic),
                                                      .process = own_.process},
                                                 nonce);
}

// The next attempt dials the next address of the handle.
void Exchange::end_attempt(Dial& dial, const std::string& why, TimeNs now) {
  dial.socket.reset();
  dial.end.reset();
  dial.next_attempt = now + pause_ns;
  dial.why = why;
}

void Exchange::advance(Dial& dial, TimeNs now) {
  if (now >= dial.deadline) {
    dial.failure = {ErrorCode::timeout,
                    "no connection within connect_timeout_s (R2CCL_CONNECT_TIMEOUT_S) to process " +
                        std::to_string(dial.to.process) +
                        (dial.why.empty() ? "" : ", last attempt: " + dial.why)};
    return;
  }
  if (!dial.socket.valid() && now >= dial.next_attempt) begin_attempt(dial, now);
  if (!dial.socket.valid()) return;
  if (dial.connecting) {
    int error = 0;
    if (connect_done(dial.socket.get(), error)) {
      dial.connecting = false;
      dial.attempt_ends = now + answer_limit_ns;
    } else {
      if (error != 0)
        end_attempt(dial, error_text("connect", error), now);
      else if (now >= dial.attempt_ends)
        end_attempt(dial, "connect: no answer", now);
      return;
    }
  }
  bool details_sent = false;
  do {
    const bool open = pump(dial.socket.get(), *dial.end);
    if (dial.end->refused()) {
      dial.failure = {ErrorCode::invalid_argument, dial.end->why()};
      return;
    }
    if (dial.end->state() == ExchangeState::failed) return end_attempt(dial, dial.end->why(), now);
    if (dial.end->state() == ExchangeState::done) {
      dial.failure = engine_->begin_connect(dial.to.process);
      dial.done = true;
      dial.socket.reset();
      return;
    }
    if (!open) return end_attempt(dial, "the peer closed the connection", now);
    details_sent = dial.end->answer_due();
    if (details_sent) dial.failure = answer(dial);
  } while (details_sent && dial.failure.ok());
  if (dial.failure.ok() && now >= dial.attempt_ends) end_attempt(dial, "no answer", now);
}

Status Exchange::answer(Dial& dial) {
  const Description& peer = dial.end->peer();
  if (peer.process != dial.to.process)
    return {ErrorCode::invalid_argument, "the peer's handle names another process"};
  auto key = key_for(peer.process);
  if (!key.ok()) return key.take_status();
  R2CCL_TRY(learn(peer, dial.end->peer_key()));
  if (!dial.made.sender) {
    auto sender = PostedSender::open(engine_, peer.process, dial.connection);
    if (!sender.ok()) return sender.take_status();
    dial.made.sender = std::move(sender.value());
  }
  dial.end->details(own_, key.value());
  return {};
}

}  // namespace r2ccl::net
