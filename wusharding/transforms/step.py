"""`shard_step`: a whole train step, found as it is written, with its weight update sharded."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from wusharding.analysis.choose import FormatChoice, Target
from wusharding.analysis.decide_step import Style
from wusharding.analysis.lines import Lines
from wusharding.analysis.step_plan import StepPlan
from wusharding.errors import (
    ReplicationError,
    StateMismatchError,
    UnsupportedStepError,
    UnsupportedStepWarning,
)
from wusharding.transforms import checks
from wusharding.transforms.context import is_tracer
from wusharding.transforms.step_programs import Built, StepOptions, StepPrograms
from wusharding.transforms.step_storage import convert, is_split

PyTree = Any


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

    >>> import jax.numpy as jnp, optax
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh, adam = jax.make_mesh((8,), ("data",)), optax.adam(1e-3)
    >>> def train_step(w, state, x):
    ...     grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    ...     updates, state = adam.update(grads, state, w)
    ...     return optax.apply_updates(w, updates), state
    >>> w = jax.device_put(jnp.ones((17, 16)), NamedSharding(mesh, P()))
    >>> x = jax.device_put(jnp.ones((32, 17)), NamedSharding(mesh, P("data")))
    >>> step = shard_step(train_step, mesh=mesh)
    >>> w, state = step(w, adam.init(w), x)
    >>> state[0].mu.addressable_shards[0].data.size, step.unshard(state)[0].mu.shape  # of 272
    (34, (17, 16))
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
        donate_argnums=checks.check_argnums("donate_argnums", donate_argnums),
        on_unsupported=checks.check_choice("on_unsupported", on_unsupported, ("raise", "warn")),
        target=checks.check_choice("target", target, (*checks.TARGETS, None)),
    )
    checks.check_mesh(mesh, reduce_axes)
    if (in_specs is None) != (out_specs is None):
        raise ValueError("in_specs, out_specs: give both, or neither.")
    if in_specs is not None:
        step = functools.partial(_per_replica, step, mesh, in_specs, out_specs)
    return ShardedStep(step, mesh, options)


def _per_replica(fun: Any, mesh: Any, in_specs: Any, out_specs: Any, *args: Any) -> Any:
    return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
        *args
    )


class ShardedStep:
    """A train step with a sharded weight update; see `shard_step`."""

    def __init__(self, step: Callable[..., Any], mesh: Mesh | None, options: StepOptions) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step = step
        self._options = options
        self._programs = StepPrograms(step, mesh, options)
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
            return built.fun(*built.stored_inline(args))
        return built.fun(*built.placed(args))

    def _positional(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """All arguments by position."""
        bound = inspect.signature(self._step).bind(*args, **kwargs)
        if bound.kwargs:
            raise TypeError(
                f"{', '.join(bound.kwargs)}: a keyword-only argument of the step. Bind it before, "
                "as by functools.partial."
            )
        return bound.args

    def _for(self, args: tuple[Any, ...]) -> Built:
        """The step as it was built for these arguments, now the last one asked for."""
        if self._plain is not None:
            raise UnsupportedStepError("it was found before that nothing in it can be sharded.")
        self._last = self._programs.built(args)
        return self._last

    def _as_written(self, error: Exception) -> Callable[..., Any]:
        """The step itself, once nothing else can be done."""
        if self._plain is None:
            warnings.warn(
                f"shard_step: the step runs as it is written: {error}",
                UnsupportedStepWarning,
                stacklevel=3,
            )
            jitted, donate = hasattr(self._step, "lower"), self._options.donate_argnums
            self._plain = self._step if jitted else jax.jit(self._step, donate_argnums=donate)
        return self._plain

    def lower(self, *args: Any) -> Any:
        """As `jax.jit(step).lower`; arrays or shapes, in the step's own shapes or as stored.

        `compile()` of it takes arguments as `shard` returns them.
        """
        built = self._for(args)
        return built.fun.lower(*built.described())

    def shard(self, *args: Any) -> tuple[Any, ...]:
        """The arguments with their state stored as the step keeps it; lossless."""
        return self._for(args).placed(args)

    def unshard(self, tree: PyTree) -> PyTree:
        """State as the step returns it, whole and in logical shapes; lossless.

        Args:
          tree: an argument of the step, a result, any part of these, or a tree of such parts.

        Raises:
          StateMismatchError: it is none of these, or may be several that are stored differently.
        """
        leaves, treedef = jax.tree.flatten(tree)
        for x in leaves:
            if not hasattr(x, "shape") or isinstance(x, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"unshard: found {type(x).__name__}, need arrays. Of shapes ask "
                    "jax.eval_shape(step.unshard, shapes)."
                )
        known = self._programs.part(treedef, leaves)
        if known is None:
            children, outer = jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)
            if not children or children[0] is tree:
                raise StateMismatchError(
                    f"unshard: found {treedef} of shapes {[tuple(x.shape) for x in leaves]}, which "
                    "is no part of the step's arguments or results. Hand over an argument, a "
                    "result, or a part of these."
                )
            return outer.unflatten(map(self.unshard, children))
        context, found = known
        split = [i for i, leaf in enumerate(found) if is_split(leaf, context.replicas, leaves[i])]
        whole = convert(context, [found[i] for i in split], [leaves[i] for i in split], back=True)
        for i, x in zip(split, whole, strict=True):
            leaves[i] = x
        return treedef.unflatten(leaves)

    def shard_shapes(self, *args: Any) -> tuple[Any, ...]:
        """The arguments as the step keeps them, as `jax.ShapeDtypeStruct`s with shardings."""
        return self._for(args).described()

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


def analyze(step: Callable[..., Any], *args: Any, **options: Any) -> StepPlan:
    """Explains what `shard_step` would do with a train step; runs and compiles nothing.

    Args:
      step: as for `shard_step`, or a `ShardedStep`.
      *args: its arguments; `jax.ShapeDtypeStruct`s suffice, with shardings for what is split.
      **options: as for `shard_step`.

    >>> import jax.numpy as jnp, optax
    >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
    >>> mesh, momentum = AbstractMesh((64,), ("data",)), optax.sgd(0.1, momentum=0.9)
    >>> def train_step(w, state, x):
    ...     grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    ...     updates, state = momentum.update(grads, state, w)
    ...     return optax.apply_updates(w, updates), state
    >>> def shape(*dims, spec=P()):
    ...     return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec))
    >>> w, x = shape(512, 256), shape(1024, 512, spec=P("data"))
    >>> plan = analyze(train_step, w, momentum.init(jnp.zeros((512, 256))), x)
    >>> plan.state_bytes, plan.held_bytes
    (524288, 8192)
    """
    sharded = step if isinstance(step, ShardedStep) else shard_step(step, **options)
    return sharded.plan_for(*args)
