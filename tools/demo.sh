#!/usr/bin/env bash
# The main demo, on real input: trains a small transformer on a text that every Debian system has, over 4
# ranks (dp 2 x tp 2, processes over shared memory), with a checkpoint in the middle from which the training
# resumes. Then it prints the parity table: the losses of the first 50 steps of this training on five meshes,
# side by side. Installs missing packages from Debian (prints the command if not root). Takes a few minutes,
# most of it for compiling.
#
#   tools/demo.sh [FLAGS]      FLAGS go to weft train and weft parity: --text FILE, --steps N, ...
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$weft_root"

install_missing build
build demo weft_cli
weft=build/demo/bin/weft
out=build/demo/run
rm -rf "$out"
mkdir -p "$out"

steps=300
half=$((steps / 2))
job=(--steps "$steps" "$@")

say "Training over 4 ranks, dp 2 x tp 2, to step $half"
"$weft" train --ranks 4 --tp 2 "${job[@]}" --until "$half" --save "$out/checkpoint" --metrics "$out/metrics.jsonl"

say "Going on from the checkpoint"
"$weft" train --ranks 4 --tp 2 "${job[@]}" --resume --save "$out/checkpoint" --metrics "$out/metrics.jsonl"

say "Parity: the first 50 steps on dp x tp = 1x1, 2x1, 1x2, 2x2, 1x4"
"$weft" parity "${job[@]}" --json "$out/parity.json"

say "Done"
echo "metrics: $out/metrics.jsonl, losses of all meshes: $out/parity.json, checkpoint: $out/checkpoint"
