# Uses ccache when it is there, unless the user chose a launcher already.
find_program(LDT_CCACHE ccache)
if(LDT_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${LDT_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${LDT_CCACHE}")
endif()
