"""Arrays of other libraries where they lie: DLPack capsules old and versioned, what may not be written,
strides, dtypes, devices, and who frees."""
import array
import ctypes
import gc
import re
import sys

import numpy as np
import pytest

import weft
from weft import _api, arrays, dtypes


class Producer:
    """A tensor of three f32 that counts how often its deleter was called."""
    # pylint: disable=protected-access

    def __init__(self, *, versioned, flags=0, code=2, bits=32, device=1, strides=None, shape=(3,)):
        self.memory = (ctypes.c_float * 16)(1, 2, 3)
        self.deleted = 0
        self.versioned = versioned
        kind = _api.weft_dl_managed_tensor_versioned if versioned else _api.weft_dl_managed_tensor
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self.managed = kind()
        if versioned:
            self.managed.version.major, self.managed.flags = 1, flags
        tensor = self.managed.dl_tensor
        tensor.data = ctypes.addressof(self.memory)
        tensor.device.device_type, tensor.ndim = device, len(shape)
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code, bits, 1
        tensor.shape = self.shape
        if strides is not None:
            tensor.strides = self.strides

        def delete(_):
            self.deleted += 1
        self.delete = type(self.managed.deleter)(delete)
        self.managed.deleter = self.delete
        self.end = arrays._Destructor(self._end_of_capsule)

    def _end_of_capsule(self, capsule):
        name = arrays.VERSIONED if self.versioned else arrays.OLD
        if arrays._is_valid(capsule, name):
            self.managed.deleter(ctypes.pointer(self.managed))

    def __dlpack__(self, **options):
        if not self.versioned and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return arrays._capsule_new(ctypes.addressof(self.managed), arrays.VERSIONED if self.versioned else arrays.OLD,
                                   ctypes.cast(self.end, ctypes.c_void_p))


@pytest.fixture(name="group")
def alone():
    with weft.Context() as context, context.group_in(None, 0, 1) as group:
        yield group


@pytest.mark.parametrize("versioned", [False, True])
def test_deleter_is_called_once(group, versioned):
    producer = Producer(versioned=versioned)
    out = np.empty(3, np.float32)
    work = group.all_reduce(producer, out=out)
    work.wait()
    del work
    gc.collect()
    np.testing.assert_array_equal(out, [1, 2, 3])
    assert producer.deleted == 1
    with pytest.raises(weft.BadArgumentError):  # a call that is refused gives the tensor back, too
        group.all_reduce(producer, out=np.empty(4, np.float32))
    gc.collect()
    assert producer.deleted == 2


def test_written_where_it_lies(group):
    producer = Producer(versioned=True)
    group.all_reduce(np.array([7, 8, 9], np.float32), out=producer).wait()
    assert list(producer.memory[:3]) == [7, 8, 9]


def test_read_only(group):
    producer = Producer(versioned=True, flags=1)
    out = np.empty(3, np.float32)
    group.all_reduce(producer, out=out).wait()
    with pytest.raises(weft.BadArgumentError, match="^out: .*read-only"):
        group.all_reduce(out, out=producer)
    fixed = np.ones(3, np.float32)
    fixed.flags.writeable = False
    np.testing.assert_array_equal(group.all_reduce(fixed).wait(), [1, 1, 1])
    with pytest.raises(weft.BadArgumentError, match="^out is read-only; expected memory that may be written$"):
        group.all_reduce(out, out=fixed)
    with pytest.raises(weft.BadArgumentError, match="^out is read-only"):
        group.all_reduce(b"abc", out=b"abc")


def test_strided(group):
    x = np.arange(12.0).reshape(3, 4)
    for strided in (x[:, ::2], x.T, x[:, 1]):
        with pytest.raises(weft.LayoutError, match="^in is strided; expected elements in a row .*: make it contiguous first$"):
            group.all_reduce(strided, out=np.empty(strided.shape))
        with pytest.raises(weft.LayoutError, match="^out is strided"):
            group.all_reduce(np.ascontiguousarray(strided), out=strided)
    np.testing.assert_array_equal(group.all_reduce(x[1:]).wait(), x[1:])  # rows in a row
    with pytest.raises(weft.LayoutError, match="^in: "):
        group.all_reduce(Producer(versioned=True, strides=(2,)), out=np.empty(3, np.float32))
    out = np.empty(1, np.float32)
    # The stride of one element does not count.
    group.all_reduce(Producer(versioned=True, shape=(1,), strides=(7,)), out=out).wait()
    assert out[0] == 1


def test_of_no_elements(group):
    for shape in ((0,), (3, 0), (0, 5)):
        assert group.all_reduce(np.empty(shape)).wait().shape == shape
    assert group.all_reduce(Producer(versioned=True, shape=(0,)), out=np.empty(0, np.float32)).wait().shape == (0,)


def test_without_dimensions(group):
    out = group.all_reduce(np.array(2.5)).wait()
    assert out.shape == () and out == 2.5
    assert group.all_gather(np.array(2.5)).wait().shape == (1,)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
                                   "complex64", "complex128"])
