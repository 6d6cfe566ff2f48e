// Looks up functions of libraries that may be absent.
#pragma once

#include <dlfcn.h>

namespace ldt {

/// Returns whether the library (a handle of dlopen) has the function. The caller vouches for its
/// type.
template <typename Function>
bool look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace ldt
