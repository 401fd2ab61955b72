#!/usr/bin/env bash
# Fuzzes the code that reads bytes from other processes (tests/fuzz): the store's server, client and file,
# texts, bootstrap infos, safetensors files and indices of checkpoints. It also fuzzes random calls of weft.h
# (`capi`). `capi` runs only if it is named, because all of libweft is compiled for it, which takes minutes.
# Starts from the targets' seeds and tests/fuzz/corpus. Inputs that it finds stay in
# build/fuzz/found/<target>; a crash also prints its input.
#
#   tools/fuzz.sh                    every target for 3 seconds
#   tools/fuzz.sh SECONDS [TARGET…]  those targets, for so long each
#   tools/fuzz.sh --keep             adds what was found to the corpus: of each target the inputs that reach something new
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$weft_root"

command -v clang++-14 >/dev/null || { echo "fuzz: clang 14 is not installed" >&2; exit 1; }
keep=false
if [ "${1:-}" = --keep ]; then keep=true; shift; fi
seconds=${1:-3}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(store_server store_client store_file texts infos tokens tokenizer safetensors index latest)

programs=()
for target in "${targets[@]}"; do
  if [ "$target" = capi ]; then programs+=(weft_fuzz_capi); else programs+=(weft_fuzz); fi
done
build fuzz "${programs[@]}"
# Small inputs reach all code; the targets also limit time and memory.
limits=(-max_len=16384 -timeout=30 -rss_limit_mb=1024 -print_final_stats=0 -verbosity=0)
for target in "${targets[@]}"; do
  program=build/fuzz/bin/fuzz_$target found=build/fuzz/found/$target seeds=build/fuzz/seeds/$target corpus=tests/fuzz/corpus/$target
  mkdir -p "$found" "$seeds" "$corpus"
  "$program" --seeds "$seeds"
  if $keep; then
    merged=$(mktemp -d)
    "$program" "${limits[@]}" -use_counters=0 -merge=1 "$merged" "$seeds" "$corpus" "$found"
    for file in "$merged"/*; do
      # Every run makes seeds anew, and large inputs are not worth their place in the tree.
      if [ "$(stat -c %s "$file")" -le 2048 ] && ! cmp -s "$file" "$corpus/$(basename "$file")"; then cp "$file" "$corpus/"; fi
    done
    rm -rf "$merged"
    rmdir --ignore-fail-on-non-empty "$corpus"
    continue
  fi
  "$program" "${limits[@]}" -max_total_time="$seconds" -artifact_prefix="build/fuzz/$target-" "$found" "$seeds" "$corpus"
  echo "fuzz: $target: nothing in $seconds s ($(find "$found" -type f | wc -l) inputs kept)"
done
