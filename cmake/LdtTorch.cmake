# Describes the torch package to build against, as targets ldt_torch (C++ only) and ldt_torch_python.
#
# find_package(Torch) is not used: with a CUDA torch it demands the whole CUDA toolkit, also for code that never
# touches CUDA. The libraries in torch/lib are all that is needed, and have the same names in every build.

if(NOT LDT_TORCH_DIR)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE LDT_TORCH_DIR
    OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT EXISTS "${LDT_TORCH_DIR}/version.py")
  message(FATAL_ERROR "ldt: no torch found for ${Python_EXECUTABLE}; install torch there or set LDT_TORCH_DIR.")
endif()

file(READ "${LDT_TORCH_DIR}/version.py" _version_py)
if(NOT _version_py MATCHES "__version__ = ['\"]([^'\"]+)['\"]")
  message(FATAL_ERROR "ldt: cannot read torch's version from ${LDT_TORCH_DIR}/version.py; reinstall torch.")
endif()
set(LDT_TORCH_VERSION "${CMAKE_MATCH_1}")

set(LDT_TORCH_LIB_DIR "${LDT_TORCH_DIR}/lib")
foreach(_name IN ITEMS c10 torch_cpu torch_python)
  # The folder of torch can change between two runs in one build folder: never trust a cached result.
  unset(LDT_${_name}_LIBRARY CACHE)
  find_library(LDT_${_name}_LIBRARY ${_name} PATHS "${LDT_TORCH_LIB_DIR}" NO_DEFAULT_PATH REQUIRED)
endforeach()
unset(LDT_c10_cuda_LIBRARY CACHE)
find_library(LDT_c10_cuda_LIBRARY c10_cuda PATHS "${LDT_TORCH_LIB_DIR}" NO_DEFAULT_PATH)

add_library(ldt_torch INTERFACE)
target_include_directories(ldt_torch SYSTEM INTERFACE "${LDT_TORCH_DIR}/include"
                                                      "${LDT_TORCH_DIR}/include/torch/csrc/api/include")
target_compile_definitions(ldt_torch INTERFACE USE_DISTRIBUTED)
# Not libtorch: in a CUDA build it pulls in libtorch_cuda, and with it every CUDA library, into each C++ test.
target_link_libraries(ldt_torch INTERFACE ${LDT_torch_cpu_LIBRARY} ${LDT_c10_LIBRARY})

add_library(ldt_torch_python INTERFACE)
target_link_libraries(ldt_torch_python INTERFACE ldt_torch ${LDT_torch_python_LIBRARY})
