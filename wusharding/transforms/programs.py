"""Traces an optimizer, decides how it is stored, and keeps what was decided for later calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from wusharding.analysis.assign import MIN_ORPHAN_ELEMS, Update, assign, decided, why_whole
from wusharding.analysis.choose import FormatChoice, Target, bucket_sizes, lanes_of
from wusharding.analysis.decide import Value, decide
from wusharding.analysis.layout import Layout, Leaf
from wusharding.analysis.lines import Lines
from wusharding.analysis.norms import norms_once
from wusharding.analysis.placement import Placement, Replicas, Tiles, replicated
from wusharding.analysis.plan import Plan, make_plan
from wusharding.analysis.propagate import Propagation
from wusharding.analysis.schedule import Problem, Schedule
from wusharding.analysis.sum_dtypes import SumDtypes
from wusharding.errors import StateMismatchError, UnsupportedOptimizerError
from wusharding.jaxprs import Aval, Program, prune, trace
from wusharding.transforms.context import is_tracer
from wusharding.transforms.trees import flatten_with_paths


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked of `shard_updates`, checked."""

    reduce_axes: tuple[str, ...]
    shard_axes: tuple[str, ...]
    other_axes: tuple[str, ...]
    reduce: str | None
    formats: FormatChoice
    min_shard_elems: int
    bucket_bytes: int
    gather_dtype: Any
    master_dtype: Any
    sum_dtypes: SumDtypes
    per_example: bool
    target: Target | None
    lines: Mapping[str, Lines] | None
    extra_args: Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """The weights of one call: their tree, paths, shapes and model-parallel tiles."""

    treedef: Any
    paths: tuple[str, ...]
    avals: tuple[Aval, ...]
    tiles: tuple[Tiles, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """An update ready to run.

    Args:
      update: the traced program.
      schedule: its steps on one device.
      reusable: it holds no functions or values of one caller.
    """

    update: Update
    schedule: Schedule
    reusable: bool


_MAX_TURNS = 3


class Programs:
    """The traced programs of one wrapped optimizer.

    Args:
      optimizer: the wrapped one.
      options: as checked by `shard_updates`.
    """

    def __init__(self, optimizer: optax.GradientTransformation, options: Options) -> None:
        self.optimizer = optax.with_extra_args_support(optimizer)
        self.options = options
        self._layouts: dict[Any, Layout] = {}
        self._inits: dict[Layout, Schedule] = {}
        self._updates: dict[Layout, Update] = {}
        self._steps: dict[Any, Step] = {}

    # -------------------------------------------------------------------------------------- layout

    def layout(self, params: ParamInfo, replicas: Replicas, target: Target) -> Layout:
        """How weights and state are stored; the same object for the same question."""
        key = (params, replicas, target)
        if key not in self._layouts:
            self._layouts[key] = self._build_layout(params, replicas, target)
        return self._layouts[key]

    def plan(self, layout: Layout, target: Target, *, reduced: bool) -> Plan:
        """What was decided, for people: from the update as it was traced for the layout."""
        schedule, problems = self._decided(layout, self._updates[layout])
        buckets = bucket_sizes(self.options.bucket_bytes, target)
        return make_plan(
            layout,
            schedule,
            problems,
            buckets,
            sum_dtypes=self.options.sum_dtypes,
            gather_dtype=self.options.gather_dtype,
            reduced=reduced,
        )

    def _decided(self, layout: Layout, update: Update) -> tuple[Schedule, list[Problem]]:
        params = [leaf.placement for leaf in layout.params]
        state = [leaf.placement for leaf in layout.state]
        return decided(update, layout.replicas, params, state)

    def _build_layout(self, params: ParamInfo, replicas: Replicas, target: Target) -> Layout:
        """The layout of weights and state, in the form that the state keeps from step to step."""
        options = self.options
        masters = tuple(_master_dtype(a.dtype, options.master_dtype) for a in params.avals)
        avals = _updated(params.avals, masters)
        _, state = self._trace_init(params.treedef, avals)
        grads_def, grads_of = _grads_tree(params.treedef)

        def layout_of(
            leaves: Sequence[Placement], tree: Any, placements: Sequence[Placement] | None
        ) -> Layout:
            paths, structs, state_def = flatten_with_paths(tree)
            found = [Aval(tuple(s.shape), s.dtype) for s in structs]
            return Layout(
                replicas,
                self._leaves(params.paths, params.avals, leaves, replicas, target),
                self._leaves(
                    paths,
                    found,
                    placements or [replicated(len(a.shape)) for a in found],
                    replicas,
                    target,
                ),
                params.treedef,
                state_def,
                masters,
                grads_def,
                grads_of,
            )

        plain = [Placement(t) for t in params.tiles]
        final = state
        for _ in range(_MAX_TURNS):
            update, after = self._trace_for_layout(layout_of(plain, final, None))
            if _same_structs(final, after):
                break
            final = after
        else:
            raise UnsupportedOptimizerError(
                f"the optimizer's state takes a new form at every step, still after {_MAX_TURNS} "
                "of "
                f"them: {jax.tree.structure(final)}"
            )
        assigned = functools.partial(
            assign,
            update,
            avals,
            params.tiles,
            replicas,
            target=target,
            choice=options.formats,
            min_shard_elems=options.min_shard_elems,
        )
        found = assigned()
        layout = layout_of(found.params, final, found.state)
        if options.other_axes:
            checked = tuple(a for a in options.other_axes if replicas.size((a,)) > 1)
            wide = assigned(other_axes=checked)
            layout = _widened(layout, layout_of(wide.params, final, wide.state))
        self._updates[layout] = update
        return layout

    def _leaves(
        self,
        paths: Sequence[str],
        avals: Sequence[Aval],
        placements: Sequence[Placement],
        replicas: Replicas,
        target: Target,
    ) -> tuple[Leaf, ...]:
        orphan = f"only used whole, and smaller than {MIN_ORPHAN_ELEMS} elements"

        def why(aval: Aval, placement: Placement) -> str:
            return why_whole(aval, placement, replicas, self.options.min_shard_elems, orphan)

        return tuple(
            Leaf(path, a.shape, a.dtype, p, lanes_of(p, a.shape, target), why(a, p))
            for path, a, p in zip(paths, avals, placements, strict=True)
        )

    def _trace_init(
        self, treedef: Any, avals: Sequence[Aval], layout: Layout | None = None
    ) -> tuple[Program, Any]:
        """The wrapped `init`, as it is or, with a layout, in the form that the state then keeps."""

        def run(leaves: list[Any]) -> Any:
            state = self.optimizer.init(treedef.unflatten(leaves))
            return state if layout is None else _in_final_form(state, layout)

        try:
            return trace(run, _structs(avals))
        except Exception as e:
            raise UnsupportedOptimizerError(
                f"the optimizer's init could not be traced at global shapes: {type(e).__name__}: "
                f"{e}"
            ) from e

    def _trace_for_layout(self, layout: Layout) -> tuple[Update, Any]:
        """Traces the update before its real extra arguments are known; also the new state."""
        grads = _updated(layout.grads, layout.grad_masters)
        if self.options.per_example:
            grads = [Aval((layout.replicas.num_replicas, *a.shape), a.dtype) for a in grads]
        given = self.options.extra_args
        tries = [dict(given)] if given is not None else _guesses(layout)
        errors = []
        for extra in tries:
            try:
                return self._trace_update(layout, grads, extra, with_params=True, apply=False)
            except StateMismatchError:
                raise
            except Exception as e:
                errors.append(e)
        first = errors[0]
        raise UnsupportedOptimizerError(
            f"the optimizer's update could not be traced at global shapes: {type(first).__name__}: "
            f"{first}. If it needs extra arguments, give examples of them (arrays, shapes or "
            f"functions): shard_updates(..., extra_args=dict(value=..., value_fn=...))."
        ) from first

    # ---------------------------------------------------------------------------------------- init

    def init(self, layout: Layout) -> Schedule:
        """The schedule of the wrapped `init` on shards of the weights."""
        if layout not in self._inits:
            avals = _updated(layout.params, layout.masters)
            program, _ = self._trace_init(layout.params_def, avals, layout)
            propagation = Propagation(program, layout.replicas)
            params = [leaf.placement for leaf in layout.params]
            state = [leaf.placement for leaf in layout.state]
            for v, p in zip((*program.inputs, *program.outputs), (*params, *state), strict=True):
                if not p.is_replicated and v not in program.consts:
                    propagation.hints.setdefault(v, p)
            propagation.run()
            values = [Value(p, leaf=i) for i, p in enumerate(params)]
            self._inits[layout], _ = decide(propagation, values, state)
        return self._inits[layout]

    # -------------------------------------------------------------------------------------- update

    def step(
        self,
        layout: Layout,
        grads: Sequence[Aval],
        extra: Mapping[str, Any],
        *,
        with_params: bool,
        apply: bool,
    ) -> Step:
        """The schedule of one update.

        Args:
          layout: how everything is stored.
          grads: global shapes and dtypes of the gradients as the wrapped optimizer gets them.
          extra: the extra arguments of this call.
          with_params: whether the caller gave the weights.
          apply: return new weights, not updates (weights with a master always do).
        """
        arrays, static, extra_def = split_extra(extra)
        cacheable = all(_is_hashable_constant(x) for x in static)
        key = None
        if cacheable:
            avals = tuple((tuple(x.shape), str(x.dtype)) for x in arrays)
            key = (layout, tuple(grads), avals, tuple(static), extra_def, with_params, apply)
            if key in self._steps:
                return self._steps[key]
        try:
            update, new_state = self._trace_update(
                layout, grads, extra, with_params=with_params, apply=apply
            )
        except (AttributeError, TypeError, ValueError) as e:
            if layout in self._updates or isinstance(e, StateMismatchError):
                raise
            raise StateMismatchError(
                "state: this optimizer did not make it, and its update fails on it: "
                f"{type(e).__name__}: {e}. Use the state of its own init, or make one by "
                "tx.shard(plain, params)."
            ) from e
        self._check_state(layout, new_state)
        steps, _ = self._decided(layout, update)
        reusable = key is not None and not any(map(is_tracer, update.program.consts.values()))
        step = Step(update, steps, reusable)
        if reusable:
            self._steps[key] = step
        return step

    def _trace_update(
        self,
        layout: Layout,
        grads: Sequence[Aval],
        extra: Mapping[str, Any],
        *,
        with_params: bool,
        apply: bool,
    ) -> tuple[Update, Any]:
        arrays, static, extra_def = split_extra(extra)
        params = _updated(layout.params, layout.masters)
        new = tuple(apply or m is not None for m in layout.masters)

        def run(grads: Any, state: Any, params: Any, arrays: Any) -> Any:
            tree = layout.params_def.unflatten(params) if params is not None else None
            kwargs = merge_extra(arrays, static, extra_def)
            updates, after = self.optimizer.update(
                layout.grads_def.unflatten(grads), layout.state_def.unflatten(state), tree, **kwargs
            )
            flat = self._check_updates(layout, updates)
            out = [
                optax.apply_updates(p, u) if n else u
                for p, u, n in zip(params or flat, flat, new, strict=True)
            ]
            return out, after

        state = [leaf.aval for leaf in layout.state]
        given = _structs(params) if with_params else None
        program, (_, after) = trace(run, _structs(grads), _structs(state), given, arrays)
        axes = layout.replicas.reduce_axes if self.options.per_example else ()
        update = Update.of_optimizer(
            prune(norms_once(program)),
            layout.grads_of,
            len(params),
            len(state),
            has_params=with_params,
            per_example_axes=axes,
        )
        return update, after

    def _check_updates(self, layout: Layout, updates: Any) -> list[Any]:
        if jax.tree.structure(updates) != layout.params_def:
            raise StateMismatchError(
                f"the wrapped optimizer returned updates of another tree than the parameters: "
                f"{jax.tree.structure(updates)}, expected {layout.params_def}"
            )
        flat = jax.tree.leaves(updates)
        for leaf, update in zip(layout.params, flat, strict=True):
            if tuple(update.shape) != leaf.shape:
                raise StateMismatchError(
                    f"params{leaf.path}: the wrapped optimizer returned an update of shape "
                    f"{list(update.shape)} for a parameter of shape {list(leaf.shape)}. An "
                    "optimizer that takes gradients per example needs per_example=True, and any "
                    "other must not have it."
                )
        return flat

    def _check_state(self, layout: Layout, after: Any) -> None:
        if jax.tree.structure(after) != layout.state_def:
            raise StateMismatchError(
                "the wrapped optimizer changed the tree of its state: "
                f"{jax.tree.structure(after)}, "
                f"expected {layout.state_def}"
            )
        for leaf, new in zip(layout.state, jax.tree.leaves(after), strict=True):
            if tuple(new.shape) != leaf.shape or new.dtype != leaf.dtype:
                raise StateMismatchError(
                    f"state{leaf.path}: the wrapped optimizer changed it from {leaf.dtype}"
                    f"{list(leaf.shape)} to {new.dtype}{list(new.shape)}, with gradients of "
                    "another "
                    f"dtype than the parameters'. Cast the gradients, or give the optimizer an "
                    f"accumulator dtype, or use master_dtype=jnp.float32."
                )


def _widened(plain: Layout, wide: Layout) -> Layout:
    """The layout `wide`, whose leaves know how model parallelism alone splits them."""

    def leaves(before: Sequence[Leaf], after: Sequence[Leaf]) -> tuple[Leaf, ...]:
        return tuple(
            b
            if a.placement.tiles == b.placement.tiles
            else dataclasses.replace(b, tiles=a.placement.tiles)
            for a, b in zip(before, after, strict=True)
        )

    return dataclasses.replace(
        wide, params=leaves(plain.params, wide.params), state=leaves(plain.state, wide.state)
    )


def _in_final_form(state: Any, layout: Layout) -> Any:
    """The state of `init` in the tree that it has after a step.

    Some optimizers (`optax.monitor`) add arrays to their state in the first step, without reading
    any before; they are zero here from the start, so that the state keeps its tree.
    """
    paths, leaves, _ = flatten_with_paths(state)
    known = dict(zip(paths, leaves, strict=True))
    return [
        _as_dtype(known[leaf.path], leaf.dtype)
        if leaf.path in known
        else jnp.zeros(leaf.shape, leaf.dtype)
        for leaf in layout.state
    ]


def _as_dtype(x: Any, dtype: Any) -> Any:
    x = jnp.asarray(x)
    return x if x.dtype == dtype else x.astype(dtype)


def _same_structs(a: Any, b: Any) -> bool:
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)


