"""A training step in each context in which `shard_updates` works, and what one sees of it.

The gradients of a step come stacked: those of each replica along a first axis. What a context makes
of them is its own business: local gradients in `shard_map` and `pmap`, `unreduced` ones on an
explicit mesh, means on an auto mesh and in eager calls.
"""

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from benchmarks.optimizer_cases import local_grads
from large_scale.hlo import Collective, collectives

Tree = Any

MANUAL = ("checked", "unchecked", "pmap")
GLOBAL = ("explicit", "auto", "eager")
CONTEXTS = (*MANUAL, *GLOBAL)


def mesh_of(shape: Mapping[str, int], *, auto: bool = False) -> Mesh:
    """A mesh of the first devices."""
    kind = AxisType.Auto if auto else AxisType.Explicit
    count = int(np.prod(list(shape.values())))
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=(kind,) * len(shape),
        devices=jax.devices()[:count],
    )


# --------------------------------------------------------------------------------------- comparing


def host(x: Any) -> np.ndarray:
    """An array on the host; of a random key its data."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def relative_error(found: Tree, wanted: Tree) -> float:
    """The largest difference of two trees, each leaf's relative to its largest magnitude."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = host(a), host(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jnp.inexact):
            a, b = (x.astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in (a, b))
            if a.size:
                error = np.max(np.abs(a - b)) / (np.max(np.abs(b)) or 1.0)
                worst = max(worst, np.inf if np.isnan(error) else float(error))
        else:
            worst = max(worst, float(np.any(a != b)))
    return worst


