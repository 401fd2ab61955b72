"""Halos and windows: against numpy.pad of the whole."""
import asyncio
import gc
import threading

import numpy as np
import pytest

import weft

PADS = {"periodic": "wrap", "reflect": "reflect", "replicate": "edge", "zero": "constant"}


def plate(shape=(11, 6), dtype="f8"):
    return (np.arange(np.prod(shape)).reshape(shape) % 113).astype(dtype)


def ghosted(whole, halo, ghost, **pad):
    """The contents of this rank's array of a halo after an exchange."""
    padded = np.pad(whole, ghost, **pad)
    return padded[tuple(slice(p.start, p.stop + before + after) for p, (before, after) in zip(halo.part, ghost))]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("edge", list(PADS))
def test_halo(ranks, edge, size):
    whole = plate()

    def program(group):
        layout = weft.Layout(weft.Mesh(group, y=-1), whole.shape, y=weft.shard(0))
        halo = weft.Halo(layout, {0: (1, 2), -1: 1}, edges=edge)
        assert halo.shape == (layout.local_shape()[0] + 3, 8) and halo.inner == (slice(1, halo.shape[0] - 2), slice(1, 7))
        for dtype in ("f8", "i4", "c16"):
            field = np.full(halo.shape, 99, dtype)
            field[halo.inner] = whole[halo.part]
            assert halo.exchange(field).wait() is field
            np.testing.assert_array_equal(field, ghosted(whole, halo, [(1, 2), (1, 1)], mode=PADS[edge]))
    ranks(size, program)


def test_halo_fields_edges_and_cuts(ranks):
    whole = plate((9, 4))

    def program(group):
        mesh = weft.Mesh(group, y=2, x=2)
        layout = weft.Layout(mesh, whole.shape, y=weft.shard(0), x=weft.shard(1))
        halo = weft.Halo(layout, {0: 1, 1: 1}, edges={0: ("zero", 7.5), 1: "periodic"}, cuts={0: [0, 2, 9]})
        assert halo.part[0] == (slice(0, 2) if group.rank < 2 else slice(2, 9))
        first, second = np.zeros(halo.shape), np.zeros(halo.shape, "f4")
        first[halo.inner], second[halo.inner] = whole[halo.part], -whole[halo.part]
        pending = halo.exchange(first, second)
        one, two = pending.wait()
        assert one is first and two is second and pending.wait() == (first, second) and pending.done()
        for field, sign in ((first, 1), (second, -1)):
            wide = np.pad(sign * whole, [(0, 0), (1, 1)], mode="wrap")
            wide = np.concatenate([np.zeros((1, 6)), wide, np.full((1, 6), 7.5)])
            np.testing.assert_array_equal(field, wide[halo.part[0].start:halo.part[0].stop + 2, halo.part[1].start:halo.part[1].stop + 2])
    ranks(4, program)


def test_halo_without_an_edge_leaves_the_ends(ranks):
    def program(group):
        layout = weft.Layout(weft.Mesh(group, y=-1), (4,), y=weft.shard(0))
        halo = weft.Halo(layout, {0: 1})
        field = np.full(halo.shape, -1.0)
        field[halo.inner] = np.arange(4.0)[halo.part]
        halo.exchange(field).wait()
        assert field.tolist() == ([-1, 0, 1, 2] if group.rank == 0 else [1, 2, 3, -1])
    ranks(2, program)


def test_halo_over_a_pole(ranks):
    whole = plate((6, 8))

    def program(group):
        layout = weft.Layout(weft.Mesh(group, y=-1), whole.shape, y=weft.shard(0))
        halo = weft.Halo(layout, {0: 2}, edges=weft.pole(longitude=1))
        field = np.zeros(halo.shape)
        field[halo.inner] = whole[halo.part]
        halo.exchange(field).wait()
        turned = np.roll(whole, 4, axis=1)
        globe = np.concatenate([turned[1::-1], whole, turned[:-3:-1]])
        np.testing.assert_array_equal(field, globe[halo.part[0].start:halo.part[0].stop + 4])
    ranks(2, program)


