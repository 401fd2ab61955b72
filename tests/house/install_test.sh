#!/usr/bin/env bash
# Installs a build into a fresh prefix and uses it as a user does: README's C++ and CMake lines, taken from README.md as they
# stand, are built by find_package(weft) and again by pkg-config, examples/c by a C compiler, and run on two ranks by the installed
# launcher.
#
#   install_test.sh SOURCE BUILD
set -euo pipefail
source_dir=$1 build_dir=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix

# fence LANGUAGE FILE: the first fenced block of that language.
fence() { awk -v open='```'"$1" '$0 == open { on = 1; next } on && $0 == "```" { exit } on' "$2"; }

# expect_sum COMMAND...: both ranks of README's program give the sum of 1 and 2.
expect_sum() {
  local output rank
  output=$("$@" 2>&1) || { echo "FAILED: $*"; echo "$output"; return 1; }
  for rank in 0 1; do
    grep -q "rank $rank of 2: sum 3\$" <<<"$output" || { echo "FAILED: no sum of rank $rank from: $*"; echo "$output"; return 1; }
  done
}

cmake --install "$build_dir" --prefix "$prefix" >"$work/install.log"

mkdir "$work/hello"
fence cpp "$source_dir/README.md" >"$work/hello/hello.cpp"
fence cmake "$source_dir/README.md" >"$work/hello/CMakeLists.txt"
grep -q all_reduce "$work/hello/hello.cpp" || { echo "FAILED: README.md has no C++ block"; exit 1; }
grep -q find_package "$work/hello/CMakeLists.txt" || { echo "FAILED: README.md has no CMake block"; exit 1; }

cmake -G Ninja -S "$work/hello" -B "$work/hello/build" -DCMAKE_PREFIX_PATH="$prefix" >"$work/cmake.log" 2>&1 &&
  cmake --build "$work/hello/build" >>"$work/cmake.log" 2>&1 || { cat "$work/cmake.log"; exit 1; }
expect_sum "$prefix/bin/weft" run -n 2 -- "$work/hello/build/hello"
echo "find_package: ok"

if command -v pkg-config >/dev/null; then
  libraries=$(dirname "$(find "$prefix" -name weft.pc)")
  export PKG_CONFIG_PATH=$libraries
  c++ -std=c++20 "$work/hello/hello.cpp" -o "$work/hello/by_pkg_config" $(pkg-config --cflags --libs weft) \
    -Wl,-rpath,"$(pkg-config --variable=libdir weft)"
  expect_sum "$prefix/bin/weft" run -n 2 -- "$work/hello/by_pkg_config"
  cc -std=c11 -Wall -Wextra -Wpedantic -Werror "$source_dir/examples/c/hello.c" -o "$work/hello/in_c" $(pkg-config --cflags --libs weft) \
    -Wl,-rpath,"$(pkg-config --variable=libdir weft)"
  expect_sum "$prefix/bin/weft" run -n 2 -- "$work/hello/in_c"
  echo "pkg-config: ok"
else
  echo "pkg-config: skipped, it is not installed"
fi

# A layer from outside, built against what was installed, trains as it does on one rank.
if ls "$prefix"/lib*/libweft_train.so "$prefix"/lib*/*/libweft_train.so >/dev/null 2>&1; then
  cmake -G Ninja -S "$source_dir/examples/layer" -B "$work/layer" -DCMAKE_PREFIX_PATH="$prefix" >"$work/cmake.log" 2>&1 &&
    cmake --build "$work/layer" >>"$work/cmake.log" 2>&1 || { cat "$work/cmake.log"; exit 1; }
  timeout 60 "$prefix/bin/weft" run -n 4 -- "$work/layer/layer" || { echo "FAILED: examples/layer"; exit 1; }
  echo "a layer from outside: ok"
else
  echo "a layer from outside: skipped, libweft_train is not installed"
fi

# The example transport, built against what was installed, passes the conformance suite.
cmake -G Ninja -S "$source_dir/examples/backend" -B "$work/backend" -DCMAKE_PREFIX_PATH="$prefix" >"$work/cmake.log" 2>&1 &&
  cmake --build "$work/backend" >>"$work/cmake.log" 2>&1 || { cat "$work/cmake.log"; exit 1; }
WEFT_BACKEND_PATH=$work/backend "$prefix/bin/weft" doctor | grep -q "example *files in a folder ($work/backend/" ||
  { echo "FAILED: weft doctor does not find the example backend"; exit 1; }
# The last one: ranks that wait in a chain behind one that is stopped.
for flags in "--programs 30 --seed 1" "--programs 15 --faults --seed 1" "--only 52 --faults --seed 2"; do
  TMPDIR=$work WEFT_BACKEND_PATH=$work/backend timeout 120 "$prefix/bin/weft" check --backend example $flags --progress none \
    >"$work/check.log" 2>&1 || { echo "FAILED: weft check --backend example $flags"; tail -40 "$work/check.log"; exit 1; }
done
if [ -x "$build_dir/bin/backends_conformance_test" ]; then
  # What ranks leave that were all killed goes with the next job; the folder of one that lives stays.
  mkdir "$work/weft-example-killed" "$work/weft-example-alive" && touch "$work/weft-example-killed/alive" "$work/weft-example-alive/alive"
  exec 8<"$work/weft-example-alive/alive" && flock -s 8
  TMPDIR=$work WEFT_BACKEND_PATH=$work/backend WEFT_TEST_BACKEND=example timeout 200 "$prefix/bin/weft" run -n 2 -- \
    "$build_dir/bin/backends_conformance_test" --gtest_filter='Job/*' >"$work/conformance.log" 2>&1 ||
    { echo "FAILED: the conformance suite over the example backend"; grep -A8 Failure "$work/conformance.log" | head -50; exit 1; }
  grep -q '\[  PASSED  \] [1-9]' "$work/conformance.log" || { echo "FAILED: no test was run over the example backend"; exit 1; }
  exec 8<&-
  [ -d "$work/weft-example-alive" ] || { echo "FAILED: the example backend removed the folder of ranks that live"; exit 1; }
  rm -r "$work/weft-example-alive"
  if ls -d "$work"/weft-example-* 2>/dev/null; then echo "FAILED: the example backend left its folder"; exit 1; fi
  echo "example backend: ok, $(grep -o 'PASSED  \] .*' "$work/conformance.log" | head -n 1)"
else
  echo "example backend: built; conformance skipped, the tests are not built"
fi

# Nothing of the build is needed any more, and nothing private has leaked.
if ldd "$work/hello/build/hello" | grep -q "$build_dir"; then echo "FAILED: the program still needs $build_dir"; exit 1; fi
if grep -rqE '#include [<"](fmt|nlohmann|CLI|dnnl)' "$prefix/include"; then echo "FAILED: private headers in public ones"; exit 1; fi
