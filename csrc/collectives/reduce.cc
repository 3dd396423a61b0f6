#include "collectives/reduce.hpp"

#include <algorithm>
#include <array>
#include <cassert>

#include "collectives/reduce_table.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace r2ccl {
namespace {

// Guard with the default floating-point control: round to nearest, keep denormals, mask exceptions.
// The destructor restores the host program's settings and exception flags.
class DefaultFloatControl {
 public:
  DefaultFloatControl() : saved_(read()) {
    if ((saved_ & control_bits) != default_bits) write(default_bits);
  }
  ~DefaultFloatControl() {
    if (read() != saved_) write(saved_);
  }
  DefaultFloatControl(const DefaultFloatControl&) = delete;
  DefaultFloatControl& operator=(const DefaultFloatControl&) = delete;

 private:
#if defined(__x86_64__)
  using Register = unsigned int;
  // The bits of FTZ, rounding, masks and DAZ, without the sticky exception flags.
  static constexpr Register control_bits = 0xffc0;
  static constexpr Register default_bits = 0x1f80;  // all exceptions masked, all else off
  static Register read() { return _mm_getcsr(); }
  static void write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = std::uint64_t;
  static constexpr Register control_bits = ~Register{0};
  static constexpr Register default_bits = 0;
  static Register read() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) { asm volatile("msr fpcr, %0" : : "r"(value) : "memory"); }
#else
#error "reduce() must know how to set this processor's rounding and denormal handling"
#endif
  Register saved_;
};

Simd detect_simd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  if (!f16c || !__builtin_cpu_supports("avx2")) return Simd::portable;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return Simd::avx512;
  }
  return Simd::avx2;
#else
  return Simd::portable;
#endif
}

const KernelTable& kernels_of(Simd simd) {
#if defined(__x86_64__)
  if (simd == Simd::avx512) return avx512_kernels;
  if (simd == Simd::avx2) return avx2_kernels;
#endif
  static_cast<void>(simd);
  return portable_kernels;
}

}  // namespace

ReductionTree ReductionTree::from_nodes(std::span<const int> node_of_rank) {
  ReductionTree tree;
  tree.order.reserve(node_of_rank.size());
  for (std::size_t first = 0; first < node_of_rank.size(); ++first) {
    const int node = node_of_rank[first];
    const auto before = node_of_rank.first(first);
    if (std::find(before.begin(), before.end(), node) != before.end()) continue;
    std::uint16_t ranks = 0;
    for (std::size_t rank = first; rank < node_of_rank.size(); ++rank) {
      if (node_of_rank[rank] != node) continue;
      tree.order.push_back(static_cast<std::uint16_t>(rank));
      ++ranks;
    }
    tree.node_sizes.push_back(ranks);
  }
  return tree;
}

std::vector<std::uint16_t> ReductionTree::node_of_rank() const {
  std::vector<std::uint16_t> nodes(order.size());
  auto rank = order.begin();
  for (std::size_t node = 0; node < node_sizes.size(); ++node)
    for (std::uint16_t local = 0; local < node_sizes[node]; ++local)
      nodes[*rank++] = static_cast<std::uint16_t>(node);
  return nodes;
}

Simd best_simd() {
  static const Simd best = detect_simd();
  return best;
}

std::string_view name_of(Simd simd) {
  switch (simd) {
    case Simd::portable: return "portable";
    case Simd::avx2: return "avx2";
    case Simd::avx512: return "avx512";
  }
  return "unknown";
}

void reduce(DType dtype, ReduceOp op, void* out, std::span<const void* const> inputs,
            const ReductionTree& tree, std::size_t count, Simd simd) {
  assert(!tree.order.empty() && inputs.size() >= tree.order.size());
  if (count == 0) return;

  // An unsupported instruction set falls back to the best supported set, with the same result bits.
  const KernelTable& table = kernels_of(std::min(simd, best_simd()));
  const Kernel kernel =
      table.kernels[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
  assert(kernel != nullptr);

  std::array<const std::byte*, 64> near;
  std::vector<const std::byte*> far;
  const std::byte** ordered = near.data();
  if (tree.order.size() > near.size()) {
    far.resize(tree.order.size());
    ordered = far.data();
  }
  for (std::size_t i = 0; i < tree.order.size(); ++i) {
    ordered[i] = static_cast<const std::byte*>(inputs[tree.order[i]]);
  }

  const DefaultFloatControl control;
  kernel({.out = static_cast<std::byte*>(out),
          .inputs = ordered,
          .node_sizes = tree.node_sizes.data(),
          .nodes = tree.node_sizes.size(),
          .ranks = tree.order.size(),
          .count = count});
}

}  // namespace r2ccl
