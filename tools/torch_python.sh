#!/usr/bin/env bash
# Prints the interpreter with which tests of weft.torch run: that of WEFT_TEST_PYTHON, else that of one virtual environment outside of the tree,
# WEFT_TORCH_VENV or ~/.cache/weft/torch, where it has torch and pytest. Fails where there is none.
#
#   tools/torch_python.sh          looks for it
#   tools/torch_python.sh --make   makes the virtual environment first, where it is missing (torch of PyPI: several gigabytes)
set -euo pipefail
folder=${WEFT_TORCH_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/weft/torch}

has() { [ -n "$1" ] && command -v "$1" >/dev/null && "$1" -c 'import torch, pytest' >/dev/null 2>&1; }
for python in "${WEFT_TEST_PYTHON:-}" "$folder/bin/python"; do
  if has "$python"; then command -v "$python"; exit; fi
done
if [ "${1:-}" = --make ]; then
  { python3 -m venv "$folder" && "$folder/bin/pip" install -q torch numpy pytest expecttest; } >&2 || exit 1
  has "$folder/bin/python" && echo "$folder/bin/python" && exit
fi
exit 1
