// Entry points of a library that is loaded while the process runs.
#pragma once

#include <dlfcn.h>

#include <string>

namespace r2ccl {

// Looks an entry point up in a library that dlopen() gave.  False: the library does not have it,
// and `missing` is its name.
template <typename Function>
bool find_entry(void* library, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr) missing = name;
  return function != nullptr;
}

}  // namespace r2ccl
