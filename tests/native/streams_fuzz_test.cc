// The fuzz target of the stream multiplexer over its corpus and random inputs, in builds without a
// fuzzer.
#include "fuzz/streams_fuzz.cc"

#include <gtest/gtest.h>

#include "fuzz/replay.hpp"
#include "sanitized.hpp"
#include "sim/random.hpp"

namespace r2ccl::fuzz {
namespace {

TEST(StreamsFuzz, TheCorpusBreaksNoInvariant) { EXPECT_GT(replay("streams"), 0U); }

TEST(StreamsFuzz, RandomRecordsLeaveMemoryWithinItsBounds) {
  sim::Random random(7);
  std::vector<std::uint8_t> bytes(600);
  for (int round = 0; round < (testing::sanitized() ? 2000 : 10'000); ++round) {
    for (std::uint8_t& byte : bytes) {
      // Small numbers are frequent: they name streams, types and ports.
      const std::uint64_t any = random.next();
      byte = static_cast<std::uint8_t>((any & 0x300U) != 0 ? any % 16 : any % 256);
    }
    Input input(bytes.data(), random.below(bytes.size()));
    run(input, 0);
  }
}

}  // namespace
}  // namespace r2ccl::fuzz
