#include <array>

#include "bindings.hpp"

namespace r2ccl::bindings {
namespace {

// Keys of r2serve.errors.ERROR_TYPES, indexed by ErrorCode.
constexpr std::array<const char*, 8> code_names{"ok",        "invalid_argument", "order_mismatch",
                                                "peer_lost", "peer_closed",      "aborted",
                                                "timeout",   "internal"};

}  // namespace

void raise_if_failed(const Status& status) {
  if (status.ok()) return;
  const nb::object types = nb::module_::import_("r2serve.errors").attr("ERROR_TYPES");
  const nb::object type = types[code_names[static_cast<std::size_t>(status.code())]];
  PyErr_SetString(type.ptr(), status.message().c_str());
  throw nb::python_error();
}

}  // namespace r2ccl::bindings
