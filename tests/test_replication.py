"""What differs between replicas: compared with JAX's own types, and on programs that mislead."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from wusharding import jaxprs
from wusharding.analysis.placement import Replicas
from wusharding.analysis.replication import Facts, Spread, analyse

AXES = ("data",)


def varying(aval: Any) -> frozenset[str]:
    manual = getattr(aval, "mat", None)
    found = manual.varying if manual is not None else getattr(aval, "vma", frozenset())
    return frozenset(found).intersection(AXES)


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Any]]:
    """The types that JAX gave to the values of each program, by the identity of its avals."""
    found: dict[int, list[Any]] = {}
    plain = jaxprs._Builder.new

    def new(self: Any, aval: Any, *args: Any) -> int:
        found.setdefault(id(self.avals), []).append(aval)
        return plain(self, aval, *args)

    monkeypatch.setattr(jaxprs._Builder, "new", new)
    return found


def all_facts(facts: Facts) -> Iterator[Facts]:
    yield facts
    for bodies in facts.bodies.values():
        for body in bodies:
            yield from all_facts(body)


def body_step(params: Any, x: jax.Array) -> Any:
    """Every kind of control flow, a cast, a reduction, an index, noise of a replica's own."""
    w = lax.pcast(params["w"], "data", to="varying")
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), lax.axis_index("data")), (3,))

    def turn(carry: Any, row: jax.Array) -> Any:
        mine, shared = carry
        return (mine + row @ w, shared * 0.5 + params["b"]), row.sum()

    zeros = lax.pcast(jnp.zeros(3), "data", to="varying")
    (mine, shared), sums = lax.scan(turn, (zeros, params["b"]), x)
    steps = lax.fori_loop(0, 3, lambda i, v: v * 2 + params["b"], params["b"])
    chosen = lax.cond(mine.sum() > 0, lambda v: v + 1, lambda v: v * 2, mine)
    alike = lax.cond(shared.sum() > 0, lambda v: v + 1, lambda v: v * 2, shared)
    total = lax.psum(chosen + noise, "data")
    return total + alike + steps, lax.pmax(sums.max(), "data"), mine


def of_step(fun: Callable[..., Any], mesh: Mesh, *args: Any) -> jaxprs.Program:
    program, _, _ = jaxprs.trace_step(fun, *args)
    return program


def test_agrees_with_jax_types_on_every_value(
    types: dict[int, list[Any]], mesh8_explicit: Mesh
) -> None:
    fun = jax.shard_map(
        body_step, mesh=mesh8_explicit, in_specs=(P(), P("data")), out_specs=(P(), P(), P("data"))
    )
    params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
    x = jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh8_explicit, P("data")))
    params = jax.device_put(params, NamedSharding(mesh8_explicit, P()))
    with jax.set_mesh(mesh8_explicit):
        program = of_step(fun, mesh8_explicit, params, x)
    replicas = Replicas((("data", 8),), AXES, AXES)
    same = [Spread.same(len(program.avals[v].shape)) for v in program.inputs]
    facts = analyse(program, replicas, [*same[:2], Spread((("data",), ()))], casts_vary=True)
    compared = 0
    for part in all_facts(facts):
        for v, aval in enumerate(types[id(part.program.avals)]):
            if not part.spreads[v].tiles or not any(part.spreads[v].tiles):
                assert part.spreads[v].varies == varying(aval), (v, aval)
                compared += bool(varying(aval))
    assert compared > 30
    honest = analyse(program, replicas, [*same[:2], Spread((("data",), ()))])
    for ours, theirs in zip(all_facts(honest), all_facts(facts), strict=True):
        for a, b in zip(ours.spreads, theirs.spreads, strict=True):
            assert (
                a.varies <= b.varies
            )  # a cast changes no value: we may know of more that is equal


MISLEADING: dict[str, Callable[[Any, jax.Array], Any]] = {
    "an index": lambda p, x: p + lax.axis_index("data"),
    "data of one replica": lambda p, x: p + x.sum(),
    "noise of one replica": lambda p, x: (
        p
        + jax.random.normal(jax.random.fold_in(jax.random.key(0), lax.axis_index("data")), p.shape)
    ),
    "a choice by data": lambda p, x: lax.cond(x.sum() > 0, lambda: p, lambda: 2 * p),
    "a loop by data": lambda p, x: lax.while_loop(
        lambda c: c[0] < x.sum(), lambda c: (c[0] + 1, c[1] * 2), (jnp.float32(0), p)
    )[1],
    "a sum over half of the replicas": lambda p, x: (
        p + lax.psum(x.sum(), "data", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]])
    ),
    "a neighbour's": lambda p, x: (
        p + lax.ppermute(x.sum(), "data", [(i, (i + 1) % 8) for i in range(8)])
    ),
    "a carry that starts equal": lambda p, x: lax.scan(lambda c, row: (c + row.sum(), None), p, x)[
        0
    ],
}


@pytest.mark.parametrize("name", MISLEADING)
def test_is_never_taken_for_replicated(name: str, mesh8_auto: Mesh) -> None:
    fun = jax.shard_map(
        MISLEADING[name],
        mesh=mesh8_auto,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    x = jax.device_put(np.ones((16, 4), np.float32), NamedSharding(mesh8_auto, P("data")))
    with pytest.raises(wus.ReplicationError, match="may differ between replicas"):
        wus.analyze(fun, jnp.ones(3), x, mesh=mesh8_auto)
