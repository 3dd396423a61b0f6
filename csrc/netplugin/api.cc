// The symbols that NCCL looks for: shims of every version over one implementation.
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "netplugin/abi.hpp"
#include "netplugin/connection.hpp"
#include "netplugin/plugin.hpp"

namespace r2ccl::net {
namespace {

constexpr std::size_t most_message_bytes = std::size_t{1} << 30U;
constexpr int most_connections = 65'536;
constexpr int unknown_mbit_s = 10'000;  // NCCL's own value for an unknown speed

// Runs a call; an exception (out of memory) becomes an error.
template <typename Body>
NcclResult guarded(const Body& body) {
  try {
    return report(body());
  } catch (const std::exception& error) {
    return report({ErrorCode::internal, std::string("exception in the plugin: ") + error.what()});
  }
}

// The same for a message of a connection: an error that is ignored ends the process.
template <typename Body>
NcclResult guarded(Connection& connection, const Body& body) {
  return guarded([&]() -> Status {
    Status status = body();
    if (!status.ok()) connection.failed(status.message());
    return status;
  });
}

Status no_plugin() {
  return {ErrorCode::invalid_argument, "the plugin is not initialised in this process"};
}

// ---- the implementation ----

NcclResult init(NcclLogger log) {
  return guarded([&] { return Plugin::add_user(log, /*ends=*/false); });
}

NcclResult init(NcclLogger log, NcclProfiler) { return init(log); }

NcclResult init(void** context, std::uint64_t, ConnectionConfig*, NcclLogger log, NcclProfiler) {
  *context = nullptr;
  return guarded([&] { return Plugin::add_user(log, /*ends=*/true); });
}

NcclResult finalize(void*) {
  return guarded([]() -> Status {
    Plugin::remove_user();
    return {};
  });
}

NcclResult set_attributes(void*, NetworkAttributes*) { return NcclResult::success; }

NcclResult devices(int* count) {
  return guarded([&]() -> Status {
    const auto plugin = Plugin::current();
    if (!plugin) return no_plugin();
    *count = static_cast<int>(plugin->nics().size());
    return {};
  });
}

// Sets what all versions have.
template <typename Properties>
void fill(const Nic& nic, int index, Properties& properties) {
  // NCCL only reads the texts, which live as long as the plugin.
  properties.name = const_cast<char*>(nic.name.c_str());
  properties.pci_path = nic.pci_path.empty() ? nullptr : const_cast<char*>(nic.pci_path.c_str());
  properties.guid = static_cast<std::uint64_t>(index);
  properties.memory_types = nccl_memory_host;
  properties.speed = nic.mbit_s > 0 ? nic.mbit_s : unknown_mbit_s;
  properties.most_connections = most_connections;
  properties.most_receives = 1;
  if constexpr (requires { properties.merged; }) {
    properties.merged.count = 1;
    properties.merged.nics[0] = index;
    properties.most_point_to_point_bytes = most_message_bytes;
    properties.most_collective_bytes = most_message_bytes;
  }
  if constexpr (requires { properties.most_requests_in_one; }) properties.most_requests_in_one = 1;
  if constexpr (requires { properties.rail; }) properties.rail = properties.plane = -1;
}

template <typename Properties>
NcclResult get_properties(int index, Properties* properties) {
  return guarded([&]() -> Status {
    const auto plugin = Plugin::current();
    if (!plugin) return no_plugin();
    if (index < 0 || static_cast<std::size_t>(index) >= plugin->nics().size())
      return {ErrorCode::invalid_argument, "device " + std::to_string(index) + ": there are " +
                                               std::to_string(plugin->nics().size())};
    *properties = {};
    fill(plugin->nics()[static_cast<std::size_t>(index)], index, *properties);
    return {};
  });
}

NcclResult listen(int nic, void* handle, void** listener) {
  *listener = nullptr;
  return guarded([&]() -> Status {
    auto plugin = Plugin::current();
    if (!plugin) return no_plugin();
    const std::span bytes(static_cast<std::byte*>(handle), nccl_handle_bytes);
    const std::uint64_t number = plugin->exchange().listen(static_cast<std::size_t>(nic), bytes);
    *listener = new Listener(std::move(plugin), number);
    return {};
  });
}

NcclResult listen(void*, int nic, void* handle, void** listener) {
  return listen(nic, handle, listener);
}

NcclResult connect_to(int nic, void* handle, void** sender, DeviceHandle**) {
  *sender = nullptr;
  return guarded([&]() -> Status {
    const auto plugin = Plugin::current();
    if (!plugin) return no_plugin();
    auto made = connect(plugin, static_cast<std::size_t>(nic),
                        {static_cast<std::byte*>(handle), nccl_handle_bytes});
    if (!made.ok()) return made.take_status();
    *sender = made.value().release();
    return {};
  });
}

NcclResult connect_to(int nic, ConnectionConfig*, void* handle, void** sender,
                      DeviceHandle** device) {
  return connect_to(nic, handle, sender, device);
}

NcclResult connect_to(void*, int nic, void* handle, void** sender, DeviceHandle** device) {
  return connect_to(nic, handle, sender, device);
}

NcclResult accept(void* listener, void** receiver, DeviceHandle**) {
  *receiver = nullptr;
  return guarded([&]() -> Status {
    auto made = static_cast<Listener*>(listener)->accept();
    if (!made.ok()) return made.take_status();
    *receiver = made.value().release();
    return {};
  });
}

NcclResult register_memory(void* connection, void* data, std::size_t bytes, int type,
                           void** memory) {
  *memory = nullptr;
  return guarded([&]() -> Status {
    if (type != nccl_memory_host)
      return {ErrorCode::invalid_argument, "memory of type " + std::to_string(type) +
                                               ": this plugin carries memory of the host only"};
    auto made =
        static_cast<Connection*>(connection)->add_memory({static_cast<std::byte*>(data), bytes});
    if (!made.ok()) return made.take_status();
    *memory = made.value();
    return {};
  });
}

NcclResult deregister_memory(void* connection, void* memory) {
  return guarded([&] {
    return static_cast<Connection*>(connection)->remove_memory(static_cast<Memory*>(memory));
  });
}

NcclResult send(void* sender, void* data, std::size_t bytes, void** request) {
  *request = nullptr;
  auto& connection = *static_cast<Connection*>(sender);
  return guarded(connection, [&]() -> Status {
    auto made = connection.send({static_cast<const std::byte*>(data), bytes});
    if (!made.ok()) return made.take_status();
    *request = made.value();
    return {};
  });
}

NcclResult send(void* sender, void* data, int bytes, int, void*, void** request) {
  return send(sender, data, static_cast<std::size_t>(bytes), request);
}

NcclResult send(void* sender, void* data, std::size_t bytes, int, void*, void** request) {
  return send(sender, data, bytes, request);
}

NcclResult send(void* sender, void* data, std::size_t bytes, int, void*, void*, void** request) {
  return send(sender, data, bytes, request);
}

// NCCL may pass a hint in *request, so that every call writes there.
NcclResult receive(void* receiver, int count, void** data, std::size_t bytes, void** memory,
                   void** request) {
  *request = nullptr;
  auto& connection = *static_cast<Connection*>(receiver);
  return guarded(connection, [&]() -> Status {
    if (count != 1)
      return {ErrorCode::invalid_argument, "a grouped receive of " + std::to_string(count) +
                                               ": this plugin allows 1 (maxRecvs)"};
    auto made = connection.receive({static_cast<std::byte*>(data[0]), bytes},
                                   static_cast<const Memory*>(memory[0]));
    if (!made.ok()) return made.take_status();
    *request = made.value();
    return {};
  });
}

NcclResult receive(void* receiver, int count, void** data, int* sizes, int*, void** memory,
                   void** request) {
  return receive(receiver, count, data, static_cast<std::size_t>(sizes[0]), memory, request);
}

NcclResult receive(void* receiver, int count, void** data, std::size_t* sizes, int*, void** memory,
                   void** request) {
  return receive(receiver, count, data, sizes[0], memory, request);
}

NcclResult receive(void* receiver, int count, void** data, std::size_t* sizes, int*, void** memory,
                   void**, void** request) {
  return receive(receiver, count, data, sizes[0], memory, request);
}

// Memory of the host needs no flush.
NcclResult flush(void*, int, void**, int*, void**, void** request) {
  *request = nullptr;
  return NcclResult::success;
}

NcclResult test(void* request, int* done, int* sizes) {
  *done = 0;
  const auto& of = *static_cast<const Request*>(request);
  return guarded(*of.connection, [&]() -> Status {
    auto bytes = of.connection->test(of);
    if (!bytes.ok()) return bytes.take_status();
    if (!bytes.value()) return {};
    *done = 1;
    if (sizes != nullptr) sizes[0] = static_cast<int>(*bytes.value());
    return {};
  });
}

NcclResult close_connection(void* connection) {
  return guarded([&] {
    const std::unique_ptr<Connection> closed(static_cast<Connection*>(connection));
    return closed->close();
  });
}

NcclResult close_listen(void* listener) {
  return guarded([&]() -> Status {
    delete static_cast<Listener*>(listener);
    return {};
  });
}

// The overloads with the types of the version are chosen.
template <typename Net>
constexpr Net shim() {
  Net net{};
  net.name = "r2ccl";
  net.init = init;
  net.devices = devices;
  net.get_properties = get_properties;
  net.listen = listen;
  net.connect = connect_to;
  net.accept = accept;
  net.register_memory = register_memory;
  // No register_dma_buf: memory of the host only.
  net.deregister_memory = deregister_memory;
  net.send = send;
  net.receive = receive;
  net.flush = flush;
  net.test = test;
  net.close_send = net.close_receive = close_connection;
  net.close_listen = close_listen;
  if constexpr (requires { net.finalize; }) net.finalize = finalize;
  if constexpr (requires { net.set_attributes; }) net.set_attributes = set_attributes;
  return net;
}

}  // namespace
}  // namespace r2ccl::net

extern "C" {
// NCCL looks for these names.
// NOLINTBEGIN(readability-identifier-naming)
extern const r2ccl::net::NetV8 ncclNetPlugin_v8;
extern const r2ccl::net::NetV9 ncclNetPlugin_v9;
extern const r2ccl::net::NetV10 ncclNetPlugin_v10;
extern const r2ccl::net::NetV11 ncclNetPlugin_v11;
extern const r2ccl::net::NetV12 ncclNetPlugin_v12;

constinit const r2ccl::net::NetV8 ncclNetPlugin_v8 = r2ccl::net::shim<r2ccl::net::NetV8>();
constinit const r2ccl::net::NetV9 ncclNetPlugin_v9 = r2ccl::net::shim<r2ccl::net::NetV9>();
constinit const r2ccl::net::NetV10 ncclNetPlugin_v10 = r2ccl::net::shim<r2ccl::net::NetV10>();
constinit const r2ccl::net::NetV11 ncclNetPlugin_v11 = r2ccl::net::shim<r2ccl::net::NetV11>();
constinit const r2ccl::net::NetV12 ncclNetPlugin_v12 = r2ccl::net::shim<r2ccl::net::NetV12>();
// NOLINTEND(readability-identifier-naming)
}
