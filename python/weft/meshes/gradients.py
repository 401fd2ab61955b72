"""Gradients of anybody's: reduced, at once or in buckets while the rest of them is still computed,
measured and clipped where they lie; and which samples each rank reads. Lists of gradients are {name:
(array, layout)}, or {name: array} without a layout, in the same order on all ranks."""
import ctypes
import weakref

from .. import _api, arrays, dtypes, errors
from .._arguments import choice, text
from .._handle import Handle, blocking
from .._library import lib
from ..group import REDUCE_OPS
from .layout import tensors
from .mesh import Mesh

__all__ = ["BucketHook", "Reducer", "Sampler", "average_gradients", "clip_grad_norm", "grad_norm", "reduce_gradients",
           "sync_replicated_gradients"]

_byref = ctypes.byref


def reduce_gradients(gradients, axes, *, data_axes=None, on_drift="error", tolerance=None):
    """Reduces gradients in place as their layouts say on each of `axes`: what is partial is summed, or
    averaged; what is cut stays; replicas stay where all have the same bits, and are averaged where they
    differ by rounding. All axes in one pass. data_axes: those of `axes` whose ranks saw different data,
    mesh["dp"]: LayoutError for a gradient that is replicated there. on_drift: "error", MismatchError where
    replicas differ by more than rounding, or "average"; tolerance: how far a replica may be from the
    average, as a part of the largest element; 0: its bits count; None: what fits the dtype. Blocks until
    all ranks of `axes` are there."""
    options = _drift(_api.weft_reduce_options, on_drift, tolerance)
    if data_axes is not None:
        options.data_axes = errors.instance(data_axes, Mesh, "data_axes")._open()
    array, count, owners = tensors(gradients, True)
    blocking(lib.reduce_gradients, array, count, errors.instance(axes, Mesh, "axes"), _byref(options), keep=(owners, data_axes))


def average_gradients(gradients, axes):
    """reduce_gradients whose data axes are all of `axes`: for gradients of ranks that saw different data.
    Blocks."""
    array, count, owners = tensors(gradients, True)
    blocking(lib.average_gradients, array, count, errors.instance(axes, Mesh, "axes"), keep=owners)


def sync_replicated_gradients(gradients, axes, *, on_drift="error", tolerance=None):
    """reduce_gradients without data axes: for gradients of weights that every rank of `axes` holds.
    Blocks."""
    options = _drift(_api.weft_sync_options, on_drift, tolerance)
    array, count, owners = tensors(gradients, True)
    blocking(lib.sync_replicated_gradients, array, count, errors.instance(axes, Mesh, "axes"), _byref(options), keep=owners)


def _drift(kind, on_drift, tolerance):
    options = _api.make(kind)
    options.on_drift = choice(on_drift, {"error": _api.DRIFT_ERROR, "average": _api.DRIFT_AVERAGE}, "on_drift")
    if tolerance is not None:
        allowed = errors.number(tolerance, "tolerance")
        if not allowed >= 0:
            raise errors.BadArgumentError(f"tolerance is {tolerance!r}; expected 0 (bits count) or more, or None for the dtype's own")
        options.tolerance = allowed or _api.EXACT
    return options


def grad_norm(gradients, p=2.0):
    """The p-norm of all gradients of all ranks, each element counted once. Collective among the ranks of
    the layouts' meshes; blocks."""
    array, count, owners = tensors(gradients, False)
    norm = ctypes.c_double()
    blocking(lib.grad_norm, array, count, errors.number(p, "p"), _byref(norm), keep=owners)
    return norm.value


def clip_grad_norm(gradients, max_norm, p=2.0, *, non_finite="error"):
    """Scales all gradients by min(1, max_norm / (norm + 1e-6)); the norm before. non_finite: "error", or
    "skip": then they stay as they are."""
    options = _api.make(_api.weft_clip_options)
    options.p = errors.number(p, "p")
    options.non_finite = choice(non_finite, {"error": _api.NON_FINITE_ERROR, "skip": _api.NON_FINITE_SKIP}, "non_finite")
    array, count, owners = tensors(gradients, True)
    norm = ctypes.c_double()
    blocking(lib.clip_grad_norm, array, count, errors.number(max_norm, "max_norm"), _byref(options), _byref(norm), keep=owners)
    return norm.value


