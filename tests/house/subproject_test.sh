#!/usr/bin/env bash
# weft as a part of another project, by add_subdirectory (FetchContent does the same). There are only
# libraries, without tests, tools, benches or install rules. A program is linked to them.
#
#   subproject_test.sh SOURCE
set -euo pipefail
source_dir=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*"; exit 1; }

cat >"$work/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.20)
project(parent VERSION 7.8.9 LANGUAGES C CXX)
enable_testing()
add_subdirectory($source_dir weft)
add_executable(program program.cpp)
target_link_libraries(program PRIVATE weft::weft)
if(WITH_TRAIN)
  target_link_libraries(program PRIVATE weft::weft_train)
endif()
END
cat >"$work/program.cpp" <<'END'
#include <weft/base/dtype.hpp>
int main() { return weft::name(weft::DType::bf16) == "bf16" ? 0 : 1; }
END

# The whole of it is configured but not built, since a build takes minutes.
cmake -G Ninja -S "$work" -B "$work/all" -DWITH_TRAIN=ON >"$work/log" 2>&1 || { cat "$work/log"; fail "cmake of a project that contains weft"; }
targets=$(ninja -C "$work/all" -t targets all)
for library in libweft.so libweft_train.so; do
  grep -q "$library" <<<"$targets" || fail "there is no $library"
done
! grep -E 'weft_cli|_tests\b|_bench:|weft_installed|weft_backend_mpi-.*bench' <<<"$targets" || fail "a part of another project has tools, tests or benches"
(cd "$work/all" && ctest -N) | grep -q '^Total Tests: 0$' || fail "the project has tests of weft: $(cd "$work/all" && ctest -N)"
! grep -q '/weft\.' "$work/all/weft/cmake_install.cmake" || fail "weft is installed with the project"
! grep -q -- '-Werror' "$work/all/compile_commands.json" || fail "warnings are errors in a project that contains weft"

# Two of its layers are built and linked.
cmake -G Ninja -S "$work" -B "$work/base" -DWEFT_LAYERS='base;host' -DWEFT_TRAIN=OFF -DWEFT_LIBRARY_UNITS=20 -DCMAKE_BUILD_TYPE=Debug >"$work/log" 2>&1 ||
  { cat "$work/log"; fail "cmake of a project with two layers of weft"; }
cmake --build "$work/base" --target program >"$work/log" 2>&1 || { cat "$work/log"; fail "a program of a project that contains weft"; }
"$work/base/program" || fail "the program"
echo "weft as a part of another project: ok"
