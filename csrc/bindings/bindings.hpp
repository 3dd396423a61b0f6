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
void register_plan(nb::module_& module);
void register_relay(nb::module_& module);
void register_simulator(nb::module_& module);

// Raises the exception of a signal handler that ran during the call, else the Python exception
// class of the status's code; returns if there is none and the status is ok.  Needs the GIL.
void raise_if_failed(const Status& status);
// The same for a result; returns its value.
template <typename T>
[[nodiscard]] T value_or_raise(Result<T> result) {
  raise_if_failed(result.ok() ? Status() : result.take_status());
  return std::move(result.value());
}

// Converts a configuration.  Raises ValueError for unknown names, and RuntimeError for values of a
// wrong type; Python has validated the values.
[[nodiscard]] Config config_from(const nb::dict& fields);

}  // namespace r2ccl::bindings
