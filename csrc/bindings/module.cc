#include "bindings.hpp"

NB_MODULE(_core, module) {
  using namespace r2ccl::bindings;
  module.doc() = "The r2ccl core (C++).";
  register_config(module);
  register_engine(module);
  register_communicator(module);
  register_device(module);
  register_simulator(module);
}
