// One register_* a concept.
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

// Raises the Python class of the status's code; returns if it is ok.  Needs the GIL.
void raise_if_failed(const Status& status);

// Raises ValueError for unknown names and wrong types; values have been validated by Python.
[[nodiscard]] Config config_from(const nb::dict& fields);

}  // namespace r2ccl::bindings
