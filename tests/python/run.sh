#!/usr/bin/env bash
# Runs files of python/tests with pytest over the library of a build. Exits 77 where no interpreter has what
# they need, and says what is missing.
#
#   run.sh SOURCE BUILD TIER FILE...
#
# TIER: numpy, or torch, torch==2.14 (that version), jax, transformers or mypy: with the interpreter of
# tools/torch_python.sh, torch only with WEFT_TEST_FULL (tools/test.sh --full). Else the first of
# WEFT_TEST_PYTHON, Debian's python3 and the python3 in PATH that has numpy and pytest.
set -euo pipefail
source_dir=$1 build_dir=$2 tier=$3
shift 3

# skip REASON: as tools/report_skips.py reads it.
skip() {
  printf 'run.sh:0: Skipped\n%s\n[  SKIPPED ] Python.%s (0 ms)\n' "$1" "$(basename "${files[0]}" .py)$(sed -n 's/.*==/_/p' <<<"$tier")"
  exit 77
}
files=("${@/#/$source_dir/python/tests/}")

has() { "$1" -c "import ${2// /, }" >/dev/null 2>&1; }
python=
if [ "$tier" != numpy ]; then
  if [[ $tier == torch* ]] && [ -z "${WEFT_TEST_FULL:-}" ]; then skip "tests with torch run with tools/test.sh --full (WEFT_TEST_FULL=1)"; fi
  python=$("$source_dir/tools/torch_python.sh" "$tier") ||
    skip "there is no interpreter with $tier and pytest: tools/torch_python.sh --make $tier makes one, or WEFT_TEST_PYTHON names it"
else
  for candidate in "${WEFT_TEST_PYTHON:-}" /usr/bin/python3 python3; do
    if [ -n "$candidate" ] && has "$candidate" "numpy pytest"; then python=$candidate; break; fi
  done
  if [ -z "$python" ]; then skip "no python3 has numpy and pytest (python3-numpy, python3-pytest; WEFT_TEST_PYTHON names one that has)"; fi
fi

export PYTHONPATH=$source_dir/python PYTHONDONTWRITEBYTECODE=1
export LD_LIBRARY_PATH=$build_dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} PATH=$build_dir/bin:$PATH
exec "$python" -m pytest -p no:cacheprovider -c "$source_dir/python/pyproject.toml" --rootdir "$source_dir/python" "${files[@]}"