def assert_same_bits(found: Tree, wanted: Tree) -> None:
    """Equal trees, shapes, dtypes and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in pairs:
        a, b = host(a), host(b)
        where = jax.tree_util.keystr(path)
        assert (where, a.shape, a.dtype) == (where, b.shape, b.dtype)
        np.testing.assert_array_equal(a, b, err_msg=where)


# ------------------------------------------------------------------------------- weights, reference


def leaf(*shape: int, seed: int = 0) -> np.ndarray:
    """Odd multiples of 1/32, of either sign: `f32[*shape]`."""
    rng = np.random.default_rng([seed, *shape])
    return ((2 * rng.integers(-20, 20, shape) + 1) / 32).astype(np.float32)


def batches(params: Tree, num_replicas: int = 8, steps: int = 3) -> list[Tree]:
    """Gradients of each replica for some steps; their sums are exact."""
    made = [local_grads(params, step, num_replicas) for step in range(steps)]
    return jax.tree.map(np.asarray, made)


def mean_of(stacked: Tree) -> Tree:
    return jax.tree.map(lambda g: jnp.sum(g, axis=0) / g.shape[0], stacked)


def reference(
    optimizer: optax.GradientTransformation,
    params: Tree,
    given: Sequence[Tree],
    grads_of: Callable[[Tree, Tree], Tree] = lambda params, grads: grads,
) -> tuple[Tree, Tree]:
    """Params and state of plain optax on one device after steps on these whole gradients.

    `grads_of(params, x)` makes the gradients of a step where something else is given for it.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    @jax.jit
    def step(x: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, state = optimizer.update(grads_of(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(params)
    for x in given:
        params, state = step(x, state, params)
    return params, state


# --------------------------------------------------------------------------------------- observing


class CompileLog(logging.Handler):
    """The functions that JAX compiled, by name; single operations, as eager calls, are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.match(r"Compiling (\S+) ", record.getMessage()):
            operation = found[1].removeprefix("jit(").removesuffix(")").lstrip("_")
            if not hasattr(jax.lax, operation) and not hasattr(jnp, operation):
                self.names.append(found[1])


@contextlib.contextmanager
def compiled_functions() -> Iterator[list[str]]:
    """Names of the functions that are compiled meanwhile."""
    log = CompileLog()
    logger = logging.getLogger("jax")
    logger.addHandler(log)
    try:
        with jax.log_compiles():
            yield log.names
    finally:
        logger.removeHandler(log)


def hlo_of(function: Any, *args: Any) -> list[Collective]:
    """The collectives of a jitted function."""
    return collectives(function.lower(*args).compile().as_text())


def of_kind(found: Sequence[Collective], kind: str) -> list[Collective]:
    return [c for c in found if c.kind == kind]


def groups_of(found: Collective) -> set[frozenset[int]]:
    """The devices that take part together, whatever their order."""
    return set(map(frozenset, found.groups))


def layout_of_arrays(tree: Tree) -> dict[str, tuple[Any, ...]]:
    """Shape, dtype and spec (trailing Nones apart) of each array, by path."""
    return {
        jax.tree_util.keystr(path): (x.shape, x.dtype, spec_of(x))
        for path, x in jax.tree.leaves_with_path(tree)
    }


def spec_of(x: Any) -> tuple[Any, ...]:
    """The entries of an array's spec; () where it lies on one device."""
    return entries(getattr(x.sharding, "spec", P()))


def entries(spec: P) -> tuple[Any, ...]:
    """The entries of a spec, trailing Nones apart."""
    found = list(spec)
    while found and found[-1] is None:
        found.pop()
    return tuple(found)


def bytes_on_devices(tree: Tree) -> dict[int, int]:
    """Bytes that each device holds of the arrays of a tree."""
    held: dict[int, int] = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return held


# ----------------------------------------------------------------------------------------- padding


def poisoned(state: Any, value: float) -> tuple[Any, int]:
    """The state with `value` in all padding, and how many elements that is."""
    layout, count = state.layout, 0

    def leaf_of(leaf: Any, x: jax.Array) -> jax.Array:
        nonlocal count
        fmt = leaf.format(layout.replicas)
        if fmt is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        padding = fmt.pack(np.ones(fmt.shape, bool)) == 0
        count += int(padding.sum())
        return jax.device_put(np.where(padding, value, np.asarray(x)), x.sharding)

    def leaves_of(leaves: Any, tree: Tree) -> list[jax.Array]:
        return [leaf_of(a, x) for a, x in zip(leaves, jax.tree.leaves(tree), strict=True)]

    inner = leaves_of(layout.state, state.inner)
    masters = leaves_of(layout.master_leaves(), state.master)
    state = state._replace(
        inner=jax.tree.unflatten(layout.state_def, inner),
        master=jax.tree.unflatten(jax.tree.structure(state.master), masters),
    )
    return state, count


# ------------------------------------------------------------------------------------------- loops


@dataclasses.dataclass
class Loop:
    """A training loop in one context.

    Attributes:
        tx: the sharded optimizer.
        step: `(params, state, stacked gradients) -> (params, state)`.
        place: puts stacked gradients where the step wants them.
        unshard: the plain state from a sharded one.
        within: the surroundings in which it is to be called.
        stacked: params are stacked along a first axis, as pmap has them.
    """

    tx: Any
    step: Callable[..., Any]
    place: Callable[[Tree], Tree]
    params: Tree
    state: Any
    unshard: Callable[[Any], Tree]
    within: Callable[[], Any]
    stacked: bool

    def run(self, grads: Sequence[Tree]) -> "Loop":
        with self.within():
            for g in grads:
                self.params, self.state = self.step(self.params, self.state, self.place(g))
        return self

    def collectives(self, grads: Tree) -> list[Collective]:
        """The collectives of one step, which is compiled for good: it is not compiled again."""
        with self.within():
            lowered = self.step.lower(self.params, self.state, self.place(grads))
            self.step = lowered.compile()
        return collectives(self.step.as_text())

    @property
    def whole_params(self) -> Tree:
        return self._first(self.params)

    @property
    def plain_state(self) -> Tree:
        with self.within():
            return self._first(self.unshard(self.state))

    def _first(self, tree: Tree) -> Tree:
        """One replica's copy, where pmap has stacked them; all of them are equal."""
        if not self.stacked:
            return tree
        for x in map(host, jax.tree.leaves(tree)):
            np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
        return jax.tree.map(lambda x: x[0], tree)


def training(
    context: str,
    optimizer: Any,
    params: Tree,
    *,
    shape: Mapping[str, int] | None = None,
    axis: str | tuple[str, ...] = "data",
    apply: bool = False,
    donate: bool = False,
    **options: Any,
) -> Loop:
    """A loop over `optimizer` in a context, with its state initialised there.

    Args:
        context: one of `CONTEXTS`.
        optimizer: to be wrapped.
        params: initial ones.
        shape: of the mesh, `{"data": 8}` by default.
        axis: the axes over which replicas lie.
        apply: call `apply`, not `update` and `optax.apply_updates`.
        donate: donate params and state.
        **options: for `shard_updates`.
    """
    mesh = mesh_of(shape or {"data": 8}, auto=context in ("auto", "eager"))
    given = {"axis": axis, **options}
    if context != "pmap":
        given["mesh"] = mesh
    tx = wus.shard_updates(optimizer, **given)

    def advance(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        if apply:
            return tx.apply(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jit = functools.partial(jax.jit, donate_argnums=(0, 1) if donate else ())
    # From the host, so that donation takes no array of the caller's.
    params = jax.tree.map(np.asarray, params)
    if context == "pmap":
        return _pmapped(tx, advance, params, mesh, donate)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, P(axis)))
    within: Callable[[], Any] = contextlib.nullcontext
    if context in ("checked", "unchecked"):
        state = tx.init(params)
        specs = tx.state_specs(params)

        def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
            return advance(params, state, jax.tree.map(lambda g: g[0], grads))

        step = jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(P(), specs, P(axis)),
                out_specs=(P(), specs),
                check_vma=context == "checked",
            )
        )
    elif context == "explicit":
        within = functools.partial(jax.set_mesh, mesh)
        with within():
            state = tx.init(params)

        @jit
        def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
            return advance(params, state, unreduced_mean(params, grads, axis))

    else:
        state = tx.init(params)

        def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
            return advance(params, state, mean_of(grads))

        step = jit(step) if context == "auto" else step
    return Loop(tx, step, place, params, state, tx.unshard, within, stacked=False)


def unreduced_mean(params: Tree, grads: Tree, axis: str | tuple[str, ...] = "data") -> Tree:
    """`unreduced` gradients of a loss that is the mean over replicas of a product with weights."""
    axes = {axis} if isinstance(axis, str) else set(axis)

    def loss(weights: Tree) -> jax.Array:
        return sum(jnp.sum(linear(g, w, axis)) / g.shape[0] for g, w in pairs(grads, weights))

    weights = jax.tree.map(lambda w: jax.sharding.reshard(w, P(reduced=axes)), params)
    return jax.grad(loss)(weights)


def linear(grads: jax.Array, weights: jax.Array, axis: str | tuple[str, ...]) -> jax.Array:
    """`[replicas]` products of weights with each replica's gradients, on an explicit mesh."""
    dims = tuple(range(weights.ndim))
    contract = ((tuple(d + 1 for d in dims), dims), ((), ()))
    return jax.lax.dot_general(grads, weights, contract, out_sharding=P(axis))


def pairs(a: Tree, b: Tree) -> Iterator[tuple[Any, Any]]:
    return zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)


def _pmapped(tx: Any, advance: Callable[..., Any], params: Tree, mesh: Mesh, donate: bool) -> Loop:
    pmap = functools.partial(jax.pmap, axis_name="data", devices=list(mesh.devices.flat))
    stacked = jax.tree.map(lambda x: np.broadcast_to(x, (mesh.size, *x.shape)), params)
    stacked = pmap(lambda x: x)(stacked)
    return Loop(
        tx,
        pmap(advance, donate_argnums=(0, 1) if donate else ()),
        lambda grads: grads,
        stacked,
        pmap(tx.init)(stacked),
        pmap(tx.unshard),
        contextlib.nullcontext,
        stacked=True,
    )