def _grads_tree(params_def: Any) -> tuple[Any, tuple[int, ...]]:
    """The tree of the gradients, and the parameter that each of them is for."""
    numbered = params_def.unflatten(range(params_def.num_leaves))
    if isinstance(numbered, optax.LookaheadParams):
        numbered = numbered.fast
    leaves, treedef = jax.tree.flatten(numbered)
    return treedef, tuple(leaves)


def _master_dtype(dtype: Any, master: Any) -> Any:
    if master is None or not jnp.issubdtype(dtype, jnp.floating) or dtype == master:
        return None
    return jnp.dtype(master)


def _updated(leaves: Sequence[Aval | Leaf], masters: Sequence[Any]) -> list[Aval]:
    """Weights or their gradients as the wrapped optimizer gets them: in their masters' dtypes."""
    return [Aval(x.shape, m or x.dtype) for x, m in zip(leaves, masters, strict=True)]


def _structs(avals: Sequence[Aval]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


def _guesses(layout: Layout) -> list[dict[str, Any]]:
    """Extra arguments that optax's own optimizers ask for, tried in turn."""
    grads = layout.grads_def.unflatten(_structs([leaf.aval for leaf in layout.grads]))

    def value_fn(tree: Any, *args: Any, **kwargs: Any) -> Any:
        return sum(jnp.sum(jnp.real(x)).astype(jnp.float32) for x in jax.tree.leaves(tree))

    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    value = {"value": scalar}
    search: dict[str, Callable[..., Any] | Any] = {"grad": grads, "value_fn": value_fn}
    sharpness = {"grad_fn": lambda tree, *args: tree}
    objective = {"obj_fn": value_fn}
    everything = {**value, **search, **objective, **sharpness}
    return [{}, value, {**value, **search}, objective, sharpness, everything]


# ----------------------------------------------------------------------------- extra arguments


def split_extra(extra: Mapping[str, Any]) -> tuple[list[Any], list[Any], Any]:
    """Arrays, everything else (functions, flags), and the tree that joins them again.

    A Python float is an array: a loss that changes from step to step must not compile anew.
    """
    leaves, treedef = jax.tree.flatten(dict(extra))
    arrays = [jnp.asarray(x) if isinstance(x, float) else x for x in leaves if _is_array(x)]
    static = [None if _is_array(x) else x for x in leaves]
    marks = tuple(_is_array(x) for x in leaves)
    return arrays, static, (treedef, marks)


def merge_extra(arrays: Sequence[Any], static: Sequence[Any], joined: Any) -> dict[str, Any]:
    """The extra arguments that `split_extra` took apart."""
    treedef, marks = joined
    remaining = iter(arrays)
    return treedef.unflatten(
        [next(remaining) if mark else s for mark, s in zip(marks, static, strict=True)]
    )


def _is_array(x: Any) -> bool:
    return isinstance(x, float) or (hasattr(x, "shape") and hasattr(x, "dtype"))


def _is_hashable_constant(x: Any) -> bool:
    return x is None or isinstance(x, bool | int | str)
