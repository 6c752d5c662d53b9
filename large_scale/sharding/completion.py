"""`complete`: from splits of a few arrays to those of all, which can be printed and applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import wusharding as wus
from large_scale.sharding.propagation import Axes, Conflict, Decision, Graph, Need
from large_scale.sharding.report import table

PyTree = Any
_OPEN = PartitionSpec.UNCONSTRAINED


class Value(NamedTuple):
    """One array of a program, and how it is split.

    Attributes:
      source: the line that made it; "input" for inputs.
      op: the operation that made it, or the path of the input.
      shape: global.
      spec: how it lies on the mesh.
      why: for each dim the annotation that split it, or kept it whole; "" where none did.
    """

    source: str
    op: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    why: tuple[str, ...]


class Difference(NamedTuple):
    """A value that XLA's partitioner splits otherwise."""

    value: Value
    compiler: PartitionSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """Splits of every array of a program; `print` it to see them.

    Attributes:
      mesh: the mesh.
      graph: the program with what was decided.
      in_tree: tree of the arguments.
      out_tree: tree of the results.
      paths: names of the inputs.
    """

    mesh: Mesh | AbstractMesh
    graph: Graph
    in_tree: Any
    out_tree: Any
    paths: tuple[str, ...]

    @property
    def in_specs(self) -> PyTree:
        """Specs of the arguments, as a tuple."""
        program = self.graph.program
        return self.in_tree.unflatten([self._spec(self.graph, v) for v in program.inputs])

    @property
    def out_specs(self) -> PyTree:
        """Specs of the results."""
        program = self.graph.program
        return self.out_tree.unflatten([self._spec(self.graph, v) for v in program.outputs])

    @property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Splits that operations would carry, and that others were in the way of."""
        return tuple(dict.fromkeys(self.graph.conflicts()))

    @property
    def needs(self) -> tuple[Need, ...]:
        """The communication that follows, operation by operation."""
        return tuple(self.graph.needs())

    def values(self) -> list[Value]:
        """Every array of at least one dim, in the order in which they are made."""
        out = []
        for graph in self.graph.graphs():
            program = graph.program
            if graph is self.graph:
                names = zip(program.inputs, self.paths, strict=True)
                made = [("input", name, v) for v, name in names]
            else:
                made = []
            made += [(op.source, op.name, v) for op in program.ops for v in op.outs]
            for source, op, v in made:
                shape = program.avals[v].shape
                if shape:
                    out.append(Value(source, op, shape, self._spec(graph, v), _roots(graph, v)))
        return out

    def apply(self) -> Callable[..., Any]:
        """The function with each split as a constraint on the array that it is of.

        It computes the same, and has the same derivatives: parts that define their own
        (`jax.custom_vjp`, `jax.custom_jvp`) keep them, and have no constraints inside; what
        `jax.checkpoint` is to compute again is computed again. Dims of which nothing is known are
        left to the compiler. Jit it. It takes arguments of the shapes and dtypes that it was
        completed for.
        """

        def constrained(*args: Any) -> Any:
            leaves, treedef = jax.tree.flatten(args)
            if treedef != self.in_tree:
                raise ValueError(f"arguments: found {treedef}, completed for {self.in_tree}.")
            program = self.graph.program
            for path, v, x in zip(self.paths, program.inputs, leaves, strict=True):
                found, wanted = jax.typeof(x), program.avals[v]
                if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
                    raise ValueError(
                        f"{path}: found {found.dtype}{list(found.shape)}, completed for "
                        f"{wanted.dtype}{list(wanted.shape)}. Numbers in the program, such as that "
                        "of examples, may depend on it: call complete() for each shape."
                    )
            graphs = {id(g.program): g for g in self.graph.graphs()}

            def visit(program: wus.Program, v: int, x: Any) -> Any:
                return self._constrained(x, graphs[id(program)].dims(v))

            outs = wus.evaluate_program(self.graph.program, leaves, visit)
            return self.out_tree.unflatten(outs)

        return constrained

    def compare(self) -> list[Difference]:
        """What XLA's partitioner makes of the same annotations, where it differs.

        Compiles the program with each of its arrays (bodies of loops and branches apart) as a
        result, constrained only where it was annotated, and reads off how they are split. How
        arguments are split is the compiler's choice too, where they are not annotated.
        """
        program = self.graph.program
        sources = {v: ("input", path) for v, path in zip(program.inputs, self.paths, strict=True)}
        sources |= {v: (op.source, op.name) for op in program.ops for v in op.outs}
        made = [v for v in sources if program.avals[v].shape]
        if not any(d is not None for v in made for d in self._annotated(v)):
            return []  # nothing puts it on the mesh
        found: dict[int, Any] = {}

        def run(leaves: Sequence[Any]) -> list[Any]:
            def visit(inner: wus.Program, v: int, x: Any) -> Any:
                if inner is not program:
                    return x
                found[v] = self._constrained(x, self._annotated(v))
                return found[v]

            wus.evaluate_program(program, leaves, visit)
            return [found[v] for v in made]

        structs = [
            jax.ShapeDtypeStruct(program.avals[v].shape, program.avals[v].dtype)
            for v in program.inputs
        ]
        compiled = jax.jit(run).lower(structs).compile()
        out = []
        for v, sharding in zip(made, compiled.output_shardings, strict=True):
            ours = self._spec(self.graph, v)
            shape = program.avals[v].shape
            if not sharding.is_equivalent_to(NamedSharding(self.mesh, ours), len(shape)):
                spec = getattr(sharding, "spec", PartitionSpec())
                value = Value(*sources[v], shape, ours, _roots(self.graph, v))
                out.append(Difference(value, spec))
        return out

    def __str__(self) -> str:
        """The splits, one line an array; what they cost; what was in their way."""
        return table(dict(self.mesh.shape), self.values(), self.needs, self.conflicts)

    def _spec(self, graph: Graph, v: int) -> PartitionSpec:
        return _spec_of(graph.dims(v), closed=True)

    def _annotated(self, v: int) -> list[Decision | None]:
        return [d if d is not None and d.annotated else None for d in self.graph.dims(v)]

    def _constrained(self, x: Any, dims: Sequence[Decision | None]) -> Any:
        if all(d is None for d in dims):
            return x
        sharding = NamedSharding(self.mesh, _spec_of(dims, closed=False))
        return jax.lax.with_sharding_constraint(x, sharding)


def complete(
    fun: Callable[..., Any],
    *args: PyTree,
    mesh: Mesh,
    specs: PyTree = None,
    names: Mapping[str, PartitionSpec] | None = None,
    uneven: bool = True,
) -> Completion:
    """Splits every array of a program, from the splits of a few.

    Annotations are `specs`, `names`, and `jax.lax.with_sharding_constraint` within the function; a
    `shard_map` in it stays as it is, and says how what enters and leaves it is split. A
    dim that one of them names, or keeps whole by None, stays as it says; a dim that is
    `PartitionSpec.UNCONSTRAINED`, and all dims of other arrays, follow.

    Args:
      fun: a function of global arrays; a whole train step if gradients are to be split.
      *args: its arguments, or `jax.ShapeDtypeStruct`s of them.
      mesh: a mesh of auto axes.
      specs: for each argument a tree of `PartitionSpec`s, or a prefix of one; None leaves open.
      names: specs of arrays that the function names by `jax.ad_checkpoint.checkpoint_name`.
      uneven: also split arrays within the program along dims that the axes do not divide, of which
        the last devices then hold less. Arguments and results are never split so.

    Returns:
      A `Completion`.

    Raises:
      ValueError: an annotation does not fit its array or the mesh.

    Source: GSPMD (arXiv 2105.04663), 3.5.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    >>> x, w, v = jnp.ones((8, 6)), jnp.ones((6, 10)), jnp.ones((10, 6))
    >>> specs = (P("data"), P(None, "model"), None)
    >>> plan = complete(lambda x, w, v: jnp.tanh(x @ w) @ v, x, w, v, mesh=mesh, specs=specs)
    >>> plan.in_specs
    (P('data',), P(None, 'model'), P('model',))
    >>> [(need.kind, need.axes) for need in plan.needs]
    [('all-reduce', ('model',))]
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh: found {type(mesh).__name__}, need a jax.sharding.Mesh.")
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    typed = [a for a, kind in kinds.items() if kind != AxisType.Auto]
    if typed:
        raise ValueError(
            f"mesh: axes {typed} are not Auto. Where axes are explicit, types split all arrays; "
            "make the mesh with axis_types=(jax.sharding.AxisType.Auto, ...) to have them found."
        )
    args = jax.tree.map(lambda x: x if hasattr(x, "shape") else jnp.asarray(x), args)
    program, out = wus.trace(fun, *args, mesh=mesh.abstract_mesh, keep_calls=True)
    with_paths, in_tree = jax.tree_util.tree_flatten_with_path(args)
    paths = tuple(f"args{jax.tree_util.keystr(path)}" for path, _ in with_paths)
    graph = Graph(program, dict(mesh.shape), uneven=uneven)
    _annotate_inputs(graph, paths, in_tree, specs)
    _check_names(graph, names or {})
    for inner in graph.graphs():
        _annotate_inside(inner, names or {})
    for v in program.outputs:
        graph.keep_even(v)
    graph.run()
    return Completion(mesh, graph, in_tree, jax.tree.structure(out), paths)


