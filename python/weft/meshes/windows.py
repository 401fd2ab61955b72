"""Halos and windows: each rank gets the range of indices that it requests of a tensor that is cut over
ranks, whichever rank holds them, and beyond the ends the elements that an edge states. Plans are made
once, without communication, on every rank the same, and used as often as needed, by one thread at a time.

An edge is "none", "zero", "periodic" (x[-1] = x[n-1]), "reflect" (x[-1] = x[1]), "replicate" (x[-1] =
x[0]), a number, which lies beyond the end then, or pole(longitude). `edges` is one edge for all ends, or
{dim: edge}, or {dim: (edge before, edge after)}; where none is given: "none".

`cuts`: {dim: begins} where a dimension is not cut evenly: part p has indices begins[p] to begins[p + 1] -
1, and the last of begins is the extent. Dimensions are counted from 0, or from the end as -1.
"""
import ctypes
import numbers

from .. import _api, arrays, errors
from .._api import weft_buffer, weft_edge
from .._arguments import choice
from .._handle import Handle, Made, blocking
from .._library import lib
from .layout import Layout
from .transfers import Exchange

__all__ = ["Halo", "Window", "pole", "start_together"]

_byref = ctypes.byref
EDGES = {"none": _api.EDGE_NONE, "zero": _api.EDGE_ZERO, "periodic": _api.EDGE_PERIODIC, "reflect": _api.EDGE_REFLECT, "replicate": _api.EDGE_REPLICATE}


def pole(longitude):
    """The edge of a globe's latitudes: beyond the end lies the same row, half a turn of dimension
    `longitude` further, the nearest first."""
    return weft_edge(_api.EDGE_POLE, errors.integer(longitude, "longitude"), 0.0)


def _edge(given, name):
    if isinstance(given, weft_edge):
        return given
    if isinstance(given, numbers.Real) and not isinstance(given, bool):
        return weft_edge(_api.EDGE_CONSTANT, 0, float(given))
    try:
        return weft_edge(choice(given, EDGES, name), 0, 0.0)
    except errors.BadArgumentError:
        raise errors.BadArgumentError(f"{name} is {given!r}; expected one of {', '.join(map(repr, EDGES))}, a number or weft.pole(longitude)") from None


def _dim(dim, rank, name):
    number = errors.integer(dim, name)
    if not -rank <= number < rank:
        raise errors.BadArgumentError(f"{name} has the dimension {dim}; expected {-rank} to {rank - 1}: the layout has {rank}")
    return number % rank


def _by_dim(given, rank, name):
    """{dim: value} with dimensions counted from 0."""
    if not isinstance(given, dict):
        raise errors.BadArgumentError(f"{name} is {given!r}; expected {{dim: ...}}")
    found = {}
    for dim, value in given.items():
        number = _dim(dim, rank, name)
        if number in found:
            raise errors.BadArgumentError(f"{name} has the dimension {number} twice; expected each once")
        found[number] = value
    return found


def _edges(given, dims, rank):
    """{dim: (before, after)} of all of `dims`."""
    by_dim = _by_dim(given, rank, "edges") if isinstance(given, dict) else {dim: given for dim in dims}
    for dim in by_dim:
        if dim not in dims:
            raise errors.BadArgumentError(f"edges has the dimension {dim}; expected one that is asked for: {sorted(dims)}")
    found = {}
    for dim in dims:
        edge = by_dim.get(dim)
        ends = edge if isinstance(edge, tuple) else (edge, edge)
        if len(ends) != 2:
            raise errors.BadArgumentError(f"edges[{dim}] is {edge!r}; expected an edge, or two: before and after")
        found[dim] = tuple(_edge("none" if end is None else end, f"edges[{dim}]") for end in ends)
    return found


def _cuts(given, rank):
    """An array of weft_cut, its length, and what it points to."""
    by_dim = _by_dim(given or {}, rank, "cuts")
    made, keep = (_api.weft_cut * max(1, len(by_dim)))(), []
    for place, (dim, begins) in zip(made, by_dim.items()):
        listed = (ctypes.c_int64 * max(1, len(begins)))(*(errors.integer(b, f"cuts[{dim}]", 64) for b in begins))
        place.dim, place.part_count, place.begins = dim, len(begins) - 1, listed
        keep.append(listed)
    return made, len(by_dim), keep


def _buffers(values, name, writes, shape):
    """An array of weft_buffer of arrays that have this shape, and what keeps them alive."""
    made, keep = (weft_buffer * max(1, len(values)))(), []
    for i, value in enumerate(values):
        which = name if len(values) == 1 else f"{name}[{i}]"
        if arrays.shape_of(value) != shape:
            raise errors.BadArgumentError(f"{which} has the shape {arrays.shape_of(value)}; expected {shape}")
        made[i], owner = arrays.view(value, which, writes)
        keep.append(owner)
    return made, keep


