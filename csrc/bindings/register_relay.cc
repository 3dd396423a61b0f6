#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "relay/relay.hpp"

namespace r2ccl::bindings {
namespace {

using Peer = std::tuple<std::uint32_t, std::uint32_t>;  // process, node

std::uint32_t prefix_from(const std::string& text) {
  const auto address = IpAddress::parse(text);
  if (!address.has_value() || address->family != AF_INET)
    throw nb::value_error(("prefix: '" + text + "' is no IPv4 address; must be 127.x.y.0").c_str());
  std::uint32_t number = 0;
  for (std::size_t i = 0; i < 4; ++i)
    number = number << 8U | static_cast<std::uint32_t>(address->bytes[i]);
  return number;
}

RelayOptions::Peer peer_from(const Peer& described) {
  const auto& [process, number] = described;
  return {.process = process, .node = number};
}

std::unique_ptr<Relay> make_relay(std::shared_ptr<Engine> engine, std::uint32_t node,
                                  const std::string& prefix, const std::vector<Peer>& peers,
                                  double link_timeout_s, int parent, bool peers_may_end) {
  RelayOptions options;
  options.node = node;
  options.prefix = prefix_from(prefix);
  options.link_timeout_ns = static_cast<TimeNs>(link_timeout_s * 1e9);
  options.parent = parent;
  options.peers_may_end = peers_may_end;
  for (const Peer& peer : peers) options.peers.push_back(peer_from(peer));
  auto made = Relay::create(std::move(engine), options);
  if (!made.ok()) raise_if_failed(made.take_status());
  return std::move(made.value());
}

void run(Relay& relay) {
  Status status;
  {
    const nb::gil_scoped_release release;
    status = relay.run();
  }
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  raise_if_failed(status);
}

bool is_prefix_free(const std::string& prefix) { return hold_prefix(prefix_from(prefix)).ok(); }

}  // namespace

void register_relay(nb::module_& module) {
  nb::class_<Relay>(module, "Relay")
      .def(nb::new_(&make_relay), nb::arg("engine"), nb::arg("node"), nb::arg("prefix"),
           nb::arg("peers"), nb::arg("link_timeout_s"), nb::arg("parent") = -1,
           nb::arg("peers_may_end") = false)
      .def("run", &run,
           "Carries connections until the parent ends; raises if a peer is lost or ends.")
      .def(
          "add_peer",
          [](Relay& relay, const Peer& peer) { raise_if_failed(relay.add_peer(peer_from(peer))); },
          nb::arg("peer"), "Adds a node that joins later, from any thread.")
      .def_prop_ro("connections", &Relay::connections);
  module.def("is_prefix_free", &is_prefix_free, nb::arg("prefix"),
             "Returns true if no relay of this host holds the address prefix 127.x.y.0.");
  module.def(
      "sync_socket_name",
      [](const std::string& prefix, std::uint32_t node) {
        return sync_socket_name(prefix_from(prefix), node);
      },
      nb::arg("prefix"), nb::arg("node"));
}

}  // namespace r2ccl::bindings
