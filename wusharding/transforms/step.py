"""`shard_step`: a whole train step, found as it is written, with its weight update sharded."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from wusharding.analysis.assign import Assignment, assign, why_whole
from wusharding.analysis.choose import FormatChoice, Target, bucket_sizes, lanes_of
from wusharding.analysis.decide_step import Style
from wusharding.analysis.layout import Leaf
from wusharding.analysis.lines import Lines
from wusharding.analysis.placement import Placement, Replicas, Tiles, spec_tiles
from wusharding.analysis.replication import Spread, needing_whole
from wusharding.analysis.schedule import Schedule
from wusharding.analysis.step import StepUpdate, find_update
from wusharding.analysis.step_plan import StepPlan, make_step_plan
from wusharding.errors import (
    ContextError,
    ReplicationError,
    StateMismatchError,
    UnsupportedStepError,
    UnsupportedStepWarning,
)
from wusharding.formats.buckets import BucketSizes
from wusharding.jaxprs import Program, is_extended, prune, trace_step
from wusharding.transforms import checks
from wusharding.transforms.collectives import Collectives
from wusharding.transforms.context import (
    Context,
    check_axes,
    current_mesh,
    is_tracer,
    platform_of,
)
from wusharding.transforms.interpret import Interpreter
from wusharding.transforms.mapped import mapped
from wusharding.transforms.programs import flatten_with_paths
from wusharding.transforms.storage import Storage
from wusharding.transforms.torus import lines_of
from wusharding.transforms.trees import matched, nodes

PyTree = Any
_UNREACHED = "no split weight's update meets it"

# What to do where all that follows needs the whole batch.
_REMEDY = (
    "Let each replica's rows stay together: of [batch, ...] take [rows, microbatches, ...] and "
    "swap these, rather than [microbatches, rows, ...]."
)
_ROWS_AT_ONCE = (
    "Let all rows run at once, as by jax.vmap, or loop over microbatches, [microbatches, rows, "
    "...] with the rows split."
)
_REMEDIES: Mapping[str, str] = {
    "scan": _ROWS_AT_ONCE,
    "dynamic_slice": _ROWS_AT_ONCE,
    "dynamic_update_slice": _ROWS_AT_ONCE,
    "concatenate": (
        "Lay parts of the batch side by side within each replica's rows: jnp.stack(parts, 1), "
        "reshaped, rather than jnp.concatenate(parts)."
    ),
}


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

    @property
    def replicas(self) -> Replicas:
        return self.context.replicas

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether these arrays, whole or as stored, are what the step was built for."""
        return all(
            x.dtype == leaf.dtype and tuple(x.shape) in _shapes(leaf, self.replicas)
            for leaf, x in zip(self.ins, leaves, strict=True)
        )