def test_dtypes_of_numpy(ranks, dtype):
    def program(group):
        x = np.array([1, 0, group.rank]).astype(dtype)
        np.testing.assert_array_equal(group.all_gather(x).wait(), np.array([1, 0, 0, 1, 0, 1]).astype(dtype))
        op = "logical_or" if dtype == "bool" else "sum"
        out = group.all_reduce(x, op=op).wait()
        assert out.dtype == x.dtype
        np.testing.assert_array_equal(out, np.array([1, 0, 1] if dtype == "bool" else [2, 0, 1]).astype(dtype))
    ranks(2, program)


def test_names_of_dtypes():
    for given, name in {"f4": "f32", "f2": "f16", "f8": "f64", "c8": "c64", "c16": "c128", "<i8": "i64", "=u4": "u32", "single": "f32", "double": "f64",
                        "half": "f16", "byte": "i8", "longlong": "i64", "?": "bool", "i8": "i8", "u8": "u8", "f16": "f16", "torch.bfloat16": "bf16"}.items():
        assert dtypes.name_of(dtypes.of(given)) == name, given
    for kind in np.sctypeDict.values() if hasattr(np, "sctypeDict") else ():
        known = np.dtype(kind).name in dtypes.OTHER
        if known:
            assert dtypes.to_numpy(dtypes.of(np.dtype(kind).name)) == np.dtype(kind)
    for given, text in {"i4": "dtype is 'i4', in bytes; expected i32, in bits: NumPy's i8 is weft's i64", "f33": "dtype is 'f33'; expected one of f64, f32",
                        ">f4": "dtype is '>f4'; expected one of", "U5": "dtype is 'U5'; expected one of"}.items():
        with pytest.raises(weft.BadArgumentError, match="^" + re.escape(text)):
            dtypes.of(given)


@pytest.mark.parametrize("code, bits, name, one, two", [(4, 16, "bf16", 0x3F80, 0x4000), (10, 8, "f8e4m3", 0x38, 0x40), (12, 8, "f8e5m2", 0x3C, 0x40)])
def test_small_floats(ranks, code, bits, name, one, two):
    """bf16 and f8 by DLPack: moved, and bf16 summed: one and one is two."""
    def program(group):
        x, out = (Producer(versioned=True, code=code, bits=bits, shape=shape) for shape in ((4,), (8,)))
        cast = ctypes.c_uint16 if bits == 16 else ctypes.c_uint8
        values, written = (ctypes.cast(p.memory, ctypes.POINTER(cast)) for p in (x, out))
        for i in range(4):
            values[i] = one if group.rank == 0 else two
        assert arrays.view(x, "in", False)[0].dtype == dtypes.NAMES[name]
        group.all_gather(x, out=out).wait()
        assert written[0:8] == [one] * 4 + [two] * 4
        if name == "bf16":
            group.all_reduce(x, out=x, op="max").wait()
            assert values[0:4] == [two] * 4
            for i in range(4):
                values[i] = one
            group.all_reduce(x, out=x).wait()
            assert values[0:4] == [two] * 4
        else:
            with pytest.raises(weft.UnsupportedError, match=f"sum of {name} is not defined"):
                group.all_reduce(x, out=x)
    ranks(2, program)


def test_what_weft_does_not_know(group):
    with pytest.raises(weft.UnsupportedError, match="^in is of dtype >f4; expected one of f64, f32"):
        group.all_reduce(np.ones(3, ">f4"))
    with pytest.raises(weft.UnsupportedError, match="^in is of dtype datetime64"):
        group.all_reduce(np.zeros(3, "M8[s]"))
    with pytest.raises(weft.Error, match="^in: "):
        group.all_reduce(Producer(versioned=True, code=2, bits=128), out=np.empty(3, np.float32))
    with pytest.raises(weft.BadArgumentError, match="^in is of type list; expected an array of NumPy, PyTorch or JAX"):
        group.all_reduce([1, 2])
    with pytest.raises(weft.BadArgumentError, match="^out is None where in is of type bytearray"):
        group.all_reduce(bytearray(3))
    with pytest.raises(weft.BadArgumentError, match="^in is 9223372036854775808; expected a number of 64 bits"):
        group.all_reduce(2**63)


def test_other_devices(group):
    with pytest.raises(weft.UnsupportedError, match="^in: .*device"):
        group.all_reduce(Producer(versioned=True, device=8), out=np.empty(3, np.float32))
    with pytest.raises(weft.Error, match="cuda"):
        group.all_reduce(Producer(versioned=True, device=2), out=np.empty(3, np.float32))


def test_memory_of_pythons_own(ranks):
    def program(group):
        x = array.array("i", [1, 2, group.rank])
        group.all_reduce(x, out=x).wait()
        assert list(x) == [2, 4, 1]
        out = bytearray(4)
        group.all_gather(bytes([group.rank, 7]), out=out).wait()
        assert out == bytes([0, 7, 1, 7])
    ranks(2, program)


