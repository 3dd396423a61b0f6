// Entry points of a library loaded at run time.
#pragma once

#include <dlfcn.h>

#include <string>

namespace r2ccl {

// Resolves the symbol `name` in a library opened with dlopen().  If the symbol does not exist,
// returns false and sets `missing` to `name`.
template <typename Function>
bool find_entry(void* library, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr) missing = name;
  return function != nullptr;
}

}  // namespace r2ccl