def shard_step(
    step: Callable[..., Any],
    *,
    mesh: Mesh | None = None,
    axis: str | Sequence[str] = "data",
    shard_axis: str | Sequence[str] | None = None,
    in_specs: PyTree = None,
    out_specs: PyTree = None,
    weights: Literal["whole", "split", "layers"] = "whole",
    accumulate: Literal["whole", "shards"] = "whole",
    scatter_dtype: Any = None,
    formats: FormatChoice = "auto",
    min_shard_elems: int = 2,
    bucket_bytes: int = 4 * 2**20,
    donate_argnums: int | Sequence[int] | None = None,
    on_unsupported: Literal["raise", "warn"] = "raise",
    target: Target | None = None,
    lines: Mapping[str, Lines] | None = None,
) -> ShardedStep:
    """Shards the weight update that is found in a train step, as the step is written.

    The step is traced; what every replica would do alike, between the sum of the gradients and the
    new weights, runs on shards: the sum becomes a reduce-scatter, auxiliary state stays split from
    step to step, and the new weights are gathered.

    Args:
      step: a train step of pytrees of arrays: a function over `shard_map` or `pmap`, a global-view
        function as for `jit`, or, with `in_specs` and `out_specs`, a function of one replica. It
        may be jitted already.
      mesh: the mesh; None takes the ambient one, else that of the arguments.
      axis: the mesh axis (or axes) of the replicas.
      shard_axis: the part of `axis` to shard over; None shards over all of it.
      in_specs: for a function of one replica that reduces over `axis` by itself: as in
        `jax.shard_map`.
      out_specs: likewise.
      weights: "whole" gathers new weights at the end of a step; "split" keeps them split between
        steps and gathers them at the start, in the dtype that the forward pass reads; "layers" also
        gathers weights that a `lax.scan` goes over one layer at a time, and scatters their
        gradients so: less memory, more and smaller collectives.
      accumulate: in loops over microbatches, "whole" adds up each replica's own gradients and
        scatters their sum once a step; "shards" scatters each microbatch's and adds up shards: 1/N
        of the memory, and as many times the traffic as there are microbatches.
      scatter_dtype: as for `shard_updates`.
      formats: as for `shard_updates`.
      min_shard_elems: weights and state arrays with fewer elements stay replicated.
      bucket_bytes: as for `shard_updates`.
      donate_argnums: as for `jax.jit`; None donates what `step`, if jitted, donates.
      on_unsupported: what to do with a step in which nothing can be sharded, or which treats as
        replicated what is not: "raise" an error that says why, or "warn" and run it as written.
      target: "cpu", "gpu" or "tpu", what formats are chosen for; None takes the mesh's devices'.
      lines: torus lines, as for `shard_updates`.

    Returns:
      A `ShardedStep`, called like `step`.

    Raises (when called):
      ReplicationError: what is declared replicated may differ between replicas.
      UnsupportedStepError: nothing in it can be sharded.

    Source: Xu et al. 2020 (arXiv 2004.13336).
    """
    if not callable(step):
        raise TypeError(f"step: found {type(step).__name__}, need a function.")
    reduce_axes = checks.axis_tuple("axis", axis)
    shard_axes = reduce_axes if shard_axis is None else checks.axis_tuple("shard_axis", shard_axis)
    options = StepOptions(
        reduce_axes=reduce_axes,
        shard_axes=checks.check_subset(shard_axes, reduce_axes),
        formats=checks.check_choice("formats", formats, checks.FORMAT_CHOICES),
        min_shard_elems=checks.check_count("min_shard_elems", min_shard_elems, 0),
        bucket_bytes=checks.check_count("bucket_bytes", bucket_bytes, 1),
        lines=lines,
        style=Style(
            checks.check_choice("weights", weights, ("whole", "split", "layers")),
            checks.check_choice("accumulate", accumulate, ("whole", "shards")),
            checks.check_sum_dtypes("scatter_dtype", scatter_dtype, reduce_axes),
        ),
        on_unsupported=checks.check_choice("on_unsupported", on_unsupported, ("raise", "warn")),
        target=checks.check_choice("target", target, (*checks.TARGETS, None)),
    )
    checks.check_mesh(mesh, reduce_axes)
    if (in_specs is None) != (out_specs is None):
        raise ValueError("in_specs, out_specs: give both, or neither.")
    if in_specs is not None:
        step = functools.partial(_per_replica, step, mesh, in_specs, out_specs)
    if isinstance(donate_argnums, int):
        donate_argnums = (donate_argnums,)
    return ShardedStep(step, mesh, options, donate_argnums)


def _per_replica(fun: Any, mesh: Any, in_specs: Any, out_specs: Any, *args: Any) -> Any:
    return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
        *args
    )


