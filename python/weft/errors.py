"""The exceptions of weft's functions: one class for each code of the library, each an Error with the
fields that a program can act on."""
import builtins
import copy
import ctypes
import operator
import traceback

from . import _api
from ._library import lib, per_thread

__all__ = ["Error", "BadArgumentError", "LayoutError", "UnsupportedError", "MismatchError", "TimeoutError", "PeerLostError", "AbortedError",
           "SystemError", "CorruptError"]


class Error(RuntimeError):
    """A failure that weft reports.

    code: "bad_argument", "timeout", ...; op: the operation it tells of, "all_reduce", ..., or "none";
    call: the call's number in its group, or None; ranks: the ranks to blame (dead, absent, mismatching),
    at most 16 of them; rank_count: how many there are; quiesced: False while peers may still touch the
    failed call's memory (Group.quiesce).
    """
    code = "system"

    def __init__(self, text, *, op="none", call=None, ranks=(), rank_count=None, quiesced=True):
        super().__init__(text)
        self.text = text
        self.op = op
        self.call = call
        self.ranks = tuple(ranks)
        self.rank_count = len(self.ranks) if rank_count is None else rank_count
        self.quiesced = quiesced

    def __reduce__(self):
        return _remade, (type(self), self.text, self.op, self.call, self.ranks, self.rank_count, self.quiesced)


def _remade(kind, text, op, call, ranks, rank_count, quiesced):
    return kind(text, op=op, call=call, ranks=ranks, rank_count=rank_count, quiesced=quiesced)


class BadArgumentError(Error, ValueError):
    """An argument of this call is wrong; nothing was sent."""
    code = "bad_argument"


class LayoutError(Error, ValueError):
    """A tensor's layout does not fit the operation, or its elements do not lie in a row."""
    code = "layout"


class UnsupportedError(Error, NotImplementedError):
    """This backend, build or process cannot do it."""
    code = "unsupported"


class MismatchError(Error):
    """Ranks called different things."""
    code = "mismatch"


class TimeoutError(Error, builtins.TimeoutError):  # pylint: disable=redefined-builtin
    """The deadline passed; `ranks` had not arrived."""
    code = "timeout"


class PeerLostError(Error, ConnectionError):
    """`ranks` died or left."""
    code = "peer_lost"


class AbortedError(Error):
    """Some rank aborted the group."""
    code = "aborted"


class SystemError(Error):  # pylint: disable=redefined-builtin
    """The operating system refused, or memory ran out."""
    code = "system"


class CorruptError(Error):
    """Bytes are damaged, in a file or in memory that ranks share: they are not what was written there."""
    code = "corrupt"


BY_STATUS = {_api.BAD_ARGUMENT: BadArgumentError, _api.LAYOUT: LayoutError, _api.UNSUPPORTED: UnsupportedError, _api.MISMATCH: MismatchError,
             _api.TIMEOUT: TimeoutError, _api.PEER_LOST: PeerLostError, _api.ABORTED: AbortedError, _api.SYSTEM: SystemError,
             _api.CORRUPT: CorruptError}


def from_struct(error):
    """The exception that a weft_error says."""
    ranks = [rank for rank in error.ranks[:min(error.rank_count, _api.ERROR_RANKS)] if rank >= 0]
    return BY_STATUS.get(error.code, SystemError)(
        error.text.decode("utf-8", "replace"), op=lib.op_name(error.op).decode(), call=None if error.call == _api.NO_CALL else error.call, ranks=ranks,
        rank_count=error.rank_count, quiesced=error.quiesced)


def to_struct(error, function, *args):
    """function(*args) of the program's, called by the library: a status, and in *error the text, of what
    it raises."""
    try:
        function(*args)
        return _api.OK
    except BaseException as failure:  # pylint: disable=broad-except
        said = getattr(failure, "text", None) or f"{type(failure).__name__}: {failure}"
        error.contents.text = said.encode()[:_api.ERROR_TEXT - 1].replace(b"\0", b" ")
        return next((status for status, kind in BY_STATUS.items() if isinstance(failure, kind)), _api.SYSTEM)


def again(error):
    """A copy of an error that an object keeps, to be raised in its place: an error that is raised refers
    to all frames that it passes, and one of them may refer to the object that keeps it."""
    try:
        made = copy.copy(error)
    except Exception:  # pylint: disable=broad-except  # a class whose arguments are not its `args`
        made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    made.__cause__, made.__context__, made.__suppress_context__ = error.__cause__, error.__context__, error.__suppress_context__
    return made.with_traceback(error.__traceback__)


class _Raised(Exception):
    """The cause of an error that was kept: where it was raised, as text."""

    def __str__(self):
        return f'\n"""\n{self.args[0]}"""'


def caught(error):
    """An error of a function of the program's, to be kept by an object. Its traceback becomes text: frames
    refer to those that called them, and one of these may refer to the object."""
    error.__cause__ = _Raised("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    error.__context__ = None
    return error.with_traceback(None)


def last():
    """The exception of the call that has just failed on this thread."""
    return from_struct(per_thread.error)


def call(function, *args):
    """function(*args, error), raising what it says."""
    try:
        status = function(*args, per_thread.ref)
    except ctypes.ArgumentError as error:  # what nothing before has looked at
        raise BadArgumentError(f"{function.__name__}: {error}") from None
    if status:
        raise last()


def take_text(handle):
    """The bytes of a weft_text, which is destroyed."""
    from ctypes import string_at
    try:
        return string_at(lib.text_data(handle), lib.text_size(handle))
    finally:
        lib.text_destroy(handle)


def nanoseconds(seconds, name, default=0):
    """Seconds as the C API takes a time: None is the default of the thing."""
    if seconds is None:
        return default
    try:
        value = float(seconds)
    except (TypeError, ValueError):
        raise BadArgumentError(f"{name} is {seconds!r}; expected seconds, or None for the default") from None
    if not 0 <= value <= 9e9:
        raise BadArgumentError(f"{name} is {seconds}; expected seconds from 0 to 9e9, or None for the default")
    return max(1, int(value * 1e9)) if value else default


def number(value, name):
    """A real number as the C API takes it."""
    try:
        return float(None if isinstance(value, (str, bytes)) else value)
    except (TypeError, ValueError):
        raise BadArgumentError(f"{name} is {value!r}; expected a number") from None


def instance(value, kind, name, none=False):
    """`value`, an object of this package that is open, as `kind` says; `none`: or None."""
    if value is None and none:
        return None
    if not isinstance(value, kind):
        raise BadArgumentError(f"{name} is of type {type(value).__name__}; expected a weft.{kind.__name__}{', or None' if none else ''}")
    value._open()
    return value


def octets(value, name):
    """Bytes as the C API takes them."""
    try:
        return value if isinstance(value, bytes) else bytes(memoryview(value))
    except TypeError:
        raise BadArgumentError(f"{name} is of type {type(value).__name__}; expected bytes") from None


def integer(value, name, bits=32):
    """A whole number as the C API takes it; ctypes would cut one that is too large."""
    try:
        number = operator.index(value)
    except TypeError:
        raise BadArgumentError(f"{name} is {value!r}; expected a whole number") from None
    if not -2**(bits - 1) <= number < 2**(bits - 1):
        raise BadArgumentError(f"{name} is {number}; expected a number of {bits} bits")
    return number
