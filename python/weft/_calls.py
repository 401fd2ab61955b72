"""The compiled calls (weft_fast, python/fast): `begin` and `wait`, or None for both where the module is
not there and ctypes does it all.

The module lies in the folder `weft` beside libweft, as plug-ins do. It is for CPython from 3.11 on;
another Python, or WEFT_PYTHON_FAST=off, does without it. Both ways do the same; the tests run over both."""
import ctypes
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

from . import _api
from ._library import lib, library_file, per_thread

NAME = "weft_fast"
begin = wait = None


def _load():
    """The module; None where this Python cannot have it."""
    wanted = os.environ.get("WEFT_PYTHON_FAST") or "on"
    if wanted not in ("on", "off"):
        raise ImportError(f'weft: WEFT_PYTHON_FAST is "{wanted}"; expected on or off')
    if wanted == "off" or sys.version_info < (3, 11) or ".abi3.so" not in importlib.machinery.EXTENSION_SUFFIXES:
        return None
    path = Path(library_file()).parent / "weft" / f"{NAME}.abi3.so"
    if not path.exists():
        return None
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    try:
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(NAME, path, loader=loader))
        loader.exec_module(module)
    except ImportError:  # a sub-interpreter, or an interpreter that keeps its symbols to itself
        return None
    return module


def _keep(address):
    """An error of the compiled calls becomes that of this thread, as if ctypes had made the call."""
    ctypes.memmove(per_thread.ref, address, ctypes.sizeof(_api.weft_error))


_module = _load()
if _module is not None:
    _module.setup(*(ctypes.cast(f, ctypes.c_void_p).value for f in (lib.submit, lib.work_wait_for, lib.work_destroy)), _keep)
    begin, wait = _module.begin, _module.wait

types = set()  # types of arrays that `begin` reads, and that `out` may be made for


def learn(kind, by_protocol):
    """From now on `begin` reads arrays of exactly this type: by the buffer protocol, or by DLPack's
    functions in C, where it has them."""
    table = None if by_protocol else getattr(kind, "__dlpack_c_exchange_api__", None)
    if _module is not None and kind not in types and (by_protocol or table is not None) and _module.add_type(kind, table):
        types.add(kind)