class ShardedStep:
    """A train step with a sharded weight update; see `shard_step`."""

    def __init__(
        self,
        step: Callable[..., Any],
        mesh: Mesh | None,
        options: StepOptions,
        donate_argnums: Sequence[int] | None,
    ) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step = step
        self._mesh = mesh
        self._options = options
        self._donate = donate_argnums
        self._built: dict[Any, Built] = {}
        self._last: Built | None = None
        self._plain: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Args:
          *args: those of the step; its state whole, as at first, or as an earlier call returned it.
          **kwargs: those of its positional arguments that are given by name.

        Returns:
          What the step returns; auxiliary state as it is stored (see `unshard`).
        """
        args = self._positional(args, kwargs) if kwargs else args
        try:
            built = self._for(args)
        except (ReplicationError, UnsupportedStepError) as e:
            if self._options.on_unsupported == "raise":
                raise
            return self._as_written(e)(*args)
        if any(map(is_tracer, jax.tree.leaves(args))):
            return built.fun(*self._stored_inline(built, args))
        return built.fun(*self._placed(built, args))

    def _positional(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """All arguments by position."""
        bound = inspect.signature(self._step).bind(*args, **kwargs)
        if bound.kwargs:
            raise TypeError(
                f"{', '.join(bound.kwargs)}: a keyword-only argument of the step. Bind it before, "
                "as by functools.partial."
            )
        return bound.args

    def _as_written(self, error: Exception) -> Callable[..., Any]:
        """The step itself, once nothing else can be done."""
        if self._plain is None:
            warnings.warn(
                f"shard_step: the step runs as it is written: {error}",
                UnsupportedStepWarning,
                stacklevel=3,
            )
            jitted = hasattr(self._step, "lower")
            self._plain = self._step if jitted else jax.jit(self._step, donate_argnums=self._donate)
        return self._plain

    def lower(self, *args: Any) -> Any:
        """As `jax.jit(step).lower`; arrays or shapes, in the step's own shapes or as stored.

        `compile()` of it takes arguments as `shard` returns them.
        """
        built = self._for(args)
        return built.fun.lower(*self._described(built))

    def shard(self, *args: Any) -> tuple[Any, ...]:
        """The arguments with their state stored as the step keeps it; lossless."""
        built = self._for(args)
        return self._placed(built, args)

    def unshard(self, tree: PyTree) -> PyTree:
        """State as the step returns it, back in logical shapes; lossless.

        Args:
          tree: an argument of the step, a result, any part of these, or a tree of such parts.

        Raises:
          StateMismatchError: it is none of these, or may be several that are stored differently.
        """
        if not self._built:
            raise StateMismatchError("unshard: the step has not run yet: nothing is sharded.")
        leaves, treedef = jax.tree.flatten(tree)
        known = self._find(treedef, leaves)
        if known is None:
            children, outer = jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)
            if not children or children[0] is tree:
                raise StateMismatchError(
                    f"unshard: found {treedef} of shapes {[tuple(x.shape) for x in leaves]}, which "
                    "is no part of the step's arguments or results. Hand over an argument, a "
                    "result, or a part of these."
                )
            return outer.unflatten(map(self.unshard, children))
        built, found = known
        out = list(leaves)
        split = [
            i
            for i, leaf in enumerate(found)
            if _is_stored_otherwise(leaf, built.replicas, leaves[i])
        ]
        whole = _convert(built, [found[i] for i in split], [leaves[i] for i in split], back=True)
        for i, x in zip(split, whole, strict=True):
            out[i] = x
        return treedef.unflatten(out)

    def shard_shapes(self, *args: Any) -> tuple[Any, ...]:
        """The arguments as the step keeps them, as `jax.ShapeDtypeStruct`s with shardings."""
        return self._described(self._for(args))

    @property
    def plan(self) -> StepPlan:
        """What was found and decided, for the arguments of the last call (see `plan_for`)."""
        if self._last is None:
            raise StateMismatchError(
                "plan: the step has seen no arguments yet: call it, or plan_for(*args)."
            )
        return self._last.plan

    def plan_for(self, *args: Any) -> StepPlan:
        """The same for these arguments (shapes suffice), without running anything."""
        return self._for(args).plan

    # -------------------------------------------------------------------------------------- looking

    def _find(self, treedef: Any, leaves: Sequence[Any]) -> tuple[Built, Sequence[Leaf]] | None:
        """The leaves that a tree has in the arguments or results of the step; None if none has."""
        found: tuple[Built, Sequence[Leaf]] | None = None
        for built in reversed(list(self._built.values())):
            for tree, known in (
                (built.args_def.unflatten([0] * len(built.ins)), built.ins),
                (jax.tree.map(lambda _: 0, built.out_shape), built.outs),
            ):
                for node in nodes(tree):
                    part = known[node.start : node.stop]
                    if node.treedef != treedef or not all(
                        tuple(x.shape) in _shapes(leaf, built.replicas)
                        for leaf, x in zip(part, leaves, strict=True)
                    ):
                        continue
                    if found is None:
                        found = (built, part)
                    elif any(
                        (a.shape, a.placement) != (b.shape, b.placement)
                        and _is_stored_otherwise(a, built.replicas, x)
                        for a, b, x in zip(part, found[1], leaves, strict=True)
                    ):
                        raise StateMismatchError(
                            f"unshard: {treedef} with these shapes may be several parts of the "
                            "step's state, stored in different ways. Hand over the whole argument."
                        )
        return found

    def _for(self, args: tuple[Any, ...]) -> Built:
        leaves, treedef = jax.tree.flatten(args)
        if self._plain is not None:
            raise UnsupportedStepError("it was found before that nothing in it can be sharded.")
        built = None
        if all(hasattr(x, "shape") for x in leaves):
            built = self._built.get((treedef, tuple(map(_form_of, leaves))))
        self._last = built or self._new(args)
        return self._last

    def _new(self, args: tuple[Any, ...]) -> Built:
        """The step for arguments of a form that was not seen yet."""
        paths, leaves, treedef = flatten_with_paths(args)
        for path, x in zip(paths, leaves, strict=True):
            if not hasattr(x, "shape") and not isinstance(x, bool | int | float | complex):
                raise TypeError(
                    f"args{path}: found {type(x).__name__}, need arrays. Bind settings and "
                    "functions before, as by functools.partial."
                )
        leaves = [x if hasattr(x, "shape") else jnp.asarray(x) for x in leaves]
        key = (treedef, tuple(map(_form_of, leaves)))
        if key not in self._built:
            known = next(
                (b for b in self._built.values() if b.args_def == treedef and b.accepts(leaves)),
                None,
            )
            self._built[key] = known or self._build(paths, leaves, treedef)
        return self._built[key]

    # ------------------------------------------------------------------------------------- building

    def _build(self, paths: Sequence[str], leaves: Sequence[Any], treedef: Any) -> Built:
        options = self._options
        mesh = self._mesh_for(leaves)
        axis_sizes = tuple((str(n), s) for n, s in mesh.shape.items())
        shard_axes = options.shard_axes
        lines = lines_of(options.lines, mesh, shard_axes, mesh.shape)
        replicas = Replicas(axis_sizes, options.reduce_axes, shard_axes, lines)
        context = Context(False, False, replicas, mesh, tuple(mesh.axis_names))
        structs = [_struct(x, mesh) for x in leaves]
        with _under(mesh):
            program, out_shape, donated = trace_step(self._step, *treedef.unflatten(structs))
        program = prune(program)
        inputs = [Spread(t) for t in self._input_tiles(program, structs)]
        args = treedef.unflatten(structs)
        update = find_update(
            program,
            replicas,
            inputs,
            matched(args, out_shape),
            options.style,
        )
        target = options.target or platform_of(mesh)
        avals = [program.avals[v] for v in update.params]
        found = assign(
            update,
            avals,
            [update.facts.spreads[v].tiles for v in update.params],
            replicas,
            target=target,
            choice=options.formats,
            min_shard_elems=options.min_shard_elems,
        )
        if not any(p.span for p in (*found.params, *found.state)):
            raise UnsupportedStepError(_why_nothing(update, replicas))
        schedule = found.schedule
        out_paths, _, _ = flatten_with_paths(out_shape)
        ins, outs = _leaves_of(
            update, found, schedule, (paths, out_paths), options, target, replicas
        )
        donate = self._donate
        if donate is None:
            donate = [k for k, d in enumerate(_per_argument(args, donated)) if d]
        buckets = bucket_sizes(options.bucket_bytes, target)

        def plan() -> StepPlan:
            return make_step_plan(
                update, ins, outs, schedule, found.problems, replicas, buckets, donate, found.params
            )

        run = _runner(context, ins, outs, schedule, buckets)
        out_def = jax.tree.structure(out_shape)

        def fun(*args: Any) -> Any:
            return out_def.unflatten(run(jax.tree.leaves(args)))

        fun.__name__ = getattr(self._step, "__name__", "step")  # what profiles call the program
        return Built(
            context,
            update,
            ins,
            outs,
            treedef,
            out_shape,
            plan,
            jax.jit(fun, donate_argnums=tuple(donate)),
        )

    def _mesh_for(self, leaves: Sequence[Any]) -> Any:
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

    def _input_tiles(self, program: Program, structs: Sequence[Any]) -> list[Tiles]:
        """How each input is split: as `shard_map` takes it, else as it comes."""
        entered = {}
        for op in program.ops:
            if op.name == "enter_manual":
                entered.setdefault(op.ins[0], op.params["spec"])
        return [
            spec_tiles(entered.get(v) or _spec_of(x) or PartitionSpec(), len(x.shape))
            for v, x in zip(program.inputs, structs, strict=True)
        ]

    # ----------------------------------------------------------------------------------- converting

    def _described(self, built: Built) -> Any:
        mesh = checks.concrete_mesh(built.context.mesh)
        return built.args_def.unflatten(
            jax.ShapeDtypeStruct(
                leaf.stored_shape(built.replicas),
                leaf.dtype,
                sharding=NamedSharding(mesh, leaf.spec(built.replicas)),
            )
            for leaf in built.ins
        )

    def _placed(self, built: Built, args: Any) -> Any:
        """Arguments as they are stored, on the mesh; those that are there already are not moved."""
        leaves = [x if hasattr(x, "shape") else jnp.asarray(x) for x in jax.tree.leaves(args)]
        whole = _unstored(built, leaves)
        if whole or not built.seen:
            _check_copies(built, leaves, range(len(leaves)) if not built.seen else whole)
            built.seen.append(True)
        if whole:
            done = _convert(built, [built.ins[i] for i in whole], [leaves[i] for i in whole])
            for i, x in zip(whole, done, strict=True):
                leaves[i] = x
        for i, x in enumerate(leaves):
            if getattr(x, "weak_type", False):  # what a step returns is not: one form, one program
                leaves[i] = jax.lax.convert_element_type(x, x.dtype)
        mesh = checks.concrete_mesh(built.context.mesh)
        wanted = [NamedSharding(mesh, leaf.spec(built.replicas)) for leaf in built.ins]
        move = [i for i, x in enumerate(leaves) if getattr(x, "sharding", None) != wanted[i]]
        if move:
            (moved,) = checks.place(
                [[leaves[i] for i in move]],
                [[wanted[i].spec for i in move]],
                [("args", tuple(built.ins[i] for i in move))],
                mesh,
            )
            for i, x in zip(move, moved, strict=True):
                leaves[i] = x
        return built.args_def.unflatten(leaves)

    def _stored_inline(self, built: Built, args: Any) -> Any:
        """The same while the call is being traced."""
        leaves = jax.tree.leaves(args)
        whole = _unstored(built, leaves)
        for i, x in zip(
            whole,
            _convert(built, [built.ins[i] for i in whole], [leaves[i] for i in whole]),
            strict=True,
        ):
            leaves[i] = x
        return built.args_def.unflatten(leaves)


def _why_nothing(update: StepUpdate, replicas: Replicas) -> str:
    """Why nothing of a step is sharded."""
    axes = replicas.reduce_axes
    if replicas.num_shards == 1:
        return f"the axes {replicas.shard_axes} to shard over have size 1."
    if not update.facts.touched:
        return (
            f"nothing in the step differs between the replicas of axis={axes}: no argument is "
            "split over it. Place the batch there first: jax.device_put(batch, "
            f"NamedSharding(mesh, PartitionSpec({', '.join(map(repr, axes))}))), or, for shapes, "
            "give them that sharding. Inside of jit on an auto mesh it cannot be seen how they "
            "are split: call the step outside of jit."
        )
    if not update.weights and not update.aux:
        return (
            "no weights or state were found: no argument comes out of the step again, in the same "
            "tree, shapes and dtypes, equal on all replicas. Let the step return its new state."
        )
    whole = next(needing_whole(update.facts, replicas), None)
    if not update.weights and whole is not None:
        return (
            f"no weights were found, for {whole.name} at {whole.source} needs the whole of "
            f"the batch, which is split over {axes}: what follows is the same on every replica. "
            + _REMEDIES.get(whole.name, _REMEDY)
        )
    if not update.weights:
        return (
            "no weights were found: of what goes round nothing is read by the forward pass and "
            "made anew. An update that differs between replicas is left alone."
        )
    return "every weight is too small to split; see min_shard_elems."


def _shapes(leaf: Leaf, replicas: Replicas) -> tuple[tuple[int, ...], ...]:
    """The shapes in which an array may come: its owner's, and as it is stored."""
    return leaf.logical_shape(replicas), leaf.stored_shape(replicas)


