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
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  if (status.ok()) return;
  const nb::object types = nb::module_::import_("r2serve.errors").attr("ERROR_TYPES");
  const nb::object type = types[code_names[static_cast<std::size_t>(status.code())]];
  // The text may contain bytes of a peer.
  const nb::object text = nb::steal(PyUnicode_DecodeUTF8(
      status.message().data(), static_cast<Py_ssize_t>(status.message().size()), "replace"));
  PyErr_SetObject(type.ptr(), text.ptr());
  throw nb::python_error();
}

}  // namespace r2ccl::bindings
