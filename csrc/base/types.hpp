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
enum class Algorithm : std::uint8_t { automatic, one_shot, two_shot, two_shot_overlap };
// How ranks compare whether their programs run the same calls: not at all, by the engine's step, or
// by the call site as well, with a warning or an error where sites differ.  The core takes
// `automatic` for off.
enum class Consensus : std::uint8_t { automatic, off, step, site, site_error };

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
[[nodiscard]] std::string_view name_of(Consensus consensus);

// What the messages of a tag belong to.
enum class TagKind : std::uint8_t {
  call,         // a call of the user
  end_of_step,  // the comparison of positions at a step's end; `call` counts the calls of the step
  result,       // the comparison of a result; `site` is the hash of the result
};

// Signature of a collective call.  Every message carries the sender's signature, so a mismatch
// error can name the calls of both ranks.
struct CallTag {
  std::uint64_t count = 0;   // elements, equal on all ranks; 0: ranks may differ.  At the end of a
                             // step: a digest of the captured calls of the step
  std::uint32_t number = 0;  // call number within the communicator
  std::uint32_t step = 0;    // step of the serving engine; 0: outside of steps, or not compared
  std::uint32_t site = 0;    // hash of the call site or of the caller's name; 0: not compared
  std::uint16_t call = 0;    // call within the step, or captured_call and the number of a capture
  std::uint16_t root = 0;    // rank of the root
  std::uint16_t bandwidth_hash = 0;  // full exchanges: hash of the losses in use
  Collective collective = Collective::barrier;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  Algorithm algorithm = Algorithm::automatic;  // all_reduce
  std::uint8_t lost_bandwidth = 0;             // full exchanges: loss of the sender's node, in 1/16
  TagKind kind = TagKind::call;

  friend bool operator==(const CallTag&, const CallTag&) = default;
};
static_assert(sizeof(CallTag) == 32);

// Bit of CallTag::call for a call of a replayed graph; the other bits number the captured calls.
inline constexpr std::uint16_t captured_call = 0x8000;
inline constexpr std::uint16_t most_captures = captured_call - 1;

// Returns true if both tags belong to the same call.  Sites are compared apart, because a site that
// differs need not be an error.  `lost_bandwidth` is the sender's own.
[[nodiscard]] constexpr bool same_call(CallTag one, const CallTag& other) {
  one.site = other.site;
  one.lost_bandwidth = other.lost_bandwidth;
  return one == other;
}

// Returns true for calls in which each rank receives a message from every other rank.
[[nodiscard]] constexpr bool is_full_exchange(const CallTag& tag) {
  if (tag.kind != TagKind::call) return false;
  switch (tag.collective) {
    case Collective::all_reduce:
    case Collective::all_gather:
    case Collective::reduce_scatter:
    case Collective::all_to_all: return true;
    case Collective::broadcast:
    case Collective::gather:
    case Collective::send:
    case Collective::recv:
    case Collective::barrier: return false;
  }
  return false;
}

// Returns a text for errors, for example "call 17: all_reduce(sum, float32, 1024 elements)", or
// with a step "call 17 (step 3, call 2): all_reduce(…)".  The first call of a step is call 1.
[[nodiscard]] std::string describe(const CallTag& tag);

}  // namespace r2ccl
