"""Ranks of torch.distributed for tests: processes that meet in a file."""
import os
import subprocess
import sys
import tempfile
import textwrap

import weft

PRELUDE = """
import os, sys, warnings
warnings.filterwarnings("ignore")
import torch
import torch.distributed as dist
torch.set_num_threads(1)
rank, size = int(sys.argv[1]), int(sys.argv[2])
def begin(backend="weft", **options):
    if backend == "weft":
        import weft.torch
    from datetime import timedelta
    options.setdefault("timeout", timedelta(seconds=60))
    dist.init_process_group(backend, init_method="file://" + sys.argv[3], rank=rank, world_size=size, **options)
"""


def run(size, program, timeout=240, check=True, python=sys.executable):
    """The program, after PRELUDE, on `size` processes; the standard output of each."""
    package = os.path.dirname(os.path.dirname(weft.__file__))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])}
    with tempfile.TemporaryDirectory() as folder:
        text = PRELUDE + textwrap.dedent(program)
        processes = [subprocess.Popen([python, "-c", text, str(rank), str(size), folder + "/store"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                      text=True, env=environment) for rank in range(size)]
        try:
            said = [process.communicate(timeout=timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if check:
            for rank, (process, (out, err)) in enumerate(zip(processes, said)):
                assert process.returncode == 0, f"rank {rank}: exit {process.returncode}\n{out}\n{err[-4000:]}"
        return [out for out, _ in said]
