"""Exchanges between neighbours: boxes and lists of indices against NumPy's own indexing."""
import copy
import gc
import pickle

import numpy as np
import pytest

import weft

BACKENDS = ["shm", "gloo"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_ring_of_columns(ranks, size, backend):
    """The last column of each rank becomes the first one of the next; two arrays travel together."""
    shape = (4, 6)

    def program(group):
        rank, before, behind = group.rank, (group.rank - 1) % size, (group.rank + 1) % size
        sent = [weft.Box.of(shape, np.s_[:, -1]), weft.Box.of((5,), np.s_[3:], field=1)]
        received = [weft.Box.of(shape, np.s_[:, 0]), weft.Box.of((5,), np.s_[:2], field=1)]
        plan = weft.ExchangePlan(["f64", np.int32], {behind: sent}, {before: received})

        def arrays(of, turn):
            return np.arange(24.0).reshape(shape) + 100 * of + turn, np.arange(5, dtype=np.int32) + 100 * of + turn

        exchange = group.make_exchange(plan)
        for turn in range(3):
            (x, y), (their_x, their_y) = arrays(rank, turn), arrays(before, turn)
            wanted_x, wanted_y = x.copy(), y.copy()
            wanted_x[:, 0], wanted_y[:2] = their_x[:, -1], their_y[3:]
            if turn < 2:
                result = exchange.start([x, y]).wait()
            else:
                result = group.exchange(plan, (x, y), deadline=5).wait()
            assert result[0] is x and result[1] is y
            np.testing.assert_array_equal(x, wanted_x)
            np.testing.assert_array_equal(y, wanted_y)
        # Into other arrays; those that keep what they had.
        (x, y), (their_x, their_y) = arrays(rank, 9), arrays(before, 9)
        out = np.zeros(shape), np.zeros(5, np.int32)
        work = exchange.start((x, y), out)
        del exchange
        assert work.wait() is out
        np.testing.assert_array_equal(out[0][:, 0], their_x[:, -1])
        np.testing.assert_array_equal(out[1], [*their_y[3:], 0, 0, 0])
        assert not out[0][:, 1:].any()
    ranks(size, program, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nodes_of_a_partition(ranks, backend):
    """Rows by their numbers to ghosts that lie in a piece; and the ghosts' back, added."""
    nodes, ghosts = 1000, 300

    def shared(rank):
        return np.random.default_rng(rank).permutation(nodes)[:ghosts]

    def points(rank):
        return np.random.default_rng(10 + rank).integers(0, 100, (nodes + ghosts, 3)).astype("f4")

    def program(group):
        rank, before, behind = group.rank, (group.rank - 1) % 3, (group.rank + 1) % 3
        x = points(rank)
        mine = weft.Box.of(x.shape, shared(rank))
        theirs = weft.Box.of(x.shape, np.s_[nodes:])
        wanted = x.copy()
        wanted[nodes:] = points(before)[shared(before)]
        assert group.exchange(weft.ExchangePlan("f32", {behind: mine}, {before: theirs}), x).wait() is x
        np.testing.assert_array_equal(x, wanted)
        wanted[shared(rank)] *= 2
        group.make_exchange(weft.ExchangePlan("f32", {before: [theirs]}, {behind: [mine]}, kind="add")).start(x).wait()
        np.testing.assert_array_equal(x, wanted)
        # Several that are added to one; lists of Python, and of other whole numbers.
        twice = weft.Box(indices=[5, 5, 7])
        z = np.zeros(10, "i8")
        plan = weft.ExchangePlan([int], {behind: weft.Box(indices=np.array([0, 1, 2], "u4"))}, {before: twice}, kind="add")
        group.exchange(plan, np.array([1, 2, 4]), z).wait()
        assert z.tolist() == [0, 0, 0, 0, 0, 3, 0, 4, 0, 0]
    ranks(3, program, backend=backend)


def test_arrays_that_are_not_needed(ranks):
    def program(group):
        x, box = np.arange(4.0), weft.Box((4,))
        if group.rank == 0:
            group.exchange(weft.ExchangePlan(["f64", "f32"], {1: box}), [x, None]).wait()
        else:
            out = np.zeros(4)
            group.exchange(weft.ExchangePlan(["f64", "f32"], {}, {0: box}), [None, None], [out, None]).wait()
            np.testing.assert_array_equal(out, x)
        frozen = np.arange(4.0)
        frozen.flags.writeable = False
        peer = 1 - group.rank
        out = np.empty(4)
        group.exchange(weft.ExchangePlan("f64", {peer: box}, {peer: box}), frozen, out).wait()
        np.testing.assert_array_equal(out, frozen)
        with pytest.raises(weft.BadArgumentError, match="^fields is read-only"):
            group.exchange(weft.ExchangePlan("f64", {}, {peer: box}), frozen)
    ranks(2, program)


@pytest.mark.parametrize("index", [np.s_[1], np.s_[:, 2], np.s_[1:3, ::2], np.s_[::-1, 4:0:-2], np.s_[-1, -1], np.s_[2:2], np.s_[()], [3, 0, 2], ([3, 0, 2], np.s_[1:3]),
                                   (2, [4, 1, 1, 0]), (np.array([1, 1], "i2"), 3)])
def test_boxes_are_numpys(index):
    whole = np.arange(20).reshape(4, 5)
    box = weft.Box.of(whole.shape, index)
    first = list(range(box.counts[0])) if box.indices is None and len(box.counts) else box.indices
    at = np.full((), box.offset)
    for d in range(len(box.counts) - 1, -1, -1):
        steps = np.array(list(first) if d == 0 else range(box.counts[d]), int) * box.strides[d]
        at = np.add.outer(steps, at - box.offset) + box.offset if at.ndim else steps + at
    np.testing.assert_array_equal(whole.ravel()[at], whole[index])
    for twin in (pickle.loads(pickle.dumps(box)), copy.deepcopy(box)):
        assert repr(twin) == repr(box) and list(twin.strides) == list(box.strides)


def test_an_exchange_holds_its_arrays_until_it_is_done(ranks):
    def program(group):
        peer = 1 - group.rank
        exchange = group.make_exchange(weft.ExchangePlan("f64", {peer: weft.Box((100_000,))}, {peer: weft.Box((100_000,), offset=100_000)}))
        work = exchange.start(np.full(200_000, float(group.rank)))
        gc.collect()
        np.testing.assert_array_equal(work.wait()[100_000:], np.full(100_000, float(peer)))
        group.close()
        with pytest.raises(weft.BadArgumentError, match="^the Group is closed; expected one that is open$"):
            exchange.start(np.zeros(200_000))
        exchange.close()
    ranks(2, program)


def test_ranks_that_differ(ranks):
    def program(group):
        peer = 1 - group.rank
        box = weft.Box((2 + group.rank,))
        with pytest.raises(weft.MismatchError, match="rank 0.* and rank 1|rank 1.* and rank 0"):
            group.exchange(weft.ExchangePlan("f64", {peer: box}, {peer: box}), np.zeros(9), np.zeros(9), name="ghosts").wait()
            group.barrier().wait()
    ranks(2, program)


def test_what_is_refused(ranks):
    def program(group):
        def refused(text, function, *args, **options):
            with pytest.raises(weft.BadArgumentError) as error:
                function(*args, **options)
            assert text in str(error.value)
        box, x = weft.Box((4,)), np.zeros(10)
        plan = weft.ExchangePlan("f64", {0: box}, {0: weft.Box((4,), offset=4)})
        refused("strides has 1 numbers; expected 2, as counts has", weft.Box, (2, 3), strides=[1])
        refused("indices has 2 numbers where counts is (3,); expected counts[0] of them", weft.Box, (3,), indices=[1, 2])
        refused("counts[0] is 1.5; expected a whole number", weft.Box, [1.5])
        refused("counts is 4; expected whole numbers", weft.Box, 4)
        refused("indices[1] is 9223372036854775808; expected a number of 64 bits", weft.Box, indices=np.array([1, 2**63], "u8"))
        refused("index has 2 places; expected at most 1: the shape is (4,)", weft.Box.of, 4, np.s_[1, 2])
        refused("index[0] is 4; expected -4 to 3", weft.Box.of, (4, 2), 4)
        refused("index[0] has 4; expected 0 to 3", weft.Box.of, (4, 2), [1, 4])
        refused("index[1] is an array of indices; expected it first, behind numbers alone", weft.Box.of, (4, 2), np.s_[1:2, [0, 1]])
        refused("kind is 'sum'; expected one of 'copy', 'add'", weft.ExchangePlan, "f64", kind="sum")
        refused("sends is [0]; expected {rank: [weft.Box, ...]}", weft.ExchangePlan, "f64", [0])
        refused("sends[0][1] is of type int; expected a weft.Box", weft.ExchangePlan, "f64", {0: [box, 3]})
        refused("plan is of type dict; expected a weft.ExchangePlan", group.make_exchange, {})
        refused("plan is of type int; expected a weft.ExchangePlan", group.exchange, 3, x)
        refused("fields has 2 arrays; expected 1, as the plan has", group.exchange, plan, [x, x])
        refused("out has 2 arrays; expected 1, as the plan has", group.exchange, plan, x, [x, x])
        refused("ghosts: sends[0].peer is 1; expected 0 to 0 (group size 1)", group.make_exchange, weft.ExchangePlan("f64", {1: box}), name="ghosts")
        refused("exchange: box 0 of the data received from rank 0: its indices name element 2 of the field twice; expected each once", group.make_exchange,
                weft.ExchangePlan("f64", {0: weft.Box((2,))}, {0: weft.Box(indices=[2, 2])}))
        refused("in is f32; expected f64, as the plan has", group.exchange, plan, x.astype("f4"), x)
        refused("out has 6 elements; boxes of it that are received reach from 4 to 7", group.exchange, plan, x, np.zeros(6))
        refused("a box of out of field 0 that is received and a box of in of field 0 that is sent overlap; expected disjoint memory", group.exchange,
                weft.ExchangePlan("f64", {0: box}, {0: weft.Box((4,), offset=2)}), x)
        refused("deadline is -1; expected seconds", group.make_exchange(plan).start, x, deadline=-1)
        group.exchange(plan, x).wait()
    ranks(1, program)
