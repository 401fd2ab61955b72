#!/usr/bin/env bash
# The main demo, on real input. It trains a small transformer on a text that every Debian system has, over 4
# ranks (processes over shared memory). The training begins on dp 2 x tp 2, and goes on from checkpoints on tp
# 4, and with parameters divided over dp 4. A tenth of the text is held out, and the loss on it is printed.
# The model then continues a text. At the end it prints the parity table: the losses of the first 50 steps of
# this training on five meshes, side by side. Installs missing packages from Debian (prints the command if
# not root). Takes a few minutes, most of it for compiling.
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
first=$((steps / 2))
second=$((steps * 3 / 4))
job=(--steps "$steps" --held-out 0.1 "$@")
saved=(--save "$out/checkpoint" --metrics "$out/metrics.jsonl" --curves "$out/curves.png")

say "Training over 4 ranks, dp 2 x tp 2, to step $first"
"$weft" train --ranks 4 --tp 2 "${job[@]}" --until "$first" "${saved[@]}"

say "Going on from the checkpoint on tp 4, to step $second"
"$weft" train --ranks 4 --tp 4 "${job[@]}" --until "$second" --resume "${saved[@]}"

say "Going on with parameters divided over dp 4"
"$weft" train --ranks 4 --data fsdp "${job[@]}" --resume "${saved[@]}"

say "The model continues a text"
"$weft" sample "$out/checkpoint" --prompt "The license " --tokens 110 --temperature 0.6

say "Parity: the first 50 steps on dp x tp = 1x1, 2x1, 1x2, 2x2, 1x4"
"$weft" parity "${job[@]}" --json "$out/parity.json"

say "Done"
echo "metrics: $out/metrics.jsonl, curves: $out/curves.png, losses of all meshes: $out/parity.json, checkpoint: $out/checkpoint"
