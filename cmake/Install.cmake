# `cmake --install`: libraries, public headers, find_package(weft), pkg-config, pages, examples. The tool
# `weft` and the plug-ins have their own install rules. Installed files find their parts relative to their own
# place, so the prefix may be moved.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
# The components are those of Debian's packages (Packages.cmake); without --component all are installed.
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME dev)

set(weft_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/weft)

# weft_pkg_config(<name> <what it is> <what it requires> <libraries> <what its archive needs>)
function(weft_pkg_config weft_pc_name weft_pc_description weft_pc_requires weft_pc_libs weft_pc_private)
  # The folder is absolute: then the files cannot be moved.
  if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
    set(weft_pc_prefix ${CMAKE_INSTALL_PREFIX})
    set(weft_pc_libdir ${CMAKE_INSTALL_FULL_LIBDIR})
    set(weft_pc_includedir ${CMAKE_INSTALL_FULL_INCLUDEDIR})
  else()
    file(RELATIVE_PATH up /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
    string(REGEX REPLACE "/$" "" up ${up})
    set(weft_pc_prefix "\${pcfiledir}/${up}")
    set(weft_pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
    set(weft_pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
  endif()
  # Programs find libraries of the system's own prefix without a run path; `cmake --install --prefix` decides
  # which prefix that is.
  configure_file(${PROJECT_SOURCE_DIR}/cmake/weft.pc.in ${PROJECT_BINARY_DIR}/pkgconfig/${weft_pc_name}.pc @ONLY)
  string(REPLACE "-Wl,-rpath,\${libdir} " "" weft_pc_libs "${weft_pc_libs}")
  configure_file(${PROJECT_SOURCE_DIR}/cmake/weft.pc.in ${PROJECT_BINARY_DIR}/pkgconfig/usr/${weft_pc_name}.pc @ONLY)
  set(folder ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
  if(NOT IS_ABSOLUTE "${folder}")
    string(PREPEND folder "\${CMAKE_INSTALL_PREFIX}/")
  endif()
  install(CODE "
    set(made \"${PROJECT_BINARY_DIR}/pkgconfig\")
    if(CMAKE_INSTALL_PREFIX STREQUAL \"/usr\")
      string(APPEND made /usr)
    endif()
    file(INSTALL DESTINATION \"${folder}\" TYPE FILE FILES \"\${made}/${weft_pc_name}.pc\")")
endfunction()

include(${PROJECT_SOURCE_DIR}/cmake/Exports.cmake)
set(weft_libraries weft_installed)
weft_installed_library(weft)
target_link_libraries(weft_installed PRIVATE $<BUILD_INTERFACE:weft_flags> $<BUILD_INTERFACE:fmt::fmt> PUBLIC Threads::Threads)
weft_pkg_config(weft "Collectives and meshes for many-rank programs" "" "-Wl,-rpath,\${libdir} -lweft" "-lfmt -lstdc++ -lm")
if(TARGET weft_train)
  list(APPEND weft_libraries weft_train_installed)
  find_package(OpenMP REQUIRED COMPONENTS CXX)
  weft_installed_library(weft_train)
  target_link_libraries(weft_train_installed PUBLIC weft_installed PRIVATE $<BUILD_INTERFACE:weft_flags> $<BUILD_INTERFACE:fmt::fmt>
                        $<BUILD_INTERFACE:OpenMP::OpenMP_CXX>)
  list(TRANSFORM OpenMP_CXX_LIB_NAMES PREPEND "-l" OUTPUT_VARIABLE weft_train_needs)
  list(JOIN weft_train_needs " " weft_train_needs)
  set(weft_train_needs "${weft_train_needs} -lfmt -lstdc++ -lm")
  weft_pkg_config(weft_train "Layers and training over weft" "weft = ${PROJECT_VERSION}" "-Wl,-rpath,\${libdir} -lweft_train" "${weft_train_needs}")
endif()
foreach(library ${weft_libraries})
  string(REPLACE _installed "" component lib${library})
  install(TARGETS ${library} EXPORT weftTargets
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${component} NAMELINK_COMPONENT dev)
endforeach()

# libweft.a and libweft_train.a, from the same objects. CMake provides their targets by find_package(weft
# COMPONENTS static), which needs fmt, and by find_package(weft COMPONENTS train_static), which needs OpenMP,
# too. For pkg-config they are weft_static and weft_train_static; or weft and weft_train with --static if all
# libraries are static, including fmt.
if(WEFT_STATIC)
  add_library(weft_static STATIC $<FILTER:$<TARGET_OBJECTS:weft>,EXCLUDE,/plugins/shared_library[.]cpp[.]o$>
              ${PROJECT_SOURCE_DIR}/src/backends/plugins/static_library.cpp)
  add_library(weft::weft_static ALIAS weft_static)
  target_compile_features(weft_static PUBLIC cxx_std_20)
  target_include_directories(weft_static PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>
                             PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(weft_static PRIVATE $<BUILD_INTERFACE:weft_flags> fmt::fmt PUBLIC Threads::Threads)
  set_target_properties(weft_static PROPERTIES OUTPUT_NAME weft ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/installed)
  install(TARGETS weft_static EXPORT weftStaticTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  weft_pkg_config(weft_static "weft as a part of the program" "" "-l:libweft.a -lfmt -lstdc++ -lm" "")
  install(EXPORT weftStaticTargets NAMESPACE weft:: DESTINATION ${weft_package_dir})
  if(TARGET weft_train)
    add_library(weft_train_static STATIC $<TARGET_OBJECTS:weft_train>)
    add_library(weft::weft_train_static ALIAS weft_train_static)
    target_link_libraries(weft_train_static PRIVATE $<BUILD_INTERFACE:weft_flags> fmt::fmt OpenMP::OpenMP_CXX PUBLIC weft_static)
    set_target_properties(weft_train_static PROPERTIES OUTPUT_NAME weft_train LINKER_LANGUAGE CXX
      ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/installed)
    install(TARGETS weft_train_static EXPORT weftTrainStaticTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
    weft_pkg_config(weft_train_static "Layers and training as a part of the program" "weft_static = ${PROJECT_VERSION}"
                    "-l:libweft_train.a ${weft_train_needs}" "")
    install(EXPORT weftTrainStaticTargets NAMESPACE weft:: DESTINATION ${weft_package_dir})
  endif()
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/weft DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp" PATTERN "*.inl" PATTERN "*.h")
install(EXPORT weftTargets NAMESPACE weft:: DESTINATION ${weft_package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/weftConfig.cmake.in ${PROJECT_BINARY_DIR}/weftConfig.cmake
                              INSTALL_DESTINATION ${weft_package_dir})
set(weft_compatibility SameMajorVersion)  # as the soname
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(weft_compatibility SameMinorVersion)
endif()
write_basic_package_version_file(${PROJECT_BINARY_DIR}/weftConfigVersion.cmake COMPATIBILITY ${weft_compatibility})
install(FILES ${PROJECT_BINARY_DIR}/weftConfig.cmake ${PROJECT_BINARY_DIR}/weftConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/weftBackendPlugin.cmake DESTINATION ${weft_package_dir})

# Pages keep their relative places, so that their links work.
set(weft_pages ${CMAKE_INSTALL_DATAROOTDIR}/doc/weft)
foreach(page README.md CHANGELOG.md CONTRIBUTING.md LICENSE)
  install(FILES ${PROJECT_SOURCE_DIR}/${page} DESTINATION ${weft_pages})
endforeach()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs DESTINATION ${weft_pages})
foreach(linked bench/README.md bench/all_reduce.svg tests/cases/README.md tools/packages.txt)
  cmake_path(GET linked PARENT_PATH folder)
  install(FILES ${PROJECT_SOURCE_DIR}/${linked} DESTINATION ${weft_pages}/${folder})
endforeach()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/bench/results DESTINATION ${weft_pages}/bench)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/examples DESTINATION ${weft_pages})

configure_file(${PROJECT_SOURCE_DIR}/cmake/Uninstall.cmake.in ${PROJECT_BINARY_DIR}/uninstall.cmake @ONLY)
if(NOT TARGET uninstall)  # of a project that this is a part of
  add_custom_target(uninstall COMMAND ${CMAKE_COMMAND} -P ${PROJECT_BINARY_DIR}/uninstall.cmake)
endif()
