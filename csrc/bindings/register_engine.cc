#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "bindings.hpp"
#include "connect/verbs_devices.hpp"
#include "drivers/ibverbs.hpp"
#include "engine/engine.hpp"

namespace r2ccl::bindings {
namespace {

RailKind kind_of(const std::string& name) {
  for (const auto kind : {RailKind::tcp, RailKind::shm, RailKind::control, RailKind::verbs})
    if (name == name_of(kind)) return kind;
  throw nb::value_error(("rail kind: unknown value " + name).c_str());
}

using GidEntry = std::tuple<std::uint8_t, std::string, nb::bytes>;

std::uint8_t gid_index(bool ethernet, const std::vector<GidEntry>& gids, const std::string& local,
                       int wanted) {
  VerbsPort port;
  port.ethernet = ethernet;
  for (const auto& [index, kind, bytes] : gids) {
    VerbsGidEntry entry{.index = index};
    if (kind == "RoCE v2") entry.type = VerbsGidType::roce_v2;
    if (kind == "RoCE v1") entry.type = VerbsGidType::roce_v1;
    if (bytes.size() != entry.gid.size()) throw nb::value_error("gids: each entry needs 16 bytes");
    std::memcpy(entry.gid.data(), bytes.c_str(), entry.gid.size());
    port.gids.push_back(entry);
  }
  auto chosen = choose_gid(port, IpAddress::parse(local).value_or(IpAddress()), wanted);
  if (!chosen.ok()) raise_if_failed(chosen.take_status());
  return chosen.value().index;
}

std::shared_ptr<Engine> make_engine(const nb::dict& config, std::uint32_t process) {
  return value_or_raise(Engine::create(config_from(config), process));
}

int listen_on(Engine& engine, const std::string& kind, const std::string& device,
              const std::string& address) {
  return value_or_raise(engine.listen({kind_of(kind), device, address}));
}

RailDescription rail_from(const nb::dict& fields) {
  RailDescription rail;
  rail.kind = kind_of(nb::cast<std::string>(fields["kind"]));
  rail.name = nb::cast<std::string>(fields["name"]);
  rail.device = nb::cast<std::string>(fields["device"]);
  rail.local_address = nb::cast<std::string>(fields["local_address"]);
  rail.remote_address = nb::cast<std::string>(fields["remote_address"]);
  rail.remote_port = nb::cast<std::uint16_t>(fields["remote_port"]);
  rail.verbs = {nb::cast<std::string>(fields["verbs_device"]),
                nb::cast<std::uint8_t>(fields["verbs_port"])};
  if (fields.contains("unnumbered")) rail.unnumbered = nb::cast<bool>(fields["unnumbered"]);
  if (fields.contains("reserve")) rail.reserve = nb::cast<bool>(fields["reserve"]);
  if (fields.contains("unit")) rail.unit = nb::cast<std::string>(fields["unit"]);
  if (fields.contains("distance")) rail.distance = nb::cast<std::uint8_t>(fields["distance"]);
  if (fields.contains("told")) rail.told = nb::cast<bool>(fields["told"]);
  if (fields.contains("late")) rail.late = nb::cast<bool>(fields["late"]);
  if (fields.contains("remote_device"))
    rail.remote_device = nb::cast<std::string>(fields["remote_device"]);
  if (fields.contains("dormant")) rail.dormant = nb::cast<bool>(fields["dormant"]);
  return rail;
}

void open_verbs(Engine& engine, const std::string& device, std::uint8_t port) {
  Status status;
  {
    const nb::gil_scoped_release release;
    status = engine.open_verbs({device, port});
  }
  raise_if_failed(status);
}

void register_buffer(Engine& engine, std::uintptr_t data, std::size_t bytes) {
  raise_if_failed(engine.register_buffer({reinterpret_cast<std::byte*>(data), bytes}));
}

void deregister_buffer(Engine& engine, std::uintptr_t data) {
  raise_if_failed(engine.deregister_buffer(reinterpret_cast<const std::byte*>(data)));
}

void add_peer(Engine& engine, std::uint32_t process, const std::string& label,
              const nb::bytes& secret, const std::vector<nb::dict>& rails) {
  PeerDescription peer;
  peer.process = process;
  peer.label = label;
  const auto* begin = reinterpret_cast<const std::byte*>(secret.c_str());
  peer.secret.assign(begin, begin + secret.size());
  for (const nb::dict& rail : rails) peer.rails.push_back(rail_from(rail));
  raise_if_failed(engine.add_peer(peer));
}

void connect(Engine& engine, const std::vector<std::uint32_t>& peers, double timeout_s,
             const std::string& option) {
  Status status;
  {
    const nb::gil_scoped_release release;
    status = engine.connect(peers, timeout_s, option);
  }
  raise_if_failed(status);
}

void check_members(Engine& engine) {
  Status status;
  {
    const nb::gil_scoped_release release;
    status = engine.check_members();
  }
  raise_if_failed(status);
}

Fault fault_from(const std::string& name) {
  const auto fault = fault_named(name);
  if (!fault.has_value())
    throw nb::value_error(
        ("fault: '" + name + "' is none of carrier_loss, black_hole, reset, slow, corrupt, heal")
            .c_str());
  return *fault;
}

void inject(Engine& engine, std::uint16_t rail, const std::string& fault, std::uint32_t process,
            double bytes_per_s) {
  const Fault kind = fault_from(fault);
  Status status;
  {
    const nb::gil_scoped_release release;
    status = engine.inject(rail, kind, process, bytes_per_s);
  }
  raise_if_failed(status);
}

void check_fault(const Engine& engine, const std::string& fault, double bytes_per_s) {
  raise_if_failed(engine.check_fault(fault_from(fault), bytes_per_s));
}

void note_injected(Engine& engine, std::uint16_t rail, const std::string& fault,
                   std::uint32_t process) {
  const Fault kind = fault_from(fault);
  Status status;
  {
    const nb::gil_scoped_release release;
    status = engine.note_injected(rail, kind, process);
  }
  raise_if_failed(status);
}

void announce_drill(Engine& engine, std::uint16_t rail, const std::string& fault, double seconds,
                    std::uint32_t process) {
  const Fault kind = fault_from(fault);
  Status status;
  {
    const nb::gil_scoped_release release;
    status = engine.announce_drill(rail, kind, seconds, process);
  }
  raise_if_failed(status);
}

void end_drill(Engine& engine, std::uint16_t rail, std::uint32_t process) {
  Status status;
  {
    const nb::gil_scoped_release release;
    status = engine.end_drill(rail, process);
  }
  raise_if_failed(status);
}

bool drill_is_known(Engine& engine, std::uint16_t rail, std::uint32_t process) {
  Status status;
  bool known = false;
  {
    const nb::gil_scoped_release release;
    status = engine.check_drill(rail, process, known);
  }
  raise_if_failed(status);
  return known;
}

std::string drill_name(std::uint8_t kind) {
  if (kind == no_drill) return "";
  return std::string(name_of(static_cast<Fault>(kind)));
}

// Returns the engine; raises in a forked child.
Engine& own(Engine& engine) {
  raise_if_failed(engine.check_origin());
  return engine;
}

bool has_peer(Engine& engine, std::uint32_t process) {
  own(engine);
  const nb::gil_scoped_release release;
  return engine.has_peer(process);
}

void on_word_of_end(Engine& engine, std::uint32_t process) {
  own(engine);
  const nb::gil_scoped_release release;
  engine.on_word_of_end(process);
}

nb::list rails(Engine& engine) {
  own(engine);
  std::vector<Engine::RailInfo> infos;
  {
    const nb::gil_scoped_release release;
    infos = engine.rails();
  }
  nb::list result;
  for (const Engine::RailInfo& info : infos) {
    nb::dict rail;
    rail["name"] = info.name;
    rail["index"] = info.index;
    rail["peer_engine"] = info.peer_engine;
    rail["kind"] = std::string(name_of(info.kind));
    rail["peer"] = info.peer;
    rail["state"] = std::string(name_of(info.state));
    rail["cause"] = std::string(name_of(info.cause));
    rail["verdict"] = std::string(name_of(info.verdict));
    rail["slow"] = info.slow;
    rail["been_up"] = info.been_up;
    rail["never_up"] = info.never_up;
    rail["reserve"] = info.reserve;
    rail["unit"] = info.unit;
    rail["drill"] = drill_name(info.drill);
    rail["epoch"] = info.epoch;
    rail["device"] = info.device;
    rail["local"] = info.local;
    rail["remote"] = info.remote;
    rail["peer_host"] = info.peer_host;
    rail["peer_device"] = info.peer_device;
    rail["round_trip_ns"] = info.round_trip;
    rail["rate"] = static_cast<std::uint64_t>(info.rate);
    rail["tx_bytes"] = info.counters.tx_bytes;
    rail["rx_bytes"] = info.counters.rx_bytes;
    rail["data_tx_bytes"] = info.counters.data_tx_bytes;
    rail["replayed_chunks"] = info.counters.replayed_chunks;
    rail["hedged_chunks"] = info.counters.hedged_chunks;
    rail["withheld_chunks"] = info.counters.withheld_chunks;
    result.append(rail);
  }
  return result;
}

// Keeps the GIL: a thread without the GIL could not return once the interpreter ends.
nb::object take_log(Engine& engine) {
  own(engine);
  const auto lines = engine.log().take();
  if (!lines.has_value()) return nb::none();
  nb::list result;
  for (const LogLine& line : *lines)
    result.append(nb::make_tuple(static_cast<int>(line.level), line.text));
  return result;
}

nb::bytes journal_bytes(Engine& engine) {
  own(engine);
  std::string bytes;
  {
    const nb::gil_scoped_release release;
    bytes = engine.journal_bytes();
  }
  return nb::bytes(bytes.data(), bytes.size());
}

}  // namespace

void register_engine(nb::module_& module) {
  module.def(
      "verbs_devices",
      [] {
        auto loaded = load_ibverbs();
        if (!loaded.ok()) raise_if_failed(loaded.take_status());
        return loaded.value()->devices();
      },
      "Returns the names of the RDMA devices; raises if libibverbs is unusable.");
  module.def("gid_index", &gid_index, nb::arg("ethernet"), nb::arg("gids"), nb::arg("local"),
             nb::arg("wanted"),
             "Returns the index of the GID that rails of a port use.  Each entry of gids has an "
             "index, a type and 16 bytes.  Raises if no entry is usable.");
  nb::class_<Engine>(module, "Engine", "Holds the links of this process to its peers.")
      .def(nb::new_(&make_engine), nb::arg("config"), nb::arg("process"))
      .def("listen", &listen_on, nb::arg("kind"), nb::arg("device"), nb::arg("address"),
           "Listens for rails at an address; returns the port.")
      .def("open_verbs", &open_verbs, nb::arg("device"), nb::arg("port"),
           "Opens an RDMA port; raises if rails cannot use the port.")
      .def("register_buffer", &register_buffer, nb::arg("data"), nb::arg("bytes"))
      .def("deregister_buffer", &deregister_buffer, nb::arg("data"))
      .def("add_peer", &add_peer, nb::arg("process"), nb::arg("label"), nb::arg("secret"),
           nb::arg("rails"))
      .def("has_peer", &has_peer, nb::arg("process"))
      .def("on_word_of_end", &on_word_of_end, nb::arg("process"),
           "Takes the word of a relay that the process of a peer has ended.")
      .def("connect", &connect, nb::arg("peers"), nb::arg("timeout_s"),
           nb::arg("option") = "connect_timeout_s (R2CCL_CONNECT_TIMEOUT_S)")
      .def("inject", &inject, nb::arg("rail"), nb::arg("fault"), nb::arg("process") = 0,
           nb::arg("bytes_per_s") = 0.0)
      .def("check_fault", &check_fault, nb::arg("fault"), nb::arg("bytes_per_s") = 0.0,
           "Raises the error that inject() would raise on any rail.")
      .def("note_injected", &note_injected, nb::arg("rail"), nb::arg("fault"),
           nb::arg("process") = 0, "Records a fault injected or healed outside of this process.")
      .def("announce_drill", &announce_drill, nb::arg("rail"), nb::arg("fault"), nb::arg("seconds"),
           nb::arg("process") = 0, "Tells the peers of a drill that begins.")
      .def("end_drill", &end_drill, nb::arg("rail"), nb::arg("process") = 0,
           "Tells the peers that the drill has ended.")
      .def("drill_is_known", &drill_is_known, nb::arg("rail"), nb::arg("process") = 0,
           "Returns true once the peers have confirmed the drill.")
      .def("rails", &rails)
      .def(
          "set_label",
          [](Engine& engine, const std::string& label) { own(engine).set_label(label); },
          nb::arg("label"))
      .def(
          "set_serving_engine",
          [](Engine& engine, const std::string& name) { own(engine).set_serving_engine(name); },
          nb::arg("name"), "Sets the name of the serving engine in the journal.")
      .def("check_members", &check_members,
           "Raises like a collective if a member of an open communicator is gone; needs no call.")
      .def_prop_ro("no_journal", &Engine::no_journal,
                   "Why the journal has no file although a folder is set; empty: none.")
      .def("take_log", &take_log,
           "Returns log lines as (level, text), level 0 debug to 3 error; None once closed.")
      .def_prop_ro(
          "log_fd", [](Engine& engine) { return own(engine).log().fd(); },
          "File descriptor, readable while take_log() has lines or the log is closed.")
      .def("journal_bytes", &journal_bytes)
      .def(
          "set_step", [](Engine& engine, std::uint32_t step) { own(engine).set_step(step); },
          nb::arg("step"),
          "Sets the number of the engine's next step; stalls are recorded with this number.")
      .def_prop_ro(
          "stalled_ns", [](Engine& engine) { return own(engine).stalled_ns(); },
          "Time that calls of all communicators lost to rail events so far, in ns.")
      .def("close", &Engine::close, nb::arg("linger_s"), nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("journal_path", &Engine::journal_path)
      .def_prop_ro("process", &Engine::process);
}

}  // namespace r2ccl::bindings
