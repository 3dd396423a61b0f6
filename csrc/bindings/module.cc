#include <unistd.h>

#include "base/interrupt.hpp"
#include "bindings.hpp"
#include "link/frame.hpp"

namespace r2ccl::bindings {
namespace {

// Python runs signal handlers on the main thread alone.  A handler's exception stays set until the
// binding of the call raises the exception, and ends every wait on the way.
bool runs_into_a_signal() {
  if (::gettid() != ::getpid()) return false;
  const nb::gil_scoped_acquire gil;
  if (PyErr_Occurred() != nullptr) return true;  // no other handler may run now
  return PyErr_CheckSignals() != 0;
}

}  // namespace
}  // namespace r2ccl::bindings

NB_MODULE(_core, module) {
  using namespace r2ccl::bindings;
  module.doc() = "The r2ccl core (C++).";
  module.attr("wire_version") = r2ccl::frame_version;
  r2ccl::interrupt_hook = &runs_into_a_signal;
  register_config(module);
  register_engine(module);
  register_communicator(module);
  register_device(module);
  register_plan(module);
  register_relay(module);
  register_simulator(module);
}
