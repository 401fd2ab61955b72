"""The compiled calls: where they are used, and that they refuse what ctypes refuses, in the same words."""
import os
import re
import subprocess
import sys
import textwrap
import time
import types

import numpy as np
import pytest

import weft
from weft import _calls

compiled = pytest.mark.skipif(_calls.begin is None, reason="the compiled calls (weft_fast) are not there: not built, an older Python, or WEFT_PYTHON_FAST=off")


def run(program, **environment):
    package = os.path.dirname(os.path.dirname(weft.__file__))
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False,
                          env={**os.environ, "PYTHONPATH": path, **environment})


# Calls on a group of one rank that are refused, or whose arrays only the way over ctypes knows, and what came
# of each.
CALLS = """
    import array
    import numpy as np
    import weft
    context = weft.Context()
    group = context.group_in(weft.Store.local(), 0, 1)
    f = np.arange(6, dtype=np.float32)
    group.all_reduce(f, f).wait()
    fixed = f.copy()
    fixed.flags.writeable = False
    masked = np.ma.masked_array(f, f > 2)
    closed = context.group_in(weft.Store.local(), 0, 1)
    closed.close()
    calls = {
        "strided": lambda: group.all_reduce(f[::2], f[:3]),
        "strided out": lambda: group.all_reduce(f[:3], f[::2]),
        "read-only": lambda: group.all_reduce(f, fixed),
        "read-only, in place": lambda: group.all_reduce(fixed, fixed),
        "read-only input": lambda: group.all_reduce(fixed),
        "foreign order": lambda: group.all_reduce(f.astype(">f4")),
        "dates": lambda: group.all_reduce(np.zeros(2, "datetime64[s]")),
        "objects": lambda: group.all_reduce(np.array([None, 1])),
        "structs": lambda: group.all_reduce(np.zeros(2, [("a", "f4"), ("b", "f4")])),
        "long doubles": lambda: group.all_reduce(np.zeros(2, np.longdouble)),
        "masked": lambda: group.all_reduce(masked),
        "counts": lambda: group.all_reduce(f, np.zeros(5, np.float32)),
        "dtypes": lambda: group.all_reduce(f, np.zeros(6)),
        "overlap": lambda: group.all_reduce(f[:4], f[2:]),
        "no input": lambda: group.all_reduce(None),
        "no input, out": lambda: group.all_reduce(None, f),
        "text": lambda: group.all_reduce("text"),
        "root": lambda: group.broadcast(f, 3),
        "root of another type": lambda: group.broadcast(f, "first"),
        "large root": lambda: group.broadcast(f, 2**40),
        "peer": lambda: group.send(f, 7),
        "op": lambda: group.all_reduce(f, f, "mean"),
        "and of floats": lambda: group.all_reduce(f, f, "bit_and"),
        "cut": lambda: group.reduce_scatter(np.float32(1)),
        "closed": lambda: closed.all_reduce(f, f),
        "numbers": lambda: group.all_reduce(2.5),
        "bytes": lambda: group.all_reduce(bytearray(b"abc")[:], bytearray(3)),
        "array.array": lambda: group.all_reduce(array.array("i", [1, 2]), array.array("i", [0, 0])),
        "nothing": lambda: group.all_reduce(np.zeros((0, 3), np.int8)),
        "scalar": lambda: group.all_reduce(np.array(3.0)),
        "truths": lambda: group.all_reduce(np.array([True, False]), op="logical_or"),
        "complex": lambda: group.all_reduce(np.array([1 + 2j], np.complex64)),
        "halves": lambda: group.all_reduce(np.array([1.5], np.float16)),
        "words": lambda: group.all_reduce(np.array([1, 2**63], np.uint64)),
    }
    for name, call in calls.items():
        try:
            made = call().wait()
            print(name, type(made).__name__, getattr(made, "dtype", ""), getattr(made, "shape", ""), made)
        except Exception as error:
            print(name, type(error).__name__, getattr(error, "call", None) is None, error)
"""


@compiled
def test_both_ways_say_the_same():
    here, there = run(CALLS, WEFT_PYTHON_FAST="on"), run(CALLS, WEFT_PYTHON_FAST="off")
    assert here.returncode == 0, here.stderr
    number = re.compile(r", call \d+")  # refused calls may have another number
    assert number.sub("", here.stdout).splitlines() == number.sub("", there.stdout).splitlines()
    assert len(here.stdout.splitlines()) >= 34


def test_wrong_setting():
    done = run("import weft", WEFT_PYTHON_FAST="fast")
    assert done.returncode != 0
    assert 'WEFT_PYTHON_FAST is "fast"; expected on or off' in done.stderr


def test_off():
    done = run("from weft import _calls; print(_calls.begin, _calls.wait)", WEFT_PYTHON_FAST="off")
    assert done.stdout == "None None\n", done.stderr


@compiled
def test_a_call_costs_less_than_five_microseconds():
    with weft.Context().group_in(weft.Store.local(), 0, 1) as group:
        x = np.zeros(2, np.float32)
        best = 1.0
        for _ in range(100):
            began = time.thread_time()
            for _ in range(200):
                group.all_reduce(x, x).wait()
            best = min(best, (time.thread_time() - began) / 200)
    assert best < 5e-6


@compiled
def test_what_the_module_refuses():
    module = _calls._module
    with pytest.raises(TypeError, match="begin got 1 arguments; expected 8"):
        module.begin(1)
    with pytest.raises(TypeError, match="wait got 0 arguments; expected 2"):
        module.wait()
    with pytest.raises(ValueError, match="work is NULL"):
        module.wait(types.SimpleNamespace(_handle=0), True)
    with pytest.raises(ValueError, match="a function is NULL"):
        module.setup(0, 0, 0, None)
    with pytest.raises(ValueError, match="PyCapsule"):
        module.add_type(int, 5)


@compiled
def test_other_threads_run_during_a_wait(ranks):
    """Ranks are threads here: a wait that held the GIL would never end."""
    x = np.ones(3, np.float32)

    def program(group):
        for _ in range(50):
            total = group.all_reduce(x).wait()
        return total
    assert all((total == 3).all() for total in ranks(3, program))
