#include "base/sha256.hpp"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace r2ccl {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string hex(const Digest& digest) {
  static constexpr std::string_view hex_digits = "0123456789abcdef";
  std::string text;
  for (std::byte b : digest) {
    text += hex_digits[std::to_integer<unsigned>(b) >> 4];
    text += hex_digits[std::to_integer<unsigned>(b) & 15];
  }
  return text;
}

constexpr std::string_view two_blocks = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";

// FIPS 180-4 example messages, as published with the NIST cryptographic standards.
TEST(Sha256, NistVectors) {
  EXPECT_EQ(hex(sha256(bytes_of(""))),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256(bytes_of("abc"))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(bytes_of(two_blocks))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(bytes_of("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmno"
                                "ijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu"))),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(hex(sha256(bytes_of(std::string(1'000'000, 'a')))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// NIST's "additional" messages of zero bytes, with lengths around the block boundary of the
// padding.
TEST(Sha256, NistVectorsAroundTheBlockBoundary) {
  const auto zeros = [](std::size_t count) { return std::string(count, '\0'); };
  EXPECT_EQ(hex(sha256(bytes_of(zeros(55)))),
            "02779466cdec163811d078815c633f21901413081449002f24aa3e80f0b88ef7");
  EXPECT_EQ(hex(sha256(bytes_of(zeros(56)))),
            "d4817aa5497628e7c77e6b606107042bbba3130888c5f47a375e6179be789fbb");
  EXPECT_EQ(hex(sha256(bytes_of(zeros(57)))),
            "65a16cb7861335d5ace3c60718b5052e44660726da4cd13bb745381b235a1785");
  EXPECT_EQ(hex(sha256(bytes_of(zeros(64)))),
            "f5a5fd42d16a20302798ef6ed309979b43003d2320d9f0e8ea9831a92759fb4b");
  EXPECT_EQ(hex(sha256(bytes_of(zeros(1000)))),
            "541b3e9daa09b20bf85fa273e5cbd3e80185aa4ec298e765db87742b70138a53");
}

TEST(Sha256, PiecesOfAnySizeGiveTheSameDigest) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
  const Digest whole = sha256(bytes_of(text));
  for (std::size_t piece = 1; piece <= text.size(); ++piece) {
    Sha256 hash;
    for (std::size_t at = 0; at < text.size(); at += piece) {
      hash.update(bytes_of(std::string_view(text).substr(at, piece)));
    }
    ASSERT_EQ(hex(hash.finish()), hex(whole)) << "pieces of " << piece;
  }
}

struct HmacVector {
  std::string key;
  std::string data;
  std::string_view mac;
};

std::string counted(int from, int to) {
  std::string text;
  for (int i = from; i <= to; ++i) text += static_cast<char>(i);
  return text;
}

// RFC 4231, section 4.  Test case 5 publishes only the first 128 bits.
TEST(HmacSha256, Rfc4231Vectors) {
  const std::vector<HmacVector> vectors = {
      {std::string(20, '\x0b'), "Hi There",
       "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {"Jefe", "what do ya want for nothing?",
       "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {std::string(20, '\xaa'), std::string(50, '\xdd'),
       "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {counted(1, 25), std::string(50, '\xcd'),
       "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {std::string(20, '\x0c'), "Test With Truncation", "a3b6167473100ee06e0c796c2955552b"},
      {std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First",
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {std::string(131, '\xaa'),
       "This is a test using a larger than block-size key and a larger than block-size data. The "
       "key needs to be hashed before being used by the HMAC algorithm.",
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
  };
  for (const HmacVector& vector : vectors) {
    EXPECT_EQ(
        hex(hmac_sha256(bytes_of(vector.key), bytes_of(vector.data))).substr(0, vector.mac.size()),
        vector.mac)
        << vector.data;
  }
}

TEST(HmacSha256, PiecesGiveTheSameMac) {
  HmacSha256 hmac(bytes_of("Jefe"));
  hmac.update(bytes_of("what do ya "));
  hmac.update({});
  hmac.update(bytes_of("want for nothing?"));
  EXPECT_EQ(hex(hmac.finish()), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

TEST(ConstantTimeCompare, SeesEveryDifference) {
  const Digest digest = sha256(bytes_of("abc"));
  EXPECT_TRUE(equal_in_constant_time(digest, Digest(digest)));
  EXPECT_TRUE(equal_in_constant_time({}, {}));
  EXPECT_FALSE(equal_in_constant_time(digest, std::span(digest).first(31)));
  for (std::size_t at = 0; at < digest.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      Digest other = digest;
      other[at] ^= static_cast<std::byte>(1 << bit);
      EXPECT_FALSE(equal_in_constant_time(digest, other)) << at << '.' << bit;
    }
  }
}

TEST(Wipe, LeavesZeros) {
  Digest secret = sha256(bytes_of("abc"));
  wipe(secret);
  EXPECT_EQ(secret, Digest{});
}

}  // namespace
}  // namespace r2ccl
