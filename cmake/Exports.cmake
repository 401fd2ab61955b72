# weft_installed_library(<library>): the target <library>_installed, which links the library's objects once
# more for `cmake --install`. It exports the symbols in src/<library>.exports: the public headers' symbols and
# a few for weft's own programs. The library of the build has all symbols, for tests
# (docs/decisions/2026-11-23-exported-symbols.md). Both libraries have one soname: the one that a process
# loads first serves all users. Exported symbols have a version: WEFT_<soversion>, so that each program calls
# the libweft to which it was linked if a process has several, and WEFT_PRIVATE_<version> for weft's own
# programs (docs/decisions/2026-11-23-several-libraries.md).
include(CheckCXXSourceCompiles)
include(CheckLinkerFlag)
check_cxx_source_compiles("#include <string>
  #if !defined __GLIBCXX__ || !_GLIBCXX_USE_CXX11_ABI
  #error the lists have the names of libstdc++
  #endif
  int main() {}" WEFT_LISTED_NAMES)
# lld refuses names that a build without some layers lacks.
check_linker_flag(CXX -Wl,--undefined-version WEFT_LINKER_UNDEFINED_VERSION)

function(weft_installed_library library)
  set(target ${library}_installed)
  set(script ${PROJECT_BINARY_DIR}/${library}.map)
  set(list ${PROJECT_SOURCE_DIR}/src/${library}.exports)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${list})
  file(STRINGS ${list} names REGEX "^[_a-z[]")
  list(FILTER names EXCLUDE REGEX "^soname ")
  string(REGEX REPLACE "\\[public\\];|;?\\[own\\].*" "" public "${names}")
  string(REGEX REPLACE ".*\\[own\\];?" "" own "${names}")
  list(JOIN public ";\n    " public)
  set(text "WEFT_${WEFT_SOVERSION} {\n  global:\n    ${public};\n  local: *;\n};\n")
  if(own)
    list(JOIN own ";\n    " own)
    string(APPEND text "WEFT_PRIVATE_${PROJECT_VERSION} {\n  global:\n    ${own};\n};\n")
  endif()
  file(CONFIGURE OUTPUT ${script} CONTENT "${text}" @ONLY)
  add_library(${target} SHARED $<TARGET_OBJECTS:${library}>)
  if(WEFT_LISTED_NAMES)
    target_link_options(${target} PRIVATE -Wl,--version-script=${script})
    if(WEFT_LINKER_UNDEFINED_VERSION)
      target_link_options(${target} PRIVATE -Wl,--undefined-version)
    endif()
  else()
    message(STATUS "${library}: all its symbols are exported, the list has the names of libstdc++ alone")
  endif()
  target_link_options(${target} PRIVATE -Wl,-Bsymbolic-functions)
  target_compile_features(${target} INTERFACE cxx_std_20)
  target_include_directories(${target} INTERFACE $<INSTALL_INTERFACE:include>)
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${library} EXPORT_NAME ${library} LINKER_LANGUAGE CXX
    VERSION ${PROJECT_VERSION} SOVERSION ${WEFT_SOVERSION} LINK_DEPENDS ${script}
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/installed INSTALL_RPATH "$ORIGIN")
endfunction()
