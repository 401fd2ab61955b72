#!/usr/bin/env bash
# Builds and checks: layers, layout, the release build with all tests, base to group under the address and
# undefined sanitizers, code that shares memory between threads under the thread sanitizer, libweft with clang
# 14, and clang-tidy on changed files. Installs missing packages from Debian (prints the command if not root).
# Its last lines are ctest's own summary of the release tests. The exit status covers all checks.
#
# Tests wait more than they compute, so the next preset is built in the time that they leave
# (tools/build_queue.sh).
#
#   tools/test.sh            the default tier, which continuous integration runs
#   tools/test.sh --full     also the fuzz targets, base and reduce for aarch64 under qemu, and both sanitizers over all of base to group, long tests too;
#                            Python over torch, in each version that is stated as tested, and JAX, in virtual environments that tools/torch_python.sh makes
#                            outside of the tree once (gigabytes)
#   tools/test.sh --quick    layers, layout and the release tests only
#
# Up to five failed tests run a second time, alone; tests that then pass are listed as "unsteady" and do not
# fail the run. With --full one failure is enough (docs/decisions/2026-11-22-unsteady-tests.md).
set -uo pipefail
. "$(dirname "$0")/lib.sh"
cd "$weft_root" || exit 1

tier=default
case "${1:-}" in
  "") ;;
  --quick) tier=quick ;;
  --full) tier=full ;;
  *) echo "usage: tools/test.sh [--quick | --full]" >&2; exit 2 ;;
esac

if [ "$tier" = full ]; then install_missing full; else install_missing test; fi
tidy_max=12  # sources; each takes some ten seconds
jobs=$(nproc)
if [ "$tier" = full ]; then export WEFT_TEST_FULL=1; fi  # tests/support/sanitizers.hpp
budget=1800  # seconds that the default tier may take on two cores with nothing built
failed=()   # the steps that failed
steps=()    # "seconds what" of each step
building=0  # seconds that the step at hand waited for its build
skipped=()  # omitted steps, and the reasons
logs=()     # ctest logs, for the skips inside of tests
under=()    # a command that runs ctest

# step NAME COMMAND...: runs the command and remembers a failure; later steps still run.
step() {
  local name=$1 started=$SECONDS
  shift
  building=0
  say "$name"
  if "$@"; then echo "$name: ok, $((SECONDS - started)) s"; else
    echo "$name: FAILED"
    failed+=("$name")
  fi
  took "$((SECONDS - started))" "$name"
}

# took SECONDS NAME: adds a line to the table at the end.
took() {
  local of=
  if [ "$building" -gt 0 ]; then of=" (build $building s, then $(($1 - building)) s)"; fi
  steps+=("$1 $2$of")
}

check_format() {
  local tool
  for tool in clang-format-14 clang-format; do
    if command -v "$tool" >/dev/null && "$tool" --version | grep -q 'version 14\.'; then
      git ls-files '*.hpp' '*.cpp' '*.h' '*.c' | xargs -r "$tool" --dry-run -Werror
      return
    fi
  done
  skipped+=("layout: clang-format 14 is not installed")
}

