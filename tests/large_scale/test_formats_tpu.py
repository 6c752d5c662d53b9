"""The format that is chosen for an array against the TPU compiler's estimates of all of them."""

import pytest

from benchmarks import formats
from tests.large_scale.compilers import needs_libtpu

# Arrays for which another format would be more than a tenth faster, and how far the chosen one may
# be off. They are small, and cost little more than an operation's own time, which `choose` does not
# know.
MISSES = {
    ("v5e:4x4", (7, 7, 3, 64)): 1.3,
    ("v3:4x4", (3, 3, 64, 64)): 1.8,
    ("v3:4x4", (7, 7, 3, 64)): 1.35,
}
# Compiling all formats of those whose rows fill no tiles takes minutes; see benchmarks/formats.py.
SHAPES = [shape for shape in formats.SHAPES if shape not in ((33_708, 1024), (50_257, 768))]
QUICK = [("v5e:4x4", (1024, 1024))]


def check(topology, shape):
    found = list(formats.trials(topology, shape))
    assert len(found) > (1 if len(shape) > 1 else 0)
    assert formats.excess(found) <= MISSES.get((topology, shape), 1.1), [
        (trial.name, trial.cycles, trial.sent_bytes) for trial in found
    ]


@needs_libtpu
@pytest.mark.parametrize(("topology", "shape"), QUICK)
def test_the_chosen_format_is_the_best(topology, shape):
    check(topology, shape)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", formats.TOPOLOGIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_chosen_format_is_the_best_of_many(topology, shape):
    check(topology, shape)


@needs_libtpu
def test_a_bad_format_would_be_found():
    found = list(formats.trials("v5e:4x4", (512, 1024)))
    assert formats.excess(found[::-1]) > 1.1


def test_a_line_of_the_table():
    first, second = (
        formats.Trial(formats.Span(0, 1, 4), 0.0, 2000.0, 10, 3e-6),
        formats.Trial(formats.Span(0, 2, 64, tiled=True), 0.0, 1000.0, 10, 2e-6),
    )
    assert formats.excess([first, second]) == 1.5
    assert formats.row("v5e:4x4", (64, 16), [first, second]) == (
        "| v5e:4x4 | (64, 16) | dims 0:1, 4 each | 2.0 k "
        "| dims 0:2 by tiles, 64 each | 1.0 k | 1.50 |"
    )
