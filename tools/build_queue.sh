#!/usr/bin/env bash
# Builds presets one after the other for tools/test.sh, which runs tests meanwhile. All but the first run at
# idle priority, in processor time that no other process wants.
#
#   tools/build_queue.sh RUN "PRESET [TARGET...]" ...
#
# For each: build/PRESET.output is what the tools print, build/PRESET.report what a user is to read,
# build/PRESET.status.RUN the exit status, which appears when it is done. RUN tells one run's results from
# another's.
set -uo pipefail
. "$(dirname "$0")/lib.sh"
cd "$weft_root" || exit 1
run=$1
shift

# One queue at a time: that of a run that was killed may still be there.
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
  # of each: be last in both.
  { echo 19 >/proc/self/autogroup; } 2>/dev/null
  chrt --idle --pid 0 $$ 2>/dev/null || renice -n 19 -p $$ >/dev/null
done
