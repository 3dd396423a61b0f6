// Python bindings of the core (nanobind).  Each register_* function adds the classes and functions
// of register_*.cc to the module.
#pragma once

#include <nanobind/nanobind.h>

#include "base/config.hpp"
#include "base/errors.hpp"

namespace r2ccl::bindings {

namespace nb = nanobind;

void register_config(nb::module_& module);
void register_engine(nb::module_& module);
void register_communicator(nb::module_& module);
void register_device(nb::module_& module);
void register_simulator(nb::module_& module);

// Raises the Python exception class of the status's code; returns if the status is ok.  Needs the
// GIL.
void raise_if_failed(const Status& status);

// Converts a configuration.  Raises ValueError for unknown names, and RuntimeError for values of a
// wrong type; Python has validated the values.
[[nodiscard]] Config config_from(const nb::dict& fields);

}  // namespace r2ccl::bindings
