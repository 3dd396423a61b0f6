#include "link/link_types.hpp"

#include "base/first_number.hpp"

namespace r2ccl {
namespace {

StreamShape shape_from(const Config& config) {
  return {.slot_bytes = static_cast<std::uint32_t>(config.slot_bytes),
          .chunk_bytes = static_cast<std::uint32_t>(config.chunk_bytes),
          .staging_bytes = static_cast<std::uint32_t>(config.staging_bytes),
          .slots = static_cast<std::uint16_t>(config.slots),
          .spare_slots = static_cast<std::uint16_t>(config.spare_slots),
          .resilience = config.resilience,
          .checksum = config.checksum,
          .first_number = first_number()};
}

}  // namespace

LinkOptions::LinkOptions(const Config& config)
    : shape(shape_from(config)),
      first_epoch(static_cast<Epoch>(first_number())),
      small_message_bytes(static_cast<std::uint32_t>(config.small_message_bytes)),
      ack_deadline_floor_ns(config.ack_deadline_floor_ms * ns_per_ms),
      ack_deadline_factor(config.ack_deadline_factor),
      dead_deadline_ns(config.dead_deadline_ms * ns_per_ms),
      probe_interval_ns(config.probe_interval_ms * ns_per_ms),
      probation_timeout_ns(config.handshake_timeout_ms * ns_per_ms),
      rejoin_backoff_min_ns(config.rejoin_backoff_min_ms * ns_per_ms),
      rejoin_backoff_max_ns(config.rejoin_backoff_max_ms * ns_per_ms),
      flap_half_life_s(config.flap_half_life_s),
      fallback(config.fallback) {}

}  // namespace r2ccl
