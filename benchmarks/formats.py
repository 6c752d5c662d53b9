"""Which format of an array is the best, by the TPU compiler's own estimates, and which is chosen.

    python -m benchmarks.formats                              # all shapes, v5e:4x4 and v3:4x4
    python -m benchmarks.formats --topology v5e:16x16 --shape 1024,1024

`wusharding.analysis.choose` ranks the formats of an array by a model of what they cost. Here the
update of one array is compiled once for every format that it considers. Takes half an hour.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh

from large_scale import Topology, aot, cost, make_mesh, programs, torus_lines
from wusharding.analysis import assign, choose
from wusharding.analysis.placement import Placement, Replicas, Span

TOPOLOGIES = ("v5e:4x4", "v3:4x4")
SHAPES: tuple[tuple[int, ...], ...] = (
    *((1024, 1024), (1024, 4096), (4096, 1024), (512, 1024)),  # of Transformers
    *((1024, 16, 64), (6, 1024, 1024), (4096,)),  # heads apart, layers stacked, a vector
    *((33_708, 1024), (50_257, 768), (32_768, 768)),  # embeddings
    *((3, 3, 512, 512), (512, 512, 3, 3), (3, 3, 64, 64), (1, 1, 256, 1024), (7, 7, 3, 64)),
    *((2048, 1000), (1000, 2048)),  # the last layer, either way
)
_HOPELESS = 1000.0  # passes over the array: more than this is padding only


@dataclasses.dataclass(frozen=True)
class Trial:
    """One format of one array, compiled.

    Args:
      span: the dims that are merged and split.
      cost: what `choose` thinks of it, in passes over the array.
      cycles: the compiler's estimates, all but collectives.
      sent_bytes: what a device sends.
      seconds: of both, each link used as along a ring.
    """

    span: Span
    cost: float
    cycles: float
    sent_bytes: int
    seconds: float

    @property
    def name(self) -> str:
        tiled = " by tiles" if self.span.tiled else ""
        return f"dims {self.span.lo}:{self.span.hi}{tiled}, {self.span.chunk} each"


def trials(topology: str, shape: tuple[int, ...]) -> Iterator[Trial]:
    """The formats that are considered for an array, the chosen one first."""
    mesh = make_mesh(topology, devices=aot.devices(topology), axis_types=AxisType.Auto)
    lines = tuple(torus_lines(mesh).items())
    replicas = Replicas((("data", mesh.size),), ("data",), ("data",), lines)
    ranked = choose.candidates(shape, ((),) * len(shape), replicas, "tpu")
    for passes, placement in ranked:
        if passes < _HOPELESS:
            yield _compiled(mesh, Topology.of(topology), shape, passes, placement)


def _compiled(
    mesh: Mesh, topology: Topology, shape: tuple[int, ...], passes: float, placement: Placement
) -> Trial:
    with mock.patch.object(assign, "candidates", lambda *_: [(passes, placement)]):
        params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
        program = programs.update_program("ours", optax.adam(1e-3), params, mesh)
        report = aot.compile_step(program.step, *program.args)
    assert placement.span is not None
    chip = topology.chip
    clock = chip.hbm_bytes_per_second / chip.cores / aot.bytes_per_cycle(chip.name)
    ring = cost.links(chip.name + ":" + "x".join(map(str, chip.pod)))[-1].bytes_per_second
    seconds = report.total_cycles / clock + report.sent_bytes / ring
    return Trial(placement.span, passes, report.total_cycles, report.sent_bytes, seconds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--topology", action="append", help="default: " + ", ".join(TOPOLOGIES))
    parser.add_argument("--shape", action="append", type=_shape, help="such as 3,3,64,64")
    args = parser.parse_args(argv)
    print("| topology | shape | chosen | cycles | fewest | cycles | chosen / best, links counted |")
    print("| --- | --- | --- | ---: | --- | ---: | ---: |")
    for topology in args.topology or TOPOLOGIES:
        for shape in args.shape or SHAPES:
            print(row(topology, shape, list(trials(topology, shape))), flush=True)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def row(topology: str, shape: tuple[int, ...], found: Sequence[Trial]) -> str:
    """One line of the table."""
    fewest = min(found, key=lambda trial: trial.cycles)
    cells = [
        *(topology, str(shape)),
        *(cell for t in (found[0], fewest) for cell in (t.name, f"{t.cycles / 1e3:.1f} k")),
        f"{excess(found):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def excess(found: Sequence[Trial]) -> float:
    """How many times as long as the best one the chosen one takes."""
    return found[0].seconds / min(trial.seconds for trial in found)


if __name__ == "__main__":
    main()
