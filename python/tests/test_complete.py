"""Every function of weft.h has its place in the package, or a reason why not."""
import ast
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

import weft
from weft import _api

PYTHON = {  # what Python has in its own way
    "dtype_size": "dtypes.SIZES", "dtype_name": "dtypes.NAMES", "dtype_from_name": "dtypes.of", "status_name": "Error.code", "version_number": "weft.version",
    "alloc": "Context.empty, by alloc_dlpack_versioned", "free": "with the array", "alloc_dlpack": "SharedTensor gives capsules of both kinds",
    "buffer_from_dltensor": "capsules", "mesh_find_axis": "Mesh.axes", "send_recv": "Group.send_recv, by coalesced",
    "work_wait_all": "weft.wait_all", "work_wait_all_for": "weft.wait_all", "checkpoint_reader_folder": "Reader", "checkpoint_reader_mesh": "Reader"}
PYTHON.update({name: "by submit" for name in ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_v", "reduce_scatter", "reduce_scatter_v", "gather",
                                              "scatter", "all_to_all", "all_to_all_v", "scan", "exscan", "barrier", "send", "recv")})
WITHOUT = {  # docs/python.md says so
    "buffer_overlap": "NumPy's shares_memory", "work_wait_on": "streams of devices"}


def test_every_function():
    sources = "".join(path.read_text(encoding="utf-8") for path in pathlib.Path(weft.__file__).parent.rglob("*.py") if path.name != "_api.py")
    used = set(re.findall(r"\blib\.(\w+)", sources)) | {f"group_{name}" for name in ("rank", "size", "name", "backend")}
    functions = {name.removeprefix("weft_") for name in _api.FUNCTIONS}
    assert not functions - used - set(PYTHON) - set(WITHOUT), "without a place in Python"
    assert set(PYTHON) | set(WITHOUT) <= functions, "no functions of weft.h"
    assert not used & set(WITHOUT), "used after all"


TYPED = """
import numpy as np
import weft
group = weft.Context().group()
mean: object = group.all_reduce(np.ones(3), op="avg").wait()
layout = weft.Layout(weft.Mesh(group, dp=1), (3, 4), dp=weft.shard(0))
halo = weft.Halo(layout, {0: 1, 1: (1, 2)}, edges={0: ("zero", 1.0)})
weft.checkpoint.save("run", {"a": (np.ones(3), layout)}, 1, on_stage=print)
"""
MISTYPED = ['weft.Context().group().all_reduce(1, op="mean")', "weft.Context().group().al_reduce(1)", "weft.Layout(weft.Context().group(), (1,))",
            "rank: str = weft.Context().group().rank"]


def run(*command):
    package = pathlib.Path(weft.__file__).parents[1]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100, check=False,
                          env={**os.environ, "PYTHONPATH": str(package), "MYPYPATH": str(package)})


def test_the_types_are_those_of_the_package():
    done = run(str(pathlib.Path(__file__).resolve().parents[2] / "tools/python_stubs.py"), "--check")
    assert done.returncode == 0, done.stderr


def test_a_type_checker_knows_the_package(tmp_path):
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    (tmp_path / "well.py").write_text(TYPED, encoding="utf-8")
    (tmp_path / "wrong.py").write_text("import weft\n" + "\n".join(MISTYPED), encoding="utf-8")
    options = ["-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "--strict", "--python-version", "3.11"]
    done = run(*options, str(tmp_path / "well.py"))
    assert done.returncode == 0, done.stdout
    done = run(*options, str(tmp_path / "wrong.py"))
    assert f"Found {len(MISTYPED)} errors" in done.stdout, done.stdout


def test_every_name_has_words():
    """Every object of the package has a docstring, and so have its methods."""
    for name in weft.__all__:
        thing = getattr(weft, name)
        if isinstance(thing, int):
            continue
        assert thing.__doc__, name


def test_files_do_not_import_each_other():
    folder = pathlib.Path(weft.__file__).parent
    names = {path.relative_to(folder).with_suffix("").as_posix().replace("/", "."): path for path in folder.rglob("*.py")}

    def imported(name):
        package = name.split(".")[:-1]
        for node in ast.walk(ast.parse(names[name].read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[:len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
                for other in [".".join(base), *(".".join([*base, alias.name]) for alias in node.names)]:
                    if other in names:
                        yield other

    edges = {name: set(imported(name)) for name in names}
    while leaves := {name for name, others in edges.items() if not others & edges.keys()}:
        edges = {name: others for name, others in edges.items() if name not in leaves}
    assert not edges, f"these import each other: {sorted(edges)}"
