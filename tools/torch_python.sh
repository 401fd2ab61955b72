#!/usr/bin/env bash
# Prints the interpreter with which tests of weft over torch, or over other packages, run: that of
# WEFT_TEST_PYTHON, else that of the first virtual environment which has pytest and what is asked for: the
# folders of WEFT_TEST_VENV (several: between colons), else one outside of the tree, ~/.cache/weft/torch; for
# a version of a package of its own, ~/.cache/weft/torch-2.14, say. Fails where there is none.
#
#   tools/torch_python.sh [MODULE...]          looks for one with these modules; none: torch. torch==2.14: with any release of that version
#   tools/torch_python.sh --make [MODULE...]   where there is none makes the virtual environment (the last folder of the list) and installs what it lacks
#                                              (torch of PyPI: several gigabytes; jax)
set -euo pipefail
make=false
if [ "${1:-}" = --make ]; then make=true && shift; fi
modules=("$@")
if [ $# -eq 0 ]; then modules=(torch); fi

own=${XDG_CACHE_HOME:-$HOME/.cache}/weft/torch
wanted="import pytest" packages=(numpy pytest)
for module in "${modules[@]}"; do
  name=${module%%==*}
  wanted+=", $name"
  version=()
  if [ "$name" != "$module" ]; then
    version=("${module#*==}")
    own=${XDG_CACHE_HOME:-$HOME/.cache}/weft/$name-${version[0]}
    checks+="; assert ($name.__version__ + '.').startswith('${version[0]}.')"
  fi
  case $name in
    torch) packages+=("torch${version:+==${version[0]}.*}" expecttest) ;;
    jax) packages+=("jax${version:+==${version[0]}.*}" ml_dtypes) ;;
    *) packages+=("$name${version:+==${version[0]}.*}") ;;
  esac
done
wanted+=${checks:-}
IFS=: read -ra folders <<<"${WEFT_TEST_VENV:-}"
# Others are only looked at for a package of a version: what is made then goes to a folder of its own.
if [ ${#folders[@]} -eq 0 ] || [ -n "${checks:-}" ]; then folders+=("$own"); fi

has() { [ -n "$1" ] && command -v "$1" >/dev/null && "$1" -c "$wanted" >/dev/null 2>&1; }
for python in "${WEFT_TEST_PYTHON:-}" "${folders[@]/%//bin/python}"; do
  if has "$python"; then command -v "$python"; exit; fi
done
if $make; then
  folder=${folders[-1]}
  {
    [ -x "$folder/bin/python" ] || python3 -m venv "$folder"
    "$folder/bin/pip" install -q "${packages[@]}"
  } >&2 || exit 1
  has "$folder/bin/python" && echo "$folder/bin/python" && exit
fi
exit 1
