# `cpack -G DEB` in a build folder: makes Debian packages of the files that `cmake --install` installs,
# divided as Debian divides them, so that nobody gets files that they do not need. dpkg-shlibdeps finds out
# what a package needs. libweft needs neither MPI nor Gloo: plug-ins over them are separate packages.
#
#   libweft0.2         libweft.so, the plug-in nccl      weft-gloo, weft-openmpi, weft-mpich   a plug-in, and its peer of `weft bench`
#   libweft-train0.2   libweft_train.so                  weft-dev   headers, static libraries, CMake, pkg-config, pages, examples
#   weft               the tool, what `weft bench` runs
#
# The preset "debian" has Debian's folders and no run paths. Packages of other presets work as well, with
# libraries in /usr/lib.

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME weft)
set(CPACK_PACKAGE_VENDOR "the weft authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "collectives, meshes and parallel training for programs of many ranks")
# The maintainer: Debian's own variables, or this user of this machine.
set(weft_maintainer "$ENV{DEBFULLNAME} <$ENV{DEBEMAIL}>")
if(NOT DEFINED ENV{DEBFULLNAME} OR NOT DEFINED ENV{DEBEMAIL})
  cmake_host_system_information(RESULT weft_host QUERY HOSTNAME)
  execute_process(COMMAND id -un OUTPUT_VARIABLE weft_user OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(weft_maintainer "${weft_user} <${weft_user}@${weft_host}>")
endif()
set(CPACK_DEBIAN_PACKAGE_MAINTAINER "${weft_maintainer}" CACHE STRING "Who maintains the packages that cpack makes")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_SET_DESTDIR ON)  # installed files contain their own prefix, not a temporary one
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEBIAN_ENABLE_COMPONENT_DEPENDS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/installed)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_COMPONENTS_ALL)

# A changelog in Debian's form; our own is a page of weft-dev.
string(TIMESTAMP today "%a, %d %b %Y 00:00:00 +0000" UTC)
file(CONFIGURE OUTPUT debian/changelog CONTENT "weft (@PROJECT_VERSION@) unstable; urgency=medium

  * Version @PROJECT_VERSION@: /usr/share/doc/weft/CHANGELOG.md of weft-dev.

 -- @CPACK_DEBIAN_PACKAGE_MAINTAINER@  @today@
" @ONLY)
set(weft_changelog ${CMAKE_CURRENT_BINARY_DIR}/debian/changelog)
find_program(WEFT_GZIP gzip)
if(WEFT_GZIP)
  execute_process(COMMAND ${WEFT_GZIP} -9nkf ${weft_changelog} COMMAND_ERROR_IS_FATAL ANY)
  string(APPEND weft_changelog .gz)
endif()

# weft_package(<component> <package> <section> <description> [DEPENDS components ...] [RECOMMENDS packages]
# [SUGGESTS packages])
macro(weft_package component package section description)
  cmake_parse_arguments(weft_package "" "RECOMMENDS;SUGGESTS" "DEPENDS" ${ARGN})
  string(TOUPPER ${component} upper)
  list(APPEND CPACK_COMPONENTS_ALL ${component})
  set(CPACK_COMPONENT_${upper}_DESCRIPTION "${description}")
  set(CPACK_COMPONENT_${upper}_DEPENDS ${weft_package_DEPENDS})
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${package})
  set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION ${section})
  set(CPACK_DEBIAN_${upper}_PACKAGE_RECOMMENDS "${weft_package_RECOMMENDS}")
  set(CPACK_DEBIAN_${upper}_PACKAGE_SUGGESTS "${weft_package_SUGGESTS}")
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/${package} RENAME copyright
          COMPONENT ${component} EXCLUDE_FROM_ALL)
  install(FILES ${weft_changelog} DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/${package} COMPONENT ${component} EXCLUDE_FROM_ALL)
endmacro()

# weft_library_package(<component> <library> <package>): records which package a library is in, for packages
# of programs that link it, and lets the system refresh its library cache.
macro(weft_library_package component library package)
  string(TOUPPER ${component} upper)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/debian/${package})
  file(CONFIGURE OUTPUT ${folder}/shlibs CONTENT "${library} ${WEFT_SOVERSION} ${package} (>= ${PROJECT_VERSION})\n")
  file(CONFIGURE OUTPUT ${folder}/triggers CONTENT "activate-noawait ldconfig\n")
  set(CPACK_DEBIAN_${upper}_PACKAGE_CONTROL_EXTRA "${folder}/shlibs;${folder}/triggers")
endmacro()

set(weft_libraries_of_packages libweft)
set(weft_plugins)
foreach(plugin gloo mpi-openmpi mpi-mpich)
  if(TARGET weft_backend_${plugin})
    string(REGEX REPLACE "^mpi-" "" plugin ${plugin})
    list(APPEND weft_plugins ${plugin})
  endif()
endforeach()
list(TRANSFORM weft_plugins PREPEND weft- OUTPUT_VARIABLE weft_suggested)
list(JOIN weft_suggested ", " weft_suggested)

weft_package(libweft libweft${WEFT_SOVERSION} libs "The library: collectives over shared memory, meshes, gradients, checkpoints."
             SUGGESTS "libsodium23, ${weft_suggested}")
weft_library_package(libweft libweft libweft${WEFT_SOVERSION})
if(TARGET weft_train)
  list(APPEND weft_libraries_of_packages libweft_train)
  weft_package(libweft_train libweft-train${WEFT_SOVERSION} libs "The library for layers, models and training." DEPENDS libweft)
  weft_library_package(libweft_train libweft_train libweft-train${WEFT_SOVERSION})
endif()
if(WEFT_TOOLS)
  weft_package(tools weft utils "The tool weft: starts ranks, looks for faults, measures, trains." DEPENDS ${weft_libraries_of_packages}
               SUGGESTS "python3, ${weft_suggested}")
endif()
foreach(plugin ${weft_plugins})
  weft_package(${plugin} weft-${plugin} libs "The transport over ${plugin}, loaded when it is asked for." DEPENDS libweft)
endforeach()
weft_package(dev weft-dev libdevel "Headers, static libraries, files for CMake and pkg-config, pages and examples."
             DEPENDS ${weft_libraries_of_packages} RECOMMENDS "libfmt-dev" SUGGESTS "cmake, pkg-config")
set(CPACK_DEBIAN_DEV_PACKAGE_SHLIBDEPS OFF)  # no program is in it, and looking at each page takes seconds
include(CPack)
