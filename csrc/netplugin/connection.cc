#include "netplugin/connection.hpp"

#include <limits>
#include <string>
#include <utility>

namespace r2ccl::net {
namespace {

constexpr std::size_t most_bytes = std::numeric_limits<int>::max();  // the type in NCCL's test()

Status too_large(std::size_t bytes) {
  return {ErrorCode::invalid_argument, "a message of " + std::to_string(bytes) +
                                           " bytes: must be at most " + std::to_string(most_bytes)};
}

Status wrong_end() {
  return {ErrorCode::invalid_argument, "a message at the wrong end of its connection"};
}

}  // namespace

Result<Request*> Connection::send(std::span<const std::byte>) { return wrong_end(); }

Result<Request*> Connection::receive(std::span<std::byte>, const Memory*) { return wrong_end(); }

// ---- sender ----

Result<Request*> Sender::send(std::span<const std::byte> source) {
  if (source.size() > most_bytes) return too_large(source.size());
  auto number = channel_->send(source);
  if (!number.ok()) return number.take_status();
  if (!number.value()) return static_cast<Request*>(nullptr);
  return request_of(*number.value(), source.size());
}

Status Sender::remove_memory(Memory* memory) {
  const std::unique_ptr<Memory> removed(memory);
  return channel_->withdraw(removed->bytes);
}

Result<std::optional<std::uint32_t>> Sender::test(const Request& request) {
  auto sent = channel_->sent(request.number);
  if (!sent.ok()) return sent.take_status();
  return sent.value() ? std::optional(request.bytes) : std::nullopt;
}

// ---- receiver ----

Result<Request*> Receiver::receive(std::span<std::byte> into, const Memory* memory) {
  if (into.size() > most_bytes) return too_large(into.size());
  const auto offset = static_cast<std::size_t>(into.data() - memory->bytes.data());
  if (into.data() < memory->bytes.data() || offset > memory->bytes.size() ||
      into.size() > memory->bytes.size() - offset)
    return Status(ErrorCode::invalid_argument, "a receive outside of its registered memory");
  auto number = channel_->receive({.memory = memory->id,
                                   .offset = offset,
                                   .bytes = static_cast<std::uint32_t>(into.size()),
                                   .home = home_});
  if (!number.ok()) return number.take_status();
  if (!number.value()) return static_cast<Request*>(nullptr);
  return request_of(*number.value(), into.size());
}

Result<Memory*> Receiver::add_memory(std::span<std::byte> bytes) {
  auto id = channel_->add_memory(bytes);
  if (!id.ok()) return id.take_status();
  return new Memory{bytes, id.value()};
}

Status Receiver::remove_memory(Memory* memory) {
  const std::unique_ptr<Memory> removed(memory);
  return channel_->remove_memory(removed->id);
}

Result<std::optional<std::uint32_t>> Receiver::test(const Request& request) {
  return channel_->received(request.number);
}

// ---- ends inside the process ----

Result<Request*> LocalSender::send(std::span<const std::byte> source) {
  if (source.size() > most_bytes) return too_large(source.size());
  auto number = queue_->send(source);
  if (!number.ok()) return number.take_status();
  if (!number.value()) return static_cast<Request*>(nullptr);
  return request_of(*number.value(), source.size());
}

// The queue reads a source inside send() only.
Status LocalSender::remove_memory(Memory* memory) {
  delete memory;
  return {};
}

Result<std::optional<std::uint32_t>> LocalSender::test(const Request& request) {
  return queue_->finish_send() ? std::optional(request.bytes) : std::nullopt;
}

Status LocalSender::close() {
  queue_->close();
  return {};
}

Result<Request*> LocalReceiver::receive(std::span<std::byte> into, const Memory*) {
  if (into.size() > most_bytes) return too_large(into.size());
  auto number = queue_->receive(into);
  if (!number.ok()) return number.take_status();
  if (!number.value()) return static_cast<Request*>(nullptr);
  return request_of(*number.value(), into.size());
}

// A receive that waits for its message ends the connection.
Status LocalReceiver::remove_memory(Memory* memory) {
  const std::unique_ptr<Memory> removed(memory);
  if (queue_->uses(removed->bytes)) queue_->close();
  return {};
}

Result<std::optional<std::uint32_t>> LocalReceiver::test(const Request& request) {
  return queue_->received(request.number);
}

Status LocalReceiver::close() {
  queue_->close();
  return {};
}

// ---- making connections ----

Result<std::unique_ptr<Connection>> Listener::accept() {
  auto incoming = plugin_->exchange().accepted(number_);
  if (!incoming.ok()) return incoming.take_status();
  std::unique_ptr<Connection> made;
  if (incoming.value().local)
    made = std::make_unique<LocalReceiver>(plugin_, std::move(incoming.value().local));
  else if (incoming.value().receiver)
    made = std::make_unique<Receiver>(plugin_, std::move(incoming.value()));
  return made;
}

Result<std::unique_ptr<Connection>> connect(const std::shared_ptr<Plugin>& plugin, std::size_t nic,
                                            std::span<std::byte> bytes) {
  auto handle = read_handle(bytes);
  if (!handle.ok()) return handle.take_status();
  std::uint64_t dial = handle.value().dial;
  if (dial == 0) {
    auto begun = plugin->exchange().dial(handle.value(), nic);
    if (!begun.ok()) return begun.take_status();
    dial = begun.value();
    write_dial(dial, bytes);
  }
  auto outgoing = plugin->exchange().dialled(dial);
  if (!outgoing.ok() || outgoing.value().ready()) write_dial(0, bytes);
  if (!outgoing.ok()) return outgoing.take_status();
  std::unique_ptr<Connection> made;
  if (outgoing.value().local)
    made = std::make_unique<LocalSender>(plugin, std::move(outgoing.value().local));
  else if (outgoing.value().sender)
    made = std::make_unique<Sender>(plugin, std::move(outgoing.value().sender));
  return made;
}

}  // namespace r2ccl::net
