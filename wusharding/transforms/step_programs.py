"""Builds a train step for arguments of one form, and keeps what was built for later calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from wusharding.analysis.assign import Assignment, assign, why_whole
from wusharding.analysis.choose import FormatChoice, Target, bucket_sizes, lanes_of
from wusharding.analysis.decide_step import Style
from wusharding.analysis.layout import Leaf
from wusharding.analysis.lines import Lines
from wusharding.analysis.placement import Placement, Replicas
from wusharding.analysis.refusal import why_nothing
from wusharding.analysis.step import StepUpdate, find_update
from wusharding.analysis.step_plan import StepPlan, make_step_plan
from wusharding.errors import (
    ContextError,
    ShardingError,
    StateMismatchError,
    UnsupportedStepError,
)
from wusharding.jaxprs import is_of_other_mesh
from wusharding.transforms.checks import check_arrays, check_positions, concrete_mesh
from wusharding.transforms.context import (
    Context,
    check_axes,
    current_mesh,
    global_context,
    platform_of,
    spec_of,
)
from wusharding.transforms.copies import check_copies
from wusharding.transforms.step_runner import runner
from wusharding.transforms.step_storage import (
    as_whole,
    check_alive,
    is_stored,
    is_stored_otherwise,
    placed,
    shapes,
    stored,
    unstored,
)
from wusharding.transforms.step_trace import traced
from wusharding.transforms.storage import stored_struct
from wusharding.transforms.trees import flatten_with_paths, matched, nodes

_STORED_ELSEWHERE = (
    "shard_step: raised by the step itself, while it was traced for these arguments. State that a "
    "sharded step returned is stored in pieces, which that step alone takes: hand it to another "
    "one whole, as step.unshard(state) gives it."
)
_UNREACHED = "no split weight's update meets it"


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What the user asked of `shard_step`, checked."""

    reduce_axes: tuple[str, ...]
    shard_axes: tuple[str, ...]
    formats: FormatChoice
    min_shard_elems: int
    bucket_bytes: int
    lines: Mapping[str, Lines] | None
    style: Style
    donate_argnums: tuple[int, ...] | None
    on_unsupported: Literal["raise", "warn"]
    target: Target | None


