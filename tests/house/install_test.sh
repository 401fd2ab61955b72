#!/usr/bin/env bash
# Installs a build into a fresh prefix, moves it to another place, and uses it there as a user does. The C++
# program of README.md and the commands and CMake lines of docs/install.md are used unchanged. examples/c and
# README's program are built by pkg-config, too, and the installed launcher starts the ranks. At the end
# `uninstall` leaves nothing.
#
#   install_test.sh SOURCE BUILD
set -euo pipefail
source_dir=$1 build_dir=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/home/weft  # as docs/install.md has it

fail() { echo "FAILED: $*"; exit 1; }

# fence PAGE LANGUAGE NUMBER: the fenced block of the page in that language, counted from 1.
fence() {
  awk -v open='```'"$2" -v wanted="$3" '$0 == open { on = ++seen == wanted; next } $0 == "```" { on = 0 } on' "$source_dir/$1"
}

# as_user COMMANDS: runs them in the folder of the program; $HOME of docs/install.md is a folder of this test.
as_user() {
  (cd "$work/hello" && HOME=$work/home bash -euo pipefail -c "$1") >"$work/user.log" 2>&1 || { cat "$work/user.log"; fail "$1"; }
}

# expect_sum WHAT: both ranks printed the sum of 1 and 2.
expect_sum() {
  local rank
  for rank in 0 1; do
    grep -q "rank $rank of 2: sum 3\$" "$work/user.log" || { cat "$work/user.log"; fail "no sum of rank $rank: $1"; }
  done
  echo "$1: ok"
}

# The first block of docs/install.md builds weft and installs it; this test has a build already.
mkdir -p "$work/hello" "$work/made" "$work/home" "$work/weft/build"
ln -s "$build_dir" "$work/weft/build/install"
install=$(fence docs/install.md sh 1)
grep -q '^cmake --preset install && cmake --build --preset install && cmake --install build/install ' <<<"$install" ||
  fail "docs/install.md does not begin with building and installing weft: $install"
for kind in configure build; do
  (cd "$source_dir" && cmake --list-presets=$kind) | grep >/dev/null '"install"' || fail "there is no $kind preset \"install\""
done
(cd "$work/weft" && HOME=$work/made bash -euo pipefail -c "${install##*&& }") >"$work/install.log"
(cd / && mv "$work/made/weft" "$prefix")
! grep -rlF "$work/made" "$prefix" --include='*.pc' --include='*.cmake' || fail "these files name the prefix that was"

# Every link of an installed page that stays on the machine leads to an existing file.
python3 - "$prefix/share/doc/weft" <<'END' || fail "links of installed pages lead nowhere"
import pathlib, re, sys
top = pathlib.Path(sys.argv[1])
pages = list(top.rglob("*.md"))
dead = [f"{page.relative_to(top)}: {link}" for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
        if "://" not in link and not (page.parent / link).exists()]
print("\n".join(dead))
sys.exit(bool(dead) or len(pages) < 20)
END

fence README.md cpp 1 >"$work/hello/hello.cpp"
fence docs/install.md cmake 1 >"$work/hello/CMakeLists.txt"
grep -q all_reduce "$work/hello/hello.cpp" || fail "README.md has no C++ block"
grep -q find_package "$work/hello/CMakeLists.txt" || fail "docs/install.md has no CMake block"
as_user "export CMAKE_GENERATOR=Ninja; $(fence docs/install.md sh 2)"
expect_sum "find_package"

