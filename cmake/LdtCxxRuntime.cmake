# One C++ runtime in the process: the module uses the libstdc++ that torch has loaded, whatever the compiler would link.
#
# A compiler may bring a libstdc++ of its own, static (`-static-libstdc++`, a folder of `-B` with an archive in it) or
# in another folder. Two in one process do not mix: exceptions, locales and streams of one crash in the other.

include(CheckCXXSourceCompiles)

# torch's own files, linked before the compiler's: whatever comes later on the line has nothing left to resolve.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -I "${CMAKE_CURRENT_LIST_DIR}/../ldt/cli/lane_check/cxx_runtime.py" "${LDT_c10_LIBRARY}"
  OUTPUT_VARIABLE LDT_CXX_RUNTIME
  OUTPUT_STRIP_TRAILING_WHITESPACE)
target_link_libraries(ldt_torch INTERFACE ${LDT_CXX_RUNTIME})

# The same types in the same layout: libstdc++, its strings those of torch, no debug containers.
file(STRINGS "${LDT_c10_LIBRARY}" _new_strings REGEX "St7__cxx11" LIMIT_COUNT 1)
set(_abi 0)
if(_new_strings)
  set(_abi 1)
endif()
set(_fits "#include <string>
#if !defined __GLIBCXX__ || defined _GLIBCXX_DEBUG || _GLIBCXX_USE_CXX11_ABI != ${_abi}
#error not the C++ library of torch
#endif
int main() {}")
# Flags of the environment can change between two runs in one build folder: never trust a cached result.
unset(LDT_HAS_TORCH_CXX_ABI CACHE)
check_cxx_source_compiles("${_fits}" LDT_HAS_TORCH_CXX_ABI)
if(NOT LDT_HAS_TORCH_CXX_ABI)
  set(_flags -U_GLIBCXX_DEBUG -U_GLIBCXX_USE_CXX11_ABI -D_GLIBCXX_USE_CXX11_ABI=${_abi})
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    list(APPEND _flags -stdlib=libstdc++)
    add_link_options(-stdlib=libstdc++)
  endif()
  list(JOIN _flags " " CMAKE_REQUIRED_FLAGS)
  unset(LDT_HAS_TORCH_CXX_ABI CACHE)
  check_cxx_source_compiles("${_fits}" LDT_HAS_TORCH_CXX_ABI)
  unset(CMAKE_REQUIRED_FLAGS)
  if(NOT LDT_HAS_TORCH_CXX_ABI)
    message(FATAL_ERROR "ldt: ${CMAKE_CXX_COMPILER} does not compile for the C++ library of torch, which is GNU's "
                        "libstdc++; set CXX to a compiler that has it, such as g++, and unset CXXFLAGS.")
  endif()
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${_flags}>")
endif()