@dataclasses.dataclass(frozen=True, eq=False)
class Built:
    """A step for arguments of one form.

    Args:
      context: the mesh.
      update: the traced step and what in it is what.
      ins: how each argument array is stored between steps.
      outs: how each array that it returns is stored.
      args_def: tree of the arguments.
      out_shape: what it returns, in logical shapes.
      make_plan: says what was decided; a run does not need it.
      fun: the compiled function, of arguments as they are stored.
      seen: not empty once stacks of copies were found to be equal.
    """

    context: Context
    update: StepUpdate
    ins: tuple[Leaf, ...]
    outs: tuple[Leaf, ...]
    args_def: Any
    out_shape: Any
    make_plan: Callable[[], StepPlan]
    fun: Any
    seen: list[bool] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def plan(self) -> StepPlan:
        return self.make_plan()

    def accepts(self, arrays: Sequence[Any]) -> bool:
        """Whether these arrays, whole or as stored, are what the step was built for."""
        return all(
            x.dtype == leaf.dtype and tuple(x.shape) in shapes(leaf, self.context.replicas)
            for leaf, x in zip(self.ins, arrays, strict=True)
        )

    def as_whole(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays, and of those that come as stored the shapes that they have whole."""
        return [as_whole(self.context, leaf, x) for leaf, x in zip(self.ins, arrays, strict=True)]

    def described(self) -> Any:
        """The arguments as they are stored, as `jax.ShapeDtypeStruct`s with shardings."""
        mesh = concrete_mesh(self.context.mesh)
        replicas = self.context.replicas
        return self.args_def.unflatten(stored_struct(leaf, replicas, mesh) for leaf in self.ins)

    def placed(self, args: Any) -> Any:
        """Arguments as they are stored, on the mesh; those that are there already are not moved."""
        arrays = [_as_array(x) for x in jax.tree.leaves(args)]
        check_arrays("args", self.ins, arrays, "ask lower(...), shard_shapes(...) or plan_for(...)")
        check_alive(self.ins, arrays)
        replicas = self.context.replicas
        whole = unstored(replicas, self.ins, arrays)
        if whole or not self.seen:
            asked = whole if self.seen else range(len(arrays))
            pairs = [(self.ins[i], arrays[i]) for i in asked]
            check_copies(self.context, [p for p in pairs if not is_stored(p[0], replicas, p[1])])
            self.seen.append(True)
        arrays = stored(self.context, self.ins, arrays, whole)
        return self.args_def.unflatten(placed(self.context, self.ins, arrays))

    def stored_inline(self, args: Any) -> Any:
        """Arguments as they are stored, while the call is being traced."""
        arrays = jax.tree.leaves(args)
        whole = unstored(self.context.replicas, self.ins, arrays)
        return self.args_def.unflatten(stored(self.context, self.ins, arrays, whole))


class StepPrograms:
    """What was built of one train step.

    Args:
      step: the train step.
      mesh: the mesh that the user named, if any.
      options: as checked by `shard_step`.
    """

    def __init__(self, step: Callable[..., Any], mesh: Mesh | None, options: StepOptions) -> None:
        self._step = step
        self._mesh = mesh
        self._options = options
        self._built: dict[Any, Built] = {}

    # -------------------------------------------------------------------------------------- looking

    def built(self, args: tuple[Any, ...]) -> Built:
        """The step for arguments of this form; the same object for the same form."""
        leaves, treedef = jax.tree.flatten(args)
        found = None
        if all(hasattr(x, "shape") for x in leaves):
            found = self._built.get((treedef, tuple(map(_form_of, leaves))))
        return found or self._new(args)

    def _new(self, args: tuple[Any, ...]) -> Built:
        """The step for arguments of a form that was not seen yet."""
        paths, leaves, treedef = flatten_with_paths(args)
        for path, x in zip(paths, leaves, strict=True):
            if not hasattr(x, "shape") and not isinstance(x, bool | int | float | complex):
                raise TypeError(
                    f"args{path}: found {type(x).__name__}, need arrays. Bind settings and "
                    "functions before, as by functools.partial."
                )
        leaves = [_as_array(x) for x in leaves]
        key = (treedef, tuple(map(_form_of, leaves)))
        if key not in self._built:
            known = next(
                (b for b in self._built.values() if b.args_def == treedef and b.accepts(leaves)),
                None,
            )
            self._built[key] = known or self._build_for(paths, leaves, treedef)
        return self._built[key]

    def _build_for(self, paths: Sequence[str], leaves: Sequence[Any], treedef: Any) -> Built:
        """The step for arguments of which some may come as an earlier call stored them.

        So the last batch of an epoch, which is smaller, finds the state of the batches before.
        """
        for built in reversed(self._built.values()):
            if built.args_def == treedef:
                whole = built.as_whole(leaves)
                if any(x is not y for x, y in zip(whole, leaves, strict=True)):
                    return _checked(self._build(paths, whole, treedef), leaves)
        return self._build(paths, leaves, treedef)

    def part(self, treedef: Any, arrays: Sequence[Any]) -> tuple[Context, Sequence[Leaf]] | None:
        """The leaves that a tree has in the arguments or results of the step; None if none has."""
        if not self._built:
            raise StateMismatchError("unshard: the step has not run yet: nothing is sharded.")
        found: tuple[Context, Sequence[Leaf]] | None = None
        for built in reversed(list(self._built.values())):
            replicas = built.context.replicas
            for tree, known in (
                (built.args_def.unflatten([0] * len(built.ins)), built.ins),
                (jax.tree.map(lambda _: 0, built.out_shape), built.outs),
            ):
                for node in nodes(tree):
                    part = known[node.start : node.stop]
                    if node.treedef != treedef or not all(
                        tuple(x.shape) in shapes(leaf, replicas)
                        for leaf, x in zip(part, arrays, strict=True)
                    ):
                        continue
                    if found is None:
                        found = (built.context, part)
                    elif any(
                        (a.shape, a.placement) != (b.shape, b.placement)
                        and is_stored_otherwise(a, replicas, x)
                        for a, b, x in zip(part, found[1], arrays, strict=True)
                    ):
                        raise StateMismatchError(
                            f"unshard: {treedef} with these shapes may be several parts of the "
                            "step's state, stored in different ways. Hand over the whole argument."
                        )
        return found

    # ------------------------------------------------------------------------------------- building

    def _build(self, paths: Sequence[str], leaves: Sequence[Any], treedef: Any) -> Built:
        options = self._options
        mesh = self._mesh_for(leaves)
        context = global_context(
            mesh, options.reduce_axes, options.shard_axes, options.lines, placed=mesh
        )
        replicas = context.replicas
        try:
            found = traced(self._step, mesh, leaves, treedef)
        except Exception as e:
            if is_of_other_mesh(e):
                raise ContextError(
                    "step: it has a shard_map or pmap over another mesh than that with axes "
                    f"{dict(mesh.shape)}, which it was given or its arguments lie on. Name the "
                    f"axes alike: jax.pmap(..., axis_name={options.reduce_axes[0]!r}) and a pmean "
                    "over it, or shard_step(..., mesh=..., axis=...) as the step has them."
                ) from e
            if not isinstance(e, ShardingError):
                e.add_note(_STORED_ELSEWHERE)
            raise
        pairs = matched(found.args, found.out_shape)
        out_paths, _, out_def = flatten_with_paths(found.out_shape)
        update = find_update(
            found.program, replicas, found.inputs, pairs, options.style, results=out_paths
        )
        target = options.target or platform_of(mesh)
        assigned = assign(
            update,
            [update.program.avals[v] for v in update.params],
            [update.facts.spreads[v].tiles for v in update.params],
            replicas,
            target=target,
            choice=options.formats,
            min_shard_elems=options.min_shard_elems,
        )
        if not any(p.span for p in (*assigned.params, *assigned.state)):
            raise UnsupportedStepError(why_nothing(update, replicas, paths, pairs))
        ins, outs = _leaves_of(update, assigned, (paths, out_paths), options, target, replicas)
        donate = found.donated
        if options.donate_argnums is not None:
            count = len(found.args)
            donate = check_positions("donate_argnums", options.donate_argnums, count)
        buckets = bucket_sizes(options.bucket_bytes, target)

        def plan() -> StepPlan:
            return make_step_plan(
                update,
                ins,
                outs,
                assigned.schedule,
                assigned.problems,
                replicas,
                buckets,
                donate,
                assigned.params,
            )

        new_weights = [o for _, o in update.weights]
        run = runner(context, ins, outs, assigned.schedule, buckets, new_weights)

        def fun(*args: Any) -> Any:
            return out_def.unflatten(run(jax.tree.leaves(args)))

        fun.__name__ = getattr(self._step, "__name__", "step")  # what profiles call the program
        return Built(
            context,
            update,
            ins,
            outs,
            treedef,
            found.out_shape,
            plan,
            jax.jit(fun, donate_argnums=donate),
        )

    def _mesh_for(self, leaves: Sequence[Any]) -> Mesh | AbstractMesh:
        mesh = current_mesh(self._mesh)
        if mesh is None:
            found = (getattr(getattr(x, "sharding", None), "mesh", None) for x in leaves)
            axes = self._options.reduce_axes
            mesh = next((m for m in found if m and {*axes} <= {*m.axis_names}), None)
            if mesh is None:
                raise ContextError(
                    "no mesh: found neither mesh= nor an ambient mesh, nor an argument on one with "
                    f"axis={axes}. Pass shard_step(..., mesh=mesh)."
                )
        check_axes(mesh, self._options.reduce_axes)
        if not isinstance(mesh, Mesh) and self._mesh is not None:
            return self._mesh
        return mesh


def _checked(built: Built, arrays: Sequence[Any]) -> Built:
    """A step that takes arrays as an earlier one stored them."""
    replicas = built.context.replicas
    for leaf, x in zip(built.ins, arrays, strict=True):
        if tuple(x.shape) not in shapes(leaf, replicas):
            raise StateMismatchError(
                f"args{leaf.path}: found {list(x.shape)}, as a call with other arguments stored "
                f"it; for these it is stored as {list(leaf.stored_shape(replicas))}. Hand it over "
                "whole, as step.unshard(state) gives it."
            )
    return built


def _as_array(x: Any) -> Any:
    """Numbers, and host arrays of dtypes that JAX does not compute in, as JAX takes them."""
    if hasattr(x, "shape"):
        host = isinstance(x, np.ndarray | np.generic)
        if not host or x.dtype == jax.dtypes.canonicalize_dtype(x.dtype):
            return x
    return jnp.asarray(x)


def _form_of(x: Any) -> tuple[Any, ...]:
    return x.shape, x.dtype, spec_of(x)


def _leaves_of(
    update: StepUpdate,
    found: Assignment,
    paths: tuple[Sequence[str], Sequence[str]],
    options: StepOptions,
    target: Target,
    replicas: Replicas,
) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """How each argument and each result is stored."""
    program = update.program
    placements = [Placement(update.facts.spreads[v].tiles) for v in program.inputs]
    reasons = [""] * len(placements)
    for pairs, splits in ((update.weights, found.params), (update.aux, found.state)):
        for (i, _), p in zip(pairs, splits, strict=True):
            placements[i] = update.stored(p) if pairs is update.weights else p
            aval = program.avals[program.inputs[i]]
            reasons[i] = why_whole(aval, p, replicas, options.min_shard_elems, _UNREACHED)
    copied_in, copied_out = ({pair[end] for pair in update.copied} for end in (0, 1))

    def leaf(v: int, path: str, p: Placement, why: str, copied: bool) -> Leaf:
        aval = program.avals[v]
        copies = replicas.reduce_axes if copied else ()
        lanes = lanes_of(p, aval.shape, target)
        return Leaf(path, aval.shape, aval.dtype, p, lanes, why, copies)

    ins = tuple(
        leaf(v, paths[0][i], placements[i], reasons[i], i in copied_in)
        for i, v in enumerate(program.inputs)
    )
    outs = tuple(
        leaf(v, paths[1][o], found.schedule.outputs[o][1], "", o in copied_out)
        for o, v in enumerate(program.outputs)
    )
    return ins, outs
