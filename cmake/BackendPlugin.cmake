# weft_backend_plugin(<name> SOURCES ... [LIBS ...]) builds libweft_backend_<name>.so, which load_backend() finds: in the folder
# `weft` beside libweft, in the build as in the installation. Only its one entry is visible. <name> may hold letters, digits,
# '-' and '_'; the target is weft_backend_<name>.
function(weft_backend_plugin name)
  cmake_parse_arguments(P "" "" "SOURCES;LIBS" ${ARGN})
  set(target weft_backend_${name})
  add_library(${target} MODULE ${P_SOURCES})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${target} PRIVATE weft weft_flags fmt::fmt ${P_LIBS})
  set_target_properties(${target} PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/weft
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    INSTALL_RPATH "$ORIGIN/..")
  install(TARGETS ${target} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/weft)
endfunction()
