"""Layouts: how a tensor lies over a mesh; arrays brought from one layout to another."""
import ctypes
import math

from .. import _api, arrays, errors
from .._api import weft_tensor
from .._arguments import choice, text
from .._handle import Handle, Made, blocking
from .._library import lib
from ..group import REDUCE_OPS
from .mesh import Mesh
from .transfers import Transfer

__all__ = ["Layout", "partial", "replicate", "shard", "redistribute", "check_replicas"]

_byref = ctypes.byref


def replicate():
    """Each rank of an axis has the same."""
    return _api.weft_placement(_api.REPLICATE, 0, _api.SUM)


def shard(dim):
    """Dimension `dim` is cut among the ranks; the first ones hold one more where it is uneven."""
    return _api.weft_placement(_api.SHARD, errors.integer(dim, "dim"), _api.SUM)


def partial(op="sum"):
    """Each rank has a contribution of full size; the value is their combination."""
    return _api.weft_placement(_api.PARTIAL, 0, choice(op, REDUCE_OPS, "op"))


def _placement_text(placement):
    """As the library's error texts name it: Shard(0)."""
    if placement.kind == _api.SHARD:
        return f"Shard({placement.dim})"
    return "Replicate" if placement.kind == _api.REPLICATE else f"Partial({next(name for name, op in REDUCE_OPS.items() if op == placement.op)})"


_api.weft_placement.__repr__ = _placement_text


def _expect_placement(placement, name):
    if not isinstance(placement, _api.weft_placement):
        raise errors.BadArgumentError(f"{name} is {placement!r}; expected weft.shard(dim), weft.partial(op) or weft.replicate()")
    return placement


def _along(axes):
    """The handle of a mesh."""
    return errors.instance(axes, Mesh, "axes")._open()


class Layout(Handle):
    """A placement for each axis of a mesh, and the shape of the whole tensor. A value: what a method makes
    of it is another one.

        weft.Layout(mesh, (1024, 512), tp=weft.shard(0))      # axes that are not named: replicate
    """
    __slots__ = ("_mesh",)
    _destroy = lib.layout_destroy

    def __init__(self, mesh, shape, /, **placements):
        mesh, shape = errors.instance(mesh, Mesh, "mesh"), arrays.extents(shape)
        names = [text(name, "axis") for name in placements]
        for name, placement in placements.items():
            _expect_placement(placement, name)
        array = (_api.weft_axis_placement * max(1, len(names)))(*zip(names, placements.values()))
        handle = ctypes.c_void_p()
        errors.call(lib.layout_create, mesh._open(), array, len(names), _extents(shape), len(shape), _byref(handle))
        Handle.__init__(self, handle.value)
        self._mesh = mesh

    def _other(self, function, *args):
        return self._of_other(function, self._open(), *args)

    def _of_other(self, function, *args):
        """A layout over the same mesh that a function gives."""
        handle = ctypes.c_void_p()
        errors.call(function, *args, _byref(handle))
        made = Layout.__new__(Layout)
        Handle.__init__(made, handle.value)
        made._mesh = self._mesh
        return made

    def with_placement(self, axes, placement):
        """This layout with another placement on `axes`, a sub-mesh of its mesh."""
        return self._other(lib.layout_with, _along(axes), _byref(_expect_placement(placement, "placement")))

    def with_shape(self, shape):
        """This layout of a whole with other extents."""
        shape = arrays.extents(shape)
        return self._other(lib.layout_with_extents, _extents(shape), len(shape))

    def shard_inside(self, axes, dim):
        """`axes` shard dimension `dim` inside all other axes that do."""
        return self._other(lib.layout_shard_inside, _along(axes), errors.integer(dim, "dim"))

    def nested(self, *axes):
        """The axes named nest in this order, outermost first."""
        return self._other(lib.layout_nested, (ctypes.c_char_p * max(1, len(axes)))(*(text(a, "axis") for a in axes)), len(axes))

    def segmented(self, dim, lengths):
        """Dimension `dim` consists of segments of these lengths, each cut on its own."""
        lengths = tuple(lengths)
        return self._other(lib.layout_segmented, errors.integer(dim, "dim"), _extents(lengths), len(lengths))

    def reshaped(self, shape):
        """The layout of the same elements as an array of another shape, of which each rank keeps what it
        holds."""
        return self._other(lib.layout_reshape, _extents(shape), len(shape))

    def transposed(self, dims):
        """The layout of the array whose dimension i is dimension dims[i] of this one (NumPy: transpose)."""
        listed = [errors.integer(dim, f"dims[{i}]") for i, dim in enumerate(dims)]
        return self._other(lib.layout_transpose, (ctypes.c_int32 * max(1, len(listed)))(*listed), len(listed))

    def reduced(self, axes):
        """The layout that reduce_gradients gives a gradient: partial on any of `axes` becomes replicate."""
        return self._other(lib.layout_reduced, _along(axes))

    @property
    def mesh(self):
        """The whole mesh that it is over."""
        handle = ctypes.c_void_p()
        errors.call(lib.layout_mesh, self._open(), _byref(handle))
        return Mesh._of(handle, self._mesh._context)

    def on(self, axes):
        """Its placement on `axes`: "replicate", ("shard", dim) or ("partial", op)."""
        placement = _api.weft_placement()
        errors.call(lib.layout_on, self._open(), _along(axes), _byref(placement))
        if placement.kind == _api.SHARD:
            return "shard", placement.dim
        if placement.kind == _api.PARTIAL:
            return "partial", lib.reduce_op_name(placement.op).decode()
        return "replicate"

    @property
    def shape(self):
        """The extents of the whole."""
        return self._shape(lib.layout_extents)

    def local_shape(self, rank=-1):
        """The extents of what `rank` of the whole mesh holds; -1: this rank."""
        return self._shape(lib.layout_local_extents, errors.integer(rank, "rank"))

    def _shape(self, function, *args):
        count = self._number(lib.layout_dim_count)
        array = (ctypes.c_int64 * max(1, count))()
        errors.call(function, self._open(), *args, array, count)
        return tuple(array[:count])

    def parts(self, rank=-1):
        """Where the parts of a rank lie in the whole: (offsets, extents) of each; one, or one for each
        segment."""
        room = self._number(lib.layout_dim_count)
        found = []
        for index in range(self._number(lib.layout_part_count)):
            offsets, extents = (ctypes.c_int64 * max(1, room))(), (ctypes.c_int64 * max(1, room))()
            errors.call(lib.layout_part, self._open(), errors.integer(rank, "rank"), index, offsets, extents, room)
            found.append((tuple(offsets[:room]), tuple(extents[:room])))
        return found

    def _number(self, function):
        number = ctypes.c_int32()
        errors.call(function, self._open(), _byref(number))
        return number.value

    def __eq__(self, other):
        if not isinstance(other, Layout):
            return NotImplemented
        equal = ctypes.c_bool()
        errors.call(lib.layout_equal, self._open(), other._open(), _byref(equal))
        return equal.value

    __hash__ = None

    def __str__(self):
        size = ctypes.c_size_t()
        errors.call(lib.layout_text, self._open(), None, 0, _byref(size))
        room = ctypes.create_string_buffer(size.value)
        errors.call(lib.layout_text, self._open(), room, size.value, _byref(size))
        return room.value.decode()

    __repr__ = __str__


