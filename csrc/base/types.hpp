// Types shared by every part of r2ccl: element types, reductions, call signatures.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace r2ccl {

// The order of the values in these enums is part of the wire format (CallTag) and of the Python
// bindings.
enum class DType : std::uint8_t { f16, bf16, f32, f64, i8, u8, i32, i64, boolean };
enum class ReduceOp : std::uint8_t { sum, prod, min, max, avg };
enum class Collective : std::uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  broadcast,
  gather,
  all_to_all,
  send,
  recv,
  barrier,
};
inline constexpr std::size_t collective_count = 9;
enum class Algorithm : std::uint8_t { automatic, one_shot, two_shot };

// Returns the size of an element in bytes.
[[nodiscard]] constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
    case DType::bf16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f64:
    case DType::i64: return 8;
    case DType::i8:
    case DType::u8:
    case DType::boolean: return 1;
  }
  return 0;
}

[[nodiscard]] std::string_view name_of(DType dtype);
[[nodiscard]] std::string_view name_of(ReduceOp op);
[[nodiscard]] std::string_view name_of(Collective collective);
[[nodiscard]] std::string_view name_of(Algorithm algorithm);

// Signature of a collective call.  Every message carries the sender's signature, so a mismatch
// error can name the calls of both ranks.
struct CallTag {
  std::uint64_t count = 0;   // elements, equal on all ranks; 0: ranks may differ
  std::uint32_t number = 0;  // call number within the communicator
  Collective collective = Collective::barrier;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  std::uint8_t root = 0;  // rank of the root; all_reduce: Algorithm

  friend bool operator==(const CallTag&, const CallTag&) = default;
};
static_assert(sizeof(CallTag) == 16);

// Returns a text for errors, for example "call 17: all_reduce(sum, float32, 1024 elements)".
[[nodiscard]] std::string describe(const CallTag& tag);

}  // namespace r2ccl
