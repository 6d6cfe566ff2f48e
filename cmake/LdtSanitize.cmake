# Compiles all of ldt with a sanitizer of the compiler's runtime, if LDT_SANITIZE asks for one (see `make sanitize`).
#
# torch is not compiled with it: what its inlined code does is seen, what its libraries do between themselves is not.

if(NOT LDT_SANITIZE)
  return()
endif()
if(NOT LDT_SANITIZE MATCHES "^(address|thread)$")
  message(FATAL_ERROR "ldt: LDT_SANITIZE is '${LDT_SANITIZE}'; set it to address or thread, or leave it empty.")
endif()

set(_flags -fsanitize=thread)
if(LDT_SANITIZE STREQUAL "address")
  # Errors end the program, and so does undefined behaviour: a test must not pass with one.
  set(_flags -fsanitize=address,undefined -fno-sanitize-recover=all)
endif()
# Before any target: a precompiled header must have been made with the flags of those who use it.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-O1> $<$<COMPILE_LANGUAGE:CXX>:-g>
                    $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${_flags}>")
add_link_options(${_flags})
