#!/usr/bin/env bash
# Builds the wheel of the package weft in python/dist/weft-*.whl, or in the given folder, and prints its name.
# The wheel is built in build/wheel.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
export CCACHE_BASEDIR=$weft_root CCACHE_NOHASHDIR=1
exec python3 "$weft_root/python/build_wheel.py" "$@"
