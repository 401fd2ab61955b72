"""Arrays of other libraries as weft's buffers, without a copy, and results in the caller's kind.

NumPy, PyTorch, JAX and whatever else speaks DLPack; objects with Python's buffer protocol (bytearray,
memoryview, array.array); Python's numbers.
"""
import atexit
import ctypes
import sys

from . import _api, _calls, dtypes, errors
from ._api import weft_buffer
from ._library import lib, per_thread

__all__ = ["view", "empty_like", "finish", "shape_of", "SharedTensor"]

_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.restype, _capsule_new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# As CFUNCTYPE, but a destructor of a capsule gets the capsule's address: it is about to end, and must not be
# owned.
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
# The struct of a tensor that others take: theirs to free, by its deleter, even where there is no Python any
# more.
_libc = ctypes.CDLL(None)
_malloc, _free = _libc.malloc, _libc.free
_malloc.restype, _malloc.argtypes, _free.restype, _free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], None, [ctypes.c_void_p]
OLD, VERSIONED = b"dltensor", b"dltensor_versioned"
_KINDS = {}  # type -> one of the functions below


def _strided(name):
    return errors.LayoutError(f"{name} is strided; expected elements in a row (row-major, without gaps): make it contiguous first")


def _read_only(name):
    return errors.BadArgumentError(f"{name} is read-only; expected memory that may be written")


def _no_dtype(name, dtype):
    return errors.UnsupportedError(f"{name} is of dtype {dtype}; expected one of {', '.join(dtypes.NAMES)}")


def _of_numpy(x, name, writes):
    code = dtypes.of_numpy(x.dtype)
    if code is None:
        raise _no_dtype(name, x.dtype)
    flags = x.flags
    if not flags.c_contiguous:
        raise _strided(name)
    if writes and not flags.writeable:
        raise _read_only(name)
    return weft_buffer(x.ctypes.data, x.size, code, 0), x


def _of_scalar(x, name, writes):
    if writes:
        raise errors.BadArgumentError(f"{name} is the number {x!r}; expected an array, or none")
    return _of_numpy(sys.modules["numpy"].asarray(x), name, False)


def _of_masked(x, name, writes):
    raise errors.UnsupportedError(f"{name} is a masked array, and weft knows no masks; expected plain elements: x.filled(value) or x.data")


def _of_torch(x, name, writes):
    code = dtypes.of_torch(x.dtype)
    if code is None:
        raise _no_dtype(name, x.dtype)
    device = x.device
    if device.type not in ("cpu", "cuda"):
        raise errors.UnsupportedError(f"{name} is on {device}; expected a tensor on cpu or cuda")
    if x.layout is not sys.modules["torch"].strided or not x.is_contiguous():
        raise _strided(name)
    if x.is_conj() or x.is_neg():
        raise errors.LayoutError(f"{name} is a conjugate or negative view; expected its values in memory: resolve_conj() or resolve_neg() first")
    return weft_buffer(x.data_ptr(), x.numel(), code, 0 if device.type == "cpu" else 1 + (device.index or 0)), x


def _of_dlpack(x, name, writes):
    try:
        try:
            capsule = x.__dlpack__(max_version=(1, 0))
        except TypeError:  # before version 1 of DLPack
            capsule = x.__dlpack__()
    except Exception as error:  # pylint: disable=broad-except  # whatever another library raises
        raise errors.BadArgumentError(f"{name} gives no DLPack capsule: {error}") from error
    try:
        kind = _capsule_name(capsule)
    except ValueError:
        raise errors.BadArgumentError(f"{name}: __dlpack__ gave an object of type {type(capsule).__name__}; expected a capsule") from None
    buffer = weft_buffer()
    if kind == VERSIONED:
        status = lib.buffer_from_dlpack_versioned(_capsule_pointer(capsule, kind), writes, buffer, per_thread.ref)
    elif kind == OLD:
        status = lib.buffer_from_dlpack(_capsule_pointer(capsule, kind), buffer, per_thread.ref)
    else:
        raise errors.BadArgumentError(f"{name}: __dlpack__ gave a capsule named {kind!r}; expected {OLD!r} or {VERSIONED!r}")
    if status:
        error = errors.last()
        raise type(error)(f"{name}: {error.text}")
    # Nobody takes the tensor out of the capsule, so that its end calls the deleter, once.
    return buffer, (x, capsule)


