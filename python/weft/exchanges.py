"""Exchanges between neighbours: each rank sends boxes of elements of its arrays to the ranks that its plan
names, and receives boxes of theirs (MPI_Neighbor_alltoallw of MPI 4)."""
import array
import ctypes
import math
import sys

from . import _api, arrays, dtypes, errors
from ._api import weft_buffer
from ._arguments import choice, text
from ._handle import Handle, Made
from ._library import lib, per_thread
from .operations import options_of
from .work import Work

__all__ = ["Box", "ExchangePlan", "PersistentExchange"]

_byref = ctypes.byref
KINDS = {"copy": _api.EXCHANGE_COPY, "add": _api.EXCHANGE_ADD}


class Box:
    """Elements of a field, in an order: element (i, j, ...) is `offset + i * strides[0] + j * strides[1] +
    ...` elements from where the field begins. `strides` None: those of a row-major array of `counts`.

    If there are `indices`, indices[i] stands in the place of i: whole numbers, 0 or more, in any order;
    `counts` None is as many. The other rank may give indices, too, or a box of the same counts without.
    """
    __slots__ = ("field", "counts", "strides", "offset", "indices")

    def __init__(self, counts=None, *, field=0, offset=0, strides=None, indices=None):
        self.field = errors.integer(field, "field")
        self.offset = errors.integer(offset, "offset", 64)
        self.indices = None if indices is None else _numbers(indices, "indices")
        if counts is None:
            counts = () if indices is None else (len(self.indices),)
        self.counts = _numbers(counts, "counts")
        self.strides = None if strides is None else _numbers(strides, "strides")
        if self.strides is not None and len(self.strides) != len(self.counts):
            raise errors.BadArgumentError(f"strides has {len(self.strides)} numbers; expected {len(self.counts)}, as counts has")
        if self.indices is not None and (len(self.counts) == 0 or self.counts[0] != len(self.indices)):
            raise errors.BadArgumentError(f"indices has {len(self.indices)} numbers where counts is {tuple(self.counts)}; expected counts[0] of them")

    @classmethod
    def of(cls, shape, index, *, field=0):
        """The box of array[index] of a row-major array of this shape. index: numbers and slices, as
        numpy.s_ gives them, or an array of indices, which stands first.

            weft.Box.of(plate.shape, numpy.s_[0, 1:-1])     # the first row, without its ends
            weft.Box.of(points.shape, nodes)                # rows points[nodes]
        """
        shape = arrays.extents(shape)
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > len(shape):
            raise errors.BadArgumentError(f"index has {len(index)} places; expected at most {len(shape)}: the shape is {shape}")
        offset, counts, strides, indices = 0, [], [], None
        for i, extent in enumerate(shape):
            step, at = math.prod(shape[i + 1:]), index[i] if i < len(index) else slice(None)
            if isinstance(at, slice):
                found = range(*at.indices(extent))
                offset += (found[0] if found else 0) * step
                counts.append(len(found))
                strides.append(found.step * step)
            elif hasattr(at, "__len__"):
                if counts:
                    raise errors.BadArgumentError(f"index[{i}] is an array of indices; expected it first, behind numbers alone")
                indices = _numbers(at, f"index[{i}]")
                for number in indices:
                    if not 0 <= number < extent:
                        raise errors.BadArgumentError(f"index[{i}] has {number}; expected 0 to {extent - 1}")
                counts.append(len(indices))
                strides.append(step)
            else:
                number = errors.integer(at, f"index[{i}]", 64)
                if not -extent <= number < extent:
                    raise errors.BadArgumentError(f"index[{i}] is {number}; expected {-extent} to {extent - 1}")
                offset += number % extent * step
        return cls(counts, field=field, offset=offset, strides=strides, indices=indices)

    def __repr__(self):
        more = "" if self.indices is None else f", {len(self.indices)} indices"
        return f"<weft.Box of field {self.field}: {tuple(self.counts)} from {self.offset}{more}>"


def _numbers(given, name):
    """Whole numbers of 64 bits, as an array.array."""
    numpy, made = sys.modules.get("numpy"), array.array("q")
    if isinstance(given, array.array) and given.typecode == "q":
        return given
    if numpy is not None and isinstance(given, numpy.ndarray) and given.ndim == 1:
        if given.dtype.kind == "i" or given.dtype.kind == "u" and given.dtype.itemsize < 8:
            made.frombytes(given.astype("=i8").tobytes())
            return made
        given = given.tolist()
    if not hasattr(given, "__len__"):
        raise errors.BadArgumentError(f"{name} is {given!r}; expected whole numbers")
    made.extend(errors.integer(number, f"{name}[{i}]", 64) for i, number in enumerate(given))
    return made


def _pointer(numbers):
    """A pointer for C; it keeps the numbers."""
    return (ctypes.c_int64 * max(1, len(numbers))).from_buffer(numbers if len(numbers) else array.array("q", [0]))


class ExchangePlan:
    """The part of one rank in an exchange. fields: the dtypes of the arrays; sends, receives: {rank: [Box,
    ...]}. Two ranks that send to each other give boxes of the same fields and counts, in the same order;
    where they lie is each rank's own. Boxes that a rank sends to itself are copied.

    kind: "copy", or "add": elements that come are added to those that are there, in the order of the ranks.
    """
    __slots__ = ("fields", "sends", "receives", "kind")

    def __init__(self, fields, sends=None, receives=None, *, kind="copy"):
        self.fields = tuple(dtypes.of(dtype) for dtype in ([fields] if isinstance(fields, (str, type)) else fields))
        self.sends, self.receives = _parts(sends, "sends"), _parts(receives, "receives")
        choice(kind, KINDS, "kind")
        self.kind = kind

    def _raw(self, name):
        """A weft_exchange_plan, and what it points to."""
        raw = _api.make(_api.weft_exchange_plan)
        keep = [text(name, "name"), (ctypes.c_int32 * max(1, len(self.fields)))(*self.fields)]
        raw.name, raw.kind = keep[0], KINDS[self.kind]
        raw.fields, raw.field_count = keep[1], len(self.fields)
        raw.sends, raw.send_count = _raw_parts(self.sends, keep)
        raw.receives, raw.receive_count = _raw_parts(self.receives, keep)
        return raw, keep


