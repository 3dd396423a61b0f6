// The binary interface between NCCL and a network plugin, versions 8 to 12, as own declarations.
// NCCL finds a version by the name of its symbol, ncclNetPlugin_v8 to ncclNetPlugin_v12.
//
// | version | first NCCL | new |
// |---|---|---|
// | 8 | 2.20 | |
// | 9 | 2.24 | sizes of 64 bits, merged NICs, largest messages |
// | 10 | 2.26 | traffic class, handles of a profiler |
// | 11 | 2.28 | a context for each communicator, attributes of its network |
// | 12 | 2.30 | rail and plane of a NIC, 8 NICs in a merged NIC |
//
// tests/native/net_abi_test.cc keeps the sizes and offsets.
#pragma once

#include <cstddef>
#include <cstdint>

namespace r2ccl::net {

enum class NcclResult : int {
  success = 0,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
};

enum class NcclLogLevel : int { none, version, warn, info, abort, trace };
inline constexpr unsigned long nccl_log_net = 0x10;  // subsystem
using NcclLogger = void (*)(NcclLogLevel level, unsigned long subsystems, const char* function,
                            int line, const char* format, ...);
using NcclProfiler = NcclResult (*)(void** handle, int type, void* parent, std::int64_t id,
                                    void* data);

inline constexpr std::size_t nccl_handle_bytes = 128;
inline constexpr int nccl_memory_host = 1;  // type of memory; bits of `memory_types`

// A connection with an offload to the GPU; not supported by this plugin.
struct DeviceHandle;

template <int most>
struct MergedNics {
  int count;
  int nics[most];
};

// Sizes in bytes, speed in Mbit/s, latency in us.
struct PropertiesV8 {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int memory_types;
  int memory_is_global;
  int speed;
  int port;
  float latency;
  int most_connections;
  int most_receives;  // in a grouped receive
  int offload;
  int offload_version;
};

template <int most>
struct PropertiesV9 {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int memory_types;
  int memory_is_global;
  int needs_flush;
  int speed;
  int port;
  float latency;
  int most_connections;
  int most_receives;
  int offload;
  int offload_version;
  MergedNics<most> merged;
  std::size_t most_point_to_point_bytes;
  std::size_t most_collective_bytes;
};

struct PropertiesV11 : PropertiesV9<4> {
  int most_requests_in_one;
};

struct PropertiesV12 : PropertiesV9<8> {
  int most_requests_in_one;
  std::int16_t rail;
  std::int16_t plane;
};

struct ConnectionConfig {
  int traffic_class;
};

struct PeerLimits {
  std::int32_t most_peers, least_peers, most_flows, least_flows;
};

struct NetworkAttributes {
  PeerLimits sends, receives;
  std::uint32_t operations, algorithms, protocols;
};

// ---- functions that have the same type in several versions ----
using Devices = NcclResult (*)(int* count);
template <typename Properties>
using GetProperties = NcclResult (*)(int nic, Properties* properties);
using Accept = NcclResult (*)(void* listener, void** receiver, DeviceHandle** device);
using RegisterMemory = NcclResult (*)(void* connection, void* data, std::size_t bytes, int type,
                                      void** memory);
using RegisterDmaBuf = NcclResult (*)(void* connection, void* data, std::size_t bytes, int type,
                                      std::uint64_t offset, int descriptor, void** memory);
using DeregisterMemory = NcclResult (*)(void* connection, void* memory);
using Flush = NcclResult (*)(void* receiver, int count, void** data, int* sizes, void** memory,
                             void** request);
using Test = NcclResult (*)(void* request, int* done, int* sizes);
using Close = NcclResult (*)(void* object);
using GetDeviceMemory = NcclResult (*)(void* connection, void* memory, void** device_memory);
using ReceiveConsumed = NcclResult (*)(void* receiver, int count, void* request);
template <int most>
using MakeMergedNic = NcclResult (*)(int* nic, MergedNics<most>* properties);
using ListenV8 = NcclResult (*)(int nic, void* handle, void** listener);
using ConnectV8 = NcclResult (*)(int nic, void* handle, void** sender, DeviceHandle** device);
using SendV9 = NcclResult (*)(void* sender, void* data, std::size_t bytes, int tag, void* memory,
                              void** request);
using ReceiveV9 = NcclResult (*)(void* receiver, int count, void** data, std::size_t* sizes,
                                 int* tags, void** memory, void** request);
using SendV10 = NcclResult (*)(void* sender, void* data, std::size_t bytes, int tag, void* memory,
                               void* profile, void** request);
using ReceiveV10 = NcclResult (*)(void* receiver, int count, void** data, std::size_t* sizes,
                                  int* tags, void** memory, void** profiles, void** request);

struct NetV8 {
  const char* name;
  NcclResult (*init)(NcclLogger log);
  Devices devices;
  GetProperties<PropertiesV8> get_properties;
  ListenV8 listen;
  ConnectV8 connect;
  Accept accept;
  RegisterMemory register_memory;
  RegisterDmaBuf register_dma_buf;
  DeregisterMemory deregister_memory;
  NcclResult (*send)(void* sender, void* data, int bytes, int tag, void* memory, void** request);
  NcclResult (*receive)(void* receiver, int count, void** data, int* sizes, int* tags,
                        void** memory, void** request);
  Flush flush;
  Test test;
  Close close_send;
  Close close_receive;
  Close close_listen;
  GetDeviceMemory get_device_memory;
  ReceiveConsumed receive_consumed;
};

struct NetV9 {
  const char* name;
  NcclResult (*init)(NcclLogger log);
  Devices devices;
  GetProperties<PropertiesV9<4>> get_properties;
  ListenV8 listen;
  ConnectV8 connect;
  Accept accept;
  RegisterMemory register_memory;
  RegisterDmaBuf register_dma_buf;
  DeregisterMemory deregister_memory;
  SendV9 send;
  ReceiveV9 receive;
  Flush flush;
  Test test;
  Close close_send;
  Close close_receive;
  Close close_listen;
  GetDeviceMemory get_device_memory;
  ReceiveConsumed receive_consumed;
  MakeMergedNic<4> make_merged_nic;
};

struct NetV10 {
  const char* name;
  NcclResult (*init)(NcclLogger log, NcclProfiler profiler);
  Devices devices;
  GetProperties<PropertiesV9<4>> get_properties;
  ListenV8 listen;
  NcclResult (*connect)(int nic, ConnectionConfig* config, void* handle, void** sender,
                        DeviceHandle** device);
  Accept accept;
  RegisterMemory register_memory;
  RegisterDmaBuf register_dma_buf;
  DeregisterMemory deregister_memory;
  SendV10 send;
  ReceiveV10 receive;
  Flush flush;
  Test test;
  Close close_send;
  Close close_receive;
  Close close_listen;
  GetDeviceMemory get_device_memory;
  ReceiveConsumed receive_consumed;
  MakeMergedNic<4> make_merged_nic;
};

// Versions 11 and 12.
template <typename Properties, int most>
struct NetWithContext {
  const char* name;
  NcclResult (*init)(void** context, std::uint64_t communicator, ConnectionConfig* config,
                     NcclLogger log, NcclProfiler profiler);
  Devices devices;
  GetProperties<Properties> get_properties;
  NcclResult (*listen)(void* context, int nic, void* handle, void** listener);
  NcclResult (*connect)(void* context, int nic, void* handle, void** sender, DeviceHandle** device);
  Accept accept;
  RegisterMemory register_memory;
  RegisterDmaBuf register_dma_buf;
  DeregisterMemory deregister_memory;
  SendV10 send;
  ReceiveV10 receive;
  Flush flush;
  Test test;
  Close close_send;
  Close close_receive;
  Close close_listen;
  GetDeviceMemory get_device_memory;
  ReceiveConsumed receive_consumed;
  MakeMergedNic<most> make_merged_nic;
  NcclResult (*finalize)(void* context);
  NcclResult (*set_attributes)(void* context, NetworkAttributes* attributes);
};
using NetV11 = NetWithContext<PropertiesV11, 4>;
using NetV12 = NetWithContext<PropertiesV12, 8>;

}  // namespace r2ccl::net