def _annotate_inputs(graph: Graph, paths: Sequence[str], in_tree: Any, specs: PyTree) -> None:
    for v in graph.program.inputs:
        graph.keep_even(v)
    if specs is None:
        return
    template = in_tree.unflatten(range(in_tree.num_leaves))
    try:
        full = jax.tree.map(
            lambda s, sub: jax.tree.map(lambda _: s, sub), specs, template, is_leaf=_is_spec
        )
    except (ValueError, TypeError) as e:
        raise ValueError(f"specs: their tree does not fit the arguments': {e}") from e
    flat = jax.tree.leaves(full, is_leaf=_is_spec)
    for path, v, spec in zip(paths, graph.program.inputs, flat, strict=True):
        if not _is_spec(spec):
            found = type(spec).__name__
            raise ValueError(f"specs: {path}: found a {found}, need a PartitionSpec or None.")
        if spec is not None:
            _annotate(graph, v, spec, path)


def _check_names(graph: Graph, names: Mapping[str, PartitionSpec]) -> None:
    ops = [op for inner in graph.graphs() for op in inner.program.ops]
    known = sorted({op.params["name"] for op in ops if op.name == "name"})
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"names: {unknown}: the function names no array so by jax.ad_checkpoint."
            f"checkpoint_name; it names {known}."
        )