def _leaves_of(
    update: StepUpdate,
    found: Assignment,
    schedule: Schedule,
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
        leaf(v, paths[1][o], schedule.outputs[o][1], "", o in copied_out)
        for o, v in enumerate(program.outputs)
    )
    return ins, outs


def _unstored(built: Built, leaves: Sequence[Any]) -> list[int]:
    """Arrays that came whole and are stored in another shape."""
    return [
        i
        for i, (leaf, x) in enumerate(zip(built.ins, leaves, strict=True))
        if tuple(x.shape) != leaf.stored_shape(built.replicas)
        or (_may_be_reordered(leaf, built.replicas) and not _is_reordered(leaf, built.replicas, x))
    ]


def _is_stored_otherwise(leaf: Leaf, replicas: Replicas, x: Any) -> bool:
    """Whether an array comes as it is stored, and that is not as its owner knows it."""
    return tuple(x.shape) != leaf.logical_shape(replicas) or _is_reordered(leaf, replicas, x)


def _may_be_reordered(leaf: Leaf, replicas: Replicas) -> bool:
    """Whether shards lie in an order of their own, though the shape may be the same.

    So they do along torus lines, and where another axis tiles a dim that is split.
    """
    span = leaf.placement.span
    if span is None:
        return False
    return bool(replicas.shard_numbers) or any(leaf.placement.tiles[span.lo : span.hi])


