#!/usr/bin/env bash
# Prints the interpreter that runs the tests of weft over torch, or over other packages. It is the Python of
# WEFT_TEST_PYTHON. Otherwise it is that of the first virtual environment which has pytest and the requested
# packages: the folders of WEFT_TEST_VENV (separated by colons), otherwise one outside of the tree,
# ~/.cache/weft/torch. A version of a package has its own folder, for example ~/.cache/weft/torch-2.14. Fails
# if there is none.
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
# The other folders are only searched for a package of a version: a new environment then goes to its own
# folder.
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
