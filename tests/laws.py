"""Slow oracles. Each law runs without a mesh or devices, and finds what is wrong by brute force.

**Split, run and join equals run.** For one application of a primitive, every run of dims of every
operand and result is split as a `Format` splits it, the padding is poisoned, the real interpreter
runs each shard, and the shards are joined again. A rule is wrong if that differs from running the
whole. A capability is missed if the rule refuses a split that works once it is let through.

**Linear.** What `OpRule.linear` calls linear gives the same on a sum as the sum of what it gives on
the parts.

Data must be able to tell right from wrong: all-zero and constant arrays are refused.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wusharding.analysis.fit import Fit, Split, split_of, tiles_of, try_fit
from wusharding.analysis.placement import Placement, Replicas, Span, replicated
from wusharding.analysis.rules import RULES, Factors, LocalView, OpRule
from wusharding.analysis.rules.base import DimFactors, Reduction
from wusharding.analysis.schedule import Compute, Mask, Schedule
from wusharding.formats import Format
from wusharding.jaxprs import Aval, Op, Program, trace
from wusharding.transforms.interpret import Interpreter, evaluate

NUM_SHARDS = (2, 3, 4, 5, 8)
WIDER = 3  # the number of shards at which chunks are longer than they need be
MODEL_SIZE = 2
REDUCTIONS: Mapping[Reduction, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


class LawBroken(AssertionError):
    """A rule says what is not so."""


# --------------------------------------------------------------------------------------------- data


def numbers(shape: tuple[int, ...], dtype: Any = np.float32, low: int = -9, high: int = 9) -> Any:
    """Small integers between `low` and `high`, none zero, the same for the same arguments."""
    seed = [len(shape), *shape, np.dtype(dtype).num % 97, low + 99, high + 99]
    rng = np.random.default_rng(seed)
    values = np.array([v for v in range(low, high + 1) if v])
    assert len(values) > 1
    while True:
        x = rng.choice(values, shape).astype(dtype)
        if x.size == 1 or np.unique(x).size > 1:
            return x


def refuse_dull_data(args: Sequence[Any], *, constants: bool = False) -> None:
    """Raises `ValueError` for arrays on which right and wrong look alike."""
    for i, x in enumerate(args):
        if not is_plain(x) or np.size(x) == 0:
            continue
        x = np.asarray(x)
        if x.size > 1 and not x.any():
            raise ValueError(f"operand {i} is all zero: nearly any rule would pass")
        if x.size > 1 and (x == x.flat[0]).all() and not constants:
            raise ValueError(f"operand {i} is constant: rules that move its elements would pass")


def is_plain(x: Any) -> bool:
    """Not an array of PRNG keys."""
    return not jax.dtypes.issubdtype(jnp.asarray(x).dtype, jax.dtypes.extended)


# ------------------------------------------------------------------------------------- applications


@dataclasses.dataclass(frozen=True, eq=False)
class Application:
    """One primitive applied once, and its whole operands."""

    op: Op
    ins: list[Aval]
    outs: list[Aval]
    args: list[Any]

    def factors(self, rule: OpRule) -> Factors:
        return rule.factors(self.op, self.ins, self.outs)

    def alone(self) -> Program:
        """The program of this operation only; value `i` is operand `i`, results follow."""
        n, m = len(self.ins), len(self.outs)
        op = dataclasses.replace(self.op, ins=tuple(range(n)), outs=tuple(range(n, n + m)))
        return Program(op.ins, op.outs, [op], [*self.ins, *self.outs], {})


def applications(name: str, fun: Callable[..., Any], *args: Any) -> list[Application]:
    """The applications of primitive `name` in `fun(*args)`, with the values that they meet."""
    program, _ = trace(fun, *args)
    env: dict[int, Any] = dict(program.consts)
    env.update(zip(program.inputs, args, strict=True))
    wanted = [k for k, op in enumerate(program.ops) if op.name == name]
    found = []
    for op in program.ops[: wanted[-1] + 1] if wanted else []:
        values = [env[v] for v in op.ins]
        if op.name == name:
            ins, outs = ([program.avals[v] for v in vs] for vs in (op.ins, op.outs))
            found.append(Application(op, ins, outs, values))
        if len(found) < len(wanted):
            env.update(zip(op.outs, evaluate(op, op.params, values), strict=True))
    return found


# ---------------------------------------------------------------------------------- split and join


def replicas_of(num_shards: int) -> Replicas:
    """A mesh of `num_shards` replicas, each over two devices along `model`."""
    return Replicas((("model", MODEL_SIZE), ("data", num_shards)), ("data",), ("data",))


class Device(NamedTuple):
    """Its place on the mesh of `replicas_of`."""

    model: int
    shard: int


class Trial(NamedTuple):
    """One fit to be tried: the operation on pieces. `turn` varies what the padding holds."""

    fit: Fit
    replicas: Replicas
    turn: int
    here: str


def devices_of(trial: Trial) -> list[Device]:
    """Those that need to run: one along `model` where nothing is tiled over it."""
    fit, replicas, _, _ = trial
    tiled = any(p.tile_axes for p in (*fit.ins, *fit.outs))
    return [
        Device(m, i) for m in range(MODEL_SIZE if tiled else 1) for i in range(replicas.num_shards)
    ]


def poisoned(fmt: Format, x: np.ndarray, turn: int) -> np.ndarray:
    """`fmt.pack(x)` with what must never be read in the padding: NaN, infinities, large numbers."""
    packed = np.array(fmt.pack(x))
    padding = fmt.pack(np.ones(x.shape, np.int8)) == 0
    kinds: list[Any]
    if x.dtype == np.bool_:
        kinds = [True, False]
    elif np.issubdtype(x.dtype, np.integer):
        kinds = [np.iinfo(x.dtype).max - 3, np.iinfo(x.dtype).min + 5, 77]
    else:
        kinds = [np.nan, np.inf, -np.inf, 1e4]
    count = int(padding.sum())
    values = [kinds[(turn + k) % len(kinds)] for k in range(count)]
    packed[padding] = np.array(values).astype(x.dtype)
    return packed


def piece(x: Any, placement: Placement, replicas: Replicas, at: Device, turn: int) -> Any:
    """What `placement` gives a device of the whole `x`, padding poisoned."""
    if placement.is_replicated:
        return x
    shape = np.shape(x)
    x = np.asarray(x)
    for d, axes in enumerate(placement.tiles):
        for _ in axes:
            x = np.split(x, MODEL_SIZE, d)[at.model]
    fmt = placement.format(shape, replicas)
    if fmt is None:
        return x
    shards = np.split(poisoned(fmt, x, turn), replicas.num_shards, fmt.storage_dim)
    return fmt.to_local(shards[at.shard])


def join(
    pieces: Mapping[Device, np.ndarray], aval: Aval, placement: Placement, trial: Trial
) -> np.ndarray:
    """The whole value from its pieces: concatenated, combined, or asserted to be equal."""
    fit, replicas, _, here = trial
    fmt = placement.format(aval.shape, replicas)
    combine = REDUCTIONS[fit.partial] if fit.partial else None

    def over(axis: str, parts: Sequence[np.ndarray]) -> np.ndarray:
        if combine is not None and axis in fit.partial_axes:
            return add_up(parts, combine)
        if any(not same(part, parts[0]) for part in parts[1:]):
            raise LawBroken(f"{here}: a value that devices hold whole differs between them")
        return parts[0]

    tiles: list[np.ndarray] = []
    for m in sorted({at.model for at in pieces}):
        parts = [pieces[Device(m, i)] for i in range(replicas.num_shards)]
        tiles.append(
            over("data", parts) if fmt is None else fmt.unpack(np.concatenate(parts, fmt.lo))
        )
    if placement.tile_axes:
        (dim,) = (d for d, axes in enumerate(placement.tiles) if axes)
        return np.concatenate(tiles, dim)
    return over("model", tiles)


def add_up(parts: Sequence[np.ndarray], combine: Callable[[Any, Any], Any] = np.add) -> np.ndarray:
    """All parts combined, in their dtype."""
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part).astype(total.dtype)
    return total


def same(a: np.ndarray, b: np.ndarray, tolerance: float = 0.0) -> bool:
    """Equal shape, dtype and values; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind in "biu":
        return bool((a == b).all())
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    return np.allclose(
        a.astype(wide), b.astype(wide), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@dataclasses.dataclass(frozen=True)
class OneShard:
    """In the place of `Collectives`, for a device that needs to know its number only."""

    replicas: Replicas
    shard_index: jax.Array


def _interpreter(replicas: Replicas, index: jax.Array) -> Interpreter:
    collectives: Any = OneShard(replicas, index)
    return Interpreter(collectives, checked=False)


def step_of(app: Application, rule: OpRule, fit: Fit, replicas: Replicas) -> Compute:
    """The step that carries out `fit`, made here anew: `decide` has to make the same."""
    op = app.alone().ops[0]
    views = []
    for avals, placements in ((app.ins, fit.ins), (app.outs, fit.outs)):
        views.append(tuple(p.local_dims() for p in placements))
        views.append(
            tuple(p.local_shape(a.shape, replicas) for a, p in zip(avals, placements, strict=True))
        )
    in_dims, in_shapes, out_dims, out_shapes = views
    view = LocalView(in_dims, out_dims, in_shapes, out_shapes) if rule.localize else None
    masks = []
    for i, (aval, placement) in enumerate(zip(app.ins, fit.ins, strict=True)):
        fmt = placement.format(aval.shape, replicas)
        if fit.masked and fmt is not None and fmt.pad_elems:
            assert fit.partial is not None
            masks.append(Mask(i, fmt, fit.partial))
    return Compute(op, op.ins, op.outs, view, tuple(masks))


Pieces = list[dict[Device, np.ndarray]]  # of each result


def run_pieces(
    app: Application, rule: OpRule, trials: Sequence[Trial]
) -> tuple[list[Pieces], list[np.ndarray]]:
    """Splits and runs on every device, for each trial; also what the whole gives.

    Devices that do the same share a column, and one compiled function runs a turn of each column
    and the whole: compiling is what takes the time here.
    """
    columns: dict[Any, list[tuple[int, Device, list[Any]]]] = {}
    for k, t in enumerate(trials):
        step = step_of(app, rule, t.fit, t.replicas)
        for at in devices_of(t):
            pairs = zip(app.args, t.fit.ins, strict=True)
            local = [piece(x, p, t.replicas, at, t.turn) for x, p in pairs]
            key = (step.view, step.masks, tuple(np.shape(x) for x in local))
            columns.setdefault(key, []).append((k, at, local))
    first = tuple(trials[column[0][0]] for column in columns.values())
    run = _compiled(app.op, tuple(app.ins), tuple(app.outs), rule, first)
    pieces: list[Pieces] = [[{} for _ in app.outs] for _ in trials]
    whole: list[Any] = []
    with _registered(app.op.name, rule):
        for turn in range(max(map(len, columns.values()), default=0)):
            now = [column[turn % len(column)] for column in columns.values()]
            indices, local = [np.int32(at.shard) for _, at, _ in now], [xs for _, _, xs in now]
            results, whole = run(indices, local, app.args)
            for (k, at, _), found in zip(now, results, strict=True):
                for of_result, x in zip(pieces[k], found, strict=True):
                    of_result[at] = np.asarray(x)
    return pieces, [np.asarray(x) for x in whole]


@functools.lru_cache(maxsize=8)
def _compiled(
    op: Op, ins: tuple[Aval, ...], outs: tuple[Aval, ...], rule: OpRule, trials: tuple[Trial, ...]
) -> Callable[[Any, Any, Any], Any]:
    """One device's piece for each trial, and the whole."""
    app = Application(op, list(ins), list(outs), [])

    @jax.jit
    def run(indices: Any, operands: Any, args: Any) -> Any:
        columns = zip(trials, indices, operands, strict=True)
        pieces = [_run_piece(app, rule, t, i, xs) for t, i, xs in columns]
        return pieces, evaluate(op, op.params, args)

    return run


def _run_piece(
    app: Application, rule: OpRule, trial: Trial, index: jax.Array, local: list[jax.Array]
) -> list[jax.Array]:
    """What the interpreter makes of a device's pieces; refused if their shapes are not as said."""
    fit, replicas, _, here = trial
    step = step_of(app, rule, fit, replicas)
    outputs = list(zip(step.outs, fit.outs, strict=True))
    schedule = Schedule(app.alone(), [step], outputs)
    try:
        found = _interpreter(replicas, index).run(schedule, local)
    except (TypeError, ValueError, IndexError) as e:
        raise LawBroken(f"{here}: the pieces do not run: {e}") from e
    for x, aval, placement in zip(found, app.outs, fit.outs, strict=True):
        wanted = placement.local_shape(aval.shape, replicas)
        if x.shape != wanted or x.dtype != aval.dtype:
            raise LawBroken(f"{here}: a piece is {x.dtype}{x.shape}, not {aval.dtype}{wanted}")
    return found


def join_and_compare(
    app: Application, pieces: Pieces, whole: list[np.ndarray], trial: Trial, tolerance: float
) -> None:
    """Raises `LawBroken` where the joined results are not those of the whole."""
    for i, (aval, placement) in enumerate(zip(app.outs, trial.fit.outs, strict=True)):
        got, want = join(pieces[i], aval, placement, trial), whole[i]
        if not same(got, want, tolerance):
            raise LawBroken(
                f"{trial.here}: joined {got.tolist()} is not the whole's {want.tolist()}"
            )


@contextlib.contextmanager
def _registered(name: str, rule: OpRule) -> Iterator[None]:
    """`rule` in the registry, where the interpreter looks it up."""
    before = RULES.get(name)
    RULES[name] = rule
    try:
        yield
    finally:
        if before is None:
            del RULES[name]
        else:
            RULES[name] = before


# ---------------------------------------------------------------------------------------- the laws


class Where(NamedTuple):
    """A run of dims of a value; operands are counted first, then results."""

    value: int
    lo: int
    hi: int


@dataclasses.dataclass
class Coverage:
    """What a rule could follow (`split`), and what it refused."""

    split: set[Where] = dataclasses.field(default_factory=set)
    refused: set[Where] = dataclasses.field(default_factory=set)


def runs(shape: tuple[int, ...], *, merged: bool) -> Iterator[tuple[int, int]]:
    """Every run of adjacent dims; of one dim only, unless `merged`."""
    for lo in range(len(shape)):
        for hi in range(lo + 1, (len(shape) if merged else lo + 1) + 1):
            if math.prod(shape[lo:hi]):
                yield lo, hi


def check_rule(
    app: Application,
    rule: OpRule,
    num_shards: Sequence[int] = NUM_SHARDS,
    *,
    tolerance: float = 0.0,
    num_tiled: int = 0,
) -> Coverage:
    """The split-run-join law, for every split of every operand and result.

    Args:
      app: what to run.
      rule: its rule, right or wrong.
      num_shards: each of them is tried.
      tolerance: absolute and relative, for functions that compilers vectorise differently.
      num_tiled: at this number of shards, each dim of each operand is also tiled over a `model`
        axis, alone and under each split.

    Raises:
      LawBroken: the joined result is not that of the whole.
    """
    factors = app.factors(rule)
    check_labels(app, factors)
    coverage = Coverage()
    trials = []
    for turn, n in enumerate(num_shards):
        replicas = replicas_of(n)
        for tiling in [None, *_tilings(app)] if n == num_tiled else [None]:
            tiles = _tiles(app, factors, tiling, replicas)
            if tiling is not None:
                fit = try_fit(factors, tiles, None, replicas) if tiles else None
                if fit is None:
                    continue
                trials.append(Trial(fit, replicas, turn, f"{app.op.name}, tiles {tiles}"))
            for where, chunk, fit in splits(app, rule, factors, tiles, replicas):
                if fit is None:
                    coverage.refused.add(where)
                    continue
                here = f"{app.op.name}: {where} over {n}, tiles {tiles}"
                check_same_elements(app, fit, where, chunk, replicas, here)
                trials.append(Trial(fit, replicas, turn, here))
                coverage.split.add(where)
    trials = list({(t.fit, t.replicas): t for t in trials}.values())
    pieces, whole = run_pieces(app, rule, trials)
    for t, of_trial in zip(trials, pieces, strict=True):
        join_and_compare(app, of_trial, whole, t, tolerance)
    return coverage


def splits(
    app: Application,
    rule: OpRule,
    factors: Factors,
    tiles: Mapping[int, tuple[str, ...]],
    replicas: Replicas,
) -> Iterator[tuple[Where, int, Fit | None]]:
    """Every run of dims of every value, the chunk of its split, and the rule's fit for it."""
    avals, labels = (*app.ins, *app.outs), (*factors.ins, *factors.outs)
    for v, (aval, label) in enumerate(zip(avals, labels, strict=True)):
        shape = [
            n // replicas.size(tiles.get(f[0], ()) if f else ())
            for n, f in zip(aval.shape, label, strict=True)
        ]
        for lo, hi in runs(shape, merged=rule.merged_dims):
            chunk = -(-math.prod(shape[lo:hi]) // replicas.num_shards)
            chunk += replicas.num_shards == WIDER
            split = split_of(label, Span(lo, hi, chunk), factors)
            fit = try_fit(factors, tiles, split, replicas)
            if fit is not None and not rule.merged_dims and _merges(fit):
                fit = None
            if fit is not None or split.factors:
                yield Where(v, lo, hi), chunk, fit


def check_labels(app: Application, factors: Factors) -> None:
    """Labels fit shapes: one a dim, and the sizes of its factors multiply to its length."""
    for aval, labels in zip((*app.ins, *app.outs), (*factors.ins, *factors.outs), strict=True):
        if len(labels) != len(aval.shape):
            raise LawBroken(f"{app.op.name}: {len(labels)} labels for shape {aval.shape}")
        for n, label in zip(aval.shape, labels, strict=True):
            size = math.prod(factors.sizes[f] for f in label)
            if size != n and factors.blocked.isdisjoint(label) and label:
                raise LawBroken(f"{app.op.name}: factors of {size} label a dim of {n}")
        flat = [f for label in labels for f in label]
        if len(set(flat)) != len(flat):
            raise LawBroken(f"{app.op.name}: one value carries a factor twice: {labels}")


def check_same_elements(
    app: Application, fit: Fit, where: Where, chunk: int, replicas: Replicas, here: str
) -> None:
    """A fit may name a split otherwise, but each shard holds the elements that it was to hold."""
    value, lo, hi = where
    shape = (*app.ins, *app.outs)[value].shape
    got = (*fit.ins, *fit.outs)[value]
    if got.span is None:
        raise LawBroken(f"{here}: the fit does not split the value that it was asked to split")
    tile = got.tile_shape(shape, replicas)
    index = np.arange(1, 1 + math.prod(tile)).reshape(tile)
    shards = []
    for placement in (got, Placement(got.tiles, Span(lo, hi, chunk))):
        fmt = placement.format(shape, replicas)
        assert fmt is not None
        split = np.split(fmt.pack(index), replicas.num_shards, fmt.lo)
        shards.append([s[s != 0].tolist() for s in split])
    if shards[0] != shards[1]:
        raise LawBroken(f"{here}: the fit splits it as {got}, which are other elements")


def _merges(fit: Fit) -> bool:
    return any(p.span and p.span.hi - p.span.lo > 1 for p in (*fit.ins, *fit.outs))


def _tilings(app: Application) -> list[tuple[int, int]]:
    """(operand, dim) that two devices can hold halves of."""
    return [
        (i, d)
        for i, a in enumerate(app.ins)
        for d, n in enumerate(a.shape)
        if n and n % MODEL_SIZE == 0
    ]


def _tiles(
    app: Application, factors: Factors, tiling: tuple[int, int] | None, replicas: Replicas
) -> dict[int, tuple[str, ...]]:
    if tiling is None:
        return {}
    placements = [replicated(len(a.shape)) for a in app.ins]
    operand, dim = tiling
    tiles = [("model",) if d == dim else () for d in range(len(app.ins[operand].shape))]
    placements[operand] = Placement(tuple(tiles))
    return tiles_of(factors, placements, replicas)


# ------------------------------------------------------------------------------ missed capabilities


class Missed(NamedTuple):
    """A refused split that works: `how` is "pass" or the reduction that joins the pieces."""

    primitive: str
    value: int
    dim: int
    how: str


def missed(app: Application, rule: OpRule, tolerance: float = 0.0) -> set[Missed]:
    """Dims that the rule blocks although the trivial labelling works.

    Each blocked factor is let through as it is, as one with a blocked factor of a result or of
    another operand that has its size, and as reduced.
    """
    factors = app.factors(rule)
    apps = _variations(app)
    found = set()
    for f in sorted(factors.blocked):
        if _length(factors, app, f) > 1:
            how = _let_through(apps, rule, factors, f, tolerance)
            at = [
                (v, d)
                for v, labels in enumerate(factors.ins)
                for d, label in enumerate(labels)
                if f in label
            ]
            if how is not None and at:
                found.add(Missed(app.op.name, *at[0], how))
    return found


def _let_through(
    apps: list[Application], rule: OpRule, factors: Factors, f: int, tolerance: float
) -> str | None:
    size = factors.sizes[f]
    alike = [g for g in factors.blocked if g != f and _length(factors, apps[0], g) == size]
    merges = [set(), *({g} for g in alike), *map(set, itertools.combinations(alike, 2))]
    for joined in merges:
        labels = [
            [
                tuple(tuple(f if g in joined else g for g in label) for label in value)
                for value in side
            ]
            for side in (factors.ins, factors.outs)
        ]
        tried = Factors(
            tuple(labels[0]),
            tuple(labels[1]),
            factors.sizes,
            factors.reduced,
            factors.blocked - {f} - joined,
        )
        if any(_twice(value) for value in (*tried.ins, *tried.outs)):
            continue
        passes = any(f in label for value in tried.outs for label in value)
        hows = ["pass"] if passes else list(REDUCTIONS)
        for app in apps:
            hows = _working(app, rule, tried, f, hows, tolerance, evenly=True)
        hows = _working(apps[0], rule, tried, f, hows, tolerance, evenly=False)
        if hows:
            return hows[0]
    return None


def _variations(app: Application) -> list[Application]:
    """The same operation on other operands: what passes by accident does not pass on all."""
    found = [app]
    for vary in (np.flip, _negated):
        args = [vary(np.asarray(x)) if is_plain(x) else x for x in app.args]
        found.append(dataclasses.replace(app, args=args))
    return found


def _negated(x: np.ndarray) -> np.ndarray:
    return -x if x.dtype.kind == "f" else x


def _length(factors: Factors, app: Application, f: int) -> int:
    """The length of a dim with the blocked factor `f`, of which rules may give another size."""
    for aval, labels in zip((*app.ins, *app.outs), (*factors.ins, *factors.outs), strict=True):
        for n, label in zip(aval.shape, labels, strict=True):
            if label == (f,):
                return n
    return factors.sizes[f]


def _twice(labels: DimFactors) -> bool:
    flat = [f for label in labels for f in label]
    return len(set(flat)) != len(flat)


def _working(
    app: Application,
    rule: OpRule,
    factors: Factors,
    f: int,
    hows: Sequence[str],
    tolerance: float,
    *,
    evenly: bool,
) -> list[str]:
    """Those of `hows` by which the pieces join; without padding, they are run only once."""
    size = factors.sizes[f]
    n = next(n for n in range(2, size + 2) if (size % n == 0) == evenly)
    working = []
    pieces: list[Pieces] = []
    whole: list[np.ndarray] = []
    for how in hows:
        reduced = {} if how == "pass" else {f: how}
        tried = factors._replace(reduced=reduced)  # type: ignore[arg-type]
        replicas = replicas_of(n)
        fit = try_fit(tried, {}, Split((f,), -(-size // n)), replicas)
        if fit is None or (not rule.merged_dims and _merges(fit)):
            return []
        trial = Trial(fit, replicas, n, "")
        try:
            if not pieces or not evenly:
                pieces, whole = run_pieces(app, rule, [trial])
            join_and_compare(app, pieces[0], whole, trial, tolerance)
        except Exception:  # whatever goes wrong, it does not work
            if not pieces:
                return []
            continue
        working.append(how)
    return working


# ------------------------------------------------------------------------------------------- linear


def check_linear(app: Application, partial: tuple[int, ...], tolerance: float = 0.0) -> None:
    """The operation on a sum is the sum of the operation on its parts.

    Args:
      app: what to run.
      partial: the operands that come in parts; the others are whole.
      tolerance: absolute and relative.
    """
    num_parts = 3
    columns = [
        _parts(x, num_parts, i) if i in partial else [x] * num_parts for i, x in enumerate(app.args)
    ]
    done = [evaluate(app.op, app.op.params, list(args)) for args in zip(*columns, strict=True)]
    whole = evaluate(app.op, app.op.params, app.args)
    for parts, want in zip(zip(*done, strict=True), whole, strict=True):
        total = add_up([np.asarray(p) for p in parts])
        if not same(total, np.asarray(want), tolerance):
            raise LawBroken(f"{app.op.name} is not linear in operands {partial}")


def _parts(x: Any, num_parts: int, seed: int) -> list[Any]:
    """Arrays of integers that add up to `x`."""
    x = np.asarray(x)
    rng = np.random.default_rng(seed)
    parts = [rng.integers(-5, 6, x.shape).astype(x.dtype) for _ in range(num_parts - 1)]
    return [*parts, (x - sum(parts)).astype(x.dtype)]