def _is_reordered(leaf: Leaf, replicas: Replicas, x: Any) -> bool:
    """Whether an array in that case comes as it is stored: split so already."""
    if not _may_be_reordered(leaf, replicas):
        return False
    if is_tracer(x) and not _tells(x, leaf.placement.tile_axes + replicas.shard_axes):
        raise ContextError(
            f"args{leaf.path}: in a call that is being traced it cannot be seen whether this is "
            "state in the step's own logical order or as the step returned it, in pieces: both "
            f"have shape {tuple(x.shape)}. Call the step outside of jit, or make the mesh with "
            "axis_types=(jax.sharding.AxisType.Explicit, ...)."
        )
    spec, ndim = _spec_of(x), len(x.shape)  # typed ones name every dim
    return spec is not None and spec_tiles(spec, ndim) == spec_tiles(leaf.spec(replicas), ndim)


def _tells(x: Any, axes: Iterable[str]) -> bool:
    """Whether the type of a traced value says how it lies along these axes."""
    sharding = _sharding_of(x)
    if sharding is None:
        return False
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    return all(kinds.get(a) == AxisType.Explicit for a in axes)


def _check_copies(built: Built, leaves: Sequence[Any], which: Iterable[int]) -> None:
    """Stacks that count as copies of one array, as with `pmap`, hold the same on every replica."""
    stacks = [i for i in which if built.ins[i].copies and leaves[i].shape[0] > 1]
    arrays = [leaves[i] for i in stacks]
    for i, same in zip(stacks, _all_equal(built, arrays) if arrays else [], strict=True):
        if not same:
            raise ReplicationError(
                f"args{built.ins[i].path}: its copies differ between the replicas, along dim 0, "
                "and the step treats it as one value: it goes round, and nothing makes the copies "
                "differ. Replicate one copy, as by jax.device_put_replicated."
            )


