#include "netplugin/nics.hpp"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "base/sha256.hpp"
#include "drivers/interfaces.hpp"

namespace r2ccl::net {
namespace {

std::filesystem::path folder_of(const std::string& device) {
  return std::filesystem::path("/sys/class/net") / device;
}

// The sysfs of a container may lack an interface; a missing file then says nothing.
bool has_file(const std::string& device, const char* name) {
  std::error_code error;
  return std::filesystem::exists(folder_of(device) / name, error);
}

std::string pci_path_of(const std::string& device) {
  std::error_code error;
  const auto path = std::filesystem::canonical(folder_of(device) / "device", error);
  if (error || !std::filesystem::exists(path / "class", error)) return "";
  return path.string();
}

Nic nic_of(const Interface& interface, const IpAddress& address) {
  Nic nic;
  nic.address = address;
  for (std::size_t i = 0; i < interface.addresses.size(); ++i)
    if (interface.addresses[i] == address) nic.prefix = interface.prefixes[i];
  nic.mbit_s = interface.speed_mbps > 0 ? static_cast<int>(interface.speed_mbps) : 0;
  if (interface.is_loopback) {
    nic.name = interface.name + ":" + address.to_string();
    return nic;
  }
  nic.name = nic.device = interface.name;
  nic.pci_path = pci_path_of(interface.name);
  return nic;
}

const IpAddress* usable_address(const Interface& interface) {
  const auto found = std::ranges::find_if(interface.addresses, [](const IpAddress& address) {
    return address.scope() == AddressScope::global;
  });
  return found == interface.addresses.end() ? nullptr : &*found;
}

bool is_named(const Interface& interface, const std::string& text) {
  const auto address = IpAddress::parse(text);
  return interface.name == text ||
         (address && std::ranges::find(interface.addresses, *address) != interface.addresses.end());
}

std::vector<Nic> every_port(const std::vector<Interface>& interfaces,
                            const std::string& management) {
  std::vector<Nic> physical;
  std::vector<Nic> virtuals;
  for (const Interface& interface : interfaces) {
    const IpAddress* const address = usable_address(interface);
    const bool port = interface.admin_up && !interface.is_loopback && address != nullptr &&
                      !has_file(interface.name, "bridge") && !has_file(interface.name, "master") &&
                      !is_named(interface, management);
    if (!port) continue;
    Nic nic = nic_of(interface, *address);
    const bool hardware = has_file(interface.name, "device") || has_file(interface.name, "bonding");
    (hardware ? physical : virtuals).push_back(std::move(nic));
  }
  return physical.empty() ? virtuals : physical;
}

Status wrong(const std::string& rails, const std::string& why) {
  return {ErrorCode::invalid_argument,
          "R2CCL_RAILS is '" + rails + "': " + why +
              "; must be auto, or devices, addresses or device=address between commas"};
}

Result<Nic> named(const std::string& item, const std::string& rails,
                  const std::vector<Interface>& interfaces) {
  const std::size_t equals = item.find('=');
  const std::string device = item.substr(0, equals);
  const auto address =
      IpAddress::parse(equals == std::string::npos ? item : item.substr(equals + 1));
  if (equals == std::string::npos && address) {
    const Interface* const interface = find_interface(interfaces, *address);
    if (interface == nullptr) return wrong(rails, "no interface has the address " + item);
    return nic_of(*interface, *address);
  }
  const auto found = std::ranges::find(interfaces, device, &Interface::name);
  if (found == interfaces.end()) return wrong(rails, "there is no interface " + device);
  if (equals != std::string::npos) {
    if (!address) return wrong(rails, item + " has no numeric address");
    return nic_of(*found, *address);
  }
  const IpAddress* const own = usable_address(*found);
  if (own == nullptr) return wrong(rails, device + " has no address");
  return nic_of(*found, *own);
}

}  // namespace

Result<std::vector<Nic>> find_nics(const std::string& rails, const std::string& management) {
  auto listed = list_interfaces();
  if (!listed.ok()) return listed.take_status();
  std::vector<Nic> nics;
  if (rails == "auto") {
    nics = every_port(listed.value(), management);
  } else {
    for (std::size_t begin = 0; begin <= rails.size();) {
      const std::size_t end = std::min(rails.find(',', begin), rails.size());
      auto nic = named(rails.substr(begin, end - begin), rails, listed.value());
      if (!nic.ok()) return nic.take_status();
      const IpAddress& address = nic.value().address;
      if (std::ranges::find(nics, address, &Nic::address) != nics.end())
        return wrong(rails, "it names the NIC with " + address.to_string() + " twice");
      nics.push_back(std::move(nic.value()));
      begin = end + 1;
    }
  }
  if (nics.empty()) return wrong(rails, "no interface is a usable port");
  std::ranges::stable_sort(nics, [](const Nic& a, const Nic& b) {
    if (a.pci_path.empty() != b.pci_path.empty()) return b.pci_path.empty();
    return std::filesystem::path(a.pci_path).filename() <
           std::filesystem::path(b.pci_path).filename();
  });
  return nics;
}

Status fill_random(std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      return {ErrorCode::internal, std::string("no random numbers: ") + std::strerror(errno)};
    out = out.subspan(static_cast<std::size_t>(got));
  }
  return {};
}

Result<NodeIdentity> identity_of_node(const std::string& node) {
  NodeIdentity identity;
  if (node == "per-rank") {
    R2CCL_TRY(fill_random(identity));
    return identity;
  }
  std::string text = "text " + node;
  if (node.empty()) {
    std::ifstream boot("/proc/sys/kernel/random/boot_id");
    std::error_code error;
    text = std::string(std::istreambuf_iterator<char>(boot), {}) +
           std::filesystem::read_symlink("/proc/self/ns/net", error).string();
    // Without both, a process is a node of its own: rails work inside a node, too.
    if (!boot || error) return identity_of_node("per-rank");
  }
  const Digest digest = sha256(std::as_bytes(std::span(text)));
  std::ranges::copy_n(digest.begin(), identity.size(), identity.begin());
  return identity;
}

}  // namespace r2ccl::net