def _extents(shape):
    return (ctypes.c_int64 * max(1, len(shape)))(*(errors.integer(extent, "an extent", 64) for extent in shape))


def _expect_part(x, layout, which):
    """The library knows counts only. A row of all elements (bytearray, array.array) has no shape of its
    own."""
    has, holds = arrays.shape_of(x), layout.local_shape()
    if has != holds and has != (math.prod(holds),):
        raise errors.LayoutError(f"redistribute: {which} is of shape {has}; rank {layout.mesh.rank} of {layout} holds {holds}")


def redistribute(x, source, target, out=None):
    """Begins to give an array another layout of the same mesh and shape: x is this rank's part as
    `source`, `out` becomes its part as `target`; None: a new array of x's kind. Collective among the ranks
    of the axes whose placement changes. Gives a Transfer."""
    source, target = errors.instance(source, Layout, "source"), errors.instance(target, Layout, "target")
    if out is None:
        out = arrays.empty_like(x, target.local_shape(), source._mesh._context)
    first, keep = arrays.view(x, "in", False)
    second, kept = arrays.view(out, "out", True)
    _expect_part(x, source, "in")
    _expect_part(out, target, "out")
    made = Made(lib.transfer_destroy)
    blocking(lib.redistribute, _byref(first), source, _byref(second), target, None, _byref(made), keep=(keep, kept))
    return Transfer(made, (keep, kept, source, target), out)


def tensors(named, writes):
    """An array of weft_tensor of (name, array, layout) or (name, array) triples, or a dict; its length;
    and what it points to."""
    try:
        items = [(name, *value) if isinstance(value, tuple) else (name, value) for name, value in named.items()] if isinstance(named, dict) else list(named)
        fit = all(isinstance(item, (tuple, list)) and len(item) in (2, 3) for item in items)
    except TypeError:
        fit = False
    if not fit:
        raise errors.BadArgumentError(f"the tensors are {named!r:.80}; expected {{name: (array, layout)}}, {{name: array}}, or a list of tuples of these")
    made, keep = (weft_tensor * max(1, len(items)))(), []
    for place, item in zip(made, items):
        name, array, layout = item if len(item) == 3 else (*item, None)
        place.data, owner = arrays.view(array, f"tensor {name!r}", writes)
        place.name = text(name, "name")
        shape = arrays.shape_of(array)
        extents = _extents(shape)
        place.extents, place.dim_count = extents, len(shape)
        if layout is not None:
            place.layout = errors.instance(layout, Layout, f"the layout of {name!r}")._open()
        keep.append((owner, extents, layout))
    return made, len(items), keep


def check_replicas(named, axes):
    """Compares arrays along those of `axes` on which their layouts are replicate: the same bits on all
    ranks. `named`: {name: (array, layout)}. MismatchError on all ranks where one has drifted: `ranks` are
    those that differ. Collective; blocks."""
    array, count, owners = tensors(named, False)
    blocking(lib.check_replicas, array, count, errors.instance(axes, Mesh, "axes"), keep=owners)
