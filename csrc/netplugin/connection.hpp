// What NCCL holds of the plugin: listeners, ends of connections, memory and requests.  Each end is
// used by one thread of NCCL at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/clock.hpp"
#include "base/errors.hpp"
#include "engine/posted_channel.hpp"
#include "netplugin/local_queue.hpp"
#include "netplugin/plugin.hpp"

namespace r2ccl::net {

// Registered memory of a connection.
struct Memory {
  std::span<std::byte> bytes;
  MemoryId id = 0;  // receivers only
};

class Connection;

struct Request {
  Connection* connection;
  std::uint64_t number;
  std::uint32_t bytes;
};

class Connection {
 public:
  virtual ~Connection() { plugin_->watchdog().closed(this); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Posts a message, at an end of the right direction.  Null: call again.
  virtual Result<Request*> send(std::span<const std::byte> source);
  virtual Result<Request*> receive(std::span<std::byte> into, const Memory* memory);
  virtual Result<Memory*> add_memory(std::span<std::byte> bytes) { return new Memory{bytes}; }
  virtual Status remove_memory(Memory* memory) = 0;
  // Finishes a request: returns the size of the message once done; empty: call again.
  virtual Result<std::optional<std::uint32_t>> test(const Request& request) = 0;
  virtual Status close() = 0;
  // Tells the watchdog of an error that NCCL is about to get.
  void failed(const std::string& why) { plugin_->watchdog().failed(this, why, now_ns()); }

 protected:
  explicit Connection(std::shared_ptr<Plugin> plugin) : plugin_(std::move(plugin)) {}

  // Returns the request of a message; at most most_posted messages are not finished.
  Request* request_of(std::uint64_t number, std::size_t bytes) {
    Request& request = requests_[number % requests_.size()];
    request = {this, number, static_cast<std::uint32_t>(bytes)};
    return &request;
  }

  const std::shared_ptr<Plugin> plugin_;

 private:
  std::array<Request, most_posted> requests_{};
};

class Sender final : public Connection {
 public:
  Sender(std::shared_ptr<Plugin> plugin, std::unique_ptr<PostedSender> channel)
      : Connection(std::move(plugin)), channel_(std::move(channel)) {}

  Result<Request*> send(std::span<const std::byte> source) override;
  Status remove_memory(Memory* memory) override;
  Result<std::optional<std::uint32_t>> test(const Request& request) override;
  Status close() override { return channel_->close(close_limit_s); }

  static constexpr double close_limit_s = 2.0;

 private:
  const std::unique_ptr<PostedSender> channel_;
};

class Receiver final : public Connection {
 public:
  Receiver(std::shared_ptr<Plugin> plugin, Exchange::Incoming incoming)
      : Connection(std::move(plugin)),
        channel_(std::move(incoming.receiver)),
        home_(incoming.home) {}

  Result<Request*> receive(std::span<std::byte> into, const Memory* memory) override;
  Result<Memory*> add_memory(std::span<std::byte> bytes) override;
  Status remove_memory(Memory* memory) override;
  Result<std::optional<std::uint32_t>> test(const Request& request) override;
  Status close() override { return channel_->close(Sender::close_limit_s); }

 private:
  const std::unique_ptr<PostedReceiver> channel_;
  const RailId home_;
};

// Ends of a connection between two ranks of this process.
class LocalSender final : public Connection {
 public:
  LocalSender(std::shared_ptr<Plugin> plugin, std::shared_ptr<LocalQueue> queue)
      : Connection(std::move(plugin)), queue_(std::move(queue)) {}

  Result<Request*> send(std::span<const std::byte> source) override;
  Status remove_memory(Memory* memory) override;
  Result<std::optional<std::uint32_t>> test(const Request& request) override;
  Status close() override;

 private:
  const std::shared_ptr<LocalQueue> queue_;
};

class LocalReceiver final : public Connection {
 public:
  LocalReceiver(std::shared_ptr<Plugin> plugin, std::shared_ptr<LocalQueue> queue)
      : Connection(std::move(plugin)), queue_(std::move(queue)) {}

  Result<Request*> receive(std::span<std::byte> into, const Memory* memory) override;
  Status remove_memory(Memory* memory) override;
  Result<std::optional<std::uint32_t>> test(const Request& request) override;
  Status close() override;

 private:
  const std::shared_ptr<LocalQueue> queue_;
};

// A listener of NCCL; the number is the exchange's.
class Listener {
 public:
  Listener(std::shared_ptr<Plugin> plugin, std::uint64_t number)
      : plugin_(std::move(plugin)), number_(number) {}
  ~Listener() { plugin_->exchange().close_listener(number_); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  Result<std::unique_ptr<Connection>> accept();  // null: call again

 private:
  const std::shared_ptr<Plugin> plugin_;
  const std::uint64_t number_;
};

// Connects to a handle.  The handle keeps the number of the attempt between two calls.  Null: call
// again.
Result<std::unique_ptr<Connection>> connect(const std::shared_ptr<Plugin>& plugin, std::size_t nic,
                                            std::span<std::byte> handle);

}  // namespace r2ccl::net
