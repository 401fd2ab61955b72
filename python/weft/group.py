"""Groups of ranks and the operations that they perform together."""
import ctypes
import functools

from . import _api, _calls, arrays, dtypes, errors
from ._api import weft_call
from ._arguments import choice, text
from ._handle import Handle, Made, blocking
from ._library import lib, per_thread
from .exchanges import PersistentExchange, exchange_once
from .operations import ANY_SOURCE, NO_INPUT, REDUCE_OPS, Operations, options_of
from .reduction import Reduction
from .traits import read_traits
from .work import Work

__all__ = ["Group", "Batch", "Persistent", "start_all", "Message", "Reduction", "ANY_SOURCE", "REDUCE_OPS"]

_BLANK = bytes(_api.make(weft_call))
_submit, _start, _byref, _addressof = lib.submit, lib.persistent_start, ctypes.byref, ctypes.addressof
_begin, _types = _calls.begin, _calls.types


class Message:
    """A message that has come and that no recv has taken yet: source, tag, count (elements), dtype
    ("f32")."""
    __slots__ = ("source", "tag", "count", "dtype")

    def __init__(self, raw):
        self.source, self.tag, self.count, self.dtype = raw.source, raw.tag, raw.count, dtypes.name_of(raw.dtype)

    def __repr__(self):
        return f"Message(source={self.source}, tag={self.tag}, count={self.count}, dtype={self.dtype!r})"