# Runs clang-tidy on the sources that differ from the commit at which this branch left main; on main, from the
# commit before.
tidy() {
  local tool base files
  tool=$(command -v clang-tidy-14 || command -v clang-tidy)
  if [ -z "$tool" ]; then
    skipped+=("clang-tidy: it is not installed")
    return
  fi
  base=$(git merge-base HEAD main 2>/dev/null) || base=
  if [ -z "$base" ] || [ "$base" = "$(git rev-parse HEAD)" ]; then base=$(git rev-parse -q --verify HEAD~1) || base=; fi
  if [ -z "$base" ]; then
    skipped+=("clang-tidy: no commit to compare with")
    return
  fi
  mapfile -t files < <(git diff --name-only --diff-filter=AMR "$base" -- 'src/*.cpp' 'tools/*.cpp' | tidied)
  if [ ${#files[@]} -eq 0 ]; then echo "no source has changed"; return; fi
  if [ "${#files[@]}" -gt "$tidy_max" ] && [ "$tier" != full ]; then
    skipped+=("clang-tidy: $((${#files[@]} - tidy_max)) of ${#files[@]} changed sources; --full has all")
    files=("${files[@]:0:$tidy_max}")
  fi
  cmake --preset clang >/dev/null || return
  # Opinions go to a file; findings of WarningsAsErrors in .clang-tidy are printed, and fail.
  printf '%s\n' "${files[@]}" | xargs -P "$jobs" -n 2 "$tool" -p build/clang --quiet >build/tidy.log 2>&1 && return
  grep -A 3 'error:' build/tidy.log || tail -n 20 build/tidy.log
  return 1
}

# tidied: reads names of files, and prints those that the build with clang compiles.
tidied() {
  cmake --preset clang >/dev/null 2>&1
  grep -xFf <(sed -n "s|^ *\"file\": \"$weft_root/\(.*\)\",\?$|\1|p" build/clang/compile_commands.json 2>/dev/null)
}

compile_with_clang() {
  if ! command -v clang++-14 >/dev/null; then
    skipped+=("clang: clang 14 is not installed")
    return
  fi
  await_build clang
}

# Builds base and reduce for aarch64; their vector code (NEON) runs in no other test.
aarch64() {
  local tool
  for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
    if ! command -v "$tool" >/dev/null; then
      skipped+=("aarch64: $tool is not installed")
      return
    fi
  done
  if [ ! -d /usr/src/googletest ]; then
    skipped+=("aarch64: googletest is not installed")
    return
  fi
  build aarch64 weft_tests_base weft_tests_reduce || return
  logs_of aarch64
  run_tests aarch64 -L '^(base|reduce)$' >build/aarch64.log 2>&1 || { tail -n 60 build/aarch64.log; return 1; }
  sed -n '/tests passed/,$p' build/aarch64.log
}

fuzz() {
  if ! command -v clang++-14 >/dev/null; then
    skipped+=("fuzz: clang 14 is not installed")
    return
  fi
  tools/fuzz.sh 3 >build/fuzz.log 2>&1 || { tail -n 60 build/fuzz.log; return 1; }
  grep '^fuzz: ' build/fuzz.log
}

# run_tests PRESET ARGUMENTS...: runs ctest, which counts in thirds of a core (tests/CMakeLists.txt), and then
# failed tests once more. The logs of both runs are in the variable logs.
run_tests() {
  local preset=$1 temporary=build/$1/Testing/Temporary
  shift
  rm -f "$temporary/LastTestsFailed.log" "build/$preset.first.log"
  "${under[@]}" ctest --test-dir "build/$preset" --no-tests=error -j "$((3 * jobs))" --no-label-summary "$@" && return
  local failures
  failures=$(cut -d: -f2 "$temporary/LastTestsFailed.log" 2>/dev/null) || return 1
  if [ "$tier" = full ] || [ -z "$failures" ] || [ "$(wc -l <<<"$failures")" -gt 5 ]; then return 1; fi
  cp "$temporary/LastTest.log" "build/$preset.first.log"
  printf '\nOnce more, one at a time, what failed:\n'
  "${under[@]}" ctest --test-dir "build/$preset" --rerun-failed --no-label-summary || return
  sed "s|^|  $preset: |" <<<"$failures" >>build/unsteady.txt
}
logs_of() { logs+=("$1, first run=build/$1.first.log" "$1=build/$1/Testing/Temporary/LastTest.log"); }

# tests_of LABELS: the targets that build the tests with one of these labels (a|b).
tests_of() {
  local labels
  IFS='|' read -ra labels <<<"$1"
  printf '%s ' "${labels[@]/#/weft_tests_}"
}

# start_builds JOB...: starts builds; jobs have the form of tools/build_queue.sh.
start_builds() {
  setsid tools/build_queue.sh "$$" "$@" &
  builder=$!
  trap 'kill -- "-$builder" 2>/dev/null' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
}

# await_build PRESET: waits until it is built. Sets `building`.
await_build() {
  local preset=$1 began=$SECONDS
  until [ -e "build/$preset.status.$$" ]; do
    if ! kill -0 "$builder" 2>/dev/null && [ ! -e "build/$preset.status.$$" ]; then
      echo "the builds ended before $preset was built" >&2
      return 1
    fi
    if [ -t 1 ]; then printf '\r\e[K%.79s' "$preset: $(tail -n 1 "build/$preset.output" 2>/dev/null)"; fi
    sleep 1
  done
  if [ -t 1 ]; then printf '\r\e[K'; fi
  building=$((SECONDS - began))
  cat "build/$preset.report"
  return "$(cat "build/$preset.status.$$")"
}

# sanitized PRESET LABELS: runs the tests that have one of these labels (a|b). It runs tests with the label
# "full" only if that is the tier.
sanitized() {
  local preset=$1 labels=$2
  await_build "$preset" || return
  local left_out=()
  if [ "$tier" != full ]; then left_out=(-LE '^full$'); fi
  # Fixed addresses are needed, because gcc 12's thread sanitizer cannot map its shadow under some settings of
  # the kernel's randomisation.
  local under=()
  if setarch -R true 2>/dev/null; then under=(setarch -R); fi
  logs_of "$preset"
  local status=0
  ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 \
    TSAN_OPTIONS=halt_on_error=1:suppressions=$weft_root/tests/support/tsan_suppressions.txt \
    run_tests "$preset" -L "^($labels)\$" "${left_out[@]}" >"build/$preset.log" 2>&1 || status=1
  sed -n '/tests passed/,$p' "build/$preset.log"
  return "$status"
}

report_skips() {
  {
    [ ${#skipped[@]} -eq 0 ] || printf '  %s\n' "${skipped[@]}"
    python3 tools/report_skips.py "${logs[@]}"
  } >build/skips.txt
  say "Skipped"
  if [ -s build/skips.txt ]; then cat build/skips.txt; else echo "  nothing"; fi
}

report_failures() {
  python3 tools/report_failures.py "${logs[@]}" >build/failures.txt
  [ -s build/failures.txt ] || return
  say "Lines of the tests that failed (all lines: Testing/Temporary/LastTest.log of each build)"
  cat build/failures.txt
}

report_times() {
  local strict=()
  if [ "$tier" = full ]; then strict=(--strict); fi
  say "Times of tests"
  python3 tools/test_budget.py "${strict[@]}" "${logs[@]}" || failed+=("times of tests")
}

report_unsteady() {
  [ -s build/unsteady.txt ] || return
  say "Unsteady: failed, and passed when run again alone. The test or what it tests has a fault"
  cat build/unsteady.txt
}

# Makes the environment of the tests over torch and JAX, and of types, if it is missing. Tests whose
# environment cannot be allocated skip themselves by name, and this function says why.
python_packages() {
  local module
  local versions  # of torch: the tests run with the newest that there is, and with the older ones that are stated as tested
  mapfile -t versions < <(sed -n 's/^TESTED = //p' python/weft/torch/needs.py | grep -oE '[0-9]+\.[0-9]+\.' | sed 's/\.$//; $d')
  for module in torch "${versions[@]/#/torch==}" jax mypy "torch ml_dtypes torchao"; do
    local log=build/python_${module// /_}.log
    # shellcheck disable=SC2086  # one module a word
    tools/torch_python.sh --make $module 2>"$log" ||
      skipped+=("tests with $module: tools/torch_python.sh --make $module: $(grep -v '^ *$' "$log" | tail -n 1)")
  done
}

# The release tests. ctest's summary is held back until the skipped tests are reported, so that it comes last.
release() {
  if ! await_build release; then
    printf '\nFAILED: %s\n' "${failed[@]}" "the release build"
    exit 1
  fi
  logs_of release
  run_tests release | hold_summary
  return "${PIPESTATUS[0]}"
}

# Without ctest's list of tests that did not run: "Skipped" has it, with the reasons.
hold_summary() {
  local line held=false listing=false
  : >build/summary.txt
  while IFS= read -r line; do
    if [[ $line =~ ^[0-9]+%\ tests\ passed ]]; then held=true; fi
    if [[ $line == "The following tests did not run:" ]]; then listing=true; fi
    if $listing; then
      if [ -z "$line" ]; then listing=false; fi
      continue
    fi
    if $held; then printf '%s\n' "$line" >>build/summary.txt; else printf '%s\n' "$line"; fi
  done
}

mkdir -p build
rm -f build/unsteady.txt build/*.status.*
core='base|host|store|reduce|backends|group'
if [ "$tier" = full ]; then races=$core; else races=races; fi
builds=(release)
if [ "$tier" != quick ]; then
  builds+=("asan $(tests_of "$core")" "tsan $(tests_of "$races")")
  if command -v clang++-14 >/dev/null; then builds+=("clang weft"); fi
fi
start_builds "${builds[@]}"
if [ "$tier" = full ]; then step "packages for Python" python_packages; fi
step "layers" python3 tools/check_layers.py
step "layout" check_format
step "release" release
if [ "$tier" = quick ]; then
  skipped+=("sanitizers, clang, clang-tidy: --quick")
else
  step "address and undefined sanitizers" sanitized asan "$core"
  step "thread sanitizer" sanitized tsan "$races"
  step "clang 14" compile_with_clang
  step "clang-tidy" tidy
fi
if [ "$tier" = full ]; then
  step "fuzz targets" fuzz
  step "aarch64" aarch64
else
  skipped+=("fuzz targets, aarch64, both sanitizers over everything: only with --full")
fi

report_skips
report_times
report_unsteady
say "Seconds of each step"
if [ "$tier" = default ]; then limit=(--limit "$budget"); else limit=(); fi
python3 tools/test_budget.py --steps "${limit[@]}" "${steps[@]}"
report_failures
if [ ${#failed[@]} -gt 0 ]; then printf 'FAILED: %s\n' "${failed[@]}"; fi
echo
cat build/summary.txt
[ ${#failed[@]} -eq 0 ]
