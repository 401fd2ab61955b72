"""Python objects between ranks: pickled, their sizes first. Unpickling runs code of the sender's: for ranks that are trusted."""
import pickle

from . import _api


def _pickled(value):
    return bytearray(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def broadcast_object(group, value, root):
    mine = group.rank == root
    data = _pickled(value) if mine else b""
    count = group.broadcast(len(data), root).wait()
    if not mine:
        data = bytearray(count)
    group.broadcast(data, root, out=data).wait()
    return value if mine else pickle.loads(data)


def _counts(group, data):
    sizes = bytearray(8 * group.size)
    group.all_gather(len(data), out=memoryview(sizes).cast("q")).wait()
    return memoryview(sizes).cast("q").tolist()


def _loaded(data, counts):
    values, begin = [], 0
    for count in counts:
        values.append(pickle.loads(memoryview(data)[begin:begin + count]))
        begin += count
    return values


def all_gather_object(group, value):
    data = _pickled(value)
    counts = _counts(group, data)
    out = bytearray(sum(counts))
    group.all_gather_v(data, counts, out=out).wait()
    return _loaded(out, counts)


def gather_object(group, value, root):
    data = _pickled(value)
    counts = _counts(group, data)
    if group.rank != root:
        group.send(data, root, tag=_api.OP_GATHER).wait()
        return None
    parts = [data if rank == root else bytearray(count) for rank, count in enumerate(counts)]
    for work in [group.recv(part, rank, tag=_api.OP_GATHER) for rank, part in enumerate(parts) if rank != root]:
        work.wait()
    return [pickle.loads(part) for part in parts]
