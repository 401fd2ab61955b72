"""Python objects between ranks: pickled, their sizes first. Unpickling runs code of the sender's: for
ranks that are trusted.

A rank whose object cannot be pickled says so instead of its size: then all ranks raise, and the group goes
on."""
import pickle

from . import errors

_UNPICKLED = -1  # in place of a size


def _pickled(value):
    """(bytes, None), or (no bytes, why not)."""
    try:
        return bytearray(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)), None
    except Exception as error:  # pylint: disable=broad-except  # whatever an object's own __reduce__ raises
        return bytearray(), errors.caught(error)


def _refuse(ranks, own):
    """Raises this rank's own failure, or tells of that of others."""
    if own is not None:
        raise errors.again(own)  # the caller's frame refers to `own`
    if ranks:
        raise errors.SystemError(f"the object of {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} could not be pickled", ranks=ranks)


def broadcast_object(group, value, root):
    mine = group.rank == root
    data, failure = _pickled(value) if mine else (None, None)
    count = group.broadcast(_UNPICKLED if failure else len(data) if mine else 0, root).wait()
    _refuse([root] if count == _UNPICKLED else [], failure)
    if not mine:
        data = bytearray(count)
    group.broadcast(data, root, out=data).wait()
    return value if mine else pickle.loads(data)


def _sizes(group, data, failure):
    """The sizes of all ranks' objects."""
    sizes = bytearray(8 * group.size)
    group.all_gather(_UNPICKLED if failure else len(data), out=memoryview(sizes).cast("q")).wait()
    counts = memoryview(sizes).cast("q").tolist()
    _refuse([rank for rank, count in enumerate(counts) if count == _UNPICKLED], failure)
    return counts


def _loaded(data, counts):
    values, begin = [], 0
    for count in counts:
        values.append(pickle.loads(memoryview(data)[begin:begin + count]))
        begin += count
    return values


def all_gather_object(group, value):
    data, failure = _pickled(value)
    counts = _sizes(group, data, failure)
    out = bytearray(sum(counts))
    group.all_gather_v(data, counts, out=out).wait()
    return _loaded(out, counts)


def gather_object(group, value, root):
    if not 0 <= errors.integer(root, "root") < group.size:
        raise errors.BadArgumentError(f"root is {root}; expected a rank from 0 to {group.size - 1}")
    data, failure = _pickled(value)
    counts = _sizes(group, data, failure)
    if group.rank != root:
        counts = [0] * group.size
    out = bytearray(sum(counts))
    group.all_to_all_v(data, [len(data) if rank == root else 0 for rank in range(group.size)], counts, out=out).wait()
    return _loaded(out, counts) if group.rank == root else None
