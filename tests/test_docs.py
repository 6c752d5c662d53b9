"""The examples in the documentation run as they stand, one after the other."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"


PAGES = ["analyze.md", "checkpoints.md", "flax.md", "model_parallel.md", "shard_step.md"]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
