"""Reductions of the program's own."""
import ctypes

from . import _api, dtypes, errors
from ._arguments import text
from ._handle import Handle
from ._library import lib

__all__ = ["Reduction"]


class Reduction(Handle):
    """A reduction of the program's own: `combine(left, right)` gives, of two numpy arrays, the combined
    one. It must be associative; left comes from lower ranks. `name` is compared between ranks. An
    exception of it fails the call on this rank with SystemError and aborts the group: ranks that have a
    result already, which is invalid, get the error in their next call."""
    __slots__ = ("name", "_function", "_errors")
    _destroy = lib.reduction_destroy

    def __init__(self, name, combine):
        import numpy
        if not callable(combine):
            raise errors.BadArgumentError(f"combine is {combine!r}; expected a function of (left, right)")

        found = []  # what `combine` has raised since somebody asked

        def run(data, left, right, out, count, dtype):
            size = count * dtypes.SIZES[dtype]
            a, b, c = (numpy.frombuffer((ctypes.c_char * size).from_address(p), dtypes.to_numpy(dtype)) for p in (left, right, out))
            try:
                made = numpy.asarray(combine(a, b))
                if made.shape != a.shape:
                    raise ValueError(f"combine gave an array of shape {made.shape}; expected {a.shape}, that of left and right")
                c[...] = made
            except BaseException as error:  # pylint: disable=broad-except
                a = b = c = made = None
                if not found:
                    # The error's frames would show memory that is gone later.
                    found.append(errors.caught(error))
        self.name, self._errors = name, found
        self._function = _api.weft_combine(run)
        handle = ctypes.c_void_p()
        errors.call(lib.reduction_create, text(name, "name"), self._function, None, _NO_RELEASE, ctypes.byref(handle))
        super().__init__(handle.value)

    def _failed(self, group, failure):
        """The error of a call with this reduction that has ended: what `combine` raised, else `failure`."""
        if not self._errors:
            return failure
        error = self._errors[0]
        self._errors.clear()
        why = f"the reduction {self.name!r} raised {type(error).__name__}: {error}"
        if group._handle is not None:
            lib.group_abort(group._handle, why.encode().replace(b"\0", b" ")[:500], None)
        failure = errors.SystemError(why)
        failure.__cause__ = error
        return failure


_NO_RELEASE = _api.FUNCTIONS["weft_reduction_create"][1][3]()
