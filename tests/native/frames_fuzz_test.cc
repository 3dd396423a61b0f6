// The fuzz target of the wire parser over its corpus, in builds without a fuzzer.
#include "fuzz/frames_fuzz.cc"

#include <gtest/gtest.h>

#include "fuzz/frames_world.cc"
#include "fuzz/replay.hpp"

namespace r2ccl::fuzz {
namespace {

TEST(FramesFuzz, TheCorpusBreaksNoInvariant) { EXPECT_GT(replay("frames"), 0U); }

}  // namespace
}  // namespace r2ccl::fuzz
