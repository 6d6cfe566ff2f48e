# Decides whether CUDA kernels are built: by the option and by what is installed, never by whether a GPU is there.
#
# Sets LDT_CUDA_ENABLED and LDT_CUDA_SUMMARY (for the summary and for `python -m ldt doctor`).

set(LDT_CUDA_ENABLED OFF)
if(NOT LDT_WITH_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "ldt: LDT_WITH_CUDA is '${LDT_WITH_CUDA}'; set it to auto, on or off.")
endif()

if(LDT_WITH_CUDA STREQUAL "off")
  set(LDT_CUDA_SUMMARY "off (LDT_WITH_CUDA=off)")
  return()
endif()

find_package(CUDAToolkit QUIET)
if(NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE)
  if(LDT_WITH_CUDA STREQUAL "on")
    message(FATAL_ERROR "ldt: LDT_WITH_CUDA=on, but no CUDA toolkit (nvcc) was found; install one and set CUDACXX "
                        "to its nvcc, or build with LDT_WITH_CUDA=off.")
  endif()
  set(LDT_CUDA_SUMMARY "off (no CUDA toolkit found)")
  return()
endif()
if(LDT_WITH_CUDA STREQUAL "auto" AND NOT LDT_c10_cuda_LIBRARY)
  set(LDT_CUDA_SUMMARY "off (torch ${LDT_TORCH_VERSION} has no CUDA)")
  return()
endif()
if(NOT LDT_CUDA_SOURCES)
  set(LDT_CUDA_SUMMARY "no kernels in this version (toolkit ${CUDAToolkit_VERSION} found, nothing to build)")
  return()
endif()

# "8.0;9.0+PTX" or "8.0 9.0a" (torch's spelling) -> "80-real;90-real;90-virtual" (CMake's).
set(_archs "")
string(REGEX REPLACE "[ ,;]+" ";" _wanted "$ENV{TORCH_CUDA_ARCH_LIST}")
foreach(_arch IN LISTS _wanted)
  if(NOT _arch MATCHES "^([0-9]+)\\.([0-9]+[af]?)(\\+PTX)?$")
    message(FATAL_ERROR "ldt: TORCH_CUDA_ARCH_LIST names '${_arch}'; write numbers, such as '8.0;9.0+PTX'.")
  endif()
  list(APPEND _archs "${CMAKE_MATCH_1}${CMAKE_MATCH_2}-real")
  if(CMAKE_MATCH_3)
    list(APPEND _archs "${CMAKE_MATCH_1}${CMAKE_MATCH_2}-virtual")
  endif()
endforeach()
if(NOT _archs)
  set(_archs all-major)
endif()
set(CMAKE_CUDA_ARCHITECTURES "${_archs}")
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_RUNTIME_LIBRARY None) # CUDA::cudart_static is linked by its path, see below
set(CMAKE_CUDA_COMPILER "${CUDAToolkit_NVCC_EXECUTABLE}")
enable_language(CUDA)
# The C++ compiler links. nvcc's host compiler may be another one: from its folders a second, static C++ library would
# come, with which that of torch does not mix.
set(CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES "")
set(CMAKE_CUDA_IMPLICIT_LINK_LIBRARIES "")
set(LDT_CUDA_ENABLED ON)
list(JOIN _archs " " _archs_text)
set(LDT_CUDA_SUMMARY "on (toolkit ${CUDAToolkit_VERSION}, architectures ${_archs_text})")
