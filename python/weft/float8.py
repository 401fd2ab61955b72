"""Numbers of eight bits: scales, casts that saturate, and the casts back, with the bits of torchao.

    from weft import float8

    with weft.Context() as context, float8.Casts(context) as casts:
        scales = float8.scales(casts.amax(x, by="rows"), format="e4m3", power_of_two=True)
        codes = casts.quantise(x, scales, format="e4m3", by="rows")
        near = casts.widen(codes, format="e4m3") / scales[:, None]

A format is "e4m3" (its largest value is 448) or "e5m2" (57344). by: the elements that share a scale, all of
the "tensor", those of a row ("rows"), or those of a column ("columns"); the columns of an array are its last
dimension, and all other dimensions together are its rows. Codes are arrays of bytes; `codes.view(...)` makes
them numbers of ml_dtypes. weft.train trains models in eight bits:
build_parallel_model(..., float8="rowwise").
"""
from __future__ import annotations

import ctypes
import math
from typing import Any

from . import _api, _train_api, arrays, errors
from ._arguments import choice
from ._compute import Compute
from ._train_library import lib

__all__ = ["Casts", "scales"]

FORMATS = {"e4m3": _api.F8E4M3, "e5m2": _api.F8E5M2}
GROUPS = {"tensor": _train_api.SCALE_OF_TENSOR, "rows": _train_api.SCALE_OF_ROWS, "columns": _train_api.SCALE_OF_COLUMNS}
_byref = ctypes.byref


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise ImportError("weft.float8: results are arrays of numpy, which is not installed") from None
    return numpy


def _matrix(buffer: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    columns = shape[-1] if shape else 1
    return _train_api.weft_matrix(buffer.data, math.prod(shape[:-1]), columns, buffer.dtype if dtype is None else dtype, buffer.device)


def scales(amax: Any, *, format: str = "e4m3", power_of_two: bool = False) -> Any:
    """The factor for each largest magnitude: the largest value of the format / max(amax, 1e-12), divided in
    f64 and rounded to f32; with power_of_two rounded down to a power of two."""
    numpy = _numpy()
    largest = numpy.asarray(amax, numpy.float32)
    found, one = numpy.empty(largest.shape, numpy.float32), ctypes.c_float()
    code = choice(format, FORMATS, "format")
    for i, value in enumerate(largest.flat):
        errors.call(lib.float8_scale, float(value), code, bool(power_of_two), _byref(one))
        found.flat[i] = one.value
    return found


class Casts(Compute):
    """The casts, with so many threads. One thread at a time uses it. Arrays are of float32 or bfloat16, on
    the host, of NumPy, PyTorch or what else weft takes; results are new arrays of NumPy."""
    __slots__ = ()

    def amax(self, x: Any, *, by: str = "tensor") -> Any:
        """The largest magnitude of each group, as float32. A NaN in a group gives a NaN, an empty group 0.
        For an array that is cut over ranks, take the largest of all parts (all_reduce with "max") before
        scales()."""
        buffer, keeps = arrays.view(x, "x", False)
        matrix = _matrix(buffer, arrays.shape_of(x))
        count = {"tensor": 1, "rows": matrix.rows, "columns": matrix.columns}
        group = choice(by, GROUPS, "by")
        found = _numpy().empty(count[by], "f4")
        to, _ = arrays.view(found, "amax", True)
        errors.call(lib.float8_amax, self._open(), _byref(matrix), group, _byref(to))
        del keeps
        return found

    def quantise(self, x: Any, scales: Any, *, format: str = "e4m3", by: str = "tensor") -> Any:
        """x * scale in the format, as an array of bytes of x's shape: rounded to nearest, ties to even;
        values beyond the largest finite value become that value."""
        numpy = _numpy()
        buffer, keeps = arrays.view(x, "x", False)
        shape = arrays.shape_of(x)
        code, group = choice(format, FORMATS, "format"), choice(by, GROUPS, "by")
        factors = numpy.ascontiguousarray(scales, numpy.float32).reshape(-1)
        of_scales, _ = arrays.view(factors, "scales", False)
        codes = numpy.empty(shape, numpy.uint8)
        to, _ = arrays.view(codes, "codes", True)
        errors.call(lib.float8_quantise, self._open(), _byref(_matrix(buffer, shape)), group, _byref(of_scales), _byref(_matrix(to, shape, code)))
        del keeps
        return codes

    def widen(self, codes: Any, *, format: str = "e4m3") -> Any:
        """The values of codes, exactly, as float32; divided by their scales they are near x."""
        numpy = _numpy()
        code, source = choice(format, FORMATS, "format"), numpy.ascontiguousarray(codes)
        if source.dtype.itemsize != 1:
            raise errors.BadArgumentError(f"codes is of dtype {source.dtype}; expected bytes")
        bits = source.view(numpy.uint8)
        values = numpy.empty(bits.shape, numpy.float32)
        of, to = arrays.view(bits, "codes", False)[0], arrays.view(values, "values", True)[0]
        errors.call(lib.float8_widen, self._open(), _byref(_matrix(of, bits.shape, code)), _byref(_matrix(to, bits.shape)))
        return values
