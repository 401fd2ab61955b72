# weft_backend_plugin(<name> SOURCES ... [LIBS ...]): a transport for weft, libweft_backend_<name>.so
# (weft/backends/plugin.hpp).
#
# Only its one entry point is visible. `cmake --install` puts it into the folder in which weft of the same
# prefix looks for it; until then, WEFT_BACKEND_PATH names the folder of the build. <name> may hold letters,
# digits, '-' and '_'; the target is weft_backend_<name>. This function makes weft's own plug-ins, and
# find_package(weft) provides it to other projects.
include(GNUInstallDirs)
function(weft_backend_plugin name)
  cmake_parse_arguments(P "" "" "SOURCES;LIBS" ${ARGN})
  if(NOT name MATCHES "^[A-Za-z0-9_-]+$")
    message(FATAL_ERROR "weft_backend_plugin: \"${name}\" is no name; expected letters, digits, '-' and '_'")
  endif()
  if(P_UNPARSED_ARGUMENTS OR NOT P_SOURCES)
    message(FATAL_ERROR "weft_backend_plugin(${name} ${ARGN}); expected weft_backend_plugin(<name> SOURCES ... [LIBS ...])")
  endif()
  set(target weft_backend_${name})
  add_library(${target} MODULE ${P_SOURCES})
  target_link_libraries(${target} PRIVATE weft::weft ${P_LIBS})
  set_target_properties(${target} PROPERTIES
    PREFIX lib SUFFIX .so
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    INSTALL_RPATH "$ORIGIN/..")
  install(TARGETS ${target} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/weft)
endfunction()
