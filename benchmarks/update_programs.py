"""What `benchmarks.update` times: five ways to write one weight update, and their parts.

Every step starts from local gradients that already lie on the devices, and ends with whole new
weights on all of them: reduction, update, gather. There is no forward or backward pass. The
gradient that is applied is the mean over the devices of the local ones.

Beside the steps there are programs that hold one phase of them only: the collectives without an
update, and the update without collectives. Each of these has an empty twin, which takes and
returns the same buffers and does nothing, so that the cost of starting a program can be told apart.

All run on the same buffers, which pass from program to program by donation, so that the memory
that a process needs is that of one step and all states.
"""

import dataclasses
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from benchmarks.devices import NUM_DEVICES
from large_scale import programs
from wusharding.formats import Format
from wusharding.transforms.collectives import Collectives
from wusharding.transforms.runner import Runner

Tree = Any

OPTIMIZERS = {name: programs.OPTIMIZERS[name] for name in ("adam", "lamb", "sgd")}
VARIANTS = {
    "replicated": "optax in shard_map: gradients lax.pmean'ed, every replica updates everything",
    "zero1-auto": "jit on an auto mesh: optimizer state sharded by NamedSharding on the first "
    "dim that divides, weights replicated by out_shardings; as users write it today",
    "ours-manual": "shard_updates in shard_map: local gradients into tx.apply",
    "ours-explicit": "shard_updates in jit on an explicit mesh: `unreduced` gradients into "
    "tx.apply",
    "ours-auto": "shard_updates in jit on an auto mesh: reduced gradients into tx.apply",
}


# ------------------------------------------------------------------------------------------ weights


