"""The compiled calls on tensors of torch: the values and the refusals of the way over ctypes."""
import re

import pytest

from test_fast import compiled, run
from torch_ranks import run as run_ranks

torch = pytest.importorskip("torch")

CALLS = """
    import torch
    import weft
    group = weft.Context().group_in(weft.Store.local(), 0, 1)
    f = torch.arange(6.)
    group.all_reduce(f, f).wait()
    c = torch.tensor([1 + 2j])
    calls = {dtype: (lambda dtype=dtype: group.all_reduce(torch.ones(3, dtype=getattr(torch, dtype)), op="max" if dtype == "bool" else "sum")) for dtype in
             ("float64", "float32", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "complex64")}
    calls |= {
        "f8": lambda: group.all_gather(torch.ones(3).to(torch.float8_e4m3fn)),
        "f8e5m2": lambda: group.all_gather(torch.ones(3).to(torch.float8_e5m2)),
        "other f8": lambda: group.all_gather(torch.ones(3).to(torch.float8_e4m3fnuz)),
        "truths": lambda: group.all_reduce(torch.tensor([True, False]), op="logical_or"),
        "strided": lambda: group.all_reduce(f[::2]),
        "transposed": lambda: group.all_reduce(f.view(2, 3).t()),
        "slice": lambda: group.all_reduce(f[2:5]),
        "empty": lambda: group.all_reduce(torch.zeros(0, 3)),
        "empty, transposed": lambda: group.all_reduce(torch.zeros(0, 3).t()),
        "scalar": lambda: group.all_reduce(torch.tensor(3.)),
        "conjugate": lambda: group.all_reduce(c.conj()),
        "negative": lambda: group.all_reduce(c.conj().imag),
        "gradient": lambda: group.all_reduce(torch.ones(2, requires_grad=True)),
        "parameter": lambda: group.all_reduce(torch.nn.Parameter(torch.ones(2)), torch.zeros(2)),
        "sparse": lambda: group.all_reduce(torch.ones(2).to_sparse()),
        "meta": lambda: group.all_reduce(torch.ones(2, device="meta")),
        "counts": lambda: group.all_reduce(f, torch.zeros(5)),
        "expanded": lambda: group.all_reduce(f, torch.zeros(1).expand(6)),
    }
    for name, call in calls.items():
        try:
            made = call().wait()
            print(name, type(made).__name__, made.dtype, tuple(made.shape), made.to(torch.float64 if made.element_size() == 1 else made.dtype))
        except Exception as error:
            print(name, type(error).__name__, error)
"""


@compiled
def test_both_ways_say_the_same():
    here, there = run(CALLS, WEFT_PYTHON_FAST="on"), run(CALLS, WEFT_PYTHON_FAST="off")
    assert here.returncode == 0, here.stderr
    number = re.compile(r", call \d+")
    assert number.sub("", here.stdout).splitlines() == number.sub("", there.stdout).splitlines()
    assert len(here.stdout.splitlines()) >= 31


@compiled
def test_tensors_are_read_in_c():
    done = run("""
        import torch
        import weft
        from weft import _calls
        group = weft.Context().group_in(weft.Store.local(), 0, 1)
        x = torch.ones(3)
        group.all_reduce(x, x).wait()
        print(torch.Tensor in _calls.types, hasattr(torch.Tensor, "__dlpack_c_exchange_api__"))
    """)
    assert len(set(done.stdout.split())) == 1, done.stdout + done.stderr


@compiled
def test_operations_begin_in_c():
    """All operations without uneven blocks or unusual tensors begin in C: the way over ctypes is cut off
    here, and the last call shows that it is."""
    run_ranks(2, """
        begin()
        import weft.torch.calls
        weft.torch.calls.weft_call = None
        x, both = torch.full((4,), 1. + rank), torch.empty(8)
        dist.all_reduce(x)
        dist.reduce(x, 0)
        dist.broadcast(x, 1)
        dist.all_gather_into_tensor(both, x)
        dist.all_gather_into_tensor(both, both[4 * rank:4 * rank + 4])
        dist.all_gather([torch.empty(4), torch.empty(4)], x)
        dist.reduce_scatter_tensor(x, both, dist.ReduceOp.AVG)
        dist.reduce_scatter(x, [x.clone(), x.clone()])
        dist.all_to_all_single(torch.empty(8), both)
        dist.gather(x, [torch.empty(4), torch.empty(4)] if rank == 0 else None)
        dist.scatter(x, [torch.zeros(4), torch.full((4,), 7.)] if rank == 0 else None)
        assert x.tolist() == [7 * rank] * 4
        dist.barrier()
        other = torch.empty(4)
        work = dist.isend(x, 1 - rank)
        dist.recv(other, 1 - rank)
        work.wait()
        assert other.tolist() == [7 - 7 * rank] * 4
        try:
            dist.all_to_all([torch.empty(1), torch.empty(1)], [torch.empty(1), torch.empty(1)])
        except AttributeError:
            print("cut off")
        dist.destroy_process_group()
    """)


def test_the_group_that_calls_go_through_has_the_names(tmp_path):
    """Hooks and profilers see a call as that of the plain group."""
    done = run(f"""
        import torch.distributed as dist
        import weft.torch
        dist.init_process_group("weft", init_method="file://{tmp_path}/store", rank=0, world_size=1)
        for group in (dist.group.WORLD, dist.new_group([0], group_desc="another")):
            print(group._plain.group_name == group.group_name, group._plain.group_desc == group.group_desc, group._plain.size(), group._plain.rank())
        dist.destroy_process_group()
    """)
    assert done.stdout.splitlines() == ["True True 1 0"] * 2, done.stdout + done.stderr
