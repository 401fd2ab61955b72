"""The base of classes that compute with libweft_train."""
from __future__ import annotations

import ctypes

from . import _train_api, errors
from ._handle import Handle, Made
from ._train_library import lib, make
from .context import Context


class Compute(Handle):
    """Computes with so many threads. One thread at a time uses it."""
    __slots__ = ()
    _destroy = lib.compute_destroy

    def __init__(self, context: Context, *, threads: int = 1) -> None:
        errors.instance(context, Context, "context")
        options = make(_train_api.weft_compute_options)
        options.threads = errors.integer(threads, "threads")
        made = Made(lib.compute_destroy)
        errors.call(lib.compute_create, context._open(), ctypes.byref(options), ctypes.byref(made))
        super().__init__(made)
