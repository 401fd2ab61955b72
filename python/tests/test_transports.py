"""The traits of transports, and a transport that is written in Python."""
import threading

import numpy as np
import pytest
from conftest import on_threads

import weft


def test_traits_of_backends(ranks):
    def program(group):
        traits = group.traits
        assert traits.progress_style == "polled" and traits.device == 0 and traits.detects_death and traits.checks_calls and traits.native_is_canonical
        assert "all_reduce" in traits.ops and {"f32", "bf16"} <= traits.dtypes and "f32" in traits.reduces["sum"] and "f8e4m3" not in traits.reduces["sum"]
        assert group.context.backend_traits("shm").ops == traits.ops
        with pytest.raises(weft.UnsupportedError, match='^backend "nope" was not found'):
            group.context.backend_traits("nope")
        with pytest.raises(weft.BadArgumentError, match="^backend is 3; expected a string"):
            group.context.backend_traits(3)
    ranks(2, program)


class Queues(weft.Transport):
    """Streams of threads of one process."""
    name = "queues"

    def __init__(self):
        self.streams, self.lock, self.opened, self.closed, self.fail = {}, threading.Lock(), [], 0, None

    def open(self, rank, size, *, group, token, transport_ranks, limit):
        assert 0 < limit <= 60 and len(transport_ranks) == size
        with self.lock:
            self.opened.append((group, rank, transport_ranks))
        return token, rank

    def _stream(self, token, source, to):
        with self.lock:
            return self.streams.setdefault((token, source, to), bytearray())

    def write(self, channel, to, data):
        if self.fail == "write":
            raise KeyError("no way out")
        assert data.readonly
        self._stream(channel[0], channel[1], to).extend(data[:1000])
        return min(len(data), 1000)

    def read(self, channel, source, room):
        if self.fail == "lost":
            raise weft.PeerLostError("the cable is out")
        if self.fail == "much":
            return len(room) + 1
        stream = self._stream(channel[0], source, channel[1])
        count = min(len(stream), len(room))
        room[:count] = stream[:count]
        del stream[:count]
        return count

    def close(self, channel):
        self.closed += 1


def over(transport, size, program, deadline=20):
    """program(group) on threads that are ranks over a transport; what each returned or raised."""
    context, store, results = weft.Context(), weft.Store.local(), [None] * size

    def rank(number):
        try:
            with context.group_over(transport, store, number, size, deadline=deadline) as group:
                results[number] = program(group)
        except BaseException as error:  # pylint: disable=broad-except
            results[number] = error
    on_threads(size, rank)
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_operations_over_a_transport_in_python(size):
    transport = Queues()

    def program(group):
        assert group.backend == "queues" and "send" in group.traits.ops
        x = np.arange(3000.0) + group.rank
        np.testing.assert_array_equal(group.all_reduce(x).wait(), np.arange(3000.0) * size + sum(range(size)))
        assert group.all_gather(group.rank).wait().tolist() == list(range(size))
        assert group.all_gather_object({"a": group.rank}) == [{"a": rank} for rank in range(size)]
        half = group.split(0, key=-group.rank)
        assert half.broadcast(np.full(5, group.rank), 0).wait()[0] == size - 1
        half.close()
        group.barrier().wait()
        return True
    assert over(transport, size, program) == [True] * size
    assert transport.closed == len(transport.opened) and (size == 1 or len(transport.opened) >= 2 * size)
    if size == 3:
        assert (2, 1, 0) in {ranks for _, _, ranks in transport.opened}
    assert not weft.transport._channels


@pytest.mark.parametrize("fail, kind, text", [("write", weft.SystemError, "KeyError: 'no way out'"), ("lost", weft.PeerLostError, "the cable is out"),
                                              ("much", weft.BadArgumentError, r"Queues.read gave \d+; expected 0 to \d+, the bytes that it was given")])
def test_what_a_transport_raises_fails_the_group(fail, kind, text):
    transport, all_are_there = Queues(), threading.Barrier(2)

    def program(group):
        group.barrier().wait()
        all_are_there.wait(20)
        transport.fail = fail
        with pytest.raises(kind, match=text):
            for _ in range(100):
                group.all_reduce(np.ones(10)).wait()
        return True
    assert over(transport, 2, program) == [True, True]


def test_what_group_over_refuses():
    with weft.Context() as context, weft.Store.local() as store:
        with pytest.raises(weft.BadArgumentError, match="^transport is 'shm'; expected a weft.Transport$"):
            context.group_over("shm", store, 0, 1)
        transport = Queues()
        transport.name = "has spaces"
        with pytest.raises(weft.BadArgumentError, match="name"):
            context.group_over(transport, store, 0, 1)
        with pytest.raises(weft.SystemError, match="NotImplementedError"):
            context.group_over(weft.Transport(), store, 0, 1)


def test_a_program_that_leaves_its_group_open(processes):
    """The interpreter ends with the group, its mesh and a child still open."""
    done = processes(1, """
        import numpy as np, weft
        class Loop(weft.Transport):
            def open(self, rank, size, **_):
                return rank
            def close(self, channel):
                print("closed", flush=True)
        group = weft.Context().group_over(Loop(), weft.Store.local(), 0, 1)
        mesh, child = weft.Mesh(group, x=1), group.duplicate()
        print(group.all_reduce(1).wait(), child.all_reduce(2).wait())
        """)
    assert done.stdout.split()[:2] == ["1", "2"] and not done.stderr, done