class Group(Operations, Handle):
    """One rank's membership in a group of ranks. Made by Context.group and its like, and by a group's own
    `subgroup`, `split`, `duplicate`, `shrink`.

    Each method of an operation begins a call and gives a Work. Their arguments:

    x, out: arrays of NumPy, PyTorch or JAX, anything with __dlpack__ or the buffer protocol, or numbers;
    of one call all of one dtype, elements in a row. `out` None: a new array of the kind of `x`; `out=x`:
    in place. An `out` that is given must have the dtype and the number of elements; its shape does not
    matter. op: "sum", "avg", "min", "max", "prod", "premul_sum" (the sum of x times `scale`), "bit_and",
    "bit_or", "bit_xor", "logical_and", "logical_or", "logical_xor", or a Reduction. order: "canonical" for
    one tree over the ranks, the same on every transport. deadline: seconds; None: the group's.

    Closing it (or dropping it) leaves the group: peers that still wait for this rank get PeerLostError.
    Any thread; the order of collectives is then the program's to agree on.

    make_all_reduce and its like, one for each operation, describe a call that is to be begun often: a
    Persistent.
    """
    __slots__ = ("_context", "rank", "size", "name", "backend", "_unquiet")
    _destroy = lib.group_destroy

    def __init__(self, handle, context):
        Handle.__init__(self, handle)
        self._context = context
        self._unquiet = []  # arrays of failed calls that peers may still touch
        number, words = ctypes.c_int32(), ctypes.c_char_p()
        for name in ("rank", "size"):
            errors.call(getattr(lib, f"group_{name}"), self._handle, _byref(number))
            setattr(self, name, number.value)
        for name in ("name", "backend"):
            errors.call(getattr(lib, f"group_{name}"), self._handle, _byref(words))
            setattr(self, name, words.value.decode())

    def __repr__(self):
        return f"<weft.Group {self.name!r}: rank {self.rank} of {self.size}, {self.backend}>"

    @property
    def context(self):
        return self._context

    def _call(self, op, x, out, shape, options, root=None, peer=None, in_blocks=None, out_blocks=None, in_counts=True):
        if _begin is not None and in_blocks is None and out_blocks is None:
            work = self._begun(op, x if in_counts else None, x, out, shape, options, root, peer)
            if work is not None:
                return work
        call = weft_call.from_buffer_copy(_BLANK)
        keep, result = self._fill(call, op, x, out, shape, options, root, peer, in_blocks, out_blocks, in_counts)
        made = Made(lib.work_destroy, keep)
        if _submit(self._handle, _byref(call), _byref(made), per_thread.ref):
            self._open()
            raise errors.last()
        return Work(made, self, keep, result, op == _api.OP_RECV, (options.own,) if hasattr(options, "own") else None)

    def _begun(self, op, read, x, out, shape, options, root, peer):
        """The Work of a call that the compiled way has begun; None where something is not for it, and
        nothing has happened."""
        if shape is None:
            out = None
        elif out is None:
            if type(x) not in _types:
                return None
            out = arrays.empty_like(x, shape(x), self._context)
        if x is None and op not in NO_INPUT:
            return None
        work = Work(None, self, (read, out, options), out, op == _api.OP_RECV, (options.own,) if hasattr(options, "own") else None)
        begun = _begin(self._handle, op, read, out, 0 if options is None else _addressof(options), -1 if root is None else root, -1 if peer is None else peer,
                       work)
        if begun:
            return work
        if begun is None:
            return None
        self._open()
        raise errors.last()

    def send_recv(self, x, destination, out, source, tag=0, *, deadline=None):
        """A send and a receive at once, with the same tag, so that rings cannot deadlock. The result is
        `out`."""
        batch = self.batch()
        batch.send(x, destination, tag, deadline=deadline)
        batch.recv(out, source, tag, deadline=deadline)
        work = batch.submit()
        work._result = out
        return work

    def batch(self):
        """Several calls as one: their methods on the Batch, then its `submit()`."""
        return Batch(self)

    def make_exchange(self, plan, *, name="exchange"):
        """An exchange between neighbours that is begun often: the plan is checked and worked out; a
        PersistentExchange. Sends nothing. `name`: the beginning of the texts of its errors."""
        return PersistentExchange(self, plan, name)

    def exchange(self, plan, fields, out=None, *, name="exchange", deadline=None):
        """The same once, for a plan that changes with each call: make_exchange(plan).start(fields, out)."""
        return exchange_once(self, plan, fields, out, name, deadline)

    def probe(self, source=ANY_SOURCE, tag=0):
        """The Message that a recv of this source and tag would take now; None where none has come. Never
        waits."""
        raw, found = _api.weft_message(), ctypes.c_bool()
        options = options_of("sum", "native", None, None, tag)
        errors.call(lib.probe, self._open(), errors.integer(source, "source"), options, _byref(found), _byref(raw))
        return Message(raw) if found else None

    def wait_message(self, source=ANY_SOURCE, tag=0, *, deadline=None):
        """The Message that a recv of this source and tag would take. Waits until there is one, at most
        `deadline` seconds: then TimeoutError, and the group fails."""
        raw = _api.weft_message()
        blocking(lib.wait_message, self._open(), errors.integer(source, "source"), options_of("sum", "native", None, deadline, tag), _byref(raw))
        return Message(raw)

    def min_loc(self, values, indices, *, deadline=None):
        """(least, where): for each i the least of values[i] of all ranks, and the index (int64) that came
        with it. Blocks."""
        return self._located(lib.min_loc, values, indices, deadline)

    def max_loc(self, values, indices, *, deadline=None):
        """(largest, where): for each i the largest of values[i] of all ranks, and the index (int64) that
        came with it. Blocks."""
        return self._located(lib.max_loc, values, indices, deadline)

    def _located(self, function, values, indices, deadline):
        best = arrays.empty_like(values, arrays.shape_of(values), self._context)
        where = arrays.empty_like(indices, arrays.shape_of(indices), self._context)
        views = [arrays.view(values, "values", False), arrays.view(indices, "indices", False), arrays.view(best, "least", True),
                 arrays.view(where, "where", True)]
        blocking(function, self._open(), *(v[0] for v in views), options_of("sum", "native", None, deadline, 0), keep=views)
        return arrays.finish(best), arrays.finish(where)

    def subgroup(self, name, ranks):
        """A group of `ranks`, which hold this rank. Only they call it; blocks until they have."""
        ranks = [errors.integer(rank, f"ranks[{i}]") for i, rank in enumerate(ranks)]
        return self._made(lib.group_subgroup, text(name, "name"), (ctypes.c_int32 * max(1, len(ranks)))(*ranks), len(ranks))

    def split(self, color, key=0):
        """The ranks that give the same color, ordered by (key, rank). All ranks call it. Color -1: in no
        group, and None."""
        return self._made(lib.group_split, errors.integer(color, "color"), errors.integer(key, "key"))

    def split_by_host(self):
        """The ranks on this rank's host, in the same order; all ranks call it."""
        return self._made(lib.group_split_by_host)

    def duplicate(self):
        """A group of the same ranks whose calls are independent of this one's. All ranks call it."""
        return self._made(lib.group_duplicate)

    def shrink(self, limit=None):
        """After a failure: a group of the survivors. All who live call it."""
        return self._made(lib.group_shrink, errors.nanoseconds(limit, "limit"))

    def _made(self, function, *args):
        made = Made(lib.group_destroy)
        blocking(function, self._open(), *args, _byref(made))
        return Group(made, self._context) if made.value else None

    @property
    def traits(self):
        """The operations that the group's transport performs itself, and its guarantees: weft.Traits."""
        return read_traits(lib.group_traits, self._open())

    def parent_rank(self, rank):
        """The rank that `rank` has in the group that this one was made from; -1: it was not."""
        return self._number(lib.group_parent_rank, errors.integer(rank, "rank"))

    @property
    def local_rank(self):
        """This rank's place among the ranks of the group that are on its host."""
        return self._number(lib.group_local_rank)

    @property
    def local_size(self):
        """How many ranks of the group are on this rank's host."""
        return self._number(lib.group_local_size)

    def _number(self, function, *args):
        number = ctypes.c_int32()
        blocking(function, self._open(), *args, _byref(number))
        return number.value

    def leave(self, *, deadline=None):
        """The last call of all ranks: waits for them, at most `deadline` seconds (None: the group's),
        compares what they have called, also in broadcasts and scatters, whose roots wait for nobody, and
        closes the group. MismatchError on every rank where calls differ or a rank has left one out."""
        blocking(lib.group_leave, self._open(), errors.nanoseconds(deadline, "deadline"))
        self.close()

    def abort(self, why):
        """Fails every pending and later call of every rank with AbortedError and this text. Does not
        block."""
        errors.call(lib.group_abort, self._open(), text(why, "why"))

    def quiesce(self, limit=0):
        """After a failure: waits at most `limit` seconds until nobody can touch the memory of failed calls
        any more; whether that is so."""
        quiet = ctypes.c_bool()
        blocking(lib.group_quiesce, self._open(), errors.nanoseconds(limit, "limit"), _byref(quiet))
        if quiet:
            self._unquiet.clear()
        return quiet.value

    def trace(self, style="json"):
        """The last 1024 calls of this rank: "json", or "chrome" for Perfetto."""
        made = ctypes.c_void_p()
        errors.call({"json": lib.group_trace_json, "chrome": lib.group_trace_chrome}[choice(style, {"json": "json", "chrome": "chrome"}, "style")],
                    self._open(), _byref(made))
        return errors.take_text(made).decode("utf-8", "replace")

    def broadcast_object(self, value, root=0):
        """A Python object of rank `root`, pickled, on all ranks. All ranks call it; elsewhere `value` does
        not count. Blocks. Use it with ranks that are trusted."""
        from .objects import broadcast_object
        return broadcast_object(self, value, root)

    def all_gather_object(self, value):
        """A list of the objects of all ranks. All ranks call it; blocks."""
        from .objects import all_gather_object
        return all_gather_object(self, value)

    def gather_object(self, value, root=0):
        """A list of the objects of all ranks at rank `root`; elsewhere None. All ranks call it; blocks."""
        from .objects import gather_object
        return gather_object(self, value, root)


