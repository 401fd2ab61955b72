"""Operations on NumPy arrays: values depend on rank and index, so that a misplaced block cannot pass."""
import pickle
import time

import numpy as np
import pytest

import weft

SIZES = (1, 2, 3)
COUNTS = (0, 1, 7, 1025)


def mine(rank, count, dtype=np.int64):
    return (np.arange(count) * 10 + rank).astype(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce(ranks, size):
    def program(group):
        for count in COUNTS:
            x = mine(group.rank, count)
            kept = x.copy()
            expected = sum(mine(r, count) for r in range(size))
            out = group.all_reduce(x).wait()
            np.testing.assert_array_equal(out, expected)
            np.testing.assert_array_equal(x, kept)
            assert out is not x and out.dtype == x.dtype
            assert group.all_reduce(x, out=x).wait() is x
            np.testing.assert_array_equal(x, expected)
    ranks(size, program)


@pytest.mark.parametrize("op, combine", [("min", np.minimum), ("max", np.maximum), ("prod", np.multiply), ("bit_or", np.bitwise_or)])
def test_reduce_ops(ranks, op, combine):
    def program(group):
        expected = mine(0, 5)
        for r in range(1, 3):
            expected = combine(expected, mine(r, 5))
        np.testing.assert_array_equal(group.all_reduce(mine(group.rank, 5), op=op).wait(), expected)
    ranks(3, program)


def test_avg_and_scale(ranks):
    def program(group):
        x = np.array([1.0, 2.0]) * (group.rank + 1)
        np.testing.assert_array_equal(group.all_reduce(x, op="avg").wait(), [1.5, 3.0])
        np.testing.assert_array_equal(group.all_reduce(x, op="premul_sum", scale=0.5).wait(), [1.5, 3.0])
        np.testing.assert_array_equal(group.all_reduce(x, op="premul_sum", scale=0).wait(), [0, 0])
        for op, scale, text in (("premul_sum", None, "scale is None; expected a number, by which premul_sum multiplies"),
                                ("premul_sum", "half", "scale is 'half'; expected a number, by which premul_sum multiplies"),
                                ("sum", 0.5, "scale is 0.5 where op is 'sum'; expected None, or op \"premul_sum\"")):
            with pytest.raises(weft.BadArgumentError) as failure:
                group.all_reduce(x, op=op, scale=scale)
            assert str(failure.value) == text
    ranks(2, program)


@pytest.mark.parametrize("size", SIZES)
def test_gathers_and_scatters(ranks, size):
    def program(group):
        rank = group.rank
        x = mine(rank, 6).reshape(3, 2)
        every = np.concatenate([mine(r, 6).reshape(3, 2) for r in range(size)])
        np.testing.assert_array_equal(group.all_gather(x).wait(), every)
        gathered = group.gather(x, root=size - 1).wait()
        if rank == size - 1:
            np.testing.assert_array_equal(gathered, every)
        else:
            assert gathered is None
        whole = mine(rank, 4 * size).reshape(2 * size, 2)
        total = sum(mine(r, 4 * size) for r in range(size)).reshape(2 * size, 2)
        np.testing.assert_array_equal(group.reduce_scatter(whole).wait(), total[2 * rank:2 * rank + 2])
        part = np.empty((3, 2), np.int64)
        group.scatter(every if rank == 0 else None, out=part).wait()
        np.testing.assert_array_equal(part, x)
        reduced = group.reduce(x, root=0).wait()
        if rank == 0:
            np.testing.assert_array_equal(reduced, sum(mine(r, 6) for r in range(size)).reshape(3, 2))
        else:
            assert reduced is None
        np.testing.assert_array_equal(group.broadcast(x, root=size - 1).wait(), mine(size - 1, 6).reshape(3, 2))
        np.testing.assert_array_equal(group.scan(x).wait(), sum(mine(r, 6) for r in range(rank + 1)).reshape(3, 2))
        before = group.exscan(x).wait()
        np.testing.assert_array_equal(before, sum((mine(r, 6) for r in range(rank)), np.zeros(6, np.int64)).reshape(3, 2))
        group.barrier().wait()
    ranks(size, program)


def test_all_to_all(ranks):
    def program(group):
        x = np.array([100 * group.rank + r for r in range(3)])
        np.testing.assert_array_equal(group.all_to_all(x).wait(), [100 * r + group.rank for r in range(3)])
    ranks(3, program)


def test_blocks_of_any_size(ranks):
    counts = [2, 0, 3]

    def program(group):
        rank = group.rank
        out = group.all_gather_v(mine(rank, counts[rank]), counts).wait()
        np.testing.assert_array_equal(out, np.concatenate([mine(r, counts[r]) for r in range(3)]))
        whole = sum(mine(r, 5) for r in range(3))
        begin = sum(counts[:rank])
        np.testing.assert_array_equal(group.reduce_scatter_v(mine(rank, 5), counts).wait(), whole[begin:begin + counts[rank]])
        x = mine(rank, 3 * (rank + 1))
        out = group.all_to_all_v(x, [rank + 1] * 3, [1, 2, 3]).wait()
        np.testing.assert_array_equal(out, np.concatenate([mine(r, 3 * (r + 1))[rank * (r + 1):(rank + 1) * (r + 1)] for r in range(3)]))
    ranks(3, program)


def test_messages(ranks):
    def program(group):
        if group.rank == 0:
            for source in (1, 2):
                message = group.wait_message(source, tag=3)
                assert (message.source, message.tag, message.count, message.dtype) == (source, 3, source, "f32")
            out = np.empty(2, np.float32)
            work = group.recv(out, 2, tag=3)
            assert work.wait() is out and work.source == 2
            np.testing.assert_array_equal(out, [2, 2])
            work = group.recv(np.empty(1, np.float32), weft.ANY_SOURCE, tag=3)
            work.wait()
            assert work.source == 1
            assert group.probe(1, tag=3) is None
        else:
            group.send(np.full(group.rank, group.rank, np.float32), 0, tag=3).wait()
        ring = np.empty(4)
        group.send_recv(np.full(4, group.rank, float), (group.rank + 1) % 3, ring, (group.rank - 1) % 3).wait()
        np.testing.assert_array_equal(ring, np.full(4, (group.rank - 1) % 3))
    ranks(3, program)


def test_memory_of_another_call_is_refused(ranks):
    """A call that would give other numbers from some size on is refused at every size."""
    def program(group):
        for count in (1, 1000, 60_000):
            y = np.full(count, float(group.rank))
            with pytest.raises(weft.BadArgumentError, match=r"^coalesced: out of call 1 \(recv\) overlaps in of call 0 \(send\); expected memory that"):
                group.send_recv(y, 1 - group.rank, y, 1 - group.rank)
            batch = group.batch()
            batch.all_reduce(y)
            batch.broadcast(y, 0, out=y)
            with pytest.raises(weft.BadArgumentError, match="overlaps in of call 0"):
                batch.submit()
            np.testing.assert_array_equal(y, np.full(count, float(group.rank)))
    ranks(2, program)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_leave_compares_the_last_calls(ranks, backend):
    try:
        weft.Context().backend_traits(backend)
    except weft.UnsupportedError as error:
        pytest.skip(str(error))

    def equal(group):
        group.broadcast(np.array([1.0]), 1).wait()
        group.leave()
        with pytest.raises(weft.BadArgumentError, match="^the Group is closed"):
            group.barrier()
    ranks(2, equal, backend=backend)

    def unequal(group):
        with pytest.raises(weft.MismatchError, match=r"broadcast f64 x1 root [01] \[call 0\]"):
            group.broadcast(np.array([float(group.rank)]), group.rank).wait()
            group.leave(deadline=10)
    ranks(2, unequal, backend=backend)


def test_what_only_a_warning_tells_is_no_success(processes):
    """Two roots, and a Work that nobody keeps: every program ends well, and the job does not."""
    for mistake, said in (("group.broadcast(x, group.rank).wait()", "mismatch, found when the group was left: "),
                          ("group.all_reduce(x)", "dropped the Work of a call in flight")):
        done = processes(2, f"""
            import numpy as np, weft
            group, x = weft.Context().group(backend="shm"), np.ones(5000)
            {mistake}
            """, check=False)
        assert done.returncode == 70 and said in done.stderr and "has logged a warning that its results may be wrong" in done.stderr, done


def test_persistent_calls(ranks):
    """Made once, started often: each start takes what the arrays hold, and gives the same result array."""
    def program(group):
        rank, x, out = group.rank, np.zeros(6), np.zeros(6)
        total = group.make_all_reduce(x, out)
        most = group.make_all_reduce(x, op="max")
        joined = group.make_all_gather_v(x[:rank + 1], [1, 2, 3])
        own = group.make_reduce(x, 2, op=weft.Reduction("larger", np.maximum))
        everybody = group.make_barrier()
        for turn in range(3):
            x[:] = np.arange(6) + 10 * rank + turn
            work = total.start()
            if turn == rank:
                with pytest.raises(weft.BadArgumentError, match=r"^all_reduce: this persistent call was started before and is still in flight; expected that"):
                    total.start()
            assert work.wait() is out
            np.testing.assert_array_equal(out, 3 * np.arange(6) + 30 + 3 * turn)
            # A rank may call what others start.
            largest = group.all_reduce(x, op="max").wait() if turn == rank else most.start().wait()
            np.testing.assert_array_equal(largest, np.arange(6) + 20 + turn)
            np.testing.assert_array_equal(joined.start().wait(), np.concatenate([np.arange(r + 1) + 10 * r + turn for r in range(3)]))
            result = own.start().wait()
            assert (result is None) == (rank != 2)
            if rank == 2:
                np.testing.assert_array_equal(result, largest)
            everybody.start().wait()
        ring = np.empty(6)
        send, recv = group.make_send(x, (rank + 1) % 3, tag=4), group.make_recv(ring, weft.ANY_SOURCE, tag=4)
        for turn in range(2):
            x[:] = rank + turn
            work = recv.start()
            weft.wait_all([send.start(), work])
            assert work.source == (rank - 1) % 3
            np.testing.assert_array_equal(ring, np.full(6, work.source + turn))
            group.barrier().wait()
        for turn in range(2):  # both as one
            x[:] = rank + 10 * turn
            work = weft.start_all([send, recv, total])
            nothing, received, summed = work.wait()
            assert nothing is None and received is ring and summed is out and work.sources == ((rank - 1) % 3,)
            np.testing.assert_array_equal(ring, np.full(6, (rank - 1) % 3 + 10 * turn))
            np.testing.assert_array_equal(out, np.full(6, 3 + 30 * turn))
            group.barrier().wait()
        for wrong, said in (([], "calls is empty; expected at least one Persistent"), ([3], r"calls\[0\] is of type int; expected a weft.Persistent"),
                            ([send, send], r"start_all: a call \(send\) is there twice; expected each once")):
            with pytest.raises(weft.BadArgumentError, match=said):
                weft.start_all(wrong)
    ranks(3, program)


def test_persistent_calls_that_end(ranks):
    def program(group):
        x = np.ones(1000)
        with pytest.raises(weft.BadArgumentError, match="^all_reduce: out has 3 elements; expected 1000"):
            group.make_all_reduce(x, np.ones(3))
        call = group.make_all_reduce(x, out=x)
        work = call.start()
        del call  # its call goes on
        assert work.wait() is x and x[0] == 2
        call = group.make_barrier()
        with call:
            call.start().wait()
        with pytest.raises(weft.BadArgumentError, match="^the Persistent is closed; expected one that is open$"):
            call.start()
        call = group.make_barrier()
        group.close()
        with pytest.raises(weft.BadArgumentError, match="^the Group is closed; expected one that is open$"):
            call.start()
    ranks(2, program)

    def unequal(group):
        x = np.ones(4, np.float32)
        call = group.make_all_reduce(x, op="max" if group.rank else "sum")
        with pytest.raises(weft.MismatchError, match=r"all_reduce f32 x4 sum \[call 0\]"):
            call.start().wait()
        with pytest.raises(weft.MismatchError):
            call.start().wait()
    ranks(2, unequal)


def test_batch(ranks):
    def program(group):
        batch = group.batch()
        first = batch.all_reduce(np.array([1.0, group.rank]))
        second = batch.all_gather(np.array([group.rank]))
        results = batch.submit().wait()
        np.testing.assert_array_equal(results[first], [2.0, 1.0])
        np.testing.assert_array_equal(results[second], [0, 1])
    ranks(2, program)


def test_min_loc(ranks):
    def program(group):
        values = np.array([3.0, 1.0]) if group.rank == 0 else np.array([2.0, 5.0])
        least, where = group.min_loc(values, np.array([10, 11]) + 100 * group.rank)
        np.testing.assert_array_equal(least, [2.0, 1.0])
        np.testing.assert_array_equal(where, [110, 11])
        largest, where = group.max_loc(values, np.array([10, 11]) + 100 * group.rank)
        np.testing.assert_array_equal(largest, [3.0, 5.0])
        np.testing.assert_array_equal(where, [10, 111])
    ranks(2, program)


def test_objects(ranks):
    def program(group):
        value = {"rank": group.rank, "data": list(range(100 * group.rank))}
        every = [{"rank": r, "data": list(range(100 * r))} for r in range(3)]
        assert group.broadcast_object(value, root=1) == every[1]
        assert group.all_gather_object(value) == every
        assert group.gather_object(value, root=2) == (every if group.rank == 2 else None)
    ranks(3, program)


def test_own_reduction(ranks):
    def program(group):
        with weft.Reduction("left", lambda left, right: left) as keep_left:
            np.testing.assert_array_equal(group.all_reduce(mine(group.rank, 5), op=keep_left).wait(), mine(0, 5))
    ranks(3, program)


def test_own_reduction_that_raises(ranks):
    def program(group):
        def fails(left, right):
            raise KeyError("what it said")
        with weft.Reduction("fails", fails) as reduction:
            with pytest.raises(weft.Error) as caught:
                group.all_reduce(np.ones(4), op=reduction).wait()
            return caught.value.text
    texts = ranks(2, program)
    assert any("KeyError" in text for text in texts), texts


def test_numbers(ranks):
    def program(group):
        total = group.all_reduce(group.rank + 0.5).wait()
        assert total == 2.0 and type(total) is float
        total = group.all_reduce(group.rank + 1).wait()
        assert total == 3 and type(total) is int
        assert group.all_reduce(complex(1, group.rank)).wait() == 2 + 1j
        assert group.all_reduce(group.rank == 0, op="logical_or").wait() is True
    ranks(2, program)


def test_groups_of_groups(ranks):
    def program(group):
        odd = group.split(group.rank % 2, key=-group.rank)
        assert odd.size == 2 and [odd.parent_rank(r) for r in range(2)] == ([2, 0] if group.rank % 2 == 0 else [3, 1])
        twin = group.duplicate()
        assert (twin.rank, twin.size) == (group.rank, 4)
        part = group.subgroup("pair", [3, 0]) if group.rank in (0, 3) else None
        if part is not None:
            assert part.rank == (1 if group.rank == 0 else 0) and part.name.endswith("pair")
            assert part.all_reduce(group.rank).wait() == 3
        assert group.split(-1) is None if group.rank == 0 else group.split(0).size == 3
        assert twin.all_reduce(1).wait() == 4 and group.local_size == 4
    ranks(4, program)


def test_own_reductions_in_a_batch(ranks):
    """Whichever of a batch's reductions raises fails the batch."""
    def program(group):
        def fails(left, right):
            raise KeyError("the second")
        with weft.Reduction("left", lambda left, right: left) as first, weft.Reduction("fails", fails) as second:
            batch = group.batch()
            batch.all_reduce(np.ones(4), op=first)
            batch.all_reduce(np.ones(4), op=second)
            with pytest.raises(weft.Error) as caught:
                batch.submit().wait()
            return caught.value.text
    texts = ranks(2, program)
    assert any("the second" in text for text in texts), texts


def test_own_reduction_after_a_failure():
    """A failure is that of one call: in another group the same reduction works again."""
    said = []

    def combine(left, right):
        if not said:
            said.append(1)
            raise KeyError("once")
        return left + right
    with weft.Reduction("once", combine) as reduction:
        from conftest import run_ranks

        def fails(group):
            with pytest.raises(weft.Error):
                group.all_reduce(np.ones(4), op=reduction).wait()
                group.barrier().wait()
        run_ranks(2, fails)
        for result in run_ranks(2, lambda group: group.all_reduce(np.ones(4), op=reduction).wait()):
            np.testing.assert_array_equal(result, np.full(4, 2.0))


def test_traceback_of_an_own_reduction(ranks):
    """As text: frames would show arrays whose memory is gone."""
    def program(group):
        def fails(left, right):
            raise KeyError("with its arguments")
        with weft.Reduction("fails", fails) as reduction, pytest.raises(weft.Error) as caught:
            group.all_reduce(np.ones(4), op=reduction).wait()
            group.barrier().wait()
        cause = caught.value.__cause__
        if cause is None:  # the other rank aborted the group
            return ""
        assert isinstance(cause, KeyError) and cause.__traceback__ is None
        return str(cause.__cause__)
    assert any("in fails" in text and "in run" in text for text in ranks(2, program))


def test_own_reduction_of_another_shape(ranks):
    def program(group):
        with weft.Reduction("sum of all", lambda left, right: left.sum()) as reduction:
            with pytest.raises(weft.Error) as caught:
                group.all_reduce(np.ones(4), op=reduction).wait()
                group.barrier().wait()
            return caught.value.text
    texts = ranks(2, program)
    assert any("combine gave an array of shape (); expected (4,), that of left and right" in text for text in texts), texts


@pytest.mark.parametrize("tag", [0, 8])
def test_objects_leave_messages_alone(ranks, tag):
    def program(group):
        if group.rank == 1:
            sent = group.send(np.full(3, 7.0), 0, tag=tag)
        objects = group.gather_object(["of", group.rank], 0)
        assert objects == ([["of", 0], ["of", 1]] if group.rank == 0 else None)
        if group.rank == 0:
            np.testing.assert_array_equal(group.recv(np.empty(3), 1, tag=tag).wait(), np.full(3, 7.0))
        else:
            sent.wait()
        with pytest.raises(weft.BadArgumentError, match="^root is 2; expected a rank from 0 to 1"):
            group.gather_object(1, 2)
    ranks(2, program)


def test_objects_that_cannot_be_pickled(ranks):
    """All ranks hear of it at once, and the group goes on."""
    def program(group):
        for call in (group.broadcast_object, group.all_gather_object, group.gather_object):
            began = time.monotonic()
            if group.rank == 0:
                with pytest.raises((AttributeError, pickle.PicklingError)):
                    call(lambda: 1)
            else:
                with pytest.raises(weft.SystemError, match="the object of rank 0 could not be pickled") as caught:
                    call(1)
                assert caught.value.ranks == (0,)
            assert time.monotonic() - began < 10
            assert group.all_gather_object(group.rank) == [0, 1]
    ranks(2, program)


def test_integers_that_do_not_fit(ranks):
    def program(group):
        x, big = np.ones(3), 2**32 + 1
        for call, text in [(lambda: group.send(x, 1 - group.rank, tag=big), f"^tag is {big}; expected a number of 32 bits"),
                           (lambda: group.recv(x, big), f"^source is {big}; expected a number of 32 bits"),
                           (lambda: group.send(x, big), f"^destination is {big}; expected a number of 32 bits"),
                           (lambda: group.broadcast(x, root=big), f"^root is {big}; expected a number of 32 bits"),
                           (lambda: group.broadcast(x, root=1.0), "^root is 1.0; expected a whole number"),
                           (lambda: group.subgroup("s", [2**32, 2**32 + 1]), rf"^ranks\[0\] is {2**32}; expected a number of 32 bits"),
                           (lambda: group.split(2**32), f"^color is {2**32}; expected a number of 32 bits"),
                           (lambda: group.split(0, 2**32), f"^key is {2**32}; expected a number of 32 bits"),
                           (lambda: group.probe(2**32), f"^source is {2**32}; expected a number of 32 bits"),
                           (lambda: group.parent_rank(2**32), f"^rank is {2**32}; expected a number of 32 bits"),
                           (lambda: group.all_gather_v(x, [2**64 + 3, 3]), rf"^counts\[0\] is {2**64 + 3}; expected a number of 64 bits"),
                           (lambda: group.context.group_in(weft.Store.local(), 2**32, 2), f"^rank is {2**32}; expected a number of 32 bits"),
                           (lambda: weft.Store.tcp("127.0.0.1", 2**32 + 80), f"^port is {2**32 + 80}; expected a number of 32 bits")]:
            with pytest.raises(weft.BadArgumentError, match=text):
                call()
        group.barrier().wait()
    ranks(2, program)


def test_words_for_wrong_arguments(ranks):
    def program(group):
        for call, text in [(lambda: group.all_reduce(None), "^in is None; expected an array or a number"),
                           (lambda: group.all_reduce(object()), "^in is of type object; expected an array of NumPy"),
                           (lambda: group.recv(None), "^recv: out is None; expected the array to write to"),
                           (lambda: group.all_reduce(1, deadline="soon"), "^deadline is 'soon'; expected seconds")]:
            with pytest.raises(weft.BadArgumentError, match=text):
                call()
        work = group.all_reduce(1)
        with pytest.raises(weft.BadArgumentError, match="^timeout is nan; expected seconds"):
            work.wait(timeout=float("nan"))
        assert work.wait() == 2
        # a generator is as good as a list
        np.testing.assert_array_equal(group.all_gather_v(np.full(2, group.rank), (2 for _ in range(2))).wait(), [0, 0, 1, 1])
        # numbers from all ranks come in an array, at the root as everywhere
        gathered = group.gather(3 + group.rank, root=1).wait()
        assert gathered is None if group.rank == 0 else gathered.tolist() == [3, 4]
        assert group.all_gather(0.5 + group.rank).wait().tolist() == [0.5, 1.5]
        group.barrier().wait()
        group.close()
        for call in (group.barrier, group.split_by_host, group.probe, group.trace):
            with pytest.raises(weft.BadArgumentError, match="^the Group is closed; expected one that is open"):
                call()
    ranks(2, program)