def _all_equal(built: Built, stacks: Sequence[Any]) -> list[bool]:
    """Whether every replica holds the same bits as the first one."""
    specs = [PartitionSpec(built.replicas.reduce_axes)] * len(stacks)

    def body(stacks: Sequence[Any]) -> tuple[list[Any]]:
        index = jax.lax.axis_index(built.replicas.reduce_axes)
        return ([_equals_first(x, index, built.replicas.reduce_axes) for x in stacks],)

    check = mapped(built.context, body, [specs], [[PartitionSpec()] * len(stacks)])
    placed = checks.place(
        [stacks], [specs], [("args", ())], checks.concrete_mesh(built.context.mesh)
    )
    return jax.device_get(jax.jit(check)(*placed)[0])


def _equals_first(x: Any, index: Any, axes: tuple[str, ...]) -> Any:
    x = jax.random.key_data(x) if is_extended(x.dtype) else x
    width = x.dtype.itemsize * 8
    if jnp.iscomplexobj(x):
        x, width = jnp.stack([x.real, x.imag]), width // 2
    bits = x.astype("uint8") if x.dtype == bool else jax.lax.bitcast_convert_type(x, f"uint{width}")
    first = jax.lax.psum(jnp.where(index == 0, bits, jnp.zeros_like(bits)), axes)
    return jax.lax.pmin(jnp.all(bits == first).astype("int32"), axes)


