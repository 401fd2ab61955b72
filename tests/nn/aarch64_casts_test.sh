#!/usr/bin/env bash
# Compiles the casts to eight bits for aarch64, alone, and runs aarch64_casts.cpp under qemu. Exits 77 where
# the compiler or qemu is missing (Debian: g++-aarch64-linux-gnu, qemu-user), and says which.
#
#   aarch64_casts_test.sh SOURCE FOLDER
set -euo pipefail
source_dir=$1 folder=$2
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  if ! command -v "$tool" >/dev/null; then
    printf 'aarch64_casts_test.sh:0: Skipped\n%s is not installed\n[  SKIPPED ] Float8Casts.Neon (0 ms)\n' "$tool"
    exit 77
  fi
done
mkdir -p "$folder"
casts=$source_dir/src/nn/kernels/float8
# The options of src/nn/CMakeLists.txt; -static: qemu then needs no libraries of aarch64.
aarch64-linux-gnu-g++ -std=c++20 -O3 -fno-trapping-math -ffp-contract=off -Wall -Wextra -Werror -static \
  -I"$source_dir/include" -I"$source_dir/src" -I"$source_dir/tests" \
  "$source_dir/tests/nn/aarch64_casts.cpp" "$casts"/{neon,no_x86,plain}.cpp -o "$folder/aarch64_casts"
qemu-aarch64 "$folder/aarch64_casts"
