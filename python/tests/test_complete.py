"""Every function of weft.h has its place in the package, or a reason why not."""
import pathlib
import re

import weft
from weft import _api

PYTHON = {  # what Python has in its own way
    "dtype_size": "dtypes.SIZES", "dtype_name": "dtypes.NAMES", "dtype_from_name": "dtypes.of", "status_name": "Error.code", "version_number": "weft.version",
    "alloc": "Context.empty, by alloc_dlpack_versioned", "free": "with the array", "alloc_dlpack": "SharedTensor gives capsules of both kinds",
    "buffer_from_dltensor": "capsules", "mesh_find_axis": "Mesh.axes", "send_recv": "Group.send_recv, by coalesced",
    "work_wait_all": "weft.wait_all", "checkpoint_reader_folder": "Reader", "checkpoint_reader_mesh": "Reader"}
PYTHON.update({name: "by submit" for name in ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_v", "reduce_scatter", "reduce_scatter_v", "gather",
                                              "scatter", "all_to_all", "all_to_all_v", "scan", "exscan", "barrier", "send", "recv")})
WITHOUT = {  # docs/python.md says so
    "buffer_overlap": "NumPy's shares_memory", "work_wait_all_for": "Work.wait(timeout)", "work_wait_on": "streams of devices", "work_then": "await",
    "work_sources": "recv one by one"}


def test_every_function():
    sources = "".join(path.read_text(encoding="utf-8") for path in pathlib.Path(weft.__file__).parent.rglob("*.py") if path.name != "_api.py")
    used = set(re.findall(r"\blib\.(\w+)", sources)) | {f"group_{name}" for name in ("rank", "size", "name", "backend")}
    functions = {name.removeprefix("weft_") for name in _api.FUNCTIONS}
    assert not functions - used - set(PYTHON) - set(WITHOUT), "without a place in Python"
    assert set(PYTHON) | set(WITHOUT) <= functions, "no functions of weft.h"
    assert not used & set(WITHOUT), "used after all"


def test_every_name_has_words():
    """What the package gives has a docstring, and so have its methods."""
    for name in weft.__all__:
        thing = getattr(weft, name)
        if isinstance(thing, int):
            continue
        assert thing.__doc__, name
