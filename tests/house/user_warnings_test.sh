#!/usr/bin/env bash
# A user's build (with no options, or with the preset "install") has neither -Werror nor tests; a developer's
# build has both.
#
#   user_warnings_test.sh SOURCE BUILD
set -euo pipefail
source_dir=$1 build_dir=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*"; exit 1; }

grep -q -- '-Werror' "$build_dir/compile_commands.json" || fail "this build's warnings are no errors; expected WEFT_DEVELOPER=ON in a build with tests"
for arguments in "" "--preset install"; do
  # Parts that the user's choice does not change.
  (cd "$source_dir" && cmake $arguments -G Ninja -S . -B "$work/build" -DWEFT_TRAIN=OFF -DWEFT_LAYERS='base;host' -DWEFT_TOOLS=OFF -DWEFT_BENCH=OFF) >"$work/log" 2>&1 ||
    { cat "$work/log"; fail "cmake $arguments"; }
  if grep -- '-Werror' "$work/build/compile_commands.json"; then fail "cmake $arguments: warnings are errors"; fi
  if grep -q 'tests/' "$work/build/compile_commands.json"; then fail "cmake $arguments: tests are built"; fi
  rm -r "$work/build"
done
