#!/usr/bin/env bash
# Builds presets one after the other for tools/test.sh, which runs tests meanwhile. All builds except the
# first run at idle priority, in processor time that no other process wants.
#
#   tools/build_queue.sh RUN "PRESET [TARGET...]" ...
#
# For each preset, build/PRESET.output holds the tools' output. build/PRESET.report holds the text for the
# user. build/PRESET.status.RUN holds the exit status; it appears when the build is done. RUN distinguishes
# the results of one run from another's.
set -uo pipefail
. "$(dirname "$0")/lib.sh"
cd "$weft_root" || exit 1
run=$1
shift

# Only one queue may run at a time, since the queue of a killed run may still be there.
mkdir -p build
exec 9>build/.queue
flock 9

for job in "$@"; do
  read -ra words <<<"$job"
  preset=${words[0]}
  status=0
  build "${words[@]}" >"build/$preset.report" 2>&1 </dev/null || status=1
  echo "$status" >"build/$preset.status.part"
  mv "build/$preset.status.part" "build/$preset.status.$run"
  # From now on tests run. The kernel divides processor time among sessions (autogroup), then among the tasks
  # of each session; this process takes the last place in both.
  { echo 19 >/proc/self/autogroup; } 2>/dev/null
  chrt --idle --pid 0 $$ 2>/dev/null || renice -n 19 -p $$ >/dev/null
done