if command -v pkg-config >/dev/null; then
  libraries=$(dirname "$(find "$prefix" -name weft.pc)")
  [ "$libraries" = "$prefix/lib/pkgconfig" ] || ln -s "$(dirname "$libraries")" "$prefix/lib"
  as_user "$(fence docs/install.md sh 3)"
  expect_sum "pkg-config"
  export PKG_CONFIG_PATH=$libraries
  as_user 'cc -std=c11 -Wall -Wextra -Wpedantic -Werror '"$source_dir"'/examples/c/hello.c -o in_c $(pkg-config --cflags --libs weft) &&
    "$HOME/weft/bin/weft" run -n 2 -- ./in_c'
  expect_sum "pkg-config, C"
  as_user 'cc -std=c11 -Wall -Wextra -Wpedantic -Werror '"$source_dir"'/examples/c/gradients/gradients.c -o gradients_in_c $(pkg-config --cflags --libs weft) &&
    "$HOME/weft/bin/weft" run -n 4 -- ./gradients_in_c'
  grep -q 'step 2: norm 127.561750, bias gradient 0.266538 after clipping$' "$work/user.log" || { cat "$work/user.log"; fail "examples/c/gradients by pkg-config"; }
  as_user 'cc -std=c11 -Wall -Wextra -Wpedantic -Werror '"$source_dir"'/examples/c/stencil/stencil.c -o stencil_in_c $(pkg-config --cflags --libs weft) &&
    "$HOME/weft/bin/weft" run -n 3 -- ./stencil_in_c'
  grep -q '100 steps: heat 960.000000, 0 cells differ from one rank.s$' "$work/user.log" || { cat "$work/user.log"; fail "examples/c/stencil by pkg-config"; }
  as_user 'cc -std=c11 -Wall -Wextra -Wpedantic -Werror '"$source_dir"'/examples/c/host/host.c -o host_in_c $(pkg-config --cflags --libs weft) -pthread && ./host_in_c'
  grep -q '^all_reduce over queues: 10 on every rank$' "$work/user.log" || { cat "$work/user.log"; fail "examples/c/host by pkg-config"; }
  # The examples in other languages, by the commands in their first comments; also a check that their
  # declaration of weft_error is right.
  export RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup}  # HOME is a different folder in as_user
  for example in rust/hello.rs:rustc fortran/hello.f90:gfortran; do
    compiler=${example#*:} example=${example%:*}
    if ! $compiler --version >/dev/null 2>&1; then
      echo "examples/$example: skipped, $compiler is not installed"
      continue
    fi
    cp "$prefix/share/doc/weft/examples/$example" "$work/hello/"
    commands=$(sed -n 's/^[/!]*   //p;/^$/q' "$source_dir/examples/$example")
    [[ $commands == "$compiler "*$'\n'"weft run "* ]] || fail "examples/$example begins with no commands: $commands"
    as_user "PATH=\$HOME/weft/bin:\$PATH; cd ../hello; $commands"
    expect_sum "$compiler"
    said=$(env -u WEFT_WORLD_SIZE WEFT_RANK=1 "$work/hello/hello_${example%/*}" 2>&1) && fail "examples/$example without a size"
    [[ $said == "WEFT_WORLD_SIZE is not set, but WEFT_RANK is; expected "* ]] || fail "examples/$example tells its error as: $said"
  done
  if [ -e "$libraries/weft_train.pc" ]; then
    [[ $(pkg-config --libs weft_train) == *-lweft_train*-lweft* ]] || fail "pkg-config --libs weft_train: $(pkg-config --libs weft_train)"
    as_user 'cc -std=c11 -Wall -Wextra -Wpedantic -Werror '"$source_dir"'/examples/c/mlp/mlp.c -o mlp_in_c $(pkg-config --cflags --libs weft_train) -lm &&
      "$HOME/weft/bin/weft" run -n 2 -- ./mlp_in_c'
    grep -q '2 ranks: y, dx, dw and db equal the serial ones$' "$work/user.log" || { cat "$work/user.log"; fail "examples/c/mlp by pkg-config"; }
  fi
else
  echo "pkg-config: skipped, it is not installed"
fi

# The error text of find_package about a missing component.
refused_package() {  # LANGUAGES COMPONENT TEXT
  mkdir -p "$work/refused"
  printf 'cmake_minimum_required(VERSION 3.20)\nproject(refused LANGUAGES %s)\nfind_package(weft REQUIRED COMPONENTS %s)\n' "$1" "$2" >"$work/refused/CMakeLists.txt"
  rm -rf "$work/refused/build"
  if cmake -G Ninja -S "$work/refused" -B "$work/refused/build" -DCMAKE_PREFIX_PATH="$prefix" >"$work/refused.log" 2>&1; then
    fail "find_package(weft COMPONENTS $2) in $1 was not refused"
  fi
  tr -s ' \n' ' ' <"$work/refused.log" | grep -qF "$3" || { cat "$work/refused.log"; fail "find_package(weft COMPONENTS $2) does not say: $3"; }
}
refused_package CXX nonsense 'weft has no component "nonsense"; its components are train, static and train_static'

# The two smaller umbrella headers, each in a program of its own; the component train.
mkdir "$work/umbrellas"
cat >"$work/umbrellas/group.cpp" <<'END'
#include <weft/group.hpp>
#include <vector>
int main() {
  weft::Context context;
  weft::ProcessGroup group = weft::ProcessGroup::create(context, "auto", weft::Membership::from_env(context));
  std::vector<float> x{1.0F + static_cast<float>(group.rank())};
  group.all_reduce(x, x).wait();
  weft::Tensor total(context, weft::Shape{1});
  return x[0] == 3.0F && total.count() == 1 ? 0 : 1;
}
END
cat >"$work/umbrellas/train.cpp" <<'END'
#include <weft/train.hpp>
int main() {
  weft::Trainer::Options options;
  weft::Plan plan;
  return options.max_norm >= 0 && weft::parse_device("cpu").kind == weft::DeviceKind::cpu ? 0 : 1;
}
END
cat >"$work/umbrellas/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.20)
project(umbrellas LANGUAGES CXX)
find_package(weft REQUIRED COMPONENTS train)
add_executable(with_group group.cpp)
target_link_libraries(with_group PRIVATE weft::weft)
add_executable(with_train train.cpp)
target_link_libraries(with_train PRIVATE weft::weft_train)
END
if [ -n "$(find "$prefix" -name 'libweft_train.so')" ]; then
  as_user 'cmake -G Ninja -S ../umbrellas -B ../umbrellas/build -DCMAKE_PREFIX_PATH="$HOME/weft" && cmake --build ../umbrellas/build'
  as_user '"$HOME/weft/bin/weft" run -n 2 -- ../umbrellas/build/with_group && ../umbrellas/build/with_train'
  echo "weft/group.hpp, weft/train.hpp: ok"
  # A build without it has only the targets of weft.
  list=$(find "$prefix" -name weftTargets.cmake)
  cp "$list" "$work/weftTargets.cmake"
  sed -i 's/weft::weft_train/weft::other/g' "$list" $(dirname "$list")/weftTargets-*.cmake
  refused_package CXX train 'weft was built without WEFT_TRAIN: it has no libweft_train.so'
  sed -i 's/weft::other/weft::weft_train/g' "$list" $(dirname "$list")/weftTargets-*.cmake
  cmp "$list" "$work/weftTargets.cmake"
else
  refused_package CXX train 'weft was built without WEFT_TRAIN: it has no libweft_train.so'
fi

# One program linked to libweft.so and to libweft.a, by CMake and by pkg-config. --static is for programs that
# need no shared library at all.
if [ -e "$(dirname "$libraries")/libweft.a" ]; then
  mkdir "$work/outside"
  cat >"$work/outside/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.20)
project(outside LANGUAGES CXX)
find_package(weft REQUIRED COMPONENTS static)
add_library(outside OBJECT $source_dir/tests/house/outside.cpp)
target_link_libraries(outside PRIVATE weft::weft)
add_executable(with_shared \$<TARGET_OBJECTS:outside>)
target_link_libraries(with_shared PRIVATE weft::weft)
add_executable(with_static \$<TARGET_OBJECTS:outside>)
target_link_libraries(with_static PRIVATE weft::weft_static)
set_target_properties(with_shared with_static PROPERTIES LINKER_LANGUAGE CXX)
END
  as_user 'cmake -G Ninja -S ../outside -B ../outside/build -DCMAKE_PREFIX_PATH="$HOME/weft" && cmake --build ../outside/build'
  programs="with_shared with_static"
  if command -v pkg-config >/dev/null; then
    as_user "c++ \$(find ../outside/build -name 'outside*.o') -o ../outside/build/by_pkg_config \$(pkg-config --cflags --libs weft_static)"
    programs+=" by_pkg_config"
    [[ $(pkg-config --static --libs weft) == *" -lweft "*" -lfmt "* ]] || fail "pkg-config --static: $(pkg-config --static --libs weft)"
    if [ -e "$(c++ -print-file-name=libfmt.a)" ]; then
      as_user "c++ -static \$(find ../outside/build -name 'outside*.o') -o ../outside/build/all_static \$(pkg-config --static --cflags --libs weft)"
      programs+=" all_static"
    else
      echo "pkg-config --static: skipped, there is no libfmt.a"
    fi
  fi
  for program in $programs; do
    as_user "\"\$HOME/weft/bin/weft\" run -n 2 -- ../outside/build/$program"
    grep -q 'a bad root is a weft::Error$' "$work/user.log" || { cat "$work/user.log"; fail "$program does not know weft's exceptions"; }
    if [ $program = with_shared ]; then
      wanted='caught unsupported: backend "absent" was not found: '
    else
      wanted='caught unsupported: backend "absent" cannot be loaded: this program has weft in itself (libweft.a), and plug-ins need the libweft.so'
      ! ldd "$work/outside/build/$program" 2>&1 | grep libweft || fail "$program needs libweft.so"
    fi
    grep -qF "$wanted" "$work/user.log" || { cat "$work/user.log"; fail "$program says otherwise of a plug-in: $wanted"; }
    expect_sum "$program"
  done
  # If it is missing, CMake says why.
  list=$(find "$prefix" -name weftStaticTargets.cmake)
  mv "$list" "$work/"
  said=$(cmake -G Ninja -S "$work/outside" -B "$work/outside/none" -DCMAKE_PREFIX_PATH="$prefix" 2>&1) && fail "find_package finds a libweft.a that is not there"
  grep -q 'weft was built without WEFT_STATIC: it has no libweft.a' <<<"$said" || fail "without libweft.a, find_package says: $said"
  mv "$work/weftStaticTargets.cmake" "$list"
else
  echo "libweft.a: skipped, it is not built (WEFT_STATIC)"
fi

# An older standard is refused with an error text.
said=$(c++ -std=c++17 -fsyntax-only -I"$prefix/include" -x c++ - <<<'#include <weft/group/process_group.hpp>' 2>&1) && fail "C++17 was accepted"
grep -q '^[^ ]*: error: #error "weft needs C++20: compile with -std=c++20' <<<"$said" || fail "C++17 is refused as: $(head -n 3 <<<"$said")"

# Pages, licence, examples.
for file in doc/weft/LICENSE doc/weft/README.md doc/weft/docs/overview.md doc/weft/examples/CMakeLists.txt doc/weft/examples/gradients/gradients.cpp; do
  [ -s "$prefix/share/$file" ] || fail "$prefix/share/$file is not installed"
done
examples=$prefix/share/doc/weft/examples

# The installed examples. Programs that the build has compiled already are only linked against the installed
# files, further down.
cmake -G Ninja -S "$examples" -B "$work/examples" -DCMAKE_PREFIX_PATH="$prefix" >"$work/cmake.log" 2>&1 || { cat "$work/cmake.log"; exit 1; }
cmake --build "$work/examples" --target gradients_in_c host_in_c stencil_in_c >"$work/cmake.log" 2>&1 || { cat "$work/cmake.log"; exit 1; }
timeout 60 "$prefix/bin/weft" run -n 4 -- "$work/examples/gradients_in_c" >"$work/user.log" 2>&1 || { cat "$work/user.log"; fail "examples/c/gradients"; }
grep -q 'step 2: norm 127.561750, bias gradient 0.266538 after clipping$' "$work/user.log" || { cat "$work/user.log"; fail "examples/c/gradients by CMake"; }
timeout 60 "$prefix/bin/weft" run -n 4 -- "$work/examples/stencil_in_c" >"$work/user.log" 2>&1 || { cat "$work/user.log"; fail "examples/c/stencil by CMake"; }
timeout 60 "$work/examples/host_in_c" >"$work/user.log" 2>&1 || { cat "$work/user.log"; fail "examples/c/host by CMake"; }

# A user's own layer trains over several ranks with the results of one rank.
if [ -n "$(find "$prefix" -name libweft_train.so)" ]; then
  cmake --build "$work/examples" --target layer >"$work/cmake.log" 2>&1 || { cat "$work/cmake.log"; exit 1; }
  timeout 60 "$prefix/bin/weft" run -n 4 -- "$work/examples/layer/layer" || fail "examples/layer"
  cmake --build "$work/examples" --target mlp_in_c >"$work/cmake.log" 2>&1 || { cat "$work/cmake.log"; exit 1; }
  timeout 60 "$prefix/bin/weft" run -n 4 -- "$work/examples/mlp_in_c" || fail "examples/c/mlp"
  echo "a layer from outside: ok"
  cmake --build "$work/examples" --target pictures >"$work/cmake.log" 2>&1 || { cat "$work/cmake.log"; exit 1; }
  (cd "$work" && timeout 60 "$prefix/bin/weft" run -n 4 -- examples/pictures begin &&
    timeout 60 "$prefix/bin/weft" run -n 3 -- examples/pictures resume) >"$work/user.log" 2>&1 ||
    { cat "$work/user.log"; fail "examples/pictures"; }
  grep -q 'step 40: loss 0.017$' "$work/user.log" || { cat "$work/user.log"; fail "examples/pictures"; }
  echo "a model from outside: ok"
  # The same object and libweft_train.a, by CMake and by pkg-config.
  if [ -n "$(find "$prefix" -name libweft_train.a)" ]; then
    refused_package C train_static 'enable CXX, as in project(name C CXX)'
    mkdir "$work/trains"
    cat >"$work/trains/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.20)
project(trains LANGUAGES CXX)
find_package(weft REQUIRED COMPONENTS train_static)
add_executable(by_cmake $(find "$work/examples/layer" -name 'layer*.o'))
set_target_properties(by_cmake PROPERTIES LINKER_LANGUAGE CXX)
target_link_libraries(by_cmake PRIVATE weft::weft_train_static)
END
    as_user 'cmake -G Ninja -S ../trains -B ../trains -DCMAKE_PREFIX_PATH="$HOME/weft" && cmake --build ../trains'
    programs=by_cmake
    if command -v pkg-config >/dev/null; then
      as_user "c++ \$(find ../examples/layer -name 'layer*.o') -o ../trains/by_pkg_config \$(pkg-config --libs weft_train_static)"
      programs+=" by_pkg_config"
      [[ $(pkg-config --static --libs weft_train) == *"-lweft_train "*"-lgomp "*"-lweft "* ]] ||
        fail "pkg-config --static: $(pkg-config --static --libs weft_train)"
    fi
    for program in $programs; do
      ! ldd "$work/trains/$program" | grep libweft || fail "$program needs libweft.so or libweft_train.so"
      as_user "\"\$HOME/weft/bin/weft\" run -n 4 -- ../trains/$program"
      grep -q 'the weights equal those of one rank' "$work/user.log" || { cat "$work/user.log"; fail "libweft_train.a, $program"; }
    done
    list=$(find "$prefix" -name weftTrainStaticTargets.cmake)
    mv "$list" "$work/"
    said=$(cmake -G Ninja -S "$work/trains" -B "$work/trains/none" -DCMAKE_PREFIX_PATH="$prefix" 2>&1) && fail "find_package finds a libweft_train.a that is not there"
    grep -q 'weft was built without WEFT_TRAIN: it has no libweft_train.a' <<<"$said" || fail "without libweft_train.a, find_package says: $said"
    mv "$work/weftTrainStaticTargets.cmake" "$list"
    echo "libweft_train.a: ok"
  else
    echo "libweft_train.a: skipped, it is not built (WEFT_STATIC)"
  fi
else
  echo "a layer from outside: skipped, libweft_train is not installed"
fi

# The example transport, built against what was installed, passes the conformance suite.
cmake --build "$work/examples" --target weft_backend_example >"$work/cmake.log" 2>&1 || { cat "$work/cmake.log"; exit 1; }
ln -s examples/backend "$work/backend"
WEFT_BACKEND_PATH=$work/backend "$prefix/bin/weft" doctor | grep >/dev/null "example *named pipes in a folder ($work/backend/" ||
  { echo "FAILED: weft doctor does not find the example backend"; exit 1; }
# The last example: ranks that wait in a chain behind a stopped rank.
for flags in "--programs 30 --seed 1" "--programs 15 --faults --seed 1" "--only 52 --faults --seed 2"; do
  TMPDIR=$work WEFT_BACKEND_PATH=$work/backend timeout 120 "$prefix/bin/weft" check --backend example $flags --progress none \
    >"$work/check.log" 2>&1 || { echo "FAILED: weft check --backend example $flags"; tail -40 "$work/check.log"; exit 1; }
done
if [ -x "$build_dir/bin/backends_conformance_test" ]; then
  # The next job removes the folder that killed ranks leave. The folder of a live rank stays.
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

# Nothing of the build is needed any more, and no private file is installed.
if ldd "$work/hello/build/hello" | grep >/dev/null "$build_dir"; then fail "the program still needs $build_dir"; fi
if grep -rqE '#include [<"](fmt|nlohmann|CLI)' "$prefix/include"; then fail "private headers in public ones"; fi

# The tool and the plug-ins of the prefix that was moved.
if ldd "$prefix/bin/weft" | grep >/dev/null -E "$build_dir|not found"; then fail "weft needs the build: $(ldd "$prefix/bin/weft")"; fi
"$prefix/bin/weft" doctor >"$work/doctor.log" || { cat "$work/doctor.log"; fail "weft doctor"; }
for plugin in "$(dirname "$libraries")"/weft/libweft_backend_*.so; do
  grep -qF "($plugin" "$work/doctor.log" || { cat "$work/doctor.log"; fail "weft doctor does not find $plugin"; }
done

# `weft bench` of the prefix that was moved: with its own programs, against the peers that were built, and its
# output without them.
programs=$(find "$prefix" -name collectives_bench)
if [ -n "$programs" ]; then
  programs=$(dirname "$programs")
  for program in "$programs"/*; do
    if ldd "$program" 2>&1 | grep >/dev/null -E "$build_dir|not found"; then fail "$program needs the build: $(ldd "$program")"; fi
  done
  if ! "$prefix/bin/weft" bench --list >"$work/bench.log"; then cat "$work/bench.log"; fail "weft bench --list"; fi
  grep -qxF "  $programs" "$work/bench.log" || { cat "$work/bench.log"; fail "weft bench --list does not name $programs"; }
  peers=$(sed -n 's/^  \([a-z]*\) *is there$/\1/p' "$work/bench.log" | grep -xE 'openmpi|mpich|gloo' | paste -sd, || true)
  timeout 60 "$prefix/bin/weft" bench all_reduce --bytes 8 --rounds 1 --seconds 0.01 --memory shared ${peers:+--against $peers} >"$work/bench.log" 2>&1 ||
    { cat "$work/bench.log"; fail "weft bench all_reduce from an install"; }
  grep -q '^8 .*[0-9] (' "$work/bench.log" || { cat "$work/bench.log"; fail "weft bench all_reduce has no row of 8 bytes"; }
  mv "$programs" "$work/programs"
  said=$("$prefix/bin/weft" bench all_reduce --bytes 8 2>&1) && fail "weft bench without its programs"
  [[ $said == *"collectives_bench is neither in $prefix/bin nor in $programs: this weft was built without its benchmarks; install libbenchmark-dev, "* ]] ||
    fail "without its programs, weft bench says: $said"
  mv "$work/programs" "$programs"
  echo "weft bench: ok, peers: ${peers:-none is there}"
else
  echo "weft bench: skipped, its programs are not built (Google Benchmark)"
fi

# Uninstalled, nothing is left. (The prefix was moved, so it is moved back.)
mv "$prefix" "$work/made/weft"
if [ -L "$work/made/weft/lib" ]; then rm "$work/made/weft/lib"; fi
grep uninstall <<<"$(cmake --build "$build_dir" --target help)" >/dev/null || fail "no target uninstall"
cmake -P "$build_dir/uninstall.cmake" >"$work/uninstall.log" 2>&1 || { cat "$work/uninstall.log"; fail "uninstall"; }
left=$(find "$work/made" ! -type d)
[ -z "$left" ] || fail "uninstall leaves $left"
! find "$work/made" -path '*/weft/include/weft*' -o -path '*/lib/weft*' | grep . || fail "uninstall leaves folders of weft"
rm "$build_dir/install_manifest.txt"
said=$(cmake -P "$build_dir/uninstall.cmake" 2>&1) && fail "uninstall a second time"
grep -q 'nothing was installed from this build' <<<"$said" || fail "uninstall a second time says: $said"
echo "uninstall: ok"