def _tuple(function, handle, rank, which, count):
    """The `which`-th of `count` lists of extents that a function writes."""
    lists = [(ctypes.c_int64 * max(1, rank))() for _ in range(count)]
    errors.call(function, handle, *lists, rank)
    return tuple(lists[which][:rank])


class Halo(Handle):
    """Ghost cells of arrays that hold this rank's part of a tensor, and around it copies of what its
    neighbours hold.

        halo = weft.Halo(layout, {0: 1, 1: (2, 0)}, edges="periodic")   # one row before and after, two columns before
        field = numpy.zeros(halo.shape)
        field[halo.inner] = whole[halo.part]
        halo.exchange(field).wait()                                     # the ghost cells are there, corners too

    shape: of this rank's array; inner: slices of it, where this rank's part lies; part: slices of the
    whole, that part. LayoutError where the layout is partial.
    """
    __slots__ = ("_layout", "shape", "inner", "part")
    _destroy = lib.halo_destroy

    def __init__(self, layout, ghost, *, edges="none", cuts=None):
        rank = len(errors.instance(layout, Layout, "layout").shape)
        ghost = _by_dim(ghost, rank, "ghost")
        ends = _edges(edges, list(ghost), rank)
        dims = (_api.weft_halo_dim * max(1, len(ghost)))()
        for place, (dim, widths) in zip(dims, ghost.items()):
            widths = widths if isinstance(widths, tuple) else (widths, widths)
            if len(widths) != 2:
                raise errors.BadArgumentError(f"ghost[{dim}] is {widths!r}; expected a number of cells, or two: before and after")
            place.dim, (place.before, place.after) = dim, (errors.integer(width, f"ghost[{dim}]", 64) for width in widths)
            place.before_edge, place.after_edge = ends[dim]
        listed, cut_count, _keep = _cuts(cuts, rank)
        handle = ctypes.c_void_p()
        errors.call(lib.halo_create, layout._open(), listed, cut_count, dims, len(ghost), _byref(handle))
        Handle.__init__(self, handle.value)
        self._layout = layout
        self.shape = _tuple(lib.halo_extents, self._handle, rank, 0, 1)
        inner, offsets, extents = (_tuple(lib.halo_part, self._handle, rank, which, 3) for which in range(3))
        self.inner = tuple(slice(at, at + size) for at, size in zip(inner, extents))
        self.part = tuple(slice(at, at + size) for at, size in zip(offsets, extents))

    def exchange(self, *fields):
        """Begins to fill the ghost cells of arrays of `shape`, of any dtypes, in one message for each
        neighbour and dtype; an Exchange, whose result is the array, or the tuple of them. Until it is done
        inner cells may be read, not written, and ghost cells neither: another exchange of this Halo that
        would write them is a BadArgumentError. A Window refuses the same."""
        return self._begin(lib.halo_start, "exchange", fields)

    def add(self, *fields):
        """The adjoint of `exchange`, in place: begins to add each ghost cell to the inner cell of which
        `exchange` makes it a copy, on the rank that holds that cell; to an inner cell first what rank 0
        sends, then what rank 1 sends, and so on. An Exchange as there. Ghost cells stay as they are.
        Integers, f64, f32, bf16 and f16. Until it is done ghost cells may be read, and inner cells near
        the border neither read nor written."""
        return self._begin(lib.halo_start_add, "add", fields)

    def _begin(self, function, name, fields):
        if not fields:
            raise errors.BadArgumentError(f"{name} has no arrays; expected at least one")
        buffers, keep = _buffers(fields, "fields", True, self.shape)
        made = Made(lib.exchange_destroy)
        blocking(function, self, buffers, len(fields), _byref(made), keep=keep)
        return Exchange(made, (self, keep), fields if len(fields) > 1 else fields[0])