def test_windows_and_their_adjoint(ranks):
    whole = plate((10, 3))

    def program(group):
        layout = weft.Layout(weft.Mesh(group, y=-1), whole.shape, y=weft.shard(0))
        wanted = [(-2, 5), (3, 8), (0, 12)]
        window = weft.Window(layout, {0: wanted}, edges="periodic")
        lo, hi = wanted[group.rank]
        assert window.shape == (hi - lo, 3) and window.part_shape == layout.local_shape()
        own = window.own(0)
        (offsets, extents), = layout.parts()
        assert own == (max(lo, offsets[0]) - lo, min(hi, offsets[0] + extents[0]) - lo)
        part = whole[offsets[0]:offsets[0] + extents[0]]
        seen = window.start(part).wait()
        np.testing.assert_array_equal(seen, whole[np.arange(lo, hi) % 10])
        several = window.start([part, part.astype("f4")]).wait()
        assert [each.dtype for each in several] == ["f8", "f4"] and (several[1] == seen).all()
        out = np.empty(window.shape)
        assert window.start(part, out).wait() is out
        back = window.adjoint(np.ones(window.shape)).wait()
        counts = np.zeros(10)
        for a, b in wanted:
            np.add.at(counts, np.arange(a, b) % 10, 1)
        np.testing.assert_array_equal(back, counts[offsets[0]:offsets[0] + extents[0], None] * np.ones((1, 3)))
    ranks(3, program)


def refused(text, call, kind=weft.BadArgumentError):
    with pytest.raises(kind, match=text):
        call()


def test_halo_adds_in_place(ranks):
    def program(group):
        layout = weft.Layout(weft.Mesh(group, y=-1), (6,), y=weft.shard(0))
        halo = weft.Halo(layout, {0: 1}, edges="periodic")
        floats, integers = np.array([10.0, 1, 1, 1, 100]), np.array([10, 1, 1, 1, 100], "i4")
        assert halo.add(floats, integers).wait()[0] is floats
        assert floats.tolist() == integers.tolist() == [10, 101, 1, 11, 100]
        refused(r"^add has no arrays; expected at least one$", halo.add)
        refused(r"expected a dtype that is added", lambda: halo.add(np.zeros(5, bool)))
    ranks(2, program)


def test_plans_start_together(ranks):
    """They give in one exchange the same as each alone."""
    def program(group):
        mesh = weft.Mesh(group, y=-1)
        nodes, cells = (weft.Layout(mesh, (n, 2), y=weft.shard(0)) for n in (9, 8))
        near, behind = weft.Halo(nodes, {0: 1}, edges="periodic"), weft.Halo(cells, {0: (0, 2)}, edges="zero")
        filled = [np.arange(float(np.prod(halo.shape))).reshape(halo.shape) + 100 * group.rank for halo in (near, near, behind)]
        alone = [field.copy() for field in filled]
        near.exchange(*alone[:2]).wait(), behind.exchange(alone[2]).wait()
        of_nodes, of_cells = weft.start_together((near, *filled[:2]), (behind, filled[2])).wait()
        assert of_nodes[0] is filled[0] and of_nodes[1] is filled[1] and of_cells is filled[2]
        for one, other in zip(filled, alone):
            np.testing.assert_array_equal(one, other)
        everything, out = [(0, 9)] * group.size, np.empty((9, 2))
        rows, also = weft.Window(nodes, {0: everything}), weft.Window(nodes, {0: everything})
        part = np.full(rows.part_shape, float(group.rank))
        first, second = weft.start_together((rows, [part, part.astype("f4")]), (also, part, out)).wait()
        assert second is out and first[1].dtype == "f4" and (first[0] == out).all() and (out[-1] == group.size - 1).all()
        refused(r"^start_together has no plans; expected at least one$", weft.start_together)
        refused(r"^plans\[1\] is \(Window, ndarray\); expected \(Halo, array, ...\) in each, or", lambda: weft.start_together((near, filled[0]), (rows, part)))
        refused(r"halo: halo 1 is halo 0; expected each once", lambda: weft.start_together((near, filled[0]), (near, filled[1])))
    ranks(3, program)


def test_exchanges_may_be_awaited(ranks):
    def program(group):
        layout = weft.Layout(weft.Mesh(group, y=-1), (6,), y=weft.shard(0))
        halo = weft.Halo(layout, {0: 1}, edges="periodic")

        async def step():
            field = np.full(halo.shape, float(group.rank))
            return (await halo.exchange(field)).tolist()
        other = 1.0 - group.rank
        assert asyncio.run(step()) == [other, group.rank, group.rank, group.rank, other]
    ranks(2, program)