def _annotate_inside(graph: Graph, names: Mapping[str, PartitionSpec]) -> None:
    for op in graph.program.ops:
        if op.name == "shard_map":
            _follow_shard_map(graph, op)
        said = op.params.get("said")
        if op.params.get("annotation") == "sharding_constraint":
            if not isinstance(said, NamedSharding):
                raise ValueError(f"{op.source}: found a constraint {said}, need a NamedSharding.")
            free = op.params.get("unconstrained_dims") or ()
            ndim = len(graph.program.avals[op.outs[0]].shape)
            entries = [*said.spec, *[None] * (ndim - len(said.spec))]
            spec = PartitionSpec(*(_OPEN if d in free else e for d, e in enumerate(entries)))
            _annotate(graph, op.outs[0], spec, f"a constraint at {op.source}")
        elif op.name == "name" and op.params["name"] in names:
            name = op.params["name"]
            _annotate(graph, op.outs[0], names[name], f"the name {name!r}")


def _follow_shard_map(graph: Graph, op: wus.Op) -> None:
    """What enters and leaves a `shard_map` is split as its specs say, where nothing else does."""
    root, all_axes = f"the shard_map at {op.source}", op.params["axes"] >= graph.sizes.keys()
    specs = (*op.params["in_specs"], *op.params["out_specs"])
    for v, spec in zip((*op.ins, *op.outs), specs, strict=True):
        for d, decision in enumerate(graph.dims(v)):
            entry = spec[d] if d < len(spec) else None
            axes: Axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
            if decision is None and (axes or all_axes) and not graph.refused(v, d, axes):
                graph.dims(v)[d] = Decision(axes, root)


def _annotate(graph: Graph, v: int, spec: PartitionSpec, where: str) -> None:
    """Fixes the dims of a value, after checking that they can be split so."""
    shape = graph.program.avals[v].shape
    if len(spec) > len(shape):
        raise ValueError(
            f"{where}: {spec} has more entries than the array has dims, {list(shape)}."
        )
    dims = graph.dims(v)
    used: set[str] = set()
    for d in range(len(shape)):
        entry = spec[d] if d < len(spec) else None
        if entry is _OPEN:
            continue
        axes: Axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        unknown = [a for a in axes if a not in graph.sizes]
        if unknown:
            raise ValueError(
                f"{where}: the mesh has no axis {unknown}; its axes are {list(graph.sizes)}."
            )
        twice = used & set(axes)
        if twice:
            raise ValueError(f"{where}: {spec} names axis {sorted(twice)} for two dims.")
        used |= set(axes)
        why_not = graph.refused(v, d, axes) if axes else ""
        if why_not:
            raise ValueError(
                f"{where}: {spec} cannot split dim {d} of {list(shape)}: {why_not}. Pad the dim, "
                "or leave it whole."
            )
        dims[d] = Decision(axes, where, annotated=True)


def _roots(graph: Graph, v: int) -> tuple[str, ...]:
    return tuple(d.root if d is not None else "" for d in graph.dims(v))


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec)


def _spec_of(dims: Sequence[Decision | None], *, closed: bool) -> PartitionSpec:
    """The spec of decided dims; of others it says None, or nothing unless `closed`."""
    entries: list[Any] = []
    for decision in dims:
        if decision is None:
            entries.append(None if closed else _OPEN)
        else:
            axes = decision.axes
            entries.append(axes[0] if len(axes) == 1 else axes or None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
