"""The pages README.md and docs/python.md, and the programs of examples/python, which print what their
pages show. Those with torch: test_torch_examples.py."""
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import weft

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples/python"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_page(processes, size, tmp_path):
    """The blocks of docs/python.md are one program, which prints what its first block says."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 4
    (tmp_path / "page.py").write_text("\n".join(blocks), encoding="utf-8")
    done = processes(size, "import os, runpy, sys; os.chdir(sys.argv[1]); runpy.run_path('page.py')", tmp_path)
    total, mean = np.arange(4.0) * size + sum(range(size)), 1.5 + (size - 1) / 2
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of {size}: {total} {mean}" for rank in range(size)]


def test_readme(processes, tmp_path):
    """The Python block of README.md is a program; it prints the sum that install_test.sh expects of the
    C++ one."""
    block, = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "page.py").write_text(block, encoding="utf-8")
    done = processes(2, "import os, runpy, sys; os.chdir(sys.argv[1]); runpy.run_path('page.py')", tmp_path)
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2: sum 3" for rank in range(2)]


@pytest.mark.parametrize("name", ["numpy_data_parallel", "stencil"])
def test_example(name):
    run_example(name)


def run_example(name):
    """Runs what the page says, and compares what it prints with what the page shows: torch's versions
    differ in the last digits."""
    page = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    command, shown = re.findall(r"^```\n(.*?)^```", page, re.M | re.S)
    words = command.split()
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
    else:
        words = [sys.executable, *words[1:3], "--no-tag-output", *words[3:]]
    package = os.path.dirname(os.path.dirname(weft.__file__))
    done = subprocess.run(words, cwd=EXAMPLES / name, capture_output=True, text=True, timeout=200, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])})
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    without_times = lambda text: [re.sub(r"^\d+ ms", "N ms", line) for line in text.strip().splitlines()]  # noqa: E731
    numbers = lambda lines: [[round(float(n), 1) for n in re.findall(r"[\d.]+\d", line)] for line in lines]  # noqa: E731
    expected, said = without_times(shown), without_times(done.stdout)
    assert len(said) == len(expected) and [re.sub(r"[\d.]+\d", "N", line) for line in said] == [re.sub(r"[\d.]+\d", "N", line) for line in expected], said
    for ours, theirs in zip(numbers(said), numbers(expected)):
        assert all(abs(a - b) <= 0.1 + 0.02 * abs(b) for a, b in zip(ours, theirs)), (said, expected)
