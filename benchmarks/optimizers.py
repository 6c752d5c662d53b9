"""The table of all optimizers: `python -m benchmarks.optimizers`.

Every case of `benchmarks.optimizer_cases` runs ten steps sharded over eight virtual CPU devices, in
`shard_map` on local gradients, and ten steps unsharded on one device. The table says how much of
its state is split, what stays replicated and why, the worst difference, and the collectives of one
step as the compiler left them.
"""

import argparse
import collections
import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

import wusharding as wus
from benchmarks.devices import use_virtual_devices
from benchmarks.optimizer_cases import STEPS, Case, cases, run_reference
from benchmarks.report import SHORT
from large_scale.hlo import collectives


@dataclasses.dataclass
class Run:
    """A sharded run: weights and logical state at the end, its plan, and the HLO of its step."""

    params: Any
    state: Any
    plan: wus.Plan
    hlo: str


def run_sharded(case: Case, mesh: Mesh, *, check_vma: bool = True, steps: int = STEPS) -> Run:
    """Runs a case in `shard_map` on the local gradients of `mesh.shape["data"]` replicas."""
    n = mesh.shape["data"]
    tx = wus.shard_updates(case.make(), mesh=mesh, per_example=case.per_example)
    params = jax.device_put(case.start(), NamedSharding(mesh, P()))
    state = tx.init(params)
    specs = tx.state_specs(params)
    compiled: dict[Any, Any] = {}

    def make(functions: tuple[tuple[str, Any], ...]) -> Any:
        def step(grads: Any, state: Any, params: Any, arrays: Any) -> Any:
            local = jax.tree.map(lambda g: g[0], grads)
            updates, state = tx.update(local, state, params, **arrays, **dict(functions))
            return optax.apply_updates(params, updates), state

        ins, outs = (P("data"), specs, P(), P()), (P(), specs)
        mapped = jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check_vma)
        return jax.jit(mapped)

    hlo = ""
    for i in range(steps):
        local = case.local_grads(params, i, n)
        extra = case.update_args(i, case.global_grads(params, i, n), params)
        functions = tuple((k, v) for k, v in extra.items() if callable(v))
        arrays = {k: v for k, v in extra.items() if not callable(v)}
        grads = jax.device_put(local, NamedSharding(mesh, P("data")))
        arrays = jax.device_put(arrays, NamedSharding(mesh, P()))
        if functions not in compiled:
            lowered = make(functions).lower(grads, state, params, arrays)
            compiled[functions] = lowered.compile()
            hlo = compiled[functions].as_text()
        params, state = compiled[functions](grads, state, params, arrays)
    return Run(params, tx.unshard(state), tx.plan(params), hlo)


def relative_error(found: Any, wanted: Any) -> float:
    """The largest difference of two trees, each leaf's relative to its largest magnitude."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        if a.dtype.kind not in "fc":
            worst = max(worst, float(np.any(a != b)))
        elif a.size:
            error = float(np.max(np.abs(a - b)) / (np.max(np.abs(b)) or 1.0))
            worst = max(worst, float("inf") if np.isnan(error) else error)
    return worst


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; bytes are logical ones of the whole state."""

    name: str
    sharded_bytes: int
    replicated_bytes: int
    why: str
    error: float
    tolerance: float
    collectives: str
    gathered: str


def measure(case: Case, mesh: Mesh) -> Row:
    """Runs a case both ways."""
    params, state = run_reference(case, num_replicas=mesh.shape["data"])
    run = run_sharded(case, mesh)
    found = collections.Counter(SHORT.get(c.kind, c.kind) for c in collectives(run.hlo))
    whole = [leaf for leaf in run.plan.state if leaf.why]
    return Row(
        name=case.name,
        sharded_bytes=run.plan.state_bytes - sum(leaf.logical_bytes for leaf in whole),
        replicated_bytes=run.plan.replicated_bytes,
        why="; ".join(sorted({leaf.why for leaf in whole})),
        error=max(relative_error(run.params, params), relative_error(run.state, state)),
        tolerance=case.tolerance,
        collectives=" ".join(f"{n} {kind}" for kind, n in sorted(found.items())) or "none",
        gathered=", ".join(sorted({p.primitive for p in run.plan.whole})),
    )


_HEADS = (
    "optimizer",
    "sharded B",
    "replicated B",
    "replicated because",
    "error",
    "collectives",
    "gathered for",
)


def _cells(row: Row) -> tuple[str, ...]:
    error = f"{row.error:.0e}" if row.error else "0"
    return (
        row.name,
        str(row.sharded_bytes),
        str(row.replicated_bytes),
        row.why,
        error,
        row.collectives,
        row.gathered,
    )


def _markdown(rows: Iterable[Row]) -> str:
    """The table as the docs show it."""
    lines = [
        "# Every optimizer of optax, sharded",
        "",
        "Made by `python -m benchmarks.optimizers --markdown docs/optimizers.md`: ten steps over 8",
        "virtual CPU devices against ten steps on one. Bytes are those of the whole state on small",
        "test parameters; *error* is the worst relative difference of any weight or state array;",
        "collectives are those of one step's optimized HLO (RS reduce-scatter, AG all-gather, AR",
        "all-reduce, A2A all-to-all). *Gathered for* names primitives that needed a split value",
        "whole.",
        "",
        "| " + " | ".join(_HEADS) + " |",
        "|" + "---|" * len(_HEADS),
    ]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the table; exits with 1 if a case is out of tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--markdown", type=pathlib.Path, help="also write the table to this file")
    args = parser.parse_args()
    console = Console()
    mesh = jax.make_mesh((8,), ("data",))
    chosen = [c for c in cases() if args.only in c.name]
    rows = [measure(c, mesh) for c in track(chosen, "running", console=console)]
    table = Table(*_HEADS, title=f"{len(rows)} cases, {STEPS} steps, 8 devices")
    for row in rows:
        table.add_row(*_cells(row), style="red" if row.error > row.tolerance else "")
    console.print(table)
    if args.markdown:
        args.markdown.write_text(_markdown(rows))
        console.print(f"wrote {args.markdown}")
    if any(row.error > row.tolerance for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    use_virtual_devices()
    main()
