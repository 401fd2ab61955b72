"""Tensors of the program's of which each rank keeps a part, and has the whole for as long as it computes
with it: what fully sharded data parallelism is made of. All ranks of the axes call these methods in the
same order, each from one thread, with the same lists."""
import ctypes

from .. import _api, arrays, dtypes, errors
from .._arguments import choice, text
from .._handle import Handle, Made, blocking
from .._library import lib
from ..group import REDUCE_OPS
from .layout import Layout
from .mesh import Mesh
from .transfers import Transfer

__all__ = ["ShardedParameters"]

_byref = ctypes.byref


class ShardedParameters(Handle):
    """A list of tensors, each cut along its dimension 0 over all ranks of `axes`, inside the cuts of other
    axes; where it is uneven the first ranks hold one row more.

        shards = weft.ShardedParameters(mesh["dp"], {"w": weft.Layout(mesh, (1024, 512)), "b": weft.Layout(mesh, (512,))})
        parts = {name: numpy.zeros(shards.part_shape(name), "f4") for name in shards.names}
        wholes = shards.unshard(parts).wait()
        ...                                                        # compute with wholes, get gradients of their shapes
        gradients = shards.reduce_scatter(gradients).wait()        # this rank's part of the average

    tensors: {name: layout} or {name: (layout, dtype)}, f32 where none is said; layouts are of wholes,
    "replicate" on the axes. reduce: what gradients are while ranks combine them; gradient: before and
    after; alone_bytes: a tensor of as many bytes travels alone, smaller ones together; 0: 64 KiB;
    replicate: axes whose ranks hold the same parts, over which gradients are combined, too. Lists are
    {name: array}, or lists in the order of `tensors`; results are of the same kind. Arrays are of the
    CPU's memory.
    """
    __slots__ = ("_context", "_layouts", "_shapes", "names")
    _destroy = lib.sharded_parameters_destroy

    def __init__(self, axes, tensors, *, reduce="f32", gradient="f32", alone_bytes=0, replicate=None):
        options = _api.make(_api.weft_sharded_parameters_options)
        options.reduce, options.gradient = dtypes.of(reduce), dtypes.of(gradient)
        options.alone_bytes = errors.integer(alone_bytes, "alone_bytes", 64)
        if replicate is not None:
            options.replicate = errors.instance(replicate, Mesh, "replicate")._open()
        self.names = list(tensors)
        pairs = [given if isinstance(given, tuple) else (given, "f32") for given in tensors.values()]
        entries = (_api.weft_shard_entry * max(1, len(pairs)))()
        for place, name, (layout, dtype) in zip(entries, self.names, pairs):
            if not isinstance(layout, Layout):
                raise errors.BadArgumentError(f"tensors[{name!r}] is {layout!r}; expected a Layout, or (a Layout, a dtype)")
            place.name, place.layout, place.dtype = text(name, "name"), layout._open(), dtypes.of(dtype)
        handle = ctypes.c_void_p()
        errors.call(lib.sharded_parameters_create, errors.instance(axes, Mesh, "axes")._open(), entries, len(pairs), _byref(options), _byref(handle))
        Handle.__init__(self, handle.value)
        self._context = axes._context
        self._layouts = [layout for layout, _ in pairs]
        self._shapes = {True: [layout.local_shape() for layout in self._layouts],  # of wholes
                        False: [self._layout(i).local_shape() for i in range(len(pairs))]}  # of parts

    def _index(self, name):
        if name not in self.names:
            raise errors.BadArgumentError(f"name is {name!r}; expected one of {', '.join(map(repr, self.names[:10]))}")
        return self.names.index(name)

    def layout(self, name):
        """The layout of what this rank keeps of a tensor: checkpoints, norms and redistribution take it as
        it is."""
        return self._layout(self._index(name))

    def _layout(self, i):
        return self._layouts[i]._of_other(lib.sharded_parameters_layout, self._open(), i)

    def part_shape(self, name):
        """The extents of what this rank keeps of a tensor."""
        return self._shapes[False][self._index(name)]

    def ranges(self, name, rank):
        """The part of a tensor that `rank` of the axes keeps: (offset, count) in the elements of the
        whole; one, or one for each segment of dimension 0."""
        offset, count, ranges, found = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_int32(1), []
        while len(found) < ranges.value:
            errors.call(lib.sharded_parameters_range, self._open(), self._index(name), errors.integer(rank, "rank"), len(found), _byref(offset), _byref(count),
                        _byref(ranges))
            found.append((offset.value, count.value))
        return found

    @property
    def bytes(self):
        """(what this rank receives in one unshard, what it sends in one reduce_scatter), at least."""
        first, second = ctypes.c_int64(), ctypes.c_int64()
        errors.call(lib.sharded_parameters_bytes, self._open(), _byref(first), _byref(second))
        return first.value, second.value

    def unshard(self, parts, wholes=None):
        """Begins to gather all wholes of the parts that ranks keep; a Transfer of the wholes. The parts
        were read once it has begun. wholes None: new arrays."""
        given, first, keep = self._buffers(parts, "parts", False, False)
        made, second, kept = self._buffers(wholes, "wholes", True, True, given)
        return self._begin(lib.sharded_parameters_unshard, first, second, len(given), (), (keep, kept), parts, made)

    def reshard(self, wholes, parts=None):
        """Copies this rank's part of each whole; the parts. Sends nothing."""
        given, first, keep = self._buffers(wholes, "wholes", False, True)
        made, second, kept = self._buffers(parts, "parts", True, False, given)
        blocking(lib.sharded_parameters_reshard, self, first, second, len(given), keep=(keep, kept))
        return self._as(wholes, [arrays.finish(each) for each in made])

    def reduce_scatter(self, gradients, parts=None, op="avg"):
        """Begins to combine the gradients of all ranks, "avg" or "sum": of each whole this rank's gradient
        in, its part of the combined one out; a Transfer of the parts. The gradients were read once it has
        begun."""
        given, first, keep = self._buffers(gradients, "gradients", False, True)
        made, second, kept = self._buffers(parts, "parts", True, False, given)
        return self._begin(lib.sharded_parameters_reduce_scatter, first, second, len(given), (choice(op, REDUCE_OPS, "op"),), (keep, kept), gradients, made)

    def _begin(self, function, first, second, count, options, keep, like, out):
        made = Made(lib.transfer_destroy)
        blocking(function, self, first, second, count, *options, _byref(made), keep=keep)
        return Transfer(made, (self, keep), self._as(like, out))

    def _as(self, like, values):
        return dict(zip(self.names, values)) if isinstance(like, dict) else list(values)

    def _buffers(self, given, name, writes, whole, like=None):
        """The arrays in the order of the tensors, an array of weft_buffer, and what keeps them alive.
        None: new arrays of the kinds of `like`."""
        if isinstance(given, dict):
            missing = [each for each in self.names if each not in given] + [each for each in given if each not in self.names]
            if missing:
                raise errors.BadArgumentError(f"{name} has {', '.join(map(repr, given))}; expected {', '.join(map(repr, self.names))}")
            given = [given[each] for each in self.names]
        shapes = self._shapes[whole]
        if given is None:
            given = [arrays.empty_like(each, shape, self._context) for each, shape in zip(like, shapes)]
        given = list(given)
        if len(given) != len(self.names):
            raise errors.BadArgumentError(f"{name} has {len(given)} arrays; expected {len(self.names)}, as there are tensors")
        buffers, keep = (_api.weft_buffer * max(1, len(given)))(), []
        for i, (array, shape) in enumerate(zip(given, shapes)):
            which = f"{name}[{self.names[i]!r}]"
            if arrays.shape_of(array) != shape:
                raise errors.BadArgumentError(f"{which} has the shape {arrays.shape_of(array)}; expected {shape}")
            buffers[i], owner = arrays.view(array, which, writes)
            keep.append(owner)
        return given, buffers, keep
