# Uses ccache when it is there, unless the user chose a launcher already.
if(LDT_CCACHE AND NOT EXISTS "${LDT_CCACHE}") # that of an environment which is gone
  unset(LDT_CCACHE CACHE)
endif()
find_program(LDT_CCACHE ccache)
if(LDT_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Without these two ccache leaves every file that uses a precompiled header uncached.
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros "${LDT_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${LDT_CCACHE}")
  add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
endif()
