// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), written here because the core links no crypto
// library.  Each connection authenticates a few hundred bytes, so the code is simple rather than
// fast.
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

  // Ends the message and returns the digest.  The object must not be used afterwards.
  [[nodiscard]] Digest finish();

 private:
  void compress(const std::byte* block);

  std::array<std::uint32_t, 8> state_;
  std::array<std::byte, 64> block_{};
  std::size_t filled_ = 0;   // bytes of block_ in use
  std::uint64_t bytes_ = 0;  // length of the whole message
};

class HmacSha256 {
 public:
  explicit HmacSha256(std::span<const std::byte> key);

  void update(std::span<const std::byte> data);
  // Ends the message and returns the MAC.  The object must not be used afterwards.
  [[nodiscard]] Digest finish();

 private:
  Sha256 inner_;
  Sha256 outer_;
};

[[nodiscard]] Digest sha256(std::span<const std::byte> data);
[[nodiscard]] Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data);

// Compares in a time independent of the first difference.  Different lengths are not equal.
[[nodiscard]] bool equal_in_constant_time(std::span<const std::byte> a,
                                          std::span<const std::byte> b);

// Overwrites a secret with zeros; the compiler may not optimise the write away.
void wipe(std::span<std::byte> secret);

}  // namespace r2ccl
