#include <array>
#include <string_view>

#include "bindings.hpp"

namespace r2ccl::bindings {
namespace {

constexpr std::array<std::string_view, 8> code_names{
    "ok",          "invalid_argument", "order_mismatch", "peer_lost",
    "peer_closed", "aborted",          "timeout",        "internal"};

// Indexed by ErrorCode.  Kept for the life of the process: a destructor would run after Python's.
std::array<PyObject*, code_names.size()> error_types{};

}  // namespace

void raise_if_failed(const Status& status) {
  if (status.ok()) return;
  PyObject* type = error_types[static_cast<std::size_t>(status.code())];
  PyErr_SetString(type != nullptr ? type : PyExc_RuntimeError, status.message().c_str());
  throw nb::python_error();
}

void register_errors(nb::module_& module) {
  module.def(
      "set_error_types",
      [](const nb::dict& types) {
        for (std::size_t code = 1; code < code_names.size(); ++code) {
          nb::object type = types[code_names[code].data()];
          Py_XDECREF(error_types[code]);
          error_types[code] = type.release().ptr();
        }
      },
      nb::arg("types"), "Classes to raise, by the name of the error code.");
}

}  // namespace r2ccl::bindings
