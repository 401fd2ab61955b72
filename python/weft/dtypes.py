"""The types of elements: weft's names for them, and those of NumPy and PyTorch."""
import re

from . import _api, errors

NAMES = {"f64": _api.F64, "f32": _api.F32, "f16": _api.F16, "bf16": _api.BF16, "i8": _api.I8, "i16": _api.I16, "i32": _api.I32, "i64": _api.I64,
         "u8": _api.U8, "u16": _api.U16, "u32": _api.U32, "u64": _api.U64, "bool": _api.BOOL, "f8e4m3": _api.F8E4M3, "f8e5m2": _api.F8E5M2,
         "c64": _api.C64, "c128": _api.C128}
SIZES = {_api.F64: 8, _api.F32: 4, _api.F16: 2, _api.BF16: 2, _api.I8: 1, _api.I16: 2, _api.I32: 4, _api.I64: 8, _api.U8: 1, _api.U16: 2, _api.U32: 4,
         _api.U64: 8, _api.BOOL: 1, _api.F8E4M3: 1, _api.F8E5M2: 1, _api.C64: 8, _api.C128: 16}
_BY_CODE = {code: name for name, code in NAMES.items()}
# The names of other libraries, without a prefix; bfloat16 and float8 are ml_dtypes' and torch's.
OTHER = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
         "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "bool": "bool", "bool_": "bool", "float8_e4m3fn": "f8e4m3",
         "float8_e5m2": "f8e5m2", "complex64": "c64", "complex128": "c128"}
PYTHON = {float: "f64", int: "i64", bool: "bool", complex: "c128"}  # as in NumPy
_numpy_code, _torch_code = {}, {}


def name_of(code):
    return _BY_CODE[code]


def of(dtype):
    """The number of a dtype that is given as weft's name ("f32"), as another library's name or as its
    object (numpy.float32, torch.float32), as any name that NumPy has for it ("f4", "single", "<i8"), or as
    float, int, bool, complex. Where the two differ, the name is weft's: "i8" is an int8, which NumPy calls
    "i1", and "u8" a uint8. So NumPy's other codes of integers without a byte order ("i4") are refused."""
    if isinstance(dtype, type) and dtype in PYTHON:
        name = PYTHON[dtype]
    elif isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type):
        name = dtype.__name__
    else:
        name = getattr(dtype, "name", None) or str(dtype)
    name = name.rpartition(".")[2]
    name = OTHER.get(name, name)
    if name not in NAMES and isinstance(dtype, str):
        if re.fullmatch("[iu][124]", name):
            raise errors.BadArgumentError(f"dtype is {dtype!r}, in bytes; expected {name[0]}{8 * int(name[1])}, in bits: NumPy's i8 is weft's i64")
        name = _numpys_name(name) or name
    if name not in NAMES:
        raise errors.BadArgumentError(f"dtype is {dtype!r}; expected one of {', '.join(NAMES)}, or numpy's or torch's name of it, such as float32")
    return NAMES[name]


def _numpys_name(text):
    """weft's name of what NumPy calls `text`; None where there is none."""
    try:
        import numpy
        found = numpy.dtype(text)
    except (ImportError, TypeError, ValueError, SyntaxError):
        return None
    return OTHER.get(found.name) if found.isnative else None


def of_numpy(dtype):
    """The number of a numpy.dtype; None where weft has none."""
    try:
        return _numpy_code[dtype]
    except KeyError:
        name = OTHER.get(dtype.name) if dtype.isnative else None
        code = _numpy_code[dtype] = None if name is None else NAMES[name]
        return code


def of_torch(dtype):
    """The number of a torch.dtype; None where weft has none."""
    try:
        return _torch_code[dtype]
    except KeyError:
        name = OTHER.get(str(dtype).rpartition(".")[2])
        code = _torch_code[dtype] = None if name is None else NAMES[name]
        return code


def to_numpy(code):
    """The numpy.dtype of a number; bf16 and f8 need the package ml_dtypes."""
    import numpy
    name = next(other for other, own in OTHER.items() if own == _BY_CODE[code])
    try:
        return numpy.dtype(name)
    except TypeError:
        try:
            import ml_dtypes
        except ImportError:
            raise errors.UnsupportedError(f"NumPy has no {_BY_CODE[code]}; expected the package ml_dtypes, which brings it") from None
        return numpy.dtype(getattr(ml_dtypes, name))


def to_torch(code):
    """The torch.dtype of a number."""
    import torch
    return getattr(torch, next(other for other, own in OTHER.items() if own == _BY_CODE[code]))
