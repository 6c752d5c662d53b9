"""The examples in the documentation run as they stand, in order; what it names is there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"


PAGES = ["analyze.md", "checkpoints.md", "flax.md", "model_parallel.md", "shard_step.md"]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_links_and_paths_lead_somewhere() -> None:
    pages = [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for page in pages:
        text = page.read_text()
        links = [x.partition("#")[0] for x in re.findall(r"\]\(([^)\s]+)\)", text)]
        links = [x for x in links if x and not x.startswith("http")]
        paths = re.findall(
            r"`((?:tests|examples|benchmarks|large_scale|wusharding|docs)/[\w/.]*)`", text
        )
        missing = [x for x in links if not (page.parent / x).exists()]
        missing += [x for x in paths if not (ROOT / x).exists()]
        assert missing == [], page.name
