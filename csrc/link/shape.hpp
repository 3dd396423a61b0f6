// Sizes that both ends of a link agree on, and the limits that follow from them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/units.hpp"

namespace r2ccl {

using RailId = std::uint16_t;
using Epoch = std::uint32_t;

inline constexpr RailId any_rail = 0xFFFF;
inline constexpr std::size_t max_rails_per_link = 64;
inline constexpr std::size_t max_chunks_per_message = 64;
// So much of a payload is read together with its header, to where it is likely to belong.
inline constexpr std::uint32_t max_likely_bytes = 64U << 10;

struct StreamShape {
  std::uint32_t slot_bytes = 1U << 20;
  std::uint32_t chunk_bytes = 128U << 10;
  std::uint32_t staging_bytes = 256U << 10;
  std::uint16_t slots = 8;
  std::uint16_t spare_slots = 4;
  bool resilience = true;
  bool checksum = false;  // of every chunk

  [[nodiscard]] std::uint16_t all_slots() const {
    return static_cast<std::uint16_t>(slots + spare_slots);
  }
};

}  // namespace r2ccl
