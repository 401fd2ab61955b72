"""The programs of examples/python that need torch print what their pages show."""
import pytest
from test_examples import run_example

pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["ddp", "elastic", "fsdp_tensor_parallel", "gpt"])
def test_example(name):
    run_example(name)
