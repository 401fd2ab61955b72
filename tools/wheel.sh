#!/usr/bin/env bash
# Builds the wheel of the package weft, python/dist/weft-*.whl or in the folder that is given, and prints its
# name. Its build is in build/wheel.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
export CCACHE_BASEDIR=$weft_root CCACHE_NOHASHDIR=1
exec python3 "$weft_root/python/build_wheel.py" "$@"
