"""The needs of weft.torch: an error names the parts that another version of torch lacks."""
import os
import re
import subprocess
import sys

import pytest

import weft

torch = pytest.importorskip("torch")
from weft.torch import needs  # noqa: E402  # pylint: disable=wrong-import-position


def test_the_tested_versions_are_those_of_the_page():
    page = os.path.join(os.path.dirname(__file__), "../../docs/torch.md")
    with open(page, encoding="utf-8") as file:
        text = file.read()
    assert sorted(re.search(r"torch (\d[\d.]+) and (\d[\d.]+), both", text).groups()) == sorted(needs.TESTED)


@pytest.mark.parametrize("path", needs.NAMES)
def test_each_name_that_is_missing_is_named(monkeypatch, path):
    needs.check()
    assert needs.has(path)
    holder = torch
    *inner, last = path.split(".")[1:]
    for name in inner:
        holder = getattr(holder, name)
    monkeypatch.delattr(holder, last)
    with pytest.raises(weft.UnsupportedError, match=rf"^torch \S+ has no {re.escape(path)}; expected a version that has: weft.torch is tested with 2\.14\.1 and 2\.15\.0$"):
        needs.check()


@pytest.mark.parametrize("name", ["torch._C._distributed_c10d.AllgatherOptions", "torch.distributed.DistBackendError"])
def test_the_import_says_it(name):
    done = subprocess.run([sys.executable, "-c", f"import torch, torch.distributed\ndel {name}\nimport weft.torch"], capture_output=True, text=True, timeout=100,
                          check=False, env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(weft.__file__))})
    assert done.returncode == 1 and f"has no {name}; expected a version that has" in done.stderr, done
