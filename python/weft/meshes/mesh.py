"""Meshes: the ranks of a group as a grid with named axes, and its parts. A mesh is a value; it keeps its
group."""
import ctypes

from .. import _api, errors
from .._arguments import text
from .._handle import Handle, Made, blocking
from .._library import lib
from ..context import Context
from ..group import Group

__all__ = ["Mesh"]

_byref = ctypes.byref


def _axes(sizes):
    """An array of weft_mesh_axis of {"dp": 2, "tp": -1}, and what it points to."""
    names = [text(name, "axis") for name in sizes]
    return (_api.weft_mesh_axis * max(1, len(names)))(*((name, errors.integer(size, "the size of an axis")) for name, size in zip(names, sizes.values()))), names


def _names(names):
    return (ctypes.c_char_p * max(1, len(names)))(*(text(name, "axis") for name in names))


class Mesh(Handle):
    """A grid of ranks as one of them sees it, or a sub-mesh: the ranks that share this rank's coordinates
    on all other axes.

        mesh = weft.Mesh(group, dp=2, tp=-1)         # -1: what is left of the ranks
        mesh["tp"], mesh["dp", "tp"]                 # sub-meshes
    """
    __slots__ = ("_context",)
    _destroy = lib.mesh_destroy

    def __init__(self, group, /, **sizes):
        """All ranks of `group` in row-major order: neighbours along the last axis have neighbouring ranks."""
        array, _ = _axes(sizes)
        handle = ctypes.c_void_p()
        errors.call(lib.mesh_create, errors.instance(group, Group, "group")._open(), array, len(sizes), _byref(handle))
        Handle.__init__(self, handle.value)
        self._context = group.context

    @classmethod
    def arithmetic(cls, context, rank, **sizes):
        """A mesh that cannot communicate, as `rank` sees it: to plan on one process."""
        array, _ = _axes(sizes)
        handle = ctypes.c_void_p()
        errors.call(lib.mesh_create_arithmetic, errors.instance(context, Context, "context")._open(), array, len(sizes), errors.integer(rank, "rank"), _byref(handle))
        return cls._of(handle, context)

    @classmethod
    def _of(cls, handle, context):
        made = cls.__new__(cls)
        Handle.__init__(made, handle.value)
        made._context = context
        return made

    def _other(self, function, *args):
        handle = ctypes.c_void_p()
        errors.call(function, self._open(), *args, _byref(handle))
        return Mesh._of(handle, self._context)

    def __getitem__(self, axes):
        """This rank's sub-mesh along some axes, in the order given."""
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        return self._other(lib.mesh_along, _names(axes), len(axes))

    def flatten(self, name):
        """All axes joined to one of this name."""
        return self._other(lib.mesh_flatten, text(name, "name"))

    def unflatten(self, axis, **parts):
        """A whole mesh of the same ranks in which one axis is divided into several."""
        array, _ = _axes(parts)
        return self._other(lib.mesh_unflatten, text(axis, "axis"), array, len(parts))

    @property
    def root(self):
        """The mesh that this one was cut from; of a whole mesh, that mesh."""
        return self._other(lib.mesh_root)

    def __eq__(self, other):
        if not isinstance(other, Mesh):
            return NotImplemented
        equal = ctypes.c_bool()
        errors.call(lib.mesh_equal, self._open(), other._open(), _byref(equal))
        return equal.value

    __hash__ = None

    def _number(self, function, *args):
        number = ctypes.c_int32()
        errors.call(function, self._open(), *args, _byref(number))
        return number.value

    @property
    def size(self):
        """How many ranks this mesh has."""
        return self._number(lib.mesh_size)

    @property
    def rank(self):
        """The number of this rank among them."""
        return self._number(lib.mesh_rank)

    @property
    def axes(self):
        """{name: size}, in their order."""
        found, axis = {}, _api.weft_mesh_axis()
        for index in range(self._number(lib.mesh_axis_count)):
            errors.call(lib.mesh_get_axis, self._open(), index, _byref(axis))
            found[axis.name.decode()] = axis.size
        return found

    def coordinate(self, axis):
        """This rank's coordinate on an axis."""
        return self._number(lib.mesh_coordinate, text(axis, "axis"))

    def coordinates(self, rank):
        """The coordinates of any rank of this mesh, one for each axis."""
        count = self._number(lib.mesh_axis_count)
        array = (ctypes.c_int32 * max(1, count))()
        errors.call(lib.mesh_coordinates, self._open(), errors.integer(rank, "rank"), array, count)
        return tuple(array[:count])

    def rank_at(self, *coordinates):
        """The rank of this mesh at these coordinates, one for each axis in order."""
        return self._number(lib.mesh_rank_at, (ctypes.c_int32 * max(1, len(coordinates)))(*(errors.integer(c, "coordinate") for c in coordinates)), len(coordinates))

    @property
    def ranks(self):
        """Its ranks as the whole mesh numbers them."""
        count = self.size
        array = (ctypes.c_int32 * count)()
        errors.call(lib.mesh_ranks, self._open(), array, count)
        return tuple(array)

    @property
    def group(self):
        """The group of this mesh's ranks. The first call for these axes is collective among them, and
        blocks."""
        made = Made(lib.group_destroy)
        blocking(lib.mesh_group, self, _byref(made))
        return Group(made, self._context)

    def __repr__(self):
        return f"<weft.Mesh {' x '.join(f'{name}={size}' for name, size in self.axes.items())}, rank {self.rank}>"
