# `cmake --install`: libraries, public headers, find_package(weft), pkg-config. The tool `weft` installs itself (tools/).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(weft_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/weft)

# weft_pkg_config(<library> <what it is> <what it requires>)
function(weft_pkg_config weft_pc_name weft_pc_description weft_pc_requires)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/weft.pc.in ${PROJECT_BINARY_DIR}/${weft_pc_name}.pc.at-install @ONLY)
  # The prefix is known for sure only when `cmake --install --prefix` says it.
  install(CODE "
    file(READ \"${PROJECT_BINARY_DIR}/${weft_pc_name}.pc.at-install\" text)
    string(REPLACE \"prefix=${CMAKE_INSTALL_PREFIX}\\n\" \"prefix=\${CMAKE_INSTALL_PREFIX}\\n\" text \"\${text}\")
    file(WRITE \"${PROJECT_BINARY_DIR}/${weft_pc_name}.pc\" \"\${text}\")")
  install(FILES ${PROJECT_BINARY_DIR}/${weft_pc_name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endfunction()

set(weft_libraries weft)
weft_pkg_config(weft "Collectives and meshes for many-rank programs" "")
if(TARGET weft_train)
  list(APPEND weft_libraries weft_train)
  weft_pkg_config(weft_train "Layers and training over weft" "weft = ${PROJECT_VERSION}")
endif()

# Installed files find each other wherever the prefix is moved to.
set_target_properties(${weft_libraries} PROPERTIES INSTALL_RPATH "$ORIGIN")
install(TARGETS ${weft_libraries} EXPORT weftTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/weft DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(EXPORT weftTargets NAMESPACE weft:: DESTINATION ${weft_package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/weftConfig.cmake.in ${PROJECT_BINARY_DIR}/weftConfig.cmake
                              INSTALL_DESTINATION ${weft_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/weftConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/weftConfig.cmake ${PROJECT_BINARY_DIR}/weftConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/weftBackendPlugin.cmake DESTINATION ${weft_package_dir})