def test_an_exchange_that_is_dropped_aborts_its_group(ranks):
    """The other rank hears of it, and a failed exchange says so each time."""
    ready = threading.Barrier(2)

    def program(group):
        layout = weft.Layout(weft.Mesh(group, y=-1), (4, 1 << 18), y=weft.shard(0))
        halo = weft.Halo(layout, {0: 1}, edges="periodic")
        field = np.zeros(halo.shape)
        halo.exchange(field).wait()  # the first one waits for the other rank's
        if group.rank == 0:
            halo.exchange(field)
            gc.collect()
            ready.wait()
        else:
            ready.wait()
            with pytest.raises(weft.AbortedError, match="^halo: rank 0 dropped an exchange in flight"):
                pending = halo.exchange(field)
                pending.wait()
            if "pending" in locals():
                with pytest.raises(weft.AbortedError):
                    pending.wait()
    ranks(2, program)


def test_what_windows_refuse():
    with weft.Context() as context:
        mesh = weft.Mesh.arithmetic(context, 0, y=2)
        layout = weft.Layout(mesh, (8, 4), y=weft.shard(0))

        refused(r"^ghost has the dimension 2; expected -2 to 1: the layout has 2$", lambda: weft.Halo(layout, {2: 1}))
        refused(r"^ghost has the dimension 0 twice; expected each once$", lambda: weft.Halo(layout, {0: 1, -2: 1}))
        refused(r"^ghost is 3; expected \{dim: \.\.\.\}$", lambda: weft.Halo(layout, 3))
        refused(r"^ghost\[0\] is \(1, 2, 3\); expected a number of cells, or two: before and after$", lambda: weft.Halo(layout, {0: (1, 2, 3)}))
        refused(r"^ghost\[0\] is 'x'; expected a whole number$", lambda: weft.Halo(layout, {0: "x"}))
        refused(r"^edges\[0\] is 'torus'; expected one of 'none', .* a number or weft.pole\(longitude\)$", lambda: weft.Halo(layout, {0: 1}, edges="torus"))
        refused(r"^edges\[0\] is \('zero',\); expected an edge, or two: before and after$", lambda: weft.Halo(layout, {0: 1}, edges={0: ("zero",)}))
        refused(r"^edges has the dimension 1; expected one that is asked for: \[0\]$", lambda: weft.Halo(layout, {0: 1}, edges={1: "zero"}))
        refused(r"cuts\[0\]\.dim is 1; expected a dimension that the layout cuts", lambda: weft.Halo(layout, {0: 1}, cuts={1: [0, 4]}))
        refused(r"^wanted\[0\] is \[\(1, 2, 3\)\]; expected \(lo, hi\) of each part$", lambda: weft.Window(layout, {0: [(1, 2, 3)]}))
        refused("-1", lambda: weft.Halo(layout, {0: -1}))
        refused("Partial", lambda: weft.Halo(weft.Layout(mesh, (8, 4), y=weft.partial()), {0: 1}), weft.LayoutError)
    with weft.Context() as context, context.group_in(None, 0, 1) as group:
        layout = weft.Layout(weft.Mesh(group, y=1), (8, 4), y=weft.shard(0))
        halo, window = weft.Halo(layout, {0: 1}, edges="zero"), weft.Window(layout, {0: [(0, 3)]})
        refused(r"^fields has the shape \(4, 10\); expected \(10, 4\)$", lambda: halo.exchange(np.zeros((4, 10))))
        refused(r"^fields\[1\] has the shape \(3,\); expected \(10, 4\)$", lambda: halo.exchange(np.zeros((10, 4)), np.zeros(3)))
        refused(r"^exchange has no arrays; expected at least one$", halo.exchange)
        frozen = np.zeros((10, 4))
        frozen.flags.writeable = False
        refused("^fields is read-only", lambda: halo.exchange(frozen))
        refused("^fields is strided", lambda: halo.exchange(np.zeros((4, 10)).T), weft.LayoutError)
        refused(r"^in has the shape \(3, 4\); expected \(8, 4\)$", lambda: window.start(np.zeros((3, 4))))
        refused(r"^out has 1 arrays; expected 2, as in has$", lambda: window.start([np.zeros((8, 4))] * 2, [np.zeros((3, 4))]))
        refused(r"^dim has the dimension 5", lambda: window.own(5))
        refused("wanted|named", lambda: window.own(1))
        field = np.zeros((10, 4))
        pending = halo.exchange(field)
        refused("^halo: the ghost cells are still written by an exchange in flight; finish that one first$", lambda: halo.exchange(field))
        pending.wait()
        halo.exchange(field).wait()
        refused("NoneType|None", lambda: halo.exchange(None))
        halo.close()
        refused("the Halo is closed", lambda: halo.exchange(np.zeros((10, 4))))
