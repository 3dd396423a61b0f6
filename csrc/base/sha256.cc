#include "base/sha256.hpp"

#include <string.h>  // explicit_bzero

#include <algorithm>
#include <bit>

namespace r2ccl {
namespace {

constexpr std::size_t block_bytes = 64;

constexpr std::array<std::uint32_t, 8> initial_state = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

constexpr std::array<std::uint32_t, 64> round_constants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

std::uint32_t load_big_endian(const std::byte* from) {
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | std::to_integer<std::uint32_t>(from[i]);
  return value;
}

void store_big_endian(std::uint32_t value, std::byte* to) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<std::byte>(value >> (24 - 8 * i) & 0xff);
}

}  // namespace

Sha256::Sha256() : state_(initial_state) {}

void Sha256::update(std::span<const std::byte> data) {
  bytes_ += data.size();
  while (!data.empty()) {
    const std::size_t part = std::min(block_bytes - filled_, data.size());
    std::copy_n(data.begin(), part, block_.begin() + static_cast<std::ptrdiff_t>(filled_));
    filled_ += part;
    data = data.subspan(part);
    if (filled_ == block_bytes) {
      compress(block_.data());
      filled_ = 0;
    }
  }
}

Digest Sha256::finish() {
  // FIPS 180-4, 5.1.1: a 1 bit, zeros, then the length in bits in the last 8 bytes of a block.
  const std::uint64_t bits = bytes_ * 8;
  const std::size_t zeros = (filled_ < 56 ? 56 : 120) - filled_ - 1;
  std::array<std::byte, block_bytes + 8> padding{};
  padding[0] = std::byte{0x80};
  store_big_endian(static_cast<std::uint32_t>(bits >> 32), padding.data() + 1 + zeros);
  store_big_endian(static_cast<std::uint32_t>(bits), padding.data() + 5 + zeros);
  update(std::span(padding).first(1 + zeros + 8));

  Digest digest;
  for (std::size_t i = 0; i < state_.size(); ++i) store_big_endian(state_[i], &digest[4 * i]);
  wipe(block_);
  return digest;
}

void Sha256::compress(const std::byte* block) {
  std::array<std::uint32_t, 64> w;
  for (std::size_t i = 0; i < 16; ++i) w[i] = load_big_endian(block + 4 * i);
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const std::uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const std::uint32_t choice = (e & f) ^ (~e & g);
    const std::uint32_t t1 = h + s1 + choice + round_constants[i] + w[i];
    const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + s0 + majority;
  }
  state_[0] += a;
  state_[1] += b;
  state_[2] += c;
  state_[3] += d;
  state_[4] += e;
  state_[5] += f;
  state_[6] += g;
  state_[7] += h;
}

HmacSha256::HmacSha256(std::span<const std::byte> key) {
  std::array<std::byte, block_bytes> padded{};
  if (key.size() > block_bytes) {
    const Digest digest = sha256(key);
    std::copy(digest.begin(), digest.end(), padded.begin());
  } else {
    std::copy(key.begin(), key.end(), padded.begin());
  }
  for (std::byte& b : padded) b ^= std::byte{0x36};
  inner_.update(padded);
  for (std::byte& b : padded) b ^= std::byte{0x36} ^ std::byte{0x5c};
  outer_.update(padded);
  wipe(padded);
}

void HmacSha256::update(std::span<const std::byte> data) { inner_.update(data); }

Digest HmacSha256::finish() {
  outer_.update(inner_.finish());
  return outer_.finish();
}

Digest sha256(std::span<const std::byte> data) {
  Sha256 hash;
  hash.update(data);
  return hash.finish();
}

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data) {
  HmacSha256 hmac(key);
  hmac.update(data);
  return hmac.finish();
}

bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return false;
  // volatile keeps the compiler from an early exit of the loop.
  volatile unsigned char difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference =
        static_cast<unsigned char>(difference | std::to_integer<unsigned char>(a[i] ^ b[i]));
  }
  return difference == 0;
}

void wipe(std::span<std::byte> secret) { explicit_bzero(secret.data(), secret.size()); }

}  // namespace r2ccl
