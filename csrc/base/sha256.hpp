// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104).  Own code because the core links nothing.
// Authenticates a few hundred bytes per connection: simple, not fast.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace r2ccl {

using Digest = std::array<std::byte, 32>;

class Sha256 {
 public:
  Sha256();

  void update(std::span<const std::byte> data);

  // Ends the message.  The object must not be used afterwards.
  [[nodiscard]] Digest finish();

 private:
  void compress(const std::byte* block);

  std::array<std::uint32_t, 8> state_;
  std::array<std::byte, 64> block_{};
  std::size_t filled_ = 0;   // bytes of block_ that wait for a full block
  std::uint64_t bytes_ = 0;  // of the whole message
};

class HmacSha256 {
 public:
  explicit HmacSha256(std::span<const std::byte> key);

  void update(std::span<const std::byte> data);
  [[nodiscard]] Digest finish();

 private:
  Sha256 inner_;
  Sha256 outer_;
};

[[nodiscard]] Digest sha256(std::span<const std::byte> data);
[[nodiscard]] Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data);

// Takes the same time wherever the first difference lies.  Different lengths are not equal.
[[nodiscard]] bool equal_in_constant_time(std::span<const std::byte> a,
                                          std::span<const std::byte> b);

// Overwrites secrets in a way that the compiler may not leave out.
void wipe(std::span<std::byte> secret);

}  // namespace r2ccl
