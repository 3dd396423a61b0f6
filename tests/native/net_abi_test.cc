// The interface between NCCL and the network plugin: sizes and offsets of every version, and the
// symbols of the built library.
//
// The numbers and the order of members were recorded from the headers of NVIDIA/nccl, folder
// src/include/plugin/net: net_v8.h, net_v9.h, net_v10.h, net_v11.h and net_v12.h.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "netplugin/abi.hpp"

namespace r2ccl::net {
namespace {

using Offsets = std::vector<std::size_t>;

// clang-format off
#define R2CCL_COMMON_PROPERTIES(T)                                                         \
  offsetof(T, name), offsetof(T, pci_path), offsetof(T, guid), offsetof(T, memory_types),  \
  offsetof(T, memory_is_global), offsetof(T, speed), offsetof(T, port),                    \
  offsetof(T, latency), offsetof(T, most_connections), offsetof(T, most_receives),         \
  offsetof(T, offload), offsetof(T, offload_version)
#define R2CCL_LATER_PROPERTIES(T)                                                          \
  offsetof(T, needs_flush), offsetof(T, merged), offsetof(T, most_point_to_point_bytes),   \
  offsetof(T, most_collective_bytes)
#define R2CCL_FUNCTIONS(T)                                                                 \
  offsetof(T, name), offsetof(T, init), offsetof(T, devices), offsetof(T, get_properties), \
  offsetof(T, listen), offsetof(T, connect), offsetof(T, accept),                          \
  offsetof(T, register_memory), offsetof(T, register_dma_buf),                             \
  offsetof(T, deregister_memory), offsetof(T, send), offsetof(T, receive),                 \
  offsetof(T, flush), offsetof(T, test), offsetof(T, close_send),                          \
  offsetof(T, close_receive), offsetof(T, close_listen), offsetof(T, get_device_memory),   \
  offsetof(T, receive_consumed)
// clang-format on

const Offsets functions{0,  8,  16, 24,  32,  40,  48,  56,  64, 72,
                        80, 88, 96, 104, 112, 120, 128, 136, 144};
const Offsets properties{0, 8, 16, 24, 28, 36, 40, 44, 48, 52, 56, 60};

TEST(NetAbi, PropertiesHaveTheLayoutOfEveryVersion) {
  EXPECT_EQ(sizeof(PropertiesV8), 64);
  EXPECT_EQ((Offsets{R2CCL_COMMON_PROPERTIES(PropertiesV8)}),
            (Offsets{0, 8, 16, 24, 28, 32, 36, 40, 44, 48, 52, 56}));
  using PropertiesV10 = PropertiesV9<4>;
  EXPECT_EQ(sizeof(PropertiesV10), 104);
  EXPECT_EQ((Offsets{R2CCL_COMMON_PROPERTIES(PropertiesV10)}), properties);
  EXPECT_EQ((Offsets{R2CCL_LATER_PROPERTIES(PropertiesV10)}), (Offsets{32, 64, 88, 96}));
  EXPECT_EQ(sizeof(PropertiesV11), 112);
  EXPECT_EQ(sizeof(PropertiesV12), 128);
  EXPECT_EQ(sizeof(MergedNics<4>), 20);
  EXPECT_EQ(sizeof(MergedNics<8>), 36);
  EXPECT_EQ(sizeof(NetworkAttributes), 44);
  EXPECT_EQ(sizeof(ConnectionConfig), 4);
  // The base classes keep the layout from being one of the standard, but not from being known.
  const PropertiesV11 v11{};
  const auto at = [](const auto& of, const auto& member) {
    return static_cast<std::size_t>(reinterpret_cast<const char*>(&member) -
                                    reinterpret_cast<const char*>(&of));
  };
  EXPECT_EQ(at(v11, v11.most_collective_bytes), 96);
  EXPECT_EQ(at(v11, v11.most_requests_in_one), 104);
  const PropertiesV12 v12{};
  EXPECT_EQ(at(v12, v12.merged), 64);
  EXPECT_EQ(at(v12, v12.most_point_to_point_bytes), 104);
  EXPECT_EQ(at(v12, v12.most_requests_in_one), 120);
  EXPECT_EQ(at(v12, v12.rail), 124);
  EXPECT_EQ(at(v12, v12.plane), 126);
}

TEST(NetAbi, FunctionsHaveTheOrderOfEveryVersion) {
  EXPECT_EQ(sizeof(NetV8), 152);
  EXPECT_EQ((Offsets{R2CCL_FUNCTIONS(NetV8)}), functions);
  EXPECT_EQ(sizeof(NetV9), 160);
  EXPECT_EQ((Offsets{R2CCL_FUNCTIONS(NetV9)}), functions);
  EXPECT_EQ(offsetof(NetV9, make_merged_nic), 152);
  EXPECT_EQ(sizeof(NetV10), 160);
  EXPECT_EQ((Offsets{R2CCL_FUNCTIONS(NetV10)}), functions);
  EXPECT_EQ(offsetof(NetV10, make_merged_nic), 152);
  EXPECT_EQ(sizeof(NetV11), 176);
  EXPECT_EQ((Offsets{R2CCL_FUNCTIONS(NetV11)}), functions);
  EXPECT_EQ(offsetof(NetV11, make_merged_nic), 152);
  EXPECT_EQ(offsetof(NetV11, finalize), 160);
  EXPECT_EQ(offsetof(NetV11, set_attributes), 168);
  EXPECT_EQ(sizeof(NetV12), 176);
  EXPECT_EQ((Offsets{R2CCL_FUNCTIONS(NetV12)}), functions);
}

// Returns the names that the library defines for others.
std::set<std::string> exported_symbols() {
  std::set<std::string> names;
  FILE* const listed = ::popen("nm -D --defined-only '" R2CCL_NETPLUGIN "'", "r");
  if (listed == nullptr) return names;
  std::array<char, 4096> line{};
  while (std::fgets(line.data(), static_cast<int>(line.size()), listed) != nullptr) {
    std::string text(line.data());
    text.erase(text.find_last_not_of("\n") + 1);
    names.insert(text.substr(text.rfind(' ') + 1));
  }
  ::pclose(listed);
  return names;
}

TEST(NetAbi, TheLibraryExportsTheInterfaceOnly) {
  EXPECT_EQ(exported_symbols(),
            (std::set<std::string>{"ncclNetPlugin_v10", "ncclNetPlugin_v11", "ncclNetPlugin_v12",
                                   "ncclNetPlugin_v8", "ncclNetPlugin_v9", "r2ccl_net_state"}));
}

TEST(NetAbi, TheLibraryHasEveryVersion) {
  void* const library = ::dlopen(R2CCL_NETPLUGIN, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << ::dlerror();
  for (const int version : {8, 9, 10, 11, 12}) {
    const std::string symbol = "ncclNetPlugin_v" + std::to_string(version);
    // The first member of every version is the name.
    const auto* const net = static_cast<const char* const*>(::dlsym(library, symbol.c_str()));
    ASSERT_NE(net, nullptr) << symbol;
    EXPECT_STREQ(*net, "r2ccl");
  }
  EXPECT_NE(::dlsym(library, "r2ccl_net_state"), nullptr);
  EXPECT_EQ(::dlclose(library), 0);
}

}  // namespace
}  // namespace r2ccl::net