class Window(Handle):
    """A range of indices for each rank, as an array of its own.

        window = weft.Window(layout, {0: [(-1, 31), (29, 61)]}, edges="zero")     # ranks that hold part 0 of dimension 0 want rows -1 to 30
        rows = window.start(part).wait()

    wanted: {dim: (lo, hi) of each part}; of dimensions that are not named each rank has its part as it is.
    shape: of this rank's window; part_shape: of what it holds.
    """
    __slots__ = ("_layout", "_rank", "shape", "part_shape")
    _destroy = lib.window_destroy

    def __init__(self, layout, wanted, *, edges="none", cuts=None):
        self._rank = rank = len(errors.instance(layout, Layout, "layout").shape)
        wanted = _by_dim(wanted, rank, "wanted")
        ends = _edges(edges, list(wanted), rank)
        dims, keep = (_api.weft_window_dim * max(1, len(wanted)))(), []
        for place, (dim, ranges) in zip(dims, wanted.items()):
            ranges = [tuple(r) for r in ranges]
            if any(len(r) != 2 for r in ranges):
                raise errors.BadArgumentError(f"wanted[{dim}] is {ranges!r}; expected (lo, hi) of each part")
            raw = (_api.weft_range * max(1, len(ranges)))(*(tuple(errors.integer(end, f"wanted[{dim}]", 64) for end in r) for r in ranges))
            place.dim, place.part_count, place.wanted = dim, len(ranges), raw
            place.before_edge, place.after_edge = ends[dim]
            keep.append(raw)
        listed, cut_count, _keep = _cuts(cuts, rank)
        handle = ctypes.c_void_p()
        errors.call(lib.window_create, layout._open(), listed, cut_count, dims, len(wanted), _byref(handle))
        Handle.__init__(self, handle.value)
        self._layout = layout
        self.part_shape, self.shape = (_tuple(lib.window_extents, self._handle, rank, which, 2) for which in range(2))

    def own(self, dim):
        """(lo, hi): the indices of the window, from 0, in a dimension that was named, of what this rank
        holds itself; they are there once `start` has returned."""
        found = _api.weft_range()
        errors.call(lib.window_own, self._open(), _dim(dim, self._rank, "dim"), _byref(found))
        return found.lo, found.hi

    def start(self, x, out=None):
        """Begins to make the window on x, which has `part_shape`; an Exchange, whose result is `out`;
        None: a new array of x's kind. Lists of arrays, of any dtypes, travel together, and give the list
        of their windows."""
        return self._start(lib.window_start, (None,), x, out, self.part_shape, self.shape)

    def adjoint(self, dy, out=None):
        """The adjoint of `start`: dy is a gradient of this rank's window; `out`, of `part_shape`, becomes
        the sum of what all windows have of each of its elements, in the order of ranks. Integers, f64,
        f32, bf16 and f16."""
        return self._start(lib.window_start_adjoint, (), dy, out, self.shape, self.part_shape)

    def _start(self, function, stream, x, out, from_shape, to_shape):
        first, second, keep, result = self._fields(x, out, from_shape, to_shape)
        made = Made(lib.exchange_destroy)
        blocking(function, self, first, second, len(first), *stream, _byref(made), keep=keep)
        return Exchange(made, (self, keep), result)

    def _fields(self, x, out, from_shape, to_shape):
        """Arrays of weft_buffer for `in` and `out`, what keeps them alive, and the result."""
        several = isinstance(x, (list, tuple))
        xs = list(x) if several else [x]
        first, keep = _buffers(xs, "in", False, from_shape)
        if out is None:
            outs = [arrays.empty_like(each, to_shape, self._layout._mesh._context) for each in xs]
        else:
            outs = list(out) if several else [out]
            if len(outs) != len(xs):
                raise errors.BadArgumentError(f"out has {len(outs)} arrays; expected {len(xs)}, as in has")
        second, kept = _buffers(outs, "out", True, to_shape)
        return first, second, (keep, kept), outs if several else outs[0]


def start_together(*plans):
    """Begins the exchanges of several halos, or of several windows, as one: each rank sends one message to
    each neighbour. An Exchange, whose result is the tuple of what each alone would give.

        weft.start_together((nodes, u, v), (cells, e)).wait()       # of a Halo: its arrays
        weft.start_together((near, x), (far, x, out)).wait()        # of a Window: x, and `out` or none

    The plans are different ones, cut over the same axes of one mesh, and all ranks give them in the same
    order. No array that is written is given twice."""
    if not plans:
        raise errors.BadArgumentError("start_together has no plans; expected at least one")
    for i, plan in enumerate(plans):
        if not isinstance(plan, tuple) or len(plan) < 2 or not isinstance(plan[0], (Halo, Window)) or type(plan[0]) is not type(plans[0][0]):
            what = f"({', '.join(type(each).__name__ for each in plan)})" if isinstance(plan, tuple) else f"of type {type(plan).__name__}"
            raise errors.BadArgumentError(f"plans[{i}] is {what}; expected (Halo, array, ...) in each, or (Window, x) or (Window, x, out) in each")
    keep, results = [plan[0] for plan in plans], []
    made = Made(lib.exchange_destroy)
    if isinstance(plans[0][0], Halo):
        listed, function, stream = (_api.weft_halo_fields * len(plans))(), lib.halo_start_together, ()
        for place, (halo, *fields) in zip(listed, plans):
            buffers, kept = _buffers(fields, "fields", True, halo.shape)
            place.halo, place.fields, place.field_count = halo._open(), buffers, len(fields)
            keep += [buffers, kept]
            results.append(tuple(fields) if len(fields) > 1 else fields[0])
    else:
        listed, function, stream = (_api.weft_window_fields * len(plans))(), lib.window_start_together, (None,)
        for place, plan in zip(listed, plans):
            window, x, out = plan if len(plan) > 2 else (*plan, None)
            first, second, kept, result = window._fields(x, out, window.part_shape, window.shape)
            place.window, place.in_, place.out, place.field_count = window._open(), first, second, len(result) if isinstance(result, list) else 1
            keep += [first, second, kept]
            results.append(result)
    blocking(function, listed, len(plans), *stream, _byref(made), keep=keep, also=[plan[0] for plan in plans])
    return Exchange(made, keep, tuple(results))
