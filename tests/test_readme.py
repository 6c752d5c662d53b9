"""The README's examples run as they stand, one after the other; its table is that of the docs."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent


def test_examples_run() -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_its_table_is_part_of_the_measured_one() -> None:
    measured = set((ROOT / "docs" / "optimizers.md").read_text().splitlines())
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if " AG " in line]
    assert len(rows) >= 10
    assert set(rows) <= measured
