// Functions of libraries that are there or not.
#pragma once

#include <dlfcn.h>

namespace ldt {

/// Whether the library (a handle of dlopen) has the function. Its type is not checked: the caller
/// knows it.
template <typename Function>
bool look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace ldt
