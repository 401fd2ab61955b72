# weft_own_backend_plugin(<name> SOURCES ... [LIBS ...]): a plug-in of weft's own tree. It sees the private
# headers, too, and lies where load_backend() finds it: in the folder `weft` next to libweft.
include(${CMAKE_CURRENT_LIST_DIR}/weftBackendPlugin.cmake)
function(weft_own_backend_plugin name)
  # The component also has the peers of `weft bench` over that library.
  string(REGEX REPLACE "^mpi-" "" CMAKE_INSTALL_DEFAULT_COMPONENT_NAME ${name})
  if(name STREQUAL "nccl")
    set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME libweft)  # it needs no package
  endif()
  weft_backend_plugin(${name} ${ARGN})
  set(target weft_backend_${name})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${target} PRIVATE weft_flags fmt::fmt)
  set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/weft)
endfunction()
