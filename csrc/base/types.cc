#include "base/types.hpp"

namespace r2ccl {

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f16: return "float16";
    case DType::bf16: return "bfloat16";
    case DType::f32: return "float32";
    case DType::f64: return "float64";
    case DType::i8: return "int8";
    case DType::u8: return "uint8";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
    case DType::boolean: return "bool";
  }
  return "unknown";
}

std::string_view name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return "sum";
    case ReduceOp::prod: return "prod";
    case ReduceOp::min: return "min";
    case ReduceOp::max: return "max";
    case ReduceOp::avg: return "avg";
  }
  return "unknown";
}

std::string_view name_of(Collective collective) {
  switch (collective) {
    case Collective::all_reduce: return "all_reduce";
    case Collective::all_gather: return "all_gather";
    case Collective::reduce_scatter: return "reduce_scatter";
    case Collective::broadcast: return "broadcast";
    case Collective::gather: return "gather";
    case Collective::all_to_all: return "all_to_all";
    case Collective::send: return "send";
    case Collective::recv: return "recv";
    case Collective::barrier: return "barrier";
  }
  return "unknown";
}

std::string_view name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::automatic: return "auto";
    case Algorithm::one_shot: return "one_shot";
    case Algorithm::two_shot: return "two_shot";
    case Algorithm::two_shot_overlap: return "two_shot_overlap";
  }
  return "unknown";
}

std::string_view name_of(Consensus consensus) {
  switch (consensus) {
    case Consensus::automatic: return "auto";
    case Consensus::off: return "off";
    case Consensus::step: return "step";
    case Consensus::site: return "site";
    case Consensus::site_error: return "site-error";
  }
  return "unknown";
}

std::string describe(const CallTag& tag) {
  if (tag.kind == TagKind::end_of_step)
    return "the end of step " + std::to_string(tag.step) + " after " + std::to_string(tag.call) +
           (tag.call == 1 ? " call" : " calls");
  if (tag.kind == TagKind::result) return "the comparison of result " + std::to_string(tag.number);
  std::string text = "call " + std::to_string(tag.number);
  const bool captured = (tag.call & captured_call) != 0;
  std::string within = tag.step != 0 ? "step " + std::to_string(tag.step) : "";
  if (tag.step != 0 && (captured || tag.collective != Collective::send)) within += ", ";
  if (captured)
    within += "captured call " + std::to_string(tag.call & most_captures);
  else if (tag.step != 0 && tag.collective != Collective::send)
    within += "call " + std::to_string(tag.call + 1);
  if (!within.empty()) text += " (" + within + ")";
  text += ": ";
  // The tag of a receive equals that of the peer's send.
  text += tag.collective == Collective::send ? std::string_view("send or recv")
                                             : name_of(tag.collective);
  if (tag.collective == Collective::barrier) return text + "()";

  const bool reduces =
      tag.collective == Collective::all_reduce || tag.collective == Collective::reduce_scatter;
  const bool rooted =
      tag.collective == Collective::broadcast || tag.collective == Collective::gather;
  text += '(';
  if (reduces) text.append(name_of(tag.op)).append(", ");
  text += name_of(tag.dtype);
  // A count of 0 marks a collective whose counts may differ between ranks.
  if (tag.count != 0) text += ", " + std::to_string(tag.count) + " elements";
  if (rooted) text += ", root " + std::to_string(tag.root);
  if (tag.algorithm != Algorithm::automatic) text.append(", ").append(name_of(tag.algorithm));
  return text + ')';
}

}  // namespace r2ccl