class Bucket:
    """A bucket all of whose gradients are there: data (a numpy array of one dimension, to be read and
    written until the step is over), members (its gradients, as the reducer numbers them), number (in the
    order in which buckets are sent, the same on all ranks), op ("sum" or "avg")."""
    __slots__ = ("data", "members", "number", "op")

    def __init__(self, raw):
        import numpy
        size = raw.data.count * dtypes.SIZES[raw.data.dtype]
        memory = (ctypes.c_char * size).from_address(raw.data.data) if size else bytearray()
        self.data = numpy.frombuffer(memory, dtypes.to_numpy(raw.data.dtype))
        self.members, self.number, self.op = tuple(raw.members[:raw.member_count]), raw.number, lib.reduce_op_name(raw.op).decode()


class BucketHook:
    """A reduction of the program's own in the place of each bucket's all_reduce. Derive and give the
    methods, which communicate over a group of the program's own (mesh.group of the same axes), and do not
    use the reducer. Both are called for every bucket in every step, in the same order on all ranks; with
    one rank, and for an empty bucket, not at all. An exception of theirs fails the reducer's call on this
    rank, with AbortedError on the others; the reducer cannot be used any more. `name` is compared between
    ranks."""
    name = "python"

    def begin(self, bucket):
        """The bucket is ready: in Reducer.ready, or in finish."""

    def end(self, bucket):
        """In Reducer.finish: leaves the result in bucket.data."""
        raise NotImplementedError


class Reducer(Handle):
    """Reduces gradients in buckets. `entries`: (name, shape, dtype, op) of each, in the order in which
    they become ready.

        reducer = weft.Reducer(mesh["dp"], [("w", (4, 3), "f4", "avg"), ("b", 3, "f4", "avg")])
        for each step:  write each gradient into slot(i), or into memory that was bound; ready(i)
                        finish(); the gradients are the reduced ones now

    Between ready(i) and the end of finish() a gradient belongs to the reduction. One thread for each rank.
    unused: what becomes of a gradient that nobody made ready: "error", or "zeros"; bucket_bytes: a bucket
    is closed when it has as many; 0: 4 MiB; compression: "bf16" sends buckets of f32 rounded to bf16;
    hook: a BucketHook.
    """
    __slots__ = ("_keep", "_slots", "_entries", "_hook", "_failure")
    _destroy = lib.reducer_destroy

    def __init__(self, axes, entries, *, unused="error", bucket_bytes=0, compression=None, hook=None):
        options = _api.make(_api.weft_reducer_options)
        options.unused = choice(unused, {"error": _api.UNUSED_ERROR, "zeros": _api.UNUSED_ZEROS}, "unused")
        options.bucket_bytes = errors.integer(bucket_bytes, "bucket_bytes", 64)
        options.compression = choice(compression, {None: _api.BUCKETS_AS_THEY_ARE, "bf16": _api.BUCKETS_BF16}, "compression")
        self._failure, self._hook = None, None
        if hook is not None:
            self._hook = hook, self._asked(hook.begin), self._asked(hook.end)
            options.hook = _api.weft_bucket_hook(text(hook.name, "hook.name"), *self._hook[1:], None)
        entries = list(entries)
        for i, entry in enumerate(entries):
            if not isinstance(entry, (tuple, list)) or len(entry) != 4:
                what = f"has {len(entry)} parts" if isinstance(entry, (tuple, list)) else f"is of type {type(entry).__name__}"
                raise errors.BadArgumentError(f"entries[{i}] {what}; expected (name, shape, dtype, op)")
        self._entries = [(name, (shape,) if isinstance(shape, int) else tuple(shape), dtypes.of(dtype), choice(op, REDUCE_OPS, "op"))
                         for name, shape, dtype, op in entries]
        raw = (_api.weft_reducer_entry * max(1, len(self._entries)))()
        for place, (name, shape, dtype, op) in zip(raw, self._entries):
            place.name, place.dtype, place.op, place.count = text(name, "name"), dtype, op, 1
            for extent in shape:
                place.count *= extent
        handle = ctypes.c_void_p()
        errors.call(lib.reducer_create, errors.instance(axes, Mesh, "axes")._open(), raw, len(self._entries), _byref(options), _byref(handle))
        Handle.__init__(self, handle.value)
        self._keep, self._slots = {}, {}

    def _asked(self, method):
        """A method of a hook as the library calls it; what it raises is raised by the reducer's call, too."""
        me = weakref.ref(self)

        def run(raw):
            try:
                method(Bucket(raw.contents))
            except BaseException as failure:  # pylint: disable=broad-except
                me()._failure = failure
                raise
        return dict(_api.weft_bucket_hook._fields_)["begin"](lambda _, raw, error: errors.to_struct(error, run, raw))

    def _run(self, function, *args):
        try:
            blocking(function, self, *args, keep=(self._keep, self._hook))
        except errors.Error as error:
            failure, self._failure = self._failure, None
            try:
                raise error from failure
            finally:
                del failure  # its frames refer to this one

    def slot(self, i):
        """Gradient i's place in its bucket, a numpy array: zeros at first. Not to be used once the reducer
        is closed."""
        import numpy
        i = errors.integer(i, "i")
        if i not in self._slots:
            buffer = _api.weft_buffer()
            errors.call(lib.reducer_slot, self._open(), i, _byref(buffer))
            _, shape, dtype, _ = self._entries[i]
            size = buffer.count * dtypes.SIZES[dtype]
            memory = (ctypes.c_char * size).from_address(buffer.data) if size else bytearray()
            if size:
                memory._weft = self
            self._slots[i] = memory
        _, shape, dtype, _ = self._entries[i]
        return numpy.frombuffer(self._slots[i], dtypes.to_numpy(dtype)).reshape(shape)

    def bind(self, i, array):
        """Gradient i is in the caller's memory from now on."""
        i = errors.integer(i, "i")
        buffer, owner = arrays.view(array, "data", True)
        errors.call(lib.reducer_bind, self._open(), i, _byref(buffer))
        self._keep[i] = owner
        self._slots.pop(i, None)

    def ready(self, i):
        """Gradient i has its final value of this step. Blocks in the first step alone."""
        self._run(lib.reducer_ready, errors.integer(i, "i"))

    def is_ready(self, i):
        """Whether entry `i` was said to be ready in this round."""
        ready = ctypes.c_bool()
        errors.call(lib.reducer_is_ready, self._open(), errors.integer(i, "i"), _byref(ready))
        return ready.value

    def no_sync(self):
        """A `with` in which ready() sends nothing: for micro-batches before the last."""
        return _NoSync(self)

    def finish(self):
        """Blocks until every gradient is reduced, on all ranks."""
        self._run(lib.reducer_finish)

    @property
    def bucket_bytes(self):
        """The bytes of each bucket, in the order they are sent."""
        count, size, found = ctypes.c_int32(), ctypes.c_int64(), []
        errors.call(lib.reducer_bucket_count, self._open(), _byref(count))
        for bucket in range(count.value):
            errors.call(lib.reducer_bucket_bytes, self._open(), bucket, _byref(size))
            found.append(size.value)
        return found

    @property
    def sent_early(self):
        """Reductions sent by ready() rather than by finish() so far."""
        count = ctypes.c_int64()
        errors.call(lib.reducer_sent_early, self._open(), _byref(count))
        return count.value

    def close(self):
        super().close()
        self._keep, self._slots = {}, {}


