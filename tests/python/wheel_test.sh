#!/usr/bin/env bash
# Builds the wheel, installs it in an empty folder, and uses it from there alone: two ranks of a Python without NumPy, torch or an MPI in reach, the entry
# point of torch, the transports that it carries, and pytest over the package. Only with WEFT_TEST_FULL: it builds libweft once more.
#
#   wheel_test.sh SOURCE FOLDER
set -euo pipefail
source_dir=$1 work=$2
skip() { printf 'wheel_test.sh:0: Skipped\n%s\n[  SKIPPED ] Python.Wheel (0 ms)\n' "$1"; exit 77; }
fail() { echo "FAILED: $*"; exit 1; }
[ -n "${WEFT_TEST_FULL:-}" ] || skip "the wheel is built with tools/test.sh --full (WEFT_TEST_FULL=1)"
python3 -m pip --version >/dev/null 2>&1 || skip "python3 has no pip"

rm -rf "$work" && mkdir -p "$work"
wheel=$("$source_dir/tools/wheel.sh" "$work/dist" 2>"$work/log" | tail -n 1) || { tail -n 30 "$work/log"; fail "tools/wheel.sh"; }
[[ $(basename "$wheel") =~ ^weft-[0-9.]+-py3-none-linux_[a-z0-9_]+\.whl$ ]] || fail "the wheel is called $wheel"
python3 -m pip install -q --no-index --no-deps --target "$work/site" "$wheel" || fail "pip install"

cat >"$work/bare.py" <<'PROGRAM'
import array, sys
import weft
assert weft.__file__.startswith(sys.argv[1]), weft.__file__
from weft._library import library_file
assert library_file().startswith(sys.argv[1]), library_file()
from weft import _calls
import os
compiled = os.path.join(sys.argv[1], "weft/lib/weft/weft_fast.abi3.so")
assert (_calls.begin is not None) == (os.path.exists(compiled) and sys.version_info >= (3, 11)), compiled
try:
    import numpy
    raise SystemExit("there is a NumPy")
except ImportError:
    pass
for backend in sys.argv[2:]:
    with weft.Context() as context, context.group(backend=backend, deadline=30) as group:
        x = array.array("d", [1, 2, group.rank])
        group.all_reduce(x, out=x).wait()
        assert list(x) == [2, 4, 1] and group.all_reduce(group.rank + 1).wait() == 3 and group.all_gather_object("a") == ["a", "a"]
        try:
            context.empty(3)
        except ImportError as error:
            assert "numpy" in str(error)
        print(group.backend, "well", flush=True)
with weft.Context() as context:
    for backend in ("mpi-openmpi", "mpi-mpich"):
        try:
            with context.group(backend=backend, deadline=5):
                pass
        except weft.Error as error:
            print(backend, error.code)
PROGRAM
bare=(env -i HOME="$HOME" PATH=/usr/bin:/bin PYTHONPATH="$work/site")
transports=shm
if [ -e "$work/site/weft/lib/weft/libweft_backend_gloo.so" ]; then transports="shm gloo"; fi
python=$(command -v /usr/bin/python3 || command -v python3)
"${bare[@]}" "$python" -m weft.run -n 2 --no-tag-output -- "$python" -S "$work/bare.py" "$work/site" $transports >"$work/said" 2>&1 || { cat "$work/said"; fail "two ranks"; }
for backend in $transports; do
  [ "$(grep -c "^$backend well$" "$work/said")" = 2 ] || { cat "$work/said"; fail "two ranks over $backend"; }
done
grep -q '^weft *= *weft.torch:register$' "$work"/site/weft-*.dist-info/entry_points.txt || fail "the entry point of torch"

if "$python" -c 'import numpy, pytest' 2>/dev/null; then
  "${bare[@]}" "$python" -m pytest -q -p no:cacheprovider -c "$source_dir/python/pyproject.toml" --rootdir "$source_dir/python" \
    "$source_dir"/python/tests/test_{arrays,collectives,meshes,works}.py || fail "pytest over the installed package"
fi
# torch finds the backend by the entry point: the program does not import weft.
if torch=$("$source_dir/tools/torch_python.sh"); then
  cat >"$work/found.py" <<'PROGRAM'
import sys
import torch
import torch.distributed as dist
dist.init_process_group("weft", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
x = torch.ones(3)
dist.all_reduce(x)
assert x.tolist() == [2, 2, 2] and dist.get_backend() == "weft"
dist.destroy_process_group()
PROGRAM
  "${bare[@]}" "$torch" "$work/found.py" 0 "$work/store" & first=$!
  "${bare[@]}" "$torch" "$work/found.py" 1 "$work/store" || fail "torch, rank 1"
  wait $first || fail "torch, rank 0"
else
  echo "without torch: its entry point was not tried"
fi
echo "the wheel works"
