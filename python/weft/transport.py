"""A transport of the program's own, over which weft does everything else."""
import atexit
import ctypes
import itertools
import weakref

from . import _api, errors
from ._arguments import text
from ._handle import Made, blocking
from ._library import lib
from .group import Group
from .store import Store

__all__ = ["Transport"]

class Transport:
    """A transport of the program's own: streams of bytes between ranks. Derive, and give the four methods;
    Context.group_over makes groups over it.

    A channel joins the ranks of one group: from each rank to each other one it is a stream of bytes, which
    arrive in the order in which they were written, each once. Streams do not wait for each other. The
    methods of one channel are called by one thread at a time, from any that uses the group; they may not
    use a group of this transport. An exception of theirs fails the group on all ranks, with the code of a
    weft.Error (PeerLostError: that rank is lost), else SystemError.

    name: 1 to 31 letters, digits, '-', '_', in errors and traces; detects_death: write and read raise
    PeerLostError soon after the other rank has died.
    """
    name = "python"
    detects_death = False

    def open(self, rank, size, *, group, token, transport_ranks, limit):
        """Opens this rank's end of a channel, any object; all ranks of the group do. May wait for the
        others, at most `limit` seconds. group: its name; token: the same on all ranks of the group, and
        different for each group of the job; transport_ranks: for each rank of the group the one that it
        gave to group_over: the group may be a part of that one."""
        raise NotImplementedError

    def write(self, channel, to, data):
        """Takes the first bytes of `data`, a memoryview, for rank `to`, as many as it can at once; how
        many; 0: none now. Never waits."""
        raise NotImplementedError

    def read(self, channel, source, room):
        """Writes the next bytes of rank `source` into `room`, a memoryview, as many as there are; how
        many; 0: none now. Never waits."""
        raise NotImplementedError

    def close(self, channel):
        """The group has ended: nothing is called on the channel afterwards. Bytes written before still
        arrive."""


_FIELDS = dict(_api.weft_transport._fields_)
# Number -> (transport, channel, what it was made of): as long as a channel is open its transport may be asked
# for more.
_channels = {}
_numbers = itertools.count(1)
_groups = weakref.WeakSet()  # those of group_over


def _open(transport, made):
    def opened(_, init, channel, error):
        def run():
            i = init.contents
            got = transport.open(i.rank, i.size, group=i.group.decode(), token=i.token.decode(),
                                 transport_ranks=tuple(i.transport_ranks[:i.size]), limit=i.limit_ns / 1e9)
            number = next(_numbers)
            _channels[number] = transport, got, made
            channel[0] = number
        return errors.to_struct(error, run)
    return _FIELDS["open"](opened)


def _moved(method):
    def move(number, peer, memory, count, done, error):
        def run():
            transport, channel, _ = _channels[number]
            view = memoryview((ctypes.c_char * count).from_address(memory)).cast("B") if count else memoryview(b"")
            moved = errors.integer(getattr(transport, method)(channel, peer, view.toreadonly() if method == "write" else view), f"what {method} gave", 64)
            if not 0 <= moved <= count:
                raise errors.BadArgumentError(f"{type(transport).__name__}.{method} gave {moved}; expected 0 to {count}, the bytes that it was given")
            done[0] = moved
        return errors.to_struct(error, run)
    return _FIELDS[method](move)


def _close(number):
    transport, channel, _ = _channels.pop(number)
    transport.close(channel)


_WRITE, _READ, _CLOSE = _moved("write"), _moved("read"), _FIELDS["close"](_close)


@atexit.register
def _at_exit():
    """Groups leave while their transport can still say so. Objects that other handles keep end without it."""
    for group in list(_groups):
        group.close()


def group_over(context, transport, store, rank, size, options):
    """A group over a Transport."""
    if not isinstance(transport, Transport):
        raise errors.BadArgumentError(f"transport is {transport!r}; expected a weft.Transport")
    store = errors.instance(store, Store, "store", none=True)
    made = _api.make(_api.weft_transport)
    made.name, made.detects_death = text(transport.name, "transport.name"), bool(transport.detects_death)
    made.open, made.write, made.read, made.close = _open(transport, made), _WRITE, _READ, _CLOSE
    handle = Made(lib.group_destroy)
    blocking(lib.group_create_over, context, ctypes.byref(made), store, errors.integer(rank, "rank"), errors.integer(size, "size"), ctypes.byref(options),
             ctypes.byref(handle), keep=made)
    group = Group(handle, context)
    _groups.add(group)
    return group