def _parts(given, name):
    if given is not None and not isinstance(given, dict):
        raise errors.BadArgumentError(f"{name} is {given!r}; expected {{rank: [weft.Box, ...]}}")
    found = {}
    for peer, boxes in (given or {}).items():
        listed = [boxes] if isinstance(boxes, Box) else list(boxes)
        for i, box in enumerate(listed):
            if not isinstance(box, Box):
                raise errors.BadArgumentError(f"{name}[{peer}][{i}] is of type {type(box).__name__}; expected a weft.Box")
        found[errors.integer(peer, name)] = listed
    return found


def _raw_parts(parts, keep):
    made = (_api.weft_exchange_part * max(1, len(parts)))()
    for part, (peer, boxes) in zip(made, parts.items()):
        raw = (_api.weft_exchange_box * max(1, len(boxes)))()
        for place, box in zip(raw, boxes):
            place.field, place.dim_count, place.offset = box.field, len(box.counts), box.offset
            place.counts = _pointer(box.counts)
            place.strides, place.indices = (None if numbers is None else _pointer(numbers) for numbers in (box.strides, box.indices))
        part.peer, part.box_count, part.boxes = peer, len(boxes), raw
        keep.append(raw)
    keep.append(made)
    return made, len(parts)


def _plan(given):
    if not isinstance(given, ExchangePlan):
        raise errors.BadArgumentError(f"plan is of type {type(given).__name__}; expected a weft.ExchangePlan")
    return given


def _fields_of(boxes_by_peer):
    return {box.field for boxes in boxes_by_peer.values() for box in boxes}


class _Uses:
    """The fields of a plan that are read, and that are written."""
    __slots__ = ("count", "read", "written")

    def __init__(self, plan):
        self.count, self.read, self.written = len(plan.fields), _fields_of(plan.sends), _fields_of(plan.receives)

    def buffers(self, fields, out):
        """(in, out, result, what keeps them alive) of a start."""
        several = isinstance(fields, (list, tuple))
        ins = list(fields) if several else [fields]
        outs = ins if out is None else list(out) if isinstance(out, (list, tuple)) else [out]
        for name, values in (("fields", ins), ("out", outs)):
            if len(values) != self.count:
                raise errors.BadArgumentError(f"{name} has {len(values)} arrays; expected {self.count}, as the plan has")
        first, kept = self._raw(ins, "fields", self.read, False)
        second, more = self._raw(outs, "fields" if out is None else "out", self.written, True)
        return first, second, (fields if out is None else out), (kept, more)

    def _raw(self, values, name, used, writes):
        made, keep = (weft_buffer * max(1, self.count))(), []
        for i in used:
            if 0 <= i < self.count:
                made[i], owner = arrays.view(values[i], name if self.count == 1 else f"{name}[{i}]", writes)
                keep.append(owner)
        return made, keep


class PersistentExchange(Handle):
    """A plan that was checked and worked out once, by Group.make_exchange, and is begun by each `start`.
    Closing it leaves exchanges in flight alone. For one thread at a time."""
    __slots__ = ("_group", "_uses")
    _destroy = lib.persistent_exchange_destroy

    def __init__(self, group, plan, name):
        raw, _keep = _plan(plan)._raw(name)
        made = Made(lib.persistent_exchange_destroy)
        errors.call(lib.persistent_exchange_create, group._open(), _byref(raw), _byref(made))
        Handle.__init__(self, made)
        self._group, self._uses = group, _Uses(plan)

    def start(self, fields, out=None, *, deadline=None):
        """Begins the exchange of these arrays, one for each of the plan's fields, or the one array; a Work,
        whose result is `out`. Boxes that are sent count from `fields`, boxes that are received from `out`;
        None: they are the same arrays. An array of which nothing is sent, or nothing received, may be None
        there.

        Only the ranks that the plan names take part. Two neighbours start the exchanges between them in the
        same order; MismatchError where their plans differ. Several may be in flight, of different memory.
        BadArgumentError, and nothing is sent, where elements that are written are written twice, or sent,
        too, and once the group is closed."""
        self._group._open()
        ins, outs, result, keep = self._uses.buffers(fields, out)
        made = Made(lib.work_destroy, keep)
        if lib.persistent_exchange_start(self._open(), ins, outs, self._uses.count, options_of("sum", "native", None, deadline, 0), _byref(made),
                                         per_thread.ref):
            raise errors.last()
        return Work(made, self._group, keep, result)


def exchange_once(group, plan, fields, out, name, deadline):
    """The whole of Group.exchange."""
    raw, _keep = _plan(plan)._raw(name)
    uses = _Uses(plan)
    ins, outs, result, keep = uses.buffers(fields, out)
    made = Made(lib.work_destroy, keep)
    errors.call(lib.group_exchange, group._open(), _byref(raw), ins, outs, uses.count, options_of("sum", "native", None, deadline, 0), _byref(made))
    return Work(made, group, keep, result)