class _NoSync:
    def __init__(self, reducer):
        self.reducer = reducer

    def __enter__(self):
        errors.call(lib.reducer_begin_no_sync, self.reducer._open())

    def __exit__(self, *exception):
        errors.call(lib.reducer_end_no_sync, self.reducer._open())


class Sampler(Handle):
    """A shuffled walk through a data set as a pure function of (seed, step). The global batch is the same
    for any number of data ranks."""
    __slots__ = ("offset", "count")
    _destroy = lib.sampler_destroy

    def __init__(self, axis, population, global_batch, seed=0):
        handle = ctypes.c_void_p()
        errors.call(lib.sampler_create, errors.instance(axis, Mesh, "axis")._open(), errors.integer(population, "population", 64),
                    errors.integer(global_batch, "global_batch", 64), seed, _byref(handle))
        Handle.__init__(self, handle.value)
        offset, count = ctypes.c_int64(), ctypes.c_int64()
        errors.call(lib.sampler_part, self._handle, _byref(offset), _byref(count))
        self.offset, self.count = offset.value, count.value  # of this rank's part of the global batch

    def batch(self, step):
        """The numbers of the samples of a step that this rank reads."""
        samples = (ctypes.c_int64 * max(1, self.count))()
        errors.call(lib.sampler_batch, self._open(), errors.integer(step, "step", 64), samples, self.count)
        return samples[:self.count]
