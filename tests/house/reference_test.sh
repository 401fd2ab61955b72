#!/usr/bin/env bash
# reference_test.sh SOURCES FOLDER: builds the API reference in FOLDER; a warning fails. Exit status 77:
# doxygen is not installed.
set -euo pipefail
if ! command -v doxygen >/dev/null; then
  # As tools/report_skips.py reads it.
  printf 'reference_test.sh:0: Skipped\ndoxygen is not installed\n[  SKIPPED ] Reference.HasNoWarning (0 ms)\n'
  exit 77
fi
cd "$1"
mkdir -p "$2"
{ cat docs/Doxyfile; printf 'OUTPUT_DIRECTORY = %s\n' "$2"; } | doxygen -
test -s "$2/html/classweft_1_1ProcessGroup.html"
