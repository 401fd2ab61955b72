#!/usr/bin/env bash
# Builds the wheel, installs it in an empty folder, and uses it from there alone: two ranks of a Python
# without NumPy, torch or an MPI in reach, the entry point of torch, the transports that it carries, and
# pytest over the package. Only with WEFT_TEST_FULL: it builds libweft once more.
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
# pip compares the tag with this system.
python3 -m pip install -q --no-index --no-deps --target "$work/site" "$wheel" || fail "pip install"

# It needs these libraries of the system and no others, and nothing newer than its tag says.
[[ $(basename "$wheel") =~ ^weft-[0-9.]+-py3-none-(manylinux_2_[0-9]+_[a-z0-9_]+)\.whl$ ]] || { tail -n 5 "$work/log"; fail "the wheel is called $wheel"; }
tag=${BASH_REMATCH[1]}
grep -qx "Tag: py3-none-$tag" "$work"/site/weft-*.dist-info/WHEEL || fail "WHEEL does not say $tag"
glibc=$(getconf GNU_LIBC_VERSION | cut -d. -f2)
[ "$(cut -d_ -f3 <<<"$tag")" -le "$glibc" ] || fail "$tag on a system with glibc 2.$glibc"
carried=$(cd "$work/site/weft" && find lib bin -type f ! -name '*.py')
wanted=$(cd "$work/site/weft" && for file in $carried; do objdump -p "$file" | awk '$1 == "NEEDED" { print $2 }'; done | sort -u)
of_the_host=$(grep -vxFf <(for file in $carried; do basename "$file"; done) <<<"$wanted" | tr '\n' ' ')
for library in $of_the_host; do
  case $library in
    ld-linux-*.so.* | libc.so.6 | libm.so.6 | libgcc_s.so.1 | libstdc++.so.6) ;;
    libmpi.so.40 | libmpich.so.12) ;;  # of the two plug-ins for MPI
    *) fail "the wheel needs $library of the host, of: $of_the_host" ;;
  esac
done

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
import weft.nn
import weft.train
with weft.Context() as context, context.group(deadline=30) as group:
    model = weft.train.build_parallel_model(weft.train.Recipe(weft.nn.Linear(2, 3)), weft.Mesh(group, dp=2, tp=1))
    assert [p.shape for p in model.parameters] == [(3, 2)]
# The libraries in the wheel were loaded from there, though this system may have them, too.
import os
mapped = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if ".so" in line}
assert any("/libweft_train.so" in path for path in mapped), mapped
carried = {name for folder, _, names in os.walk(sys.argv[1] + "/weft/lib") for name in names}
strangers = [path for path in mapped if os.path.basename(path) in carried and not path.startswith(sys.argv[1])]
assert not strangers and any(path.startswith(sys.argv[1]) for path in mapped), strangers
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

# The command, and the same by python -m weft; both start programs of Python.
cat >"$work/rank.py" <<'PROGRAM'
import weft
group = weft.Context().group(deadline=30)
print(f"rank {group.rank} of {group.size}", flush=True)
PROGRAM
sed -i "1s|.*|#!$python|" "$work/site/bin/weft"  # pip wrote its own interpreter there
for weft in "$work/site/bin/weft" "$python -m weft"; do
  said=$("${bare[@]}" $weft --version) || fail "$weft --version"
  [[ $said == *"$(sed -n 's/^Version: //p' "$work"/site/weft-*.dist-info/METADATA)"* ]] || fail "$weft --version: $said"
  said=$("${bare[@]}" $weft run -n 2 --no-tag-output "$work/rank.py" | sort) || fail "$weft run"
  [ "$said" = $'rank 0 of 2\nrank 1 of 2' ] || fail "$weft run: $said"
  "${bare[@]}" $weft run -n 2 no_such_program 2>"$work/said" && fail "$weft run of a program that is not there"
  grep -q 'cannot start "no_such_program"' "$work/said" || { cat "$work/said"; fail "$weft run of a program that is not there"; }
done

grep -q '^weft *= *weft.torch:register$' "$work"/site/weft-*.dist-info/entry_points.txt || fail "the entry point of torch"

if "$python" -c 'import numpy, pytest' 2>/dev/null; then
  "${bare[@]}" "$python" -m pytest -q -p no:cacheprovider -c "$source_dir/python/pyproject.toml" --rootdir "$source_dir/python" \
    "$source_dir"/python/tests/test_{arguments,arrays,checkpoints,collectives,command,fast,interrupts,lifetimes,meshes,shards,train,transports,windows,works}.py || fail "pytest over the installed package"
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