def test_shared_memory(ranks):
    def program(group):
        x = group.context.empty((1000, 3), "f64")
        assert x.shape == (1000, 3) and x.dtype == np.float64 and x.flags.writeable
        x[...] = group.rank + 1
        group.all_reduce(x, out=x).wait()
        assert (x == 3).all()
        flat = x.reshape(-1)[5:]
        del x
        gc.collect()
        assert (flat == 3).all()  # the memory lives as long as a view of it
        assert group.context.empty(0, np.int32).shape == (0,)
        assert group.context.empty(np.int64(3), float).dtype == np.float64 and group.context.empty([2, 3], int).dtype == np.int64
        for shape, words in ((-1, "shape[0] is -1; expected 0 or more"), ((2, 2.5), "shape[1] is 2.5; expected a whole number")):
            with pytest.raises(weft.BadArgumentError, match="^" + re.escape(words) + "$"):
                group.context.empty(shape)
        with pytest.raises(weft.BadArgumentError, match="^kind is 'jax'; expected one of 'numpy', 'torch', 'dlpack'$"):
            group.context.empty(3, kind="jax")
        with pytest.raises(weft.BadArgumentError, match="^dtype is 'f7'; expected one of f64, f32"):
            group.context.empty(3, "f7")
    ranks(2, program)


@pytest.mark.parametrize("versioned", [False, True])
def test_shared_memory_by_dlpack(group, versioned):
    alive = len(arrays._Managed._alive)
    tensor = group.context.empty((2, 3), "f32", kind="dlpack")
    tensor.numpy()[...] = 5
    capsule = tensor.__dlpack__(max_version=(1, 0)) if versioned else tensor.__dlpack__()
    assert arrays._capsule_name(capsule) == (arrays.VERSIONED if versioned else arrays.OLD)
    assert len(arrays._Managed._alive) == alive + 1
    del capsule
    gc.collect()
    assert len(arrays._Managed._alive) == alive
    out = np.from_dlpack(tensor)
    del tensor
    gc.collect()
    assert (out == 5).all() and out.shape == (2, 3)
    del out
    gc.collect()
    assert len(arrays._Managed._alive) == alive
    assert sys.getrefcount(arrays._Managed) > 0


class Foreign(Producer):
    """As an array of a library that has the array API, whose arrays never change."""
    dtype, shape_ = "float32", (3,)

    def __array_namespace__(self):
        return np if hasattr(np, "from_dlpack") else pytest.skip("this NumPy has no from_dlpack")


def test_result_in_the_callers_kind(group):
    x = Foreign(versioned=True)
    x.shape = (3,)
    out = group.all_reduce(x).wait()
    assert isinstance(out, np.ndarray)
    np.testing.assert_array_equal(out, [1, 2, 3])


def test_torch_tensors(ranks):
    torch = pytest.importorskip("torch")

    def program(group):
        moved = group.all_gather(torch.full((2,), float(group.rank)).to(torch.float8_e4m3fn)).wait()
        assert moved.dtype == torch.float8_e4m3fn and moved.float().tolist() == [0, 0, 1, 1]
        for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64):
            x = torch.ones(3).to(dtype)
            out = group.all_reduce(x).wait()
            assert isinstance(out, torch.Tensor) and out.dtype == dtype and out.to(torch.complex64)[0] == 2
        with pytest.raises(weft.LayoutError, match="^in is strided"):
            group.all_reduce(torch.ones(3, 2).T)
        with pytest.raises(weft.LayoutError, match="^in is a conjugate"):
            group.all_reduce(torch.ones(3, dtype=torch.complex64).conj())
        with pytest.raises(weft.UnsupportedError, match="^in is on meta"):
            group.all_reduce(torch.empty(3, device="meta"))
        with pytest.raises(weft.LayoutError, match="^in is strided"):
            group.all_reduce(torch.eye(3).to_sparse())
        shared = group.context.empty((4,), torch.float32, kind="torch")
        shared[:] = group.rank
        assert group.all_reduce(shared, out=shared).wait() is shared and shared[0] == 1
    ranks(2, program)


def test_masked_arrays_are_refused(group):
    masked = np.ma.masked_array(np.ones(3), [True, False, False])
    for call in (lambda: group.all_reduce(masked), lambda: group.all_reduce(np.ones(3), out=masked)):
        with pytest.raises(weft.UnsupportedError, match="is a masked array, and weft knows no masks"):
            call()
    np.testing.assert_array_equal(group.all_reduce(masked.filled(0)).wait(), [0, 1, 1])


def test_scalars_of_numpy(ranks):
    def program(group):
        mean = group.all_reduce((np.arange(4.0) + group.rank).mean(), op="avg").wait()
        assert mean == 2.0 and mean.dtype == np.float64 and mean.shape == ()
        total = group.all_reduce(np.int16(3)).wait()
        assert total == 6 and total.dtype == np.int16
        assert group.all_gather(np.float32(group.rank)).wait().tolist() == [0, 1]
        with pytest.raises(weft.BadArgumentError, match="^out is the number .*; expected an array, or none"):
            group.all_reduce(np.ones(()), out=np.float64(1))
    ranks(2, program)