def transformer_shapes(elems: int) -> Tree:
    """Shapes of a decoder's weights, about `elems` elements in all.

    From 10 M elements on the width is 512, and 3/4 of the elements are in the layers; the
    vocabulary takes the rest, whatever number that is.
    """
    d = 512 if elems >= 10e6 else max(round(512 * math.sqrt(elems / 25e6) / 8) * 8, 8)
    one = decoder_shapes(d, layers=1, vocabulary=0)
    layer = num_elems(one["layers"])
    layers = max(round(0.75 * elems / layer), 1)
    rest = elems - layers * layer - num_elems((one["positions"], one["norm"]))
    return decoder_shapes(d, layers=layers, vocabulary=max(rest // d, 1))


def decoder_shapes(d: int, *, layers: int, vocabulary: int) -> Tree:
    """Shapes of a decoder's weights, `d` elements wide, for sequences of up to d / 2 tokens."""
    heads, ff = 8, 4 * d
    layer = {
        "attention": {
            **{
                name: {"kernel": (d, heads, d // heads), "bias": (heads, d // heads)}
                for name in ("query", "key", "value")
            },
            "out": {"kernel": (heads, d // heads, d), "bias": (d,)},
        },
        "mlp": {
            "up": {"kernel": (d, ff), "bias": (ff,)},
            "down": {"kernel": (ff, d), "bias": (d,)},
        },
        "norm1": {"scale": (d,), "bias": (d,)},
        "norm2": {"scale": (d,), "bias": (d,)},
    }
    return {
        "embedding": (vocabulary, d),
        "positions": (d // 2, d),
        "layers": [layer] * layers,
        "norm": {"scale": (d,), "bias": (d,)},
    }


def many_shapes(leaves: int) -> Tree:
    """Shapes of many small weights, none of which is like its neighbours."""
    kinds = ((64, 64), (64,), (32, 96), (96,), (7, 9), (3, 3, 16, 8), (128, 24), (5,))
    return [kinds[i % len(kinds)] for i in range(leaves)]


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def leaf_shapes(shapes: Tree) -> list[tuple[int, ...]]:
    return jax.tree.leaves(shapes, is_leaf=is_shape)


def num_elems(shapes: Tree) -> int:
    return sum(math.prod(shape) for shape in leaf_shapes(shapes))


# ----------------------------------------------------------------------------------------- programs


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program over named buffers.

    Args:
      name: what it is called in reports.
      compiled: takes the buffers `takes`, of which those in `gives` are donated and returned new.
      takes: names of buffers.
      gives: names of the buffers that it replaces.
      mesh: the mesh that its weights have to lie on; the others' lie on the auto mesh.
      seconds: what tracing, lowering and compiling it took.
    """

    name: str
    compiled: Any
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    mesh: Mesh
    seconds: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Taken:
    """Seconds that a call took: on the clock, of all cores, and of these in the system.

    Other processes on the machine stretch the first and hardly the second. The third is mostly page
    faults: XLA's CPU client takes its temporaries from malloc at every call.
    """

    wall: float
    cpu: float
    system: float


def timed(fun: Callable[..., Any], *args: Any) -> tuple[Any, Taken]:
    """What `fun` returns, and what it took until the last of it was there."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    out = jax.block_until_ready(fun(*args))
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    system = after.ru_stime - before.ru_stime
    return out, Taken(seconds, after.ru_utime - before.ru_utime + system, system)


def staged(jitted: Any, args: Sequence[Any], mesh: Mesh) -> tuple[Any, dict[str, float]]:
    """Compiled program, and the seconds that each stage took."""
    stages: dict[str, Callable[[Any], Any]] = {
        "trace": lambda _: jitted.trace(*args),
        "lower": lambda traced: traced.lower(),
        "compile": lambda lowered: lowered.compile(),
    }
    with jax.set_mesh(mesh):
        return in_stages(stages)


def in_stages(stages: dict[str, Callable[[Any], Any]]) -> tuple[Any, dict[str, float]]:
    """Runs each stage on what the one before it gave; the last result, and each stage's seconds."""
    out, seconds = None, {}
    for name, stage in stages.items():
        start = time.perf_counter()
        out = stage(out)
        seconds[name] = time.perf_counter() - start
    return out, seconds


@dataclasses.dataclass(frozen=True)
class Split:
    """How a set of weights is split: a format for each, None where a weight is replicated."""

    formats: tuple[Format | None, ...]

    def spec(self, i: int) -> P:
        fmt = self.formats[i]
        return P() if fmt is None else P(*(None,) * fmt.lo, "data")

    def specs(self) -> list[P]:
        return [self.spec(i) for i in range(len(self.formats))]

    def local_shapes(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        pairs = zip(self.formats, shapes, strict=True)
        return [s if f is None else f.local_shape for f, s in pairs]

    def take(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """This device's pieces of whole arrays."""
        me = lax.axis_index("data")
        pairs = zip(self.formats, xs, strict=True)
        return [x if f is None else f.shard_of(x, me) for f, x in pairs]


def first_divisible(shapes: Sequence[tuple[int, ...]]) -> Split:
    """What `zero1-auto` does: the first dim that the device count divides, else replicated."""
    formats = []
    for shape in shapes:
        dims = [d for d, n in enumerate(shape) if n and n % NUM_DEVICES == 0]
        formats.append(
            Format.split(shape, dims[0], dims[0] + 1, num_shards=NUM_DEVICES) if dims else None
        )
    return Split(tuple(formats))


class Bench:
    """All programs of one optimizer on weights of one set of shapes, and the buffers they run on.

    Weights are lists here: the trees of a model are the optimizers' business, not the timer's.
    """

    def __init__(self, shapes: Tree, optimizer: optax.GradientTransformation) -> None:
        self.shapes = leaf_shapes(shapes)
        self.optimizer = optimizer
        self.auto = jax.make_mesh((NUM_DEVICES,), ("data",), axis_types=(AxisType.Auto,))
        self.explicit = jax.make_mesh((NUM_DEVICES,), ("data",), axis_types=(AxisType.Explicit,))
        self.buffers: dict[str, Tree] = {}
        # Explicit gradients are sums: a user's loss is the mean of the whole batch already. All
        # variants share the same gradients here, so the division moves into the optimizer.
        scaled = optax.chain(optax.scale(1 / NUM_DEVICES), optimizer)
        self.ours = {
            "ours-manual": wus.shard_updates(optimizer),
            "ours-explicit": wus.shard_updates(scaled, mesh=self.explicit),
            "ours-auto": wus.shard_updates(optimizer, mesh=self.auto),
        }
        self.split_zero1 = first_divisible(self.shapes)

    @property
    def grad_bytes(self) -> int:
        return 4 * num_elems(self.shapes)

    # ---------------------------------------------------------------------------------- buffers

    def fill(self) -> None:
        """Puts weights, gradients and states in place."""
        self.buffers["grads"] = self._local_grads()
        self.buffers["unreduced"] = [
            jax.make_array_from_single_device_arrays(
                shape,
                NamedSharding(self.explicit, P(unreduced={"data"})),
                [piece.data for piece in g.addressable_shards],
            )
            for shape, g in zip(self.shapes, self.buffers["grads"], strict=True)
        ]
        self.reset_weights()
        params = self.buffers["params"]
        self.buffers["state:replicated"] = self._jit_init(None)
        self.buffers["state:zero1-auto"] = self._jit_init(self.split_zero1)
        manual = self.ours["ours-manual"]
        with jax.set_mesh(self.auto):
            specs = manual.state_specs(params)
            self.buffers["state:ours-manual"] = jax.jit(
                jax.shard_map(manual.init, in_specs=P(), out_specs=specs)
            )(params)
            self.buffers["state:ours-auto"] = self.ours["ours-auto"].init(params)
        with jax.set_mesh(self.explicit):
            on_explicit = on_mesh(params, self.explicit)
            self.buffers["state:ours-explicit"] = self.ours["ours-explicit"].init(on_explicit)
        layout = self.buffers["state:ours-manual"].layout
        self.split_ours = Split(tuple(leaf.format(layout.replicas) for leaf in layout.params))
        for key, split in (("ours", self.split_ours), ("zero1", self.split_zero1)):
            self.buffers[f"state:local-{key}"] = self._local_init(split)
            for use in ("grad", "new"):
                self.buffers[f"{use}-shards:{key}"] = self._shards(split)
        self.buffers["reduced"] = self._weights(lambda i: 0.0 * i)

    def reset_weights(self) -> None:
        self.buffers["params"] = self._weights(lambda i: 0.02 * jnp.sin(0.7 * i))

    def _weights(self, value: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
        return jax.jit(
            lambda: [value(_index(s)) for s in self.shapes],
            out_shardings=NamedSharding(self.auto, P()),
        )()

    def _local_grads(self) -> list[jax.Array]:
        """`[devices * rows, ...]`: side by side along the first dim."""

        def make() -> list[jax.Array]:
            me = lax.axis_index("data").astype(jnp.float32)
            return [0.01 * jnp.sin(0.37 * _index(s) + me * me) for s in self.shapes]

        return jax.jit(
            jax.shard_map(make, mesh=self.auto, in_specs=(), out_specs=P("data"), check_vma=False)
        )()

    def _shards(self, split: Split) -> list[jax.Array]:
        local = split.local_shapes(self.shapes)
        return jax.jit(
            jax.shard_map(
                lambda: [jnp.zeros(s, jnp.float32) for s in local],
                mesh=self.auto,
                in_specs=(),
                out_specs=split.specs(),
                check_vma=False,
            )
        )()

    def _jit_init(self, split: Split | None) -> Tree:
        """The wrapped optimizer's state under `jit`, as `split` says or replicated."""
        params = self.buffers["params"]
        init = self.optimizer.init
        specs = [P()] * len(params) if split is None else split.specs()
        return jax.jit(init, out_shardings=self._state_shardings(params, specs))(params)

    def _state_shardings(self, params: list[Any], specs: list[P]) -> Tree:
        return jax.tree.map(
            lambda s: NamedSharding(self.auto, s),
            self._state_specs(params, specs),
            is_leaf=lambda x: isinstance(x, P),
        )

    def _state_specs(self, params: list[Any], specs: list[P]) -> Tree:
        return state_specs(self.optimizer, params, specs)

    def _local_init(self, split: Split) -> Tree:
        """The wrapped optimizer's own state for pieces of weights, on each device."""
        structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in split.local_shapes(self.shapes)]
        init = jax.shard_map(
            lambda shards: self.optimizer.init(shards),
            mesh=self.auto,
            in_specs=(split.specs(),),
            out_specs=self._state_specs(structs, split.specs()),
            check_vma=False,
        )
        return jax.jit(init)(self._shards(split))

    # ------------------------------------------------------------------------------------ running

    def arguments(self, program: Program) -> list[Tree]:
        return [on_mesh(self.buffers[name], program.mesh) for name in program.takes]

    def run(self, program: Program) -> Taken:
        """What one call takes, until its last result is there."""
        args = self.arguments(program)
        for name in program.gives:
            del self.buffers[name]
        out, taken = timed(program.compiled, *args)
        del args
        for name, value in zip(program.gives, out, strict=True):
            keep = program.mesh if name.startswith("state:") else self.auto
            self.buffers[name] = on_mesh(value, keep)
        return taken

    def _program(
        self,
        name: str,
        fun: Callable[..., Any],
        takes: tuple[str, ...],
        gives: tuple[str, ...],
        *,
        mesh: Mesh | None = None,
        **jit_options: Any,
    ) -> Program:
        mesh = mesh or self.auto
        donated = tuple(takes.index(g) for g in gives)
        jitted = jax.jit(fun, donate_argnums=donated, keep_unused=True, **jit_options)
        args = [on_mesh(self.buffers[n], mesh) for n in takes]
        compiled, seconds = staged(jitted, args, mesh)
        return Program(name, compiled, takes, gives, mesh, seconds)

    # -------------------------------------------------------------------------------------- steps

    def steps(self) -> Iterator[Program]:
        """The five variants, each a whole step."""
        yield self._replicated()
        yield self._zero1()
        manual = self.ours["ours-manual"]
        with jax.set_mesh(self.auto):
            specs = manual.state_specs(self.buffers["params"])
        mapped = jax.shard_map(
            lambda p, s, g: manual.apply(g, s, p),
            mesh=self.auto,
            in_specs=(P(), specs, P("data")),
            out_specs=(P(), specs),
        )
        yield self._step("ours-manual", mapped)
        explicit = self.ours["ours-explicit"]
        yield self._step(
            "ours-explicit",
            lambda p, s, g: explicit.apply(g, s, p),
            grads="unreduced",
            mesh=self.explicit,
        )
        auto = self.ours["ours-auto"]
        yield self._step("ours-auto", lambda p, s, g: auto.apply(self._mean(g), s, p))

    def _step(
        self,
        name: str,
        fun: Callable[..., Any],
        *,
        grads: str = "grads",
        mesh: Mesh | None = None,
        **options: Any,
    ) -> Program:
        names = ("params", f"state:{name}")
        return self._program(name, fun, (*names, grads), names, mesh=mesh, **options)

    def _replicated(self) -> Program:
        def step(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
            return self._updated(lax.pmean(grads, "data"), state, params)

        mapped = jax.shard_map(
            step, mesh=self.auto, in_specs=(P(), P(), P("data")), out_specs=(P(), P())
        )
        return self._step("replicated", mapped)

    def _zero1(self) -> Program:
        def step(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
            return self._updated(self._mean(grads), state, params)

        params = self.buffers["params"]
        shardings = self._state_shardings(params, self.split_zero1.specs())
        whole = NamedSharding(self.auto, P())
        return self._step("zero1-auto", step, out_shardings=(whole, shardings))

    def _mean(self, grads: Tree) -> Tree:
        """The mean over a leading dim of replicas: the partitioner makes the all-reduce."""
        pairs = zip(grads, self.shapes, strict=True)
        return [g.reshape(NUM_DEVICES, *s).mean(0) for g, s in pairs]

    def _updated(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, state = self.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    # ------------------------------------------------------------------------------------- phases

    def phases(self) -> Iterator[Program]:
        """Collectives without an update, updates without collectives."""
        yield self._mapped(
            "all-reduce",
            lambda grads, _: (lax.psum(grads, "data"),),
            (("grads", P("data")), ("reduced", P())),
            ("reduced",),
        )
        yield from self._our_collectives()
        yield self._zero1_gather()
        yield self._local("update:replicated", None, "reduced")
        yield self._local("update:zero1", self.split_zero1, "reduced")
        yield self._local("update:ours", self.split_ours, "grad-shards:ours")
        yield self._local("update:ours-sliced", self.split_ours, "reduced")

    def empty(self, program: Program) -> Program:
        """The program's empty twin."""
        places = [program.takes.index(g) for g in program.gives]
        shardings = jax.tree.map(
            lambda x: x.sharding, tuple(self.buffers[g] for g in program.gives)
        )
        return self._program(
            f"empty:{program.name}",
            lambda *args: tuple(args[i] for i in places),
            program.takes,
            program.gives,
            out_shardings=shardings,
        )

    def _mapped(
        self,
        name: str,
        fun: Callable[..., Any],
        takes: tuple[tuple[str, Tree], ...],
        gives: tuple[str, ...],
    ) -> Program:
        specs = dict(takes)
        mapped = jax.shard_map(
            fun,
            mesh=self.auto,
            in_specs=tuple(specs.values()),
            out_specs=tuple(specs[g] for g in gives),
            check_vma=False,
        )
        return self._program(name, mapped, tuple(specs), gives)

    def _our_collectives(self) -> Iterator[Program]:
        """The same buckets as in the step, packing and unpacking included."""
        tx = self.ours["ours-manual"]
        layout = self.buffers["state:ours-manual"].layout
        formats = self.split_ours.formats

        def collectives() -> Collectives:
            core = tx._core
            return Runner.here(layout, core.options, core.target(), checked=False).collectives

        split = [i for i, f in enumerate(formats) if f is not None]
        kept = [formats[i] for i in split]

        def scatter(grads: list[Any], _: list[Any]) -> tuple[list[Any]]:
            out = lax.psum([g for g, f in zip(grads, formats, strict=True) if f is None], "data")
            whole = iter(out)
            done = iter(collectives().reduce_scatter([grads[i] for i in split], kept))
            return ([next(whole) if f is None else next(done) for f in formats],)

        def gather(shards: list[Any], _: list[Any]) -> tuple[list[Any]]:
            done = iter(collectives().all_gather([shards[i] for i in split], kept))
            pairs = zip(shards, formats, strict=True)
            return ([x if f is None else next(done) for x, f in pairs],)

        specs = self.split_ours.specs()
        yield self._mapped(
            "reduce-scatter",
            scatter,
            (("grads", P("data")), ("grad-shards:ours", specs)),
            ("grad-shards:ours",),
        )
        yield self._mapped(
            "gather:ours",
            gather,
            (("new-shards:ours", specs), ("params", P())),
            ("params",),
        )

    def _zero1_gather(self) -> Program:
        whole = NamedSharding(self.auto, P())

        def gather(shards: list[Any], params: list[Any]) -> tuple[list[Any]]:
            triples = zip(shards, params, self.split_zero1.formats, strict=True)
            return ([p if f is None else s for s, p, f in triples],)

        return self._program(
            "gather:zero1",
            gather,
            ("new-shards:zero1", "params"),
            ("params",),
            out_shardings=(whole,),
        )

    def _local(self, name: str, split: Split | None, grads: str) -> Program:
        """Plain optax on each device's pieces, cut out of whole weights; no collectives."""

        def update(grad: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            return self._updated([g / NUM_DEVICES for g in grad], state, params)

        if split is None:
            names = ("params", "state:replicated")
            return self._mapped(
                name,
                lambda params, state, grad: update(grad, state, params),
                ((names[0], P()), (names[1], P()), (grads, P())),
                names,
            )

        def on_pieces(grad: Tree, params: Tree, _: Tree, state: Tree) -> tuple[Tree, Tree]:
            mine = split.take(grad) if grads == "reduced" else grad
            return update(mine, state, split.take(params))

        key = "zero1" if split is self.split_zero1 else "ours"
        specs = split.specs()
        structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in self.shapes]
        names = (f"new-shards:{key}", f"state:local-{key}")
        return self._mapped(
            name,
            on_pieces,
            (
                (grads, P() if grads == "reduced" else specs),
                ("params", P()),
                (names[0], specs),
                (names[1], self._state_specs(structs, specs)),
            ),
            names,
        )

    # ------------------------------------------------------------------------------------- checking

    def max_differences(self, steps: Sequence[Program]) -> dict[str, float]:
        """How far each variant's weights are from `replicated`'s after one step from the same ones.

        As a fraction of the largest change of a weight in that step.
        """
        first: list[jax.Array] = []
        change = 0.0
        out = {}
        for program in steps:
            self.reset_weights()
            before = _on_first_device(self.buffers["params"]) if not first else []
            before = [jnp.copy(x) for x in before]
            self.run(program)
            after = [jnp.copy(x) for x in _on_first_device(self.buffers["params"])]
            if not first:
                first = after
                change = _distance(before, after)
            out[program.name] = _distance(first, after) / change
        return out

    def state_bytes(self, name: str) -> int:
        """Bytes of optimizer state that the first device holds, read off its buffers."""
        pieces = _on_first_device(jax.tree.leaves(self.buffers[f"state:{name}"]))
        return sum(x.nbytes for x in pieces)


def state_specs(optimizer: optax.GradientTransformation, params: Tree, specs: Tree) -> Tree:
    """A spec for each array of an optimizer's state: its weight's, else replicated."""
    state = jax.eval_shape(optimizer.init, params)
    return optax.tree.map_params(
        optimizer, lambda _, s: s, state, specs, transform_non_params=lambda _: P()
    )


def _index(shape: tuple[int, ...]) -> jax.Array:
    return lax.iota(jnp.float32, math.prod(shape)).reshape(shape)


def on_mesh(tree: Tree, mesh: Mesh) -> Tree:
    """The same buffers as arrays on another mesh of the same devices; moves nothing."""

    def move(x: jax.Array) -> jax.Array:
        sharding = x.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh == mesh:
            return x
        pieces = [piece.data for piece in x.addressable_shards]
        target = NamedSharding(mesh, sharding.spec)
        return jax.make_array_from_single_device_arrays(x.shape, target, pieces)

    return jax.tree.map(move, tree)


def _on_first_device(xs: Sequence[jax.Array]) -> list[jax.Array]:
    return [x.addressable_shards[0].data for x in xs]


def _distance(xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> float:
    pairs = zip(xs, ys, strict=True)
    return max(float(jnp.max(jnp.abs(x - y))) for x, y in pairs)


# ------------------------------------------------------------------------------------------ tracing


def stage_seconds(
    shapes: Tree, make: Callable[[], optax.GradientTransformation], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of tracing, lowering and compiling a step, plain and sharded, from nothing each time.

    The sharded one's `plan` is what its first call does before it traces: deciding how to store the
    weights and state (`state_specs`). Both are the manual step, and see shapes only.
    """
    mesh = jax.make_mesh((NUM_DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())
    side_by_side = NamedSharding(mesh, P("data"))
    flat = leaf_shapes(shapes)
    params = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=whole) for s in flat]
    grads = [
        jax.ShapeDtypeStruct((NUM_DEVICES * s[0], *s[1:]), jnp.float32, sharding=side_by_side)
        for s in flat
    ]
    out: dict[str, dict[str, list[float]]] = {"plain": {}, "ours": {}}

    def note(kind: str, seconds: dict[str, float]) -> None:
        for stage, value in seconds.items():
            out[kind].setdefault(stage, []).append(value)

    for _ in range(repeats):
        optimizer = make()

        def plain(p: Tree, s: Tree, g: Tree, optimizer: Any = optimizer) -> Any:
            updates, s = optimizer.update(lax.pmean(g, "data"), s, p)
            return optax.apply_updates(p, updates), s

        state = jax.eval_shape(optimizer.init, params)
        mapped = jax.shard_map(
            plain, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), P())
        )
        note("plain", staged(jax.jit(mapped), (params, state, grads), mesh)[1])

        tx = wus.shard_updates(make(), mesh=mesh)
        start = time.perf_counter()
        with jax.set_mesh(mesh):
            specs = tx.state_specs(params)
        note("ours", {"plan": time.perf_counter() - start})
        held = tx.abstract_state(params)
        mapped = jax.shard_map(
            lambda p, s, g, tx=tx: tx.apply(g, s, p),
            mesh=mesh,
            in_specs=(P(), specs, P("data")),
            out_specs=(P(), specs),
        )
        note("ours", staged(jax.jit(mapped), (params, held, grads), mesh)[1])
    return out
