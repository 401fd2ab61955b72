"""The shared library behind this package: found, loaded, its functions declared. Calls release the GIL.

Where the package is a wheel's, the library and its plug-ins lie in weft/lib; else the dynamic loader finds
libweft (LD_LIBRARY_PATH, the system's folders). Any thread may call any function."""
import atexit
import ctypes
import os
import sys
import threading
from pathlib import Path

from . import _api

FOLDER = Path(__file__).resolve().parent
SONAME = f"libweft.so.{_api.VERSION_MAJOR}" + (f".{_api.VERSION_MINOR}" if _api.VERSION_MAJOR == 0 else "")


def _load():
    own = FOLDER / "lib" / SONAME
    try:
        return ctypes.CDLL(str(own) if own.exists() else SONAME)
    except OSError as error:
        raise ImportError(f"weft: {SONAME} cannot be loaded: {error}; expected it in {own.parent} (as the wheel has it) or where the dynamic "
                          "loader looks (LD_LIBRARY_PATH)") from None


class Library:
    """The functions of a header as attributes, `weft_` left out, each with its types."""

    def __init__(self, dll, functions):
        for name, (result, params) in functions.items():
            try:
                function = getattr(dll, name)
            except AttributeError:
                dll.weft_version.restype = ctypes.c_char_p  # libweft_train finds that of libweft
                raise ImportError(f"weft: {dll._name} is version {dll.weft_version().decode()} and has no {name}; expected the library that this package "
                                  f"was made for") from None
            function.restype = result
            function.argtypes = params
            setattr(self, name.removeprefix("weft_"), function)


_dll = _load()
lib = Library(_dll, _api.FUNCTIONS)
# How long the end of the interpreter waits for functions of the program's that the library has called.
LAST_CALLS_NS = 10 * 10**9


@atexit.register  # first in the package, and so called last: handles that end at exit may still call Python
def _end_callbacks():
    """From now on no thread of the library's calls Python: where it asks for the GIL of an interpreter
    that ends, CPython ends the thread (to 3.13) in the middle of C++, which aborts the process, or lets it
    wait without end (from 3.14 on)."""
    if ctypes.pythonapi.PyInterpreterState_Get() != ctypes.pythonapi.PyInterpreterState_Main():
        return  # one of several interpreters
    if lib.callbacks_end(LAST_CALLS_NS, None):
        print(f"weft: the interpreter ends, and functions that weft has called are still running after {LAST_CALLS_NS // 10**9} s", file=sys.stderr)


for _function in (ctypes.pythonapi.PyInterpreterState_Get, ctypes.pythonapi.PyInterpreterState_Main):
    _function.restype, _function.argtypes = ctypes.c_void_p, []
lib.callbacks_begin(None)  # an interpreter of this process may have ended before


class _PerThread(threading.local):
    """One weft_error for each thread: a call writes it, and the code that checks the call's status reads
    it."""

    def __init__(self):
        self.error = _api.make(_api.weft_error)
        self.ref = ctypes.byref(self.error)


per_thread = _PerThread()


class _Dl_info(ctypes.Structure):  # of dlfcn.h
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)]


def library_file():
    """The path of the library that is loaded. The dynamic loader knows it, where there is no /proc, too."""
    info, dladdr = _Dl_info(), ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Dl_info)]
    if dladdr(ctypes.c_void_p.from_buffer(lib.version), ctypes.byref(info)) and info.file:
        return os.path.abspath(os.fsdecode(info.file))
    return _dll._name