def _convert(
    built: Built, leaves: Sequence[Leaf], arrays: Sequence[Any], *, back: bool = False
) -> list[Any]:
    """Whole arrays as they are stored, or `back`; one by one, so that few are there twice."""
    done = []
    for leaf, x in zip(leaves, arrays, strict=True):
        unnamed = dataclasses.replace(leaf, path="", why="")
        convert, spec = _converter(built.context, unnamed, back)
        if not is_tracer(x):
            mesh = checks.concrete_mesh(built.context.mesh)
            ((x,),) = checks.place([[x]], [[spec]], [("args", (leaf,))], mesh)
        done.append(convert([x])[0][0])
    return done


@functools.lru_cache(maxsize=1024)
def _converter(context: Context, leaf: Leaf, back: bool) -> tuple[Any, PartitionSpec]:
    """Converts arrays of one form, and the spec in which it takes them."""
    replicas = context.replicas

    def body(xs: Sequence[Any]) -> tuple[list[Any]]:
        storage = Storage(Collectives.here(replicas, BucketSizes(0, 0)))
        return (storage.unshard([leaf], xs) if back else storage.shard([leaf], xs),)

    stored, logical = leaf.spec(replicas), leaf.logical_spec()
    into, out = (stored, logical) if back else (logical, stored)
    return jax.jit(mapped(context, body, [[into]], [[out]])), into


def _runner(
    context: Context,
    ins: Sequence[Leaf],
    outs: Sequence[Leaf],
    schedule: Schedule,
    buckets: BucketSizes,
) -> Callable[[Sequence[Any]], list[Any]]:
    replicas = context.replicas
    leaving = frozenset(v for v, _ in schedule.outputs)

    def body(args: Sequence[Any]) -> tuple[list[Any]]:
        collectives = Collectives.here(replicas, buckets)
        storage = Storage(collectives)
        local = [storage.load(leaf, x) for leaf, x in zip(ins, args, strict=True)]
        done = Interpreter(collectives, checked=False).run(schedule, local, leaving)
        return ([storage.store(leaf, x) for leaf, x in zip(outs, done, strict=True)],)

    run = mapped(
        context,
        body,
        [[leaf.spec(replicas) for leaf in ins]],
        [[leaf.spec(replicas) for leaf in outs]],
    )
    return lambda args: run(args)[0]


def _per_argument(args: tuple[Any, ...], flags: Sequence[bool]) -> list[bool]:
    rest = iter(flags)
    return [
        bool(found) and all(found)
        for found in ([next(rest) for _ in jax.tree.leaves(a)] for a in args)
    ]


def _form_of(x: Any) -> tuple[Any, ...]:
    return x.shape, x.dtype, _spec_of(x)


def _sharding_of(x: Any) -> NamedSharding | None:
    """How an array, a shape or a traced value lies on a mesh, as far as it tells."""
    found = jax.typeof(x) if is_tracer(x) else x
    sharding = getattr(found, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _spec_of(x: Any) -> PartitionSpec | None:
    sharding = _sharding_of(x)
    return None if sharding is None else sharding.spec


def _struct(x: Any, mesh: Any) -> jax.ShapeDtypeStruct:
    own = _sharding_of(x)
    spec = PartitionSpec() if own is None else own.spec
    # Arrays on a mesh of other axes, as Flax's `replicate` makes them, are moved to this one.
    if own is None or not set(own.mesh.axis_names) <= set(mesh.axis_names):
        spec = PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False)
    )


def _under(mesh: Any) -> Any:
    if not jax.sharding.get_abstract_mesh().empty:
        return jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
    return jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh))


def analyze(step: Callable[..., Any], *args: Any, **options: Any) -> StepPlan:
    """Explains what `shard_step` would do with a train step; runs and compiles nothing.

    Args:
      step: as for `shard_step`, or a `ShardedStep`.
      *args: its arguments; `jax.ShapeDtypeStruct`s suffice, with shardings for what is split.
      **options: as for `shard_step`.
    """
    sharded = step if isinstance(step, ShardedStep) else shard_step(step, **options)
    return sharded.plan_for(*args)
