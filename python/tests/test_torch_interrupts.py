"""Ctrl-C in what torch.distributed waits for: the rank goes on within a moment, also where it is inside of
torch, and the others hear of it while it lives."""
import pytest

pytest.importorskip("torch")
from torch_ranks import run  # noqa: E402  pylint: disable=wrong-import-position

PROGRAM = """
    import os, signal, threading, time
    import weft.torch
    signal.signal(signal.SIGINT, signal.default_int_handler)
    x, model = torch.ones(3), None
    if {case!r} != "init":
        begin()
        dist.all_reduce(x)
    if {case!r} in ("functional", "dtensor"):
        import torch.distributed._functional_collectives as funcol
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, Replicate, distribute_tensor
        divided = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (size,)), [Shard(0)])
    if {case!r} == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
    def call():
        {call}
    if rank == 0:
        began = []
        def stop():
            time.sleep(0.5)
            began.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=stop).start()
        try:
            try:
                call()
            except RuntimeError:  # of torch's C++; KeyboardInterrupt comes with Python's next step
                assert {inside}
                for _ in range(100):
                    time.sleep(0.001)
            raise SystemExit("not interrupted")
        except KeyboardInterrupt:
            print("took", time.monotonic() - began[0])
        time.sleep(2.5)
    else:
        time.sleep(1.5)
        try:
            for _ in range(2):  # the first may end well: what rank 0 gives to it had come
                call()
            raise SystemExit("not told")
        except (weft.AbortedError, RuntimeError) as error:
            assert "rank 0" in str(error) and "interrupted" in str(error), repr(error)
            assert {inside} or error.ranks == (0,)
    print("well")
"""
CASES = {"init": "begin()",
         "new_group": "dist.new_group([0, 1])",
         "barrier": "dist.barrier()",
         "wait": "dist.all_reduce(x, async_op=True).wait()",
         "objects": "dist.all_gather_object([None, None], rank)",
         "functional": "funcol.wait_tensor(funcol.all_reduce(x, 'sum', dist.group.WORLD))",
         "dtensor": "divided.redistribute(placements=[Replicate()]).to_local().sum()",
         "coalesced": "dist.all_reduce_coalesced([x, x.clone()])",
         "future": "dist.all_reduce(x, async_op=True).get_future().wait()",
         "ddp": "model(torch.ones(2, 4)).sum().backward()"}


@pytest.mark.parametrize("case", list(CASES))
def test_a_wait_ends(case):
    said = run(2, PROGRAM.format(case=case, call=CASES[case], inside=case in ("future", "ddp")).replace("\n    ", "\n"))
    assert [text.splitlines()[-1] for text in said] == ["well"] * 2, said
    assert float(said[0].split()[1]) < 0.5, said  # some 20 ms; other tests run, too


def test_a_handler_of_the_program_goes_on():
    """Where SIGINT does not raise KeyboardInterrupt the call is left alone."""
    run(2, """
        import os, signal, threading, time
        begin()
        seen = []
        signal.signal(signal.SIGINT, lambda *_: seen.append(True))
        x = torch.ones(3)
        if rank == 0:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            dist.all_reduce(x, async_op=True).get_future().wait()
            assert seen
        else:
            time.sleep(1)
            dist.all_reduce(x)
        assert x[0] == 2
        """)


def test_a_rank_that_does_not_come():
    """The ranks that the making of the default group waits for."""
    run(3, """
        from datetime import timedelta
        import weft
        import weft.torch
        if rank != 1:
            try:
                dist.init_process_group("weft", init_method="file://" + sys.argv[3], rank=rank, world_size=size, timeout=timedelta(seconds=1))
                raise SystemExit("no time-out")
            except weft.TimeoutError as error:
                said = "rank 1 did not come" if rank == 0 else "rank 0, or one that it waits for, did not come"
                assert "the making of a group: not finished within 1 s: " + said in str(error) and error.ranks == ((1,) if rank == 0 else ()), error
        """)


def test_a_rank_that_dies_in_training():
    """DDP's backward ends with torch's error, and weft's text in it."""
    said = run(3, """
        import os, time
        begin()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        for step in range(3):
            if step == 2 and rank == 1:
                time.sleep(0.3)
                os.kill(os.getpid(), 9)
            try:
                model(torch.ones(2, 4)).sum().backward()
            except RuntimeError as error:
                print(step, "rank 1" in str(error) and "died" in str(error), flush=True)
                os._exit(0)
        """, check=False)
    assert [said[0], said[2]] == ["2 True\n"] * 2, said
