// The fuzz target of the handshake over its corpus, in builds without a fuzzer.
#include "fuzz/handshake_fuzz.cc"

#include <gtest/gtest.h>

#include "fuzz/replay.hpp"

namespace r2ccl::fuzz {
namespace {

TEST(HandshakeFuzz, TheCorpusBreaksNoInvariant) { EXPECT_GT(replay("handshake"), 0U); }

}  // namespace
}  // namespace r2ccl::fuzz
