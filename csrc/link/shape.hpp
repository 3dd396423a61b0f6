// Sizes shared by both ends of a link, and derived limits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/config.hpp"
#include "base/limits.hpp"
#include "base/units.hpp"

namespace r2ccl {

using RailId = std::uint16_t;
// Epochs of a rail count from 1; 0: none.
using Epoch = std::uint32_t;

inline constexpr RailId any_rail = 0xFFFF;
// Largest payload in bytes that is read together with its header into a predicted slot.
inline constexpr std::uint32_t max_likely_bytes = 64U << 10;
// Number of copies of a message that goes to every usable rail.
inline constexpr std::uint8_t every_rail = 255;

// LinkOptions builds the shape from a Config, the only source of defaults.
struct StreamShape {
  std::uint32_t slot_bytes = 0;
  std::uint32_t chunk_bytes = 0;
  std::uint32_t staging_bytes = 0;        // sends up to this size are copied
  std::uint16_t slots = 0;                // per communicator and direction
  std::uint16_t spare_slots = 0;          // replace slots in quarantine
  bool resilience = Config().resilience;  // off: no replay, no hedges, no probes
  bool checksum = Config().checksum;      // CRC32C of every chunk
  std::uint32_t ack_later_bytes = ~0U;    // larger messages ask for a delivery ack at once
  std::uint64_t first_number = 0;         // of messages; tests begin close to the wrap

  [[nodiscard]] std::uint16_t all_slots() const {
    return static_cast<std::uint16_t>(slots + spare_slots);
  }
};

}  // namespace r2ccl