def _of_jax(x, name, writes):
    if isinstance(x, sys.modules["jax"].core.Tracer):
        raise errors.BadArgumentError(f"{name} is traced by a transformation of JAX's (jit, grad, vmap), and has no elements; expected an array: call weft "
                                      "outside of it, or by jax.experimental.io_callback")
    if writes:
        raise errors.BadArgumentError(f"{name} is a JAX array, which never changes; expected memory that may be written, or no {name}: a result of JAX's kind "
                                      "is a new array")
    if str(x.dtype) not in dtypes.OTHER:
        raise _no_dtype(name, x.dtype)
    return _of_dlpack(x, name, False)


class _PyBuffer(ctypes.Structure):
    _fields_ = [("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
                ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p)]


_FORMATS = {"d": "f64", "f": "f32", "e": "f16", "b": "i8", "B": "u8", "c": "u8", "?": "bool"}


def _of_memory(x, name, writes):
    memory = memoryview(x)
    letter = memory.format.lstrip("@=<")
    if letter in "hHiIlLqQnN" and len(letter) == 1:
        code = dtypes.NAMES[("i" if letter.islower() else "u") + str(8 * memory.itemsize)]
    elif letter in _FORMATS:
        code = dtypes.NAMES[_FORMATS[letter]]
    else:
        raise _no_dtype(name, memory.format)
    if not memory.c_contiguous:
        raise _strided(name)
    if writes and memory.readonly:
        raise _read_only(name)
    raw = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(raw), 0)
    address = raw.buf
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(raw))
    return weft_buffer(address, memory.nbytes // memory.itemsize, code, 0), memory


class Number:
    """A Python number where a call can read and write it."""
    __slots__ = ("memory", "kind")
    TYPES = {bool: (ctypes.c_bool, _api.BOOL), int: (ctypes.c_int64, _api.I64), float: (ctypes.c_double, _api.F64)}

    def __init__(self, kind, value=0):
        self.kind = kind
        self.memory = (ctypes.c_double * 2)(value.real, value.imag) if kind is complex else self.TYPES[kind][0](value)

    def buffer(self):
        return weft_buffer(ctypes.addressof(self.memory), 1, _api.C128 if self.kind is complex else self.TYPES[self.kind][1], 0)

    @property
    def value(self):
        return complex(*self.memory) if self.kind is complex else self.kind(self.memory.value)


def _of_number(x, name, writes):
    if writes:
        raise errors.BadArgumentError(f"{name} is the number {x!r}; expected an array, or none: the result is a number")
    if type(x) is int and not -2**63 <= x < 2**63:
        raise errors.BadArgumentError(f"{name} is {x}; expected a number of 64 bits")
    number = Number(type(x), x)
    return number.buffer(), number


def _kind_of(x):
    """How a type's objects are read."""
    kind = type(x)
    modules = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if kind in (bool, int, float, complex):
        how = _of_number
    elif "numpy" in modules and hasattr(x, "__array_interface__") and isinstance(x, sys.modules["numpy"].ndarray):
        masked = sys.modules.get("numpy.ma")
        how = _of_masked if masked is not None and isinstance(x, masked.MaskedArray) else _of_numpy
    elif "numpy" in modules and isinstance(x, sys.modules["numpy"].generic):
        how = _of_scalar
    elif "torch" in modules and isinstance(x, sys.modules["torch"].Tensor):
        how = _of_torch
    elif hasattr(x, "__dlpack__"):
        how = _of_jax if "jax" in sys.modules and modules & {"jax", "jaxlib"} else _of_dlpack
    else:
        try:
            memoryview(x)
        except TypeError:
            return None
        how = _of_memory
    _KINDS[kind] = how
    if how is _of_torch or how is _of_numpy:
        name = "Tensor" if how is _of_torch else "ndarray"
        if kind is getattr(sys.modules["torch" if how is _of_torch else "numpy"], name):
            _calls.learn(kind, how is _of_numpy)
    return how


def view(x, name, writes):
    """(weft_buffer, what keeps its memory alive) of x's elements, as they lie. `name` is what errors call
    it."""
    how = _KINDS.get(type(x)) or _kind_of(x)
    if how is None:
        raise _unknown(x, name)
    return how(x, name, writes)


def _unknown(x, name):
    return errors.BadArgumentError(f"{name} is of type {type(x).__name__}; expected an array of NumPy, PyTorch or JAX, anything with __dlpack__ or the "
                                   "buffer protocol, or a number")


def shape_of(x):
    """The extents of x; () of a number."""
    how = _KINDS.get(type(x)) or _kind_of(x)
    if how is _of_number:
        return ()
    if how is _of_memory:
        return tuple(memoryview(x).shape or ())
    if how is None:
        raise _unknown(x, "in")
    return tuple(x.shape)


def extents(shape):
    """The shape of a new array, as a tuple: a number or several."""
    if not hasattr(shape, "__iter__"):
        shape = (shape,)
    found = tuple(errors.integer(extent, f"shape[{i}]", 64) for i, extent in enumerate(shape))
    for i, extent in enumerate(found):
        if extent < 0:
            raise errors.BadArgumentError(f"shape[{i}] is {extent}; expected 0 or more")
    return found


class SharedTensor:
    """Memory that ranks of one host share (Context.empty), as a tensor that others take by DLPack. Freed
    when the last of them lets it go."""

    def __init__(self, context, shape, dtype):
        self.shape, self.dtype = extents(shape), dtypes.name_of(dtype)
        sizes = (ctypes.c_int64 * max(1, len(self.shape)))(*self.shape)
        managed = ctypes.c_void_p()
        errors.call(lib.alloc_dlpack_versioned, context._open(), dtype, sizes, len(self.shape), ctypes.byref(managed))
        self._managed = _Managed(managed.value)

    def __reduce__(self):
        raise TypeError("weft: a SharedTensor cannot be pickled or copied: its memory is this process's; its numpy() can")

    @property
    def address(self):
        """Where the elements are."""
        return (self._managed.struct.dl_tensor.data or 0) + self._managed.struct.dl_tensor.byte_offset

    @property
    def nbytes(self):
        count = 1
        for extent in self.shape:
            count *= extent
        return count * dtypes.SIZES[dtypes.NAMES[self.dtype]]

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if dl_device not in (None, (1, 0)) or copy:
            raise BufferError("weft: shared memory is on the CPU and is given as it lies")
        return self._managed.capsule(versioned=max_version is not None and max_version[0] >= 1)

    def numpy(self):
        """The elements as a numpy.ndarray."""
        import numpy
        memory = (ctypes.c_char * self.nbytes).from_address(self.address) if self.nbytes else bytearray()
        if self.nbytes:
            memory._weft = self._managed
        return numpy.frombuffer(memory, dtypes.to_numpy(dtypes.NAMES[self.dtype])).reshape(self.shape)

    def torch(self):
        """The elements as a torch.Tensor."""
        import torch
        return torch.from_dlpack(self)


class _Managed:
    """The owner of a DLManagedTensorVersioned; each capsule made of it refers to it, too."""
    _alive = {}  # address of a capsule's own struct, of malloc() -> (that struct, its owner)
    _ends = []  # not empty: the interpreter ends, and what is alive stays

    def __init__(self, address):
        self.address = address
        self.struct = _api.weft_dl_managed_tensor_versioned.from_address(address)

    def __del__(self):
        self.struct.deleter(ctypes.pointer(self.struct))

    def capsule(self, versioned):
        """A capsule over the same memory; the code that takes its tensor calls our deleter, which releases
        this owner."""
        kind = _api.weft_dl_managed_tensor_versioned if versioned else _api.weft_dl_managed_tensor
        address = _malloc(ctypes.sizeof(kind))
        if not address:
            raise MemoryError
        own = kind.from_address(address)
        ctypes.memset(address, 0, ctypes.sizeof(kind))
        own.dl_tensor = self.struct.dl_tensor
        if versioned:
            own.version = self.struct.version
        name = VERSIONED if versioned else OLD
        if _Managed._ends:
            _outlive(own, self)
            return _capsule_new(address, name, None)
        own.deleter = _release_versioned if versioned else _release_old
        _Managed._alive[address] = own, self
        return _capsule_new(address, name, ctypes.cast(_end_of_capsule, ctypes.c_void_p))


def _let_go(managed):
    address = ctypes.addressof(managed.contents)
    if _Managed._alive.pop(address, None):
        _free(address)


_release_old = type(_api.weft_dl_managed_tensor().deleter)(_let_go)
_release_versioned = type(_api.weft_dl_managed_tensor_versioned().deleter)(_let_go)


@_Destructor
def _end_of_capsule(capsule, ends=_Managed._ends, alive=_Managed._alive, is_valid=_is_valid, pointer_of=_pointer_of, names=(OLD, VERSIONED), free=_free):
    """Needs no name of this module: as the interpreter ends these go first. Consumers may take the
    destructor away, and the capsule goes unseen."""
    for name in () if ends else names:
        if is_valid(capsule, name):  # nobody took the tensor
            address = pointer_of(capsule, name)
            if alive.pop(address, None):
                free(address)


def _keep_for_ever(*objects):
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _outlive(own, owner):
    """The tensor's deleter becomes free(), which needs no Python; what the tensor points to stays until
    the process has ended."""
    own.deleter = ctypes.cast(_free, type(own.deleter))
    _keep_for_ever(own, owner)


_keep_for_ever(_end_of_capsule)  # the code that capsules point to


def _at_exit():
    """Tensors that outlive the interpreter would call deleters written in Python. (DLPack allows none at
    all, but JAX calls it.)"""
    _Managed._ends.append(True)
    for own, owner in list(_Managed._alive.values()):
        _outlive(own, owner)


atexit.register(_at_exit)


def empty_like(x, shape, context):
    """A new array of x's kind and dtype for a result of that shape; `finish` makes of it what the caller
    gets."""
    how = _KINDS.get(type(x)) or _kind_of(x)
    if how is _of_numpy or how is _of_scalar:
        return sys.modules["numpy"].empty(shape, x.dtype)
    if how is _of_torch:
        return sys.modules["torch"].empty(shape, dtype=x.dtype, device=x.device)
    if how is _of_number and shape == ():
        return Number(type(x))
    if how is _of_number:
        import numpy
        return numpy.empty(shape, {int: numpy.int64}.get(type(x), type(x)))
    if how in (_of_dlpack, _of_jax) and hasattr(x, "__array_namespace__"):
        buffer, _ = _of_dlpack(x, "in", False)
        if buffer.device == 0:
            return _Foreign(SharedTensor(context, shape, buffer.dtype), x.__array_namespace__())
    raise errors.BadArgumentError(f"out is None where in is of type {type(x).__name__}; expected an array to write to")


class _Foreign:
    """A result that becomes an array of another library."""

    def __init__(self, shared, namespace):
        self.shared, self.namespace = shared, namespace
        self.shape = shared.shape

    def __dlpack__(self, **options):
        return self.shared.__dlpack__(**options)

    def take(self):
        return self.namespace.from_dlpack(self.shared)


def _of_result(x, name, writes):
    if type(x) is Number:
        return x.buffer(), x
    return weft_buffer(x.shared.address, x.shared.nbytes // dtypes.SIZES[dtypes.NAMES[x.shared.dtype]], dtypes.NAMES[x.shared.dtype], 0), x


_KINDS[Number] = _KINDS[_Foreign] = _of_result


def finish(result):
    """The array that the caller gets for a result that empty_like made, or that was the caller's."""
    if type(result) is Number:
        return result.value
    if type(result) is _Foreign:
        return result.take()
    return result
