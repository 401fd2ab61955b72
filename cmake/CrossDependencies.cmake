# The libraries that libweft and its tests need and that a cross compiler does not have, from the headers and
# sources that Debian's packages libfmt-dev and googletest install for every architecture: fmt as headers
# only, GoogleTest compiled here.
# A folder with fmt alone: /usr/include holds this machine's C library, too.
set(headers ${PROJECT_BINARY_DIR}/cross/include)
file(MAKE_DIRECTORY ${headers})
file(CREATE_LINK /usr/include/fmt ${headers}/fmt SYMBOLIC)
add_library(fmt::fmt INTERFACE IMPORTED GLOBAL)
target_include_directories(fmt::fmt SYSTEM INTERFACE ${headers})
target_compile_definitions(fmt::fmt INTERFACE FMT_HEADER_ONLY)
if(WEFT_TESTS)
  add_subdirectory(/usr/src/googletest ${PROJECT_BINARY_DIR}/cross/googletest EXCLUDE_FROM_ALL)
endif()
