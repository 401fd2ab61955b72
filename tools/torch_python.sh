#!/usr/bin/env bash
# Prints the interpreter with which tests of weft over torch, or over other packages, run: that of WEFT_TEST_PYTHON, else that of one virtual environment
# outside of the tree, WEFT_TEST_VENV or ~/.cache/weft/torch, where it has pytest and what is asked for. Fails where there is none.
#
#   tools/torch_python.sh [MODULE...]          looks for one with these modules; none: torch
#   tools/torch_python.sh --make [MODULE...]   makes the virtual environment first, and installs what it lacks (torch of PyPI: several gigabytes; jax)
set -euo pipefail
folder=${WEFT_TEST_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/weft/torch}
make=false
if [ "${1:-}" = --make ]; then make=true && shift; fi
modules=("$@")
if [ $# -eq 0 ]; then modules=(torch); fi
wanted=$(printf ', %s' "${modules[@]}")

has() { [ -n "$1" ] && command -v "$1" >/dev/null && "$1" -c "import pytest$wanted" >/dev/null 2>&1; }
for python in "${WEFT_TEST_PYTHON:-}" "$folder/bin/python"; do
  if has "$python"; then command -v "$python"; exit; fi
done
if $make; then
  packages=(numpy pytest)
  for module in "${modules[@]}"; do
    case $module in
      torch) packages+=(torch expecttest) ;;
      jax) packages+=(jax ml_dtypes) ;;
      *) packages+=("$module") ;;
    esac
  done
  {
    [ -x "$folder/bin/python" ] || python3 -m venv "$folder"
    "$folder/bin/pip" install -q "${packages[@]}"
  } >&2 || exit 1
  has "$folder/bin/python" && echo "$folder/bin/python" && exit
fi
exit 1