class Persistent(Handle):
    """A call that was checked and described once, by Group.make_all_reduce or its like, and is begun by
    each `start`: a persistent operation of MPI.

    It keeps the call's arrays alive. Each start takes what they hold then, and its Work's result is the
    same array each time. For the other ranks a start is what the plain method is, which they may call as
    well. Closing it leaves a call in flight alone. For one thread at a time.
    """
    __slots__ = ("_group", "_keep", "_result", "_is_recv", "_from_any", "_reductions")
    _destroy = lib.persistent_destroy

    def __init__(self, handle, group, keep, result, is_recv, from_any, reductions):
        Handle.__init__(self, handle)
        self._from_any = from_any
        self._group, self._keep, self._result, self._is_recv, self._reductions = group, keep, result, is_recv, reductions

    def start(self):
        """Begins the call; gives a Work. BadArgumentError, and nothing is sent, while the Work of the last
        start is not done, and once the group is closed."""
        self._group._open()
        made = Made(lib.work_destroy, self._keep)
        if _start(self._open(), _byref(made), per_thread.ref):
            raise errors.last()
        return Work(made, self._group, self._keep, self._result, self._is_recv, self._reductions)


def start_all(calls):
    """Starts several Persistent calls of one group as one, as a Batch begins its calls; one Work, whose
    result is the list of theirs. So a send and a receive that neighbours start are no deadlock on any
    transport."""
    calls = list(calls)
    for i, call in enumerate(calls):
        errors.instance(call, Persistent, f"calls[{i}]")
    if not calls:
        raise errors.BadArgumentError("calls is empty; expected at least one Persistent")
    group = calls[0]._group
    group._open()
    keep, reductions = [call._keep for call in calls], [r for call in calls for r in call._reductions or ()]
    made = Made(lib.work_destroy, keep)
    handles = (ctypes.c_void_p * len(calls))(*(call._open() for call in calls))
    errors.call(lib.persistent_start_all, handles, len(calls), _byref(made))
    return Work(made, group, keep, [call._result for call in calls], sum(call._from_any for call in calls), reductions)


