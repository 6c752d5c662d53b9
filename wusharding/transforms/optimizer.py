"""`shard_updates`: an optax optimizer whose update and state are sharded over the data replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wusharding.analysis.choose import FormatChoice, Target
from wusharding.analysis.layout import Layout, Leaf, restricted
from wusharding.analysis.lines import Lines
from wusharding.analysis.placement import Placement, spec_tiles
from wusharding.analysis.plan import Plan
from wusharding.analysis.schedule import Schedule
from wusharding.errors import ContextError
from wusharding.jaxprs import Aval, array_aval
from wusharding.transforms import checks
from wusharding.transforms.boxes import stored_trees
from wusharding.transforms.context import (
    Context,
    current_mesh,
    find_context,
    is_tracer,
    platform_of,
    spec_of,
)
from wusharding.transforms.mapped import mapped
from wusharding.transforms.programs import Options, ParamInfo, Programs, split_extra
from wusharding.transforms.runner import Runner
from wusharding.transforms.spread import Spreader, is_stored_whole
from wusharding.transforms.storage import stored_struct
from wusharding.transforms.trees import flatten_with_paths

PyTree = Any
_NO_SPEC = PartitionSpec()


class ShardedState(NamedTuple):
    """State of a sharded optimizer.

    Attributes:
      inner: the wrapped optimizer's state, same tree, each array as one device (or, outside of
        manual mode, all devices together) stores it: padded and possibly of another rank. Its
        logical shapes come back with `unshard`.
      master: master weights in the tree of the parameters (None where a weight has none), or `()`.
      layout: how all of it is stored; static.
    """

    inner: PyTree
    master: PyTree
    layout: Layout


def shard_updates(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    mesh: Mesh | None = None,
    axis: str | Sequence[str] = "data",
    shard_axis: str | Sequence[str] | None = None,
    reduce: Literal["mean", "sum"] | None = "mean",
    formats: FormatChoice = "auto",
    min_shard_elems: int = 2,
    bucket_bytes: int = 4 * 2**20,
    scatter_dtype: Any = None,
    gather_dtype: Any = None,
    master_dtype: Any = None,
    param_specs: PyTree = None,
    per_example: bool = False,
    extra_args: Mapping[str, Any] | None = None,
    target: Target | None = None,
    lines: Mapping[str, Lines] | None = None,
) -> ShardedOptimizer:
    """Shards an optimizer's update and its state over the data-parallel replicas.

    Each replica updates 1/N of every weight with 1/N of the state, and the new weights (or the
    updates) are gathered. The numbers are those of `optimizer` on one device with the whole
    gradient: norms, factored statistics and matrix operations are those of whole tensors.

    Args:
      optimizer: any optax gradient transformation. Wrap the outermost one: clipping, accumulation
        and masks inside of it are then right on shards.
      mesh: the mesh for calls outside of `shard_map` and `pmap`; None takes the ambient one.
      axis: the mesh axis (or axes) over which replicas hold the same weights. With several,
        reduce-scatter runs axis by axis in this order, and gather in reverse.
      shard_axis: the part of `axis` to shard over; the shards are all-reduced over the rest. None
        shards over all of it. Axes that are not in `axis`, as those of model parallelism, count for
        weights that are the same along them: their update is split over them too, along a dim that
        they divide.
      reduce: how gradients that still vary over `axis` inside `shard_map` or `pmap` combine; None
        declares that they are already reduced. `unreduced` gradients of explicit meshes are always
        summed, and with `check_vma=True` the type tells whether a gradient is still to be reduced.
      formats: "auto" chooses for each leaf by cost among splitting one dim ("dim"), merged leading
        dims ("merged") and all dims merged ("flat"); the other values allow one kind only.
      min_shard_elems: weights and state arrays with fewer elements stay replicated.
      bucket_bytes: arrays travel together in buffers of at most this many bytes; larger ones
        travel alone, on CPU and TPU those of 256 KiB already.
      scatter_dtype: dtype in which gradients of a longer floating dtype are summed; or a mapping
        from axes among `axis` to dtypes, for the sums along these: `{"dcn": jnp.bfloat16}` halves
        what crosses slices. What is not split is summed in its own dtype.
      gather_dtype: dtype in which weights (`apply`) or updates (`update`) are gathered.
      master_dtype: keep sharded master weights of this dtype in the state for weights of another.
      param_specs: tree of `PartitionSpec` of the weights, for model parallelism where it cannot be
        seen: in `shard_map`, and in `jit` on an auto mesh before any eager `init`. Or a function
        that tells it from the weights (as Flax's `nn.get_partition_spec`), asked only there.
      per_example: gradients carry a leading dim of examples, split over `axis`, and the optimizer
        reduces them itself (`optax.contrib.differentially_private_aggregate`).
      extra_args: examples of the extra arguments that `optimizer.update` needs, where they are not
        those of optax's own optimizers.
      target: "cpu", "gpu" or "tpu", what formats and buckets are chosen for; None takes the mesh's
        devices'.
      lines: for axes that lie over several dims of a torus, the groups of positions that differ in
        one dim only, dim by dim: gradients are scattered along one dim after the other, and the
        second moves 1/length of the bytes of the first. None finds them (see `torus_lines`) in the
        coordinates of the TPU devices of `mesh=`; {} reduces over whole axes.

    Returns:
      A `ShardedOptimizer`, itself an `optax.GradientTransformationExtraArgs`.

    Raises:
      TypeError, ValueError: an argument is not what it should be.

    Source: Xu et al. 2020 (arXiv 2004.13336).

    >>> import jax, jax.numpy as jnp, optax
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> tx = shard_updates(optax.adam(1e-3), mesh=mesh)
    >>> params = {"w": jnp.ones((17, 16))}
    >>> state = tx.init(params)
    >>> state.inner[0].mu["w"].addressable_shards[0].data.size  # of 272
    34
    """
    optimizer = checks.as_transformation(optimizer)
    reduce_axes = checks.axis_tuple("axis", axis)
    shard_axes = reduce_axes if shard_axis is None else checks.axis_tuple("shard_axis", shard_axis)
    own, others = checks.divide_axes(shard_axes, reduce_axes, per_example=per_example)
    options = Options(
        reduce_axes=reduce_axes,
        shard_axes=own,
        other_axes=others,
        reduce=checks.check_choice("reduce", reduce, ("mean", "sum", None)),
        formats=checks.check_choice("formats", formats, checks.FORMAT_CHOICES),
        min_shard_elems=checks.check_count("min_shard_elems", min_shard_elems, 0),
        bucket_bytes=checks.check_count("bucket_bytes", bucket_bytes, 1),
        gather_dtype=checks.check_float_dtype("gather_dtype", gather_dtype),
        master_dtype=checks.check_float_dtype("master_dtype", master_dtype),
        sum_dtypes=checks.check_sum_dtypes("scatter_dtype", scatter_dtype, reduce_axes),
        per_example=bool(per_example),
        target=checks.check_choice("target", target, (*checks.TARGETS, None)),
        lines=lines,
        extra_args=extra_args,
    )
    if per_example and not options.sum_dtypes.is_own:
        raise ValueError("scatter_dtype: the optimizer sums gradients per example itself.")
    checks.check_mesh(mesh, (*reduce_axes, *others))
    return ShardedOptimizer._create(_Core(optimizer, options, mesh, param_specs))


class ShardedOptimizer(optax.GradientTransformationExtraArgs):
    """An optax optimizer with sharded updates; see `shard_updates`."""

    _core: _Core

    @classmethod
    def _create(cls, core: _Core) -> ShardedOptimizer:
        self = cls(core.init, core.update)  # pyright: ignore[reportArgumentType]
        self._core = core
        return self

    def apply(
        self, grads: PyTree, state: ShardedState, params: PyTree, **extra_args: Any
    ) -> tuple[PyTree, ShardedState]:
        """`update` and `optax.apply_updates` in one, gathering new weights instead of updates.

        Args:
          grads: gradients, as for `update`.
          state: from `init`, `update` or `apply`.
          params: the weights.
          **extra_args: passed to the wrapped optimizer.

        Returns:
          New weights, in the sharding that `params` came in, and new state.
        """
        return self._core.run(grads, state, params, extra_args, apply=True)

    def plan(self, params: PyTree) -> Plan:
        """What is sharded, how, what it saves and moves, and what is not and why.

        Args:
          params: weights, or `jax.ShapeDtypeStruct`s of them.
        """
        return self._core.plan(params)

    def unshard(self, state: ShardedState) -> PyTree:
        """The wrapped optimizer's own state, in logical shapes; lossless."""
        return self._core.unshard(state)

    def master(self, state: ShardedState) -> PyTree:
        """The master weights in logical shapes; None for weights that have none."""
        return self._core.unshard_master(state)

    def shard(self, inner: PyTree, params: PyTree, master: PyTree = None) -> ShardedState:
        """The sharded state for the wrapped optimizer's own state `inner`; lossless.

        Args:
          inner: as from `unshard` or from the wrapped optimizer's `init`.
          params: the weights.
          master: master weights as from `master`; None makes them from `params`.
        """
        return self._core.shard(inner, params, master)

    def state_specs(
        self, params: PyTree, *, axis_names: Collection[str] | None = None
    ) -> ShardedState:
        """`PartitionSpec`s of the state, for `shard_map`'s `in_specs` and `out_specs`.

        Args:
          params: the weights, or `jax.ShapeDtypeStruct`s of them.
          axis_names: as given to `shard_map`, where it is manual over some mesh axes only; the
            specs then name no others.
        """
        return self._core.state_specs(params, axis_names)

    def state_shardings(self, params: PyTree) -> ShardedState:
        """`NamedSharding`s of the state, for `jit`."""
        return self._core.state_shardings(params)

    def abstract_state(self, params: PyTree) -> ShardedState:
        """`jax.ShapeDtypeStruct`s of the stored state, with shardings."""
        return self._core.abstract_state(params)


class _Core:
    """What the methods of `ShardedOptimizer` share."""

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        options: Options,
        mesh: Mesh | None,
        param_specs: PyTree,
    ) -> None:
        self.options = options
        self.mesh = mesh
        self.param_specs = param_specs
        self.programs = Programs(optimizer, options)
        self._seen_specs: dict[Any, tuple[PartitionSpec, ...]] = {}
        self._eager: dict[Any, Callable[..., Any]] = {}

    # ------------------------------------------------------------------------------ looking around

    def context(self) -> Context:
        options = self.options
        return find_context(self.mesh, options.reduce_axes, options.shard_axes, options.lines)

    def target(self) -> Target:
        return self.options.target or platform_of(self.mesh or current_mesh(None))

    def layout(self, params: PyTree, context: Context) -> tuple[Layout, list[Any]]:
        """The layout for these weights, and their leaves."""
        paths, leaves, treedef = flatten_with_paths(params)
        checks.check_params(paths, leaves)
        avals = tuple(array_aval(x) for x in leaves)
        specs = self._specs(treedef, avals, leaves, context)
        tiles = []
        for path, aval, spec in zip(paths, avals, specs, strict=True):
            checks.check_spec(path, spec, len(aval.shape))
            tiles.append(spec_tiles(spec, len(aval.shape)))
            checks.check_tiles(path, aval, tiles[-1], context)
        avals = tuple(_global_aval(a, t, context) for a, t in zip(avals, tiles, strict=True))
        info = ParamInfo(treedef, paths, avals, tuple(tiles))
        return self.programs.layout(info, context.replicas, self.target()), leaves

    def _specs(
        self, treedef: Any, avals: Sequence[Aval], leaves: Sequence[Any], context: Context
    ) -> Sequence[PartitionSpec]:
        """How model parallelism splits each weight: given, seen in types, recorded, or told.

        A function of the weights tells what cannot be seen: what lies on a mesh lies as it does.
        """
        given = self.param_specs

        def told() -> list[PartitionSpec]:
            specs = given(treedef.unflatten(leaves)) if callable(given) else given
            return checks.broadcast_specs(specs, treedef)

        if given is not None and (context.manual or not callable(given)):
            return told()
        if context.manual:
            checks.check_splits_told(context, treedef, leaves)
        if context.manual and not context.open_axes:
            return [_NO_SPEC] * len(leaves)
        seen = [spec_of(x) for x in leaves]
        key = (treedef, tuple(a.shape for a in avals))
        if all(s is not None for s in seen):
            specs = tuple(s for s in seen if s is not None)
            if not any(is_tracer(x) for x in leaves):
                self._seen_specs[key] = specs
            return specs
        if key in self._seen_specs:
            return self._seen_specs[key]
        if given is not None:
            return told()
        checks.check_spec_known(context, self.options.reduce_axes, leaves)
        return [s if s is not None else _NO_SPEC for s in seen]

    def here(self, layout: Layout, context: Context) -> Runner:
        """The runner of the device that this is traced for: called inside the body."""
        return Runner.here(layout, self.options, self.target(), checked=context.checked)

    # ---------------------------------------------------------------------------- calling contexts

    def _call(
        self,
        context: Context,
        name: Any,
        body: Callable[..., Any],
        args: Sequence[Sequence[Any]],
        names: Sequence[tuple[str, Sequence[Leaf]]],
        in_specs: Sequence[Sequence[PartitionSpec]],
        out_specs: Sequence[Sequence[PartitionSpec]],
    ) -> Any:
        """Runs `body` on one device's pieces: here, or in a `shard_map` over the axes left open.

        `name` identifies the body and its specs among eager calls, so that it is compiled once;
        None if it cannot be compared.
        """
        if context.manual and not context.open_axes:
            return body(*args)
        if any(is_tracer(x) for group in args for x in group):
            return mapped(context, body, in_specs, out_specs)(*args)
        args = checks.place(args, in_specs, names, checks.concrete_mesh(context.mesh))
        key = (name, context)
        if name is None or key not in self._eager:
            fun = jax.jit(mapped(context, body, in_specs, out_specs))
            if name is None:
                return fun(*args)
            self._eager[key] = fun
        return self._eager[key](*args)

    # -------------------------------------------------------------------------------------- init

    def init(self, params: PyTree) -> ShardedState:
        """Initial state, born sharded: no device ever holds the whole of it.

        Args:
          params: the weights (in `shard_map` and `pmap`, whole on each device).
        """
        context = self.context()
        layout, leaves = self.layout(params, context)
        checks.check_replicated(context, layout, leaves)
        checks.warn_if_nothing_sharded(layout)
        schedule: Schedule = self.programs.init(layout)
        replicas = layout.replicas
        inner, masters = self._call(
            context,
            ("init", layout),
            lambda p: self.here(layout, context).init(schedule, p),
            [leaves],
            [("params", layout.params)],
            [[leaf.logical_spec() for leaf in layout.params]],
            [
                [leaf.spec(replicas) for leaf in layout.state],
                [leaf.spec(replicas) for leaf in layout.master_leaves()],
            ],
        )
        return _state(layout, inner, masters)

    # ------------------------------------------------------------------------------------ update

    def update(
        self,
        updates: PyTree,
        state: ShardedState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, ShardedState]:
        """Optax's `update`: whole updates, and the new sharded state.

        Args:
          updates: gradients. In `shard_map` and `pmap` local ones, still to be reduced over `axis`
            (see `reduce`); on explicit meshes `unreduced` or reduced ones.
          state: from `init` or an earlier step.
          params: the weights, if the wrapped optimizer needs them.
          **extra_args: passed to the wrapped optimizer; values, not per-replica ones.
        """
        return self.run(updates, state, params, extra_args, apply=False)

    def run(
        self,
        grads: PyTree,
        state: ShardedState,
        params: PyTree | None,
        extra_args: Mapping[str, Any],
        *,
        apply: bool,
    ) -> tuple[PyTree, ShardedState]:
        """`update` or `apply`."""
        context = self.context()
        layout = checks.check_state(state, context)
        replicas = layout.replicas
        inner, masters = _stored(state)
        grad_leaves = checks.check_grads(
            grads, layout, context, per_example=self.options.per_example
        )
        param_leaves = None
        if params is not None:
            param_leaves = checks.check_same_params(params, layout, context)
            checks.check_grads_vary_as_params(layout, grad_leaves, param_leaves)
        elif apply and layout.params:
            raise ValueError(
                "params: found None, need the weights, of which apply makes new ones: "
                "apply(grads, state, params)."
            )
        checks.check_master_params(layout, params)
        layout = checks.trees_as_given(layout, state, grads, params)
        arrivals = checks.arrivals(grad_leaves, layout, context, self.options.reduce)
        checks.check_something_summed(self.options.sum_dtypes, arrivals)
        arrays, _, _ = split_extra(extra_args)
        checks.check_extra(extra_args, context)
        step = self.programs.step(
            layout,
            [
                self._grad_aval(leaf, g, m, context)
                for leaf, g, m in zip(layout.grads, grad_leaves, layout.grad_masters, strict=True)
            ],
            extra_args,
            with_params=param_leaves is not None,
            apply=apply,
        )

        def body(g: Any, s: Any, m: Any, p: Any, e: Any) -> Any:
            whole = p if param_leaves is not None else None
            runner = self.here(layout, context)
            return runner.update(step, g, arrivals, s, m, whole, e, apply=apply)

        logical = [leaf.logical_spec() for leaf in layout.params]
        state_specs = [leaf.spec(replicas) for leaf in layout.state]
        master_specs = [leaf.spec(replicas) for leaf in layout.master_leaves()]
        grad_specs = [
            checks.grad_spec(spec, arrival, self.options)
            for spec, arrival in zip(
                (leaf.logical_spec() for leaf in layout.grads), arrivals, strict=True
            )
        ]
        name = ("run", id(step), tuple(arrivals), apply) if step.reusable else None
        out, new_inner, new_masters = self._call(
            context,
            name,
            body,
            [grad_leaves, inner, masters, param_leaves or [], arrays],
            [
                ("gradients", layout.grads),
                ("state", layout.state),
                ("master", tuple(layout.master_leaves())),
                ("params", layout.params),
                ("an extra argument", ()),
            ],
            [
                grad_specs,
                state_specs,
                master_specs,
                logical if param_leaves is not None else [],
                [_NO_SPEC] * len(arrays),
            ],
            [logical, state_specs, master_specs],
        )
        # In the state's own trees and layout, whatever boxes this call came in.
        new_state = ShardedState(
            jax.tree.structure(state.inner).unflatten(new_inner),
            jax.tree.structure(state.master).unflatten(new_masters),
            state.layout,
        )
        return layout.params_def.unflatten(out), new_state

    def _grad_aval(self, leaf: Leaf, grad: Any, master: Any, context: Context) -> Aval:
        """Global shape of a gradient, and the dtype in which the wrapped optimizer gets it."""
        aval = array_aval(grad)
        shape = leaf.shape
        if self.options.per_example:
            examples = aval.shape[0] * (context.replicas.num_replicas if context.manual else 1)
            shape = (examples, *leaf.shape)
        return Aval(shape, master or aval.dtype)

    # ------------------------------------------------------------------------------- conversions

    def unshard(self, state: ShardedState) -> PyTree:
        """See `ShardedOptimizer.unshard`."""
        context = self.context()
        layout = checks.check_state(state, context)
        inner, _ = _stored(state)
        whole = self._converted(context, layout, layout.state, inner, "state", back=True)
        return checks.plain_state_def(layout, state.inner).unflatten(whole)

    def unshard_master(self, state: ShardedState) -> PyTree:
        """See `ShardedOptimizer.master`."""
        context = self.context()
        layout = checks.check_state(state, context)
        _, masters = _stored(state)
        leaves = tuple(layout.master_leaves())
        whole = iter(self._converted(context, layout, leaves, masters, "master", back=True))
        return layout.params_def.unflatten(
            [None if m is None else next(whole) for m in layout.masters]
        )

    def _converted(
        self,
        context: Context,
        layout: Layout,
        leaves: Sequence[Leaf],
        arrays: Sequence[Any],
        name: str,
        *,
        back: bool = False,
    ) -> list[Any]:
        """Whole arrays as they are stored, or `back`."""

        def body(xs: Sequence[Any]) -> tuple[list[Any]]:
            storage = self.here(layout, context).storage
            return (storage.unshard(leaves, xs) if back else storage.shard(leaves, xs),)

        kept = [leaf.spec(layout.replicas) for leaf in leaves]
        logical = [leaf.logical_spec() for leaf in leaves]
        into, out = (kept, logical) if back else (logical, kept)
        key = ("convert", back, layout.replicas, tuple(leaf.unnamed() for leaf in leaves))
        (done,) = self._call(context, key, body, [arrays], [(name, leaves)], [into], [out])
        return done

    def shard(self, inner: PyTree, params: PyTree, master: PyTree) -> ShardedState:
        """See `ShardedOptimizer.shard`."""
        context = self.context()
        layout, leaves = self.layout(params, context)
        whole = checks.check_inner(inner, layout, context)
        masters = checks.check_masters(master, layout, leaves)
        kept = tuple(layout.master_leaves())
        if not context.manual and not any(map(is_tracer, (*whole, *masters))):
            return self._shard_in_turn(context, layout, whole, masters)
        inner = self._converted(context, layout, layout.state, whole, "state")
        return _state(layout, inner, self._converted(context, layout, kept, masters, "master"))

    def _shard_in_turn(
        self, context: Context, layout: Layout, whole: list[Any], masters: list[Any]
    ) -> ShardedState:
        """Leaf by leaf: beside its shards, no device holds more than one whole array."""
        replicas, mesh = layout.replicas, checks.concrete_mesh(context.mesh)
        spreader = Spreader(replicas, mesh)

        def stored(name: str, leaf: Leaf, x: Any) -> Any:
            where = spreader.of(leaf)
            if getattr(x, "sharding", None) == where.narrow:
                x = where.widened(x)
            if not is_stored_whole(leaf, replicas):
                return self._converted(context, layout, (leaf,), [x], name)[0]
            spec = leaf.spec(replicas)
            ((x,),) = checks.place([[x]], [[spec]], [(name, (leaf,))], mesh)
            return x if x.dtype == leaf.dtype else x.astype(leaf.dtype)

        inner = [stored("state", leaf, x) for leaf, x in zip(layout.state, whole, strict=True)]
        kept = zip(layout.master_leaves(), masters, strict=True)
        return _state(layout, inner, [stored("master", leaf, x) for leaf, x in kept])

    def spread(self, state: ShardedState) -> tuple[PyTree, PyTree]:
        """The wrapped optimizer's own state and the masters, whole, but spread over the devices.

        Leaf by leaf: beside the result, no device holds more than one whole array.
        """
        context = self._global_context("a spread state")
        layout = checks.check_state(state, context)
        spreader = Spreader(layout.replicas, checks.concrete_mesh(context.mesh))

        def whole(leaf: Leaf, stored: Any) -> Any:
            where = spreader.of(leaf)
            if is_stored_whole(leaf, layout.replicas):
                return stored
            (x,) = self._converted(context, layout, (leaf,), [stored], "state", back=True)
            return where.narrowed(where.moved(x))

        inner, masters = _stored(state)
        done = [whole(leaf, x) for leaf, x in zip(layout.state, inner, strict=True)]
        kept = zip(layout.master_leaves(), masters, strict=True)
        return (
            jax.tree.structure(state.inner).unflatten(done),
            jax.tree.structure(state.master).unflatten([whole(leaf, x) for leaf, x in kept]),
        )

    def mesh_of_devices(self) -> Mesh:
        """The mesh with its devices, outside of manual mode."""
        return checks.concrete_mesh(self._global_context("a spread state").mesh)

    def abstract_spread(self, params: PyTree) -> ShardedState:
        """`jax.ShapeDtypeStruct`s of what `spread` returns, with shardings."""
        mesh = self.mesh_of_devices()
        spreader: list[Spreader] = []

        def describe(leaf: Leaf, layout: Layout) -> jax.ShapeDtypeStruct:
            if not spreader:
                spreader.append(Spreader(layout.replicas, mesh))
            where = spreader[0].of(leaf).narrow
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return self._described(params, describe)

    # ---------------------------------------------------------------------------------- abstracts

    def _described(self, params: PyTree, describe: Callable[[Leaf, Layout], Any]) -> ShardedState:
        layout, _ = self.layout(params, self.context())
        inner = [describe(leaf, layout) for leaf in layout.state]
        masters = [describe(leaf, layout) for leaf in layout.master_leaves()]
        return _state(layout, inner, masters)

    def state_specs(self, params: PyTree, axis_names: Collection[str] | None) -> ShardedState:
        """See `ShardedOptimizer.state_specs`."""
        names = None if axis_names is None else checks.axis_tuple("axis_names", axis_names)

        def describe(leaf: Leaf, layout: Layout) -> PartitionSpec:
            spec, axes = leaf.spec(layout.replicas), dict(layout.replicas.axis_sizes)
            if names is not None and not axes.keys() >= {*names}:
                raise ContextError(f"axis_names={names}: the axes of the mesh are {tuple(axes)}.")
            return spec if names is None else restricted(spec, names)

        return self._described(params, describe)

    def state_shardings(self, params: PyTree) -> ShardedState:
        """See `ShardedOptimizer.state_shardings`."""
        mesh = checks.concrete_mesh(self._global_context("state_shardings").mesh)
        return self._described(
            params, lambda leaf, layout: NamedSharding(mesh, leaf.spec(layout.replicas))
        )

    def abstract_state(self, params: PyTree) -> ShardedState:
        """See `ShardedOptimizer.abstract_state`."""
        mesh = checks.concrete_mesh(self._global_context("abstract_state").mesh)
        return self._described(
            params, lambda leaf, layout: stored_struct(leaf, layout.replicas, mesh)
        )

    def _global_context(self, name: str) -> Context:
        context = self.context()
        if context.manual:
            raise ContextError(
                f"{name} describes global arrays: call it outside of shard_map and pmap."
            )
        return context

    def plan(self, params: PyTree) -> Plan:
        """See `ShardedOptimizer.plan`."""
        context = self.context()
        layout, _ = self.layout(params, context)
        return self.programs.plan(layout, self.target(), reduced=self.options.reduce is None)


def _global_aval(aval: Aval, tiles: Any, context: Context) -> Aval:
    """The aval of the whole array, of which `aval` is the piece along the axes that are local."""
    local = Placement(tiles).along(context.local_axes)
    shape = tuple(n * context.replicas.size(t) for n, t in zip(aval.shape, local, strict=True))
    return Aval(shape, aval.dtype)


def _stored(state: ShardedState) -> tuple[list[Any], list[Any]]:
    return jax.tree.leaves(state.inner), jax.tree.leaves(state.master)


def _state(layout: Layout, inner: Sequence[Any], masters: Sequence[Any]) -> ShardedState:
    trees = stored_trees(layout)
    return ShardedState(trees.inner.unflatten(inner), trees.master.unflatten(masters), layout)
