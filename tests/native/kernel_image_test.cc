// The form of the kernels a driver gets, and the error if the driver takes no form.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>

#include "drivers/cuda_device.hpp"
#include "stream_ranks.hpp"

namespace r2ccl {
namespace {

using testing::fake;

constexpr char ptx[] = "// as nvcc begins it\n.version 7.0\n";
constexpr std::array binary{std::byte{1}};

cuda::Image both() { return {.binary = binary, .text = std::as_bytes(std::span(ptx))}; }

// Emulates a driver of another CUDA version until the end of the scope.
struct Version {
  explicit Version(int version) { (void)fake().call("fake_cuda_set_version", version); }
  ~Version() { (void)fake().call("fake_cuda_set_version", 13000); }
  Version(const Version&) = delete;
  Version& operator=(const Version&) = delete;
};

Status open(const cuda::Image& image) {
  auto device = cuda::Device::open(R2CCL_FAKE_CUDA, 0, image);
  return device.ok() ? Status() : device.take_status();
}

TEST(KernelImage, ADriverOfTheCompilersVersionGetsTheBinary) {
  EXPECT_TRUE(open({.binary = binary}).ok());
  EXPECT_TRUE(open(both()).ok());
}

TEST(KernelImage, AnOlderDriverCompilesThePtx) {
  const Version older(12020);
  EXPECT_FALSE(open({.binary = binary}).ok());
  const Status status = open(both());
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(KernelImage, AnErrorNamesADriverThatTakesNeitherWithItsVersion) {
  const Version old(10020);
  const std::string text = open(both()).message();
  for (const char* part : {"(209)", "PTX", "(222)", "the driver supports CUDA 10.2",
                           "compute capability 9.0", "CUDA 11.0 or later"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
}

}  // namespace
}  // namespace r2ccl