class _Making(Operations):
    """Describes an operation of a Group instead of starting it."""

    def __init__(self, group):
        self.group, self._context, self.rank, self.size = group, group._context, group.rank, group.size

    def _call(self, op, x, out, shape, options, root=None, peer=None, in_blocks=None, out_blocks=None, in_counts=True):
        call = weft_call.from_buffer_copy(_BLANK)
        keep, result = self._fill(call, op, x, out, shape, options, root, peer, in_blocks, out_blocks, in_counts)
        made = Made(lib.persistent_destroy, keep)
        errors.call(lib.persistent_create, self.group._open(), _byref(call), _byref(made))
        return Persistent(made, self.group, keep, result, op == _api.OP_RECV, op == _api.OP_RECV and peer == ANY_SOURCE, (options.own,) if hasattr(options, "own") else None)


def _maker(operation):
    @functools.wraps(operation)
    def make(self, *args, **options):
        return operation(_Making(self), *args, **options)
    make.__name__ = f"make_{operation.__name__}"
    make.__qualname__ = f"Group.{make.__name__}"
    make.__doc__ = f"The call of `{operation.__name__}` with the same arguments, to be begun often: a Persistent. Sends nothing."
    return make


for _name, _operation in list(vars(Operations).items()):
    if not _name.startswith("_"):
        setattr(Group, f"make_{_name}", _maker(_operation))


class Batch(Operations):
    """Calls that are begun together and done when all of them are. Methods add calls and give the number
    that each has."""

    def __init__(self, group):
        self.group, self._context, self.rank, self.size = group, group._context, group.rank, group.size
        self._calls, self._keep, self._results, self._reductions = [], [], [], []
        self._from_any = 0  # how many are a recv from ANY_SOURCE

    def __reduce__(self):
        raise TypeError("weft: a Batch cannot be pickled or copied: its calls are of this process, and begin once")

    def _call(self, op, x, out, shape, options, root=None, peer=None, in_blocks=None, out_blocks=None, in_counts=True):
        call = weft_call.from_buffer_copy(_BLANK)
        keep, result = self._fill(call, op, x, out, shape, options, root, peer, in_blocks, out_blocks, in_counts)
        if hasattr(options, "own"):
            self._reductions.append(options.own)
        self._from_any += op == _api.OP_RECV and peer == ANY_SOURCE
        self._calls.append(call)
        self._keep.append(keep)
        self._results.append(result)
        return len(self._calls) - 1

    def submit(self):
        """One Work for all of them; its result is the list of theirs."""
        count = len(self._calls)
        calls = (weft_call * max(1, count))(*self._calls)
        made = Made(lib.work_destroy, (self._keep, calls))
        errors.call(lib.coalesced, self.group._open(), calls, count, _byref(made))
        return Work(made, self.group, (self._keep, calls), list(self._results), self._from_any, self._reductions)
