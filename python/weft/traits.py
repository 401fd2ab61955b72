"""The abilities and guarantees of a transport."""
import ctypes
import typing

from . import _api, dtypes
from ._handle import blocking
from ._library import lib

__all__ = ["Traits"]

_STYLES = {_api.PROGRESS_POLLED: "polled", _api.PROGRESS_THREADED: "threaded", _api.PROGRESS_STREAM: "stream"}
_FLAGS = ("native_is_canonical", "spin", "rings", "deadline", "names_absent", "detects_death", "survives_death", "checks_calls", "revocable", "quiesces")


class Traits(typing.NamedTuple):
    """The operations that a transport performs itself (the rest is composed from them), and its
    guarantees."""
    # The agent of progress: "polled" (the thread that waits), "threaded" (a thread of the transport's),
    # "stream" (a device's).
    progress_style: str
    ops: frozenset[str]  # of operations' names
    dtypes: frozenset[str]  # that it moves, "f32", ...
    reduces: dict[str, frozenset[str]]  # reduce op -> the dtypes that it combines itself
    device: int  # whose memory it moves; 0: the CPU
    native_is_canonical: bool
    spin: bool  # a rank that waits may spin: there are no more ranks here than usable cores
    rings: bool  # it wakes a rank that sleeps
    deadline: bool  # a call that is not finished by its deadline fails with TimeoutError
    names_absent: bool  # ... which names the ranks that had not arrived
    detects_death: bool  # a rank that dies is PeerLostError on every survivor, before the deadline
    survives_death: bool  # survivors may go on, in other groups
    checks_calls: bool  # ranks that call different things get MismatchError
    revocable: bool  # after a failure it does not touch the callers' memory again
    quiesces: bool  # Group.quiesce becomes True even where a peer is stopped


def _bits(mask, names):
    return frozenset(name for number, name in names if mask >> number & 1)


def read_traits(function, *args):
    """The Traits that a function of the library writes."""
    raw = _api.make(_api.weft_traits)
    blocking(function, *args, ctypes.byref(raw))
    kinds = [(code, name) for name, code in dtypes.NAMES.items()]
    ops = [(number, lib.op_name(number).decode()) for number in range(1, 64) if raw.ops >> number & 1]
    reduces = {lib.reduce_op_name(op).decode(): _bits(raw.reduces[op], kinds) for op in range(_api.USER)}
    return Traits(_STYLES[raw.progress_style], _bits(raw.ops, ops), _bits(raw.dtypes, kinds), reduces, raw.device, *(bool(getattr(raw, f)) for f in _FLAGS))
