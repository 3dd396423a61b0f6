#include <nanobind/stl/string.h>

#include <string>
#include <string_view>

#include "bindings.hpp"

namespace r2ccl::bindings {
namespace {

// Visits every field of the configuration with its Python name: the only list of these names.
template <typename Visit>
void each_field(Config& config, Visit visit) {
  visit("ports", config.ports);
  visit("resilience", config.resilience);
  visit("fallback", config.fallback);
  visit("checksum", config.checksum);
  visit("link_timeout_s", config.link_timeout_s);
  visit("call_timeout_s", config.call_timeout_s);
  visit("connect_timeout_s", config.connect_timeout_s);
  visit("refused_grace_s", config.refused_grace_s);
  visit("handshake_timeout_ms", config.handshake_timeout_ms);
  visit("small_message_bytes", config.small_message_bytes);
  visit("chunk_bytes", config.chunk_bytes);
  visit("slot_bytes", config.slot_bytes);
  visit("slots", config.slots);
  visit("spare_slots", config.spare_slots);
  visit("staging_bytes", config.staging_bytes);
  visit("socket_buffer_bytes", config.socket_buffer_bytes);
  visit("ack_deadline_floor_ms", config.ack_deadline_floor_ms);
  visit("ack_deadline_factor", config.ack_deadline_factor);
  visit("dead_deadline_ms", config.dead_deadline_ms);
  visit("probe_interval_ms", config.probe_interval_ms);
  visit("rejoin_backoff_min_ms", config.rejoin_backoff_min_ms);
  visit("rejoin_backoff_max_ms", config.rejoin_backoff_max_ms);
  visit("flap_half_life_s", config.flap_half_life_s);
  visit("gid_index", config.gid_index);
  visit("verbs_timeout", config.verbs_timeout);
  visit("verbs_retry_count", config.verbs_retry_count);
  visit("verbs_rnr_timer", config.verbs_rnr_timer);
  visit("verbs_rnr_retry", config.verbs_rnr_retry);
  visit("traffic_class", config.traffic_class);
  visit("service_level", config.service_level);
  visit("pkey_index", config.pkey_index);
  visit("spin_us", config.spin_us);
  visit("background_interval_ms", config.background_interval_ms);
  visit("background_cpus", config.background_cpus);
  visit("algorithm", config.algorithm);
  visit("consensus", config.consensus);
  visit("consensus_result", config.consensus_result);
  visit("journal_dir", config.journal_dir);
  visit("fault_file", config.fault_file);
}

template <typename T>
T value_of(const nb::handle& value) {
  return nb::cast<T>(value);
}

template <>
Algorithm value_of<Algorithm>(const nb::handle& value) {
  const auto name = nb::cast<std::string>(value);
  for (const auto algorithm : {Algorithm::automatic, Algorithm::one_shot, Algorithm::two_shot,
                               Algorithm::two_shot_overlap})
    if (name == name_of(algorithm)) return algorithm;
  throw nb::value_error(("algorithm: " + name).c_str());
}

template <>
Consensus value_of<Consensus>(const nb::handle& value) {
  const auto name = nb::cast<std::string>(value);
  for (const auto consensus : {Consensus::automatic, Consensus::off, Consensus::step,
                               Consensus::site, Consensus::site_error})
    if (name == name_of(consensus)) return consensus;
  throw nb::value_error(("consensus: " + name).c_str());
}

template <typename T>
nb::object object_of(const T& value) {
  return nb::cast(value);
}

template <>
nb::object object_of<Algorithm>(const Algorithm& value) {
  return nb::cast(std::string(name_of(value)));
}

template <>
nb::object object_of<Consensus>(const Consensus& value) {
  return nb::cast(std::string(name_of(value)));
}

}  // namespace

Config config_from(const nb::dict& fields) {
  Config config;
  std::size_t matched = 0;
  each_field(config, [&]<typename T>(const char* name, T& field) {
    if (!fields.contains(name)) return;
    field = value_of<T>(fields[name]);
    ++matched;
  });
  if (matched != fields.size()) throw nb::value_error("config: holds a field unknown to the core");
  return config;
}

void register_config(nb::module_& module) {
  module.def(
      "config_defaults",
      [] {
        nb::dict defaults;
        Config config;
        each_field(config, [&]<typename T>(const char* name, T& field) {
          defaults[name] = object_of(field);
        });
        return defaults;
      },
      "Returns every field of the core's configuration with its default.");
}

}  // namespace r2ccl::bindings
