"""Operations for the laws of `tests/test_rules.py`: a row or more for every primitive with a rule.

Lengths of dims are distinct and not divisible by the numbers of shards; `[5, 1, 3]` is there as
dims of length 1 may be merged with their neighbours.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as extend_random
from jax.extend.core import primitives
from jax.lax import linalg

from tests.laws import numbers

F32, I32 = np.float32, np.int32
CLOSE = 2e-6


class Case(NamedTuple):
    """A function in which `primitive` occurs, and its operands.

    `tolerance` is for functions of which compilers give other last bits for other shapes; `dull`
    allows operands that are zero or constant, where the function makes them so.
    """

    primitive: str
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    tolerance: float = 0.0
    dull: bool = False


CASES: list[Case] = []


def case(
    primitive: str,
    fun: Callable[..., Any],
    *args: Any,
    tolerance: float = 0.0,
    dull: bool = False,
    **params: Any,
) -> None:
    """Adds a row: `primitive` occurs in `fun(*args, **params)`."""
    CASES.append(Case(primitive, functools.partial(fun, **params), args, tolerance, dull))


# --------------------------------------------------------------------------------------------- data


def unit(shape: tuple[int, ...]) -> np.ndarray:
    """Between 0 and 1, both excluded."""
    return (np.abs(numbers(shape)) / 10).astype(F32)


def positive(shape: tuple[int, ...], dtype: Any = F32) -> np.ndarray:
    return np.abs(numbers(shape, dtype)).astype(dtype)


def flags(shape: tuple[int, ...]) -> np.ndarray:
    return numbers(shape) > 0


def below(n: int, shape: tuple[int, ...]) -> np.ndarray:
    """Indices from 0 to `n - 1`."""
    return np.random.default_rng([n, *shape]).integers(0, n, shape).astype(I32)


def regular(shape: tuple[int, ...]) -> np.ndarray:
    """Matrices that every factorisation takes."""
    return (numbers(shape) + 20 * np.eye(shape[-1])).astype(F32)


def symmetric(shape: tuple[int, ...]) -> np.ndarray:
    x = regular(shape)
    return x + np.swapaxes(x, -1, -2)


# -------------------------------------------------------------------------------------- elementwise

VECTOR, MATRIX, CUBE, THIN = (7,), (5, 3), (2, 5, 3), (5, 1, 3)
EVERY_SHAPE = (VECTOR, MATRIX, CUBE, (5, 1, 7))

for shape in (VECTOR, CUBE, THIN):
    case("neg", lax.neg, numbers(shape))
x = numbers(MATRIX)
case("abs", lax.abs, x)
case("ceil", lax.ceil, x / 4)
case("floor", lax.floor, x / 4)
case("is_finite", lax.is_finite, np.where(x > 3, np.inf, x))
case("real", lax.real, x + 1j * x[::-1])
case("imag", lax.imag, x + 1j * x[::-1])
case("conj", lax.conj, x + 1j * x[::-1])
case("sign", lax.sign, x)
case("square", lax.square, x)
case("stop_gradient", lax.stop_gradient, x)
case("copy", jnp.copy, x)
case("name", primitives.name_p.bind, x, name="here")
case("optimization_barrier", lax.optimization_barrier, x)
case("reduce_precision", lax.reduce_precision, x, exponent_bits=5, mantissa_bits=2)
case("round", lax.round, x / 4)
case("integer_pow", lax.integer_pow, x, y=3)
case("convert_element_type", lax.convert_element_type, x, new_dtype=I32)
case("neg", lax.neg, numbers(CUBE, I32))
case("convert_element_type", lax.convert_element_type, below(3, MATRIX), new_dtype=np.bool_)
case("not", lax.bitwise_not, numbers(MATRIX, I32))
case("not", lax.bitwise_not, flags(VECTOR))
case("clz", lax.clz, numbers(MATRIX, I32))
case("population_count", lax.population_count, numbers(MATRIX, I32))
for name in (
    *("asinh", "atan", "bessel_i0e", "bessel_i1e", "cbrt", "cos", "cosh", "erf", "erfc", "exp"),
    *("exp2", "expm1", "logistic", "sin", "sinh", "tan", "tanh"),
):
    case(name, getattr(lax, name), numbers(MATRIX), tolerance=CLOSE)
for name in ("acos", "asin", "atanh", "erf_inv"):
    case(name, getattr(lax, name), unit(MATRIX), tolerance=CLOSE)
for name in ("acosh", "digamma", "lgamma", "log", "log1p", "rsqrt", "sqrt"):
    case(name, getattr(lax, name), positive(MATRIX), tolerance=CLOSE)

for name in (
    *("add", "sub", "mul", "max", "min", "rem", "div", "eq", "ne", "ge", "gt", "le", "lt"),
    *("atan2", "nextafter", "complex", "pow"),
):
    fun, close = getattr(lax, name), CLOSE if name in ("atan2", "pow", "div") else 0.0
    base = positive if name == "pow" else numbers
    case(name, fun, base(MATRIX), numbers((5, 1), low=-3, high=5), tolerance=close)
    case(name, fun, base(MATRIX), F32(3), tolerance=close)
    if name in ("add", "sub", "mul"):
        case(name, fun, numbers(CUBE), numbers(CUBE, low=-3, high=5))
        case(name, fun, numbers(THIN), numbers((5, 4, 3), high=3))
        case(name, fun, numbers((1, 3)), numbers(MATRIX, high=5))
case("div", lax.div, numbers(MATRIX, I32), I32(3))
case("mul", lax.mul, numbers(MATRIX, I32), I32(3))
case("add_any", primitives.add_jaxvals_p.bind, numbers(MATRIX), numbers(MATRIX, high=5))
for name in ("eq_to", "le_to", "lt_to"):
    case(name, getattr(primitives, f"{name}_p").bind, numbers(MATRIX), numbers(MATRIX, high=5))
for name in ("and", "or", "xor"):
    fun = getattr(lax, f"bitwise_{name}")
    case(name, fun, numbers(MATRIX, I32), numbers(MATRIX, I32, high=5))
    case(name, fun, flags(MATRIX), np.bool_(name == "and"))
for name in ("shift_left", "shift_right_arithmetic", "shift_right_logical"):
    case(name, getattr(lax, name), numbers(MATRIX, I32), positive(MATRIX, I32))
case("mulhi", lax.mulhi, numbers(MATRIX, I32) << 27, numbers(MATRIX, I32, high=5) << 20)
for name in ("igamma", "igammac", "igamma_grad_a"):
    case(name, getattr(lax, name), positive(VECTOR), unit(VECTOR), tolerance=CLOSE)
case("polygamma", lax.polygamma, positive(VECTOR), positive(VECTOR), tolerance=CLOSE)
case("zeta", lax.zeta, positive(VECTOR) + 1, positive(VECTOR), tolerance=CLOSE)
case(
    "regularized_incomplete_beta",
    lax.betainc,
    positive(VECTOR),
    positive(VECTOR),
    unit(VECTOR),
    tolerance=CLOSE,
)
case("clamp", lax.clamp, F32(-3), numbers(CUBE), F32(4))
case("clamp", lax.clamp, numbers(MATRIX, high=-1), numbers(MATRIX), numbers(MATRIX, low=1))
case("select_n", lax.select_n, flags(CUBE), numbers(CUBE), numbers(CUBE, high=5))
case("select_n", lax.select_n, np.bool_(True), numbers(THIN), numbers(THIN, high=5))
case("select_n", lax.select_n, below(3, MATRIX), *(numbers(MATRIX, high=h) for h in (3, 5, 7)))


def barrier(*xs: Any) -> Any:
    return lax.optimization_barrier(xs)


case("optimization_barrier", barrier, numbers(MATRIX), numbers(MATRIX, I32))
case("optimization_barrier", barrier, numbers(MATRIX), numbers((3,)), F32(2))
for shape, old, new in (
    (MATRIX, F32, I32),
    (MATRIX, F32, np.uint8),
    (THIN, F32, np.float16),
    ((5, 3, 2), np.int16, F32),
    ((5, 4), np.int8, F32),
    ((4,), np.int8, F32),
    ((), F32, np.int16),
):
    case("bitcast_convert_type", lax.bitcast_convert_type, numbers(shape, old), new_dtype=new)

# --------------------------------------------------------------------------------------- reductions

REDUCED = (
    ((7,), (0,)),
    ((5, 3), (0,)),
    ((5, 3), (1,)),
    ((5, 3), (0, 1)),
    ((2, 5, 3), (0, 2)),
    ((2, 5, 3), (1,)),
    ((5, 1, 7), (1,)),
    ((5, 1, 7), (0, 2)),
    ((5, 1, 7), (0,)),
    ((3, 2, 1, 1, 5), (0, 1, 3, 4)),
    ((2, 1, 3, 5), (1, 3)),
    ((7, 1), (1,)),
    ((1, 7), (0,)),
    ((3, 3), (0,)),
    ((5, 3), ()),
)
for name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"):
    low = -2 if name == "reduce_prod" else -9
    for shape, axes in REDUCED if name == "reduce_sum" else REDUCED[::4]:
        case(name, getattr(lax, name), numbers(shape, F32, low, -low), axes=axes)
    case(name, getattr(lax, name), numbers((5, 3), I32, -2, 2), axes=(0,))
for name in ("reduce_and", "reduce_or", "reduce_xor"):
    for shape, axes in REDUCED[::4]:
        case(name, getattr(lax, name), numbers(shape, I32), axes=axes)
    case(name, getattr(lax, name), flags((5, 3)), axes=(0,))
    case(name, getattr(lax, name), positive((5, 3), np.uint8), axes=(0,))


def both(a: Any, b: Any) -> Any:
    """Combines a pair of numbers, in an order that matters."""
    return a[0] + 2 * b[0], a[1] * b[1]


def last(a: Any, b: Any) -> Any:
    return a + 2 * b


def sort_pair(x: Any, dimension: int) -> Any:
    return lax.sort((x, -x), dimension=dimension, num_keys=2)


for shape in EVERY_SHAPE:
    for d in range(len(shape)):
        x, small = numbers(shape), numbers(shape, low=-2, high=2)
        case("argmax", lax.argmax, x, axis=d, index_dtype=I32)
        case("argmin", lax.argmin, x, axis=d, index_dtype=I32)
        case("cumsum", lax.cumsum, x, axis=d)
        case("cumsum", lax.cumsum, x, axis=d, reverse=True)
        case("cumprod", lax.cumprod, small, axis=d)
        case("cummax", lax.cummax, x, axis=d)
        case("cummin", lax.cummin, x, axis=d, reverse=True)
        case("sort", lax.sort, x, dimension=d)
        case("sort", sort_pair, x, dimension=d)
        case("top_k", lax.top_k, x, k=min(2, shape[d]), axis=d)
        case("reduce", lax.reduce, x, F32(1), computation=last, dimensions=(d,))
case("cumlogsumexp", lax.cumlogsumexp, numbers((7,)), tolerance=CLOSE)
case("cumlogsumexp", lax.cumlogsumexp, numbers((5, 3)), axis=1, tolerance=CLOSE)
case("top_k", lax.top_k, numbers((5, 3)), k=1)
case("top_k", lax.top_k, numbers((5, 1)), k=1)
case("approx_top_k", lax.approx_max_k, numbers((5, 3)), k=2)
case("approx_top_k", lax.approx_min_k, numbers((5, 3)), k=2, reduction_dimension=0)
case(
    "reduce",
    lambda *xs: lax.reduce(xs, (F32(1), F32(1)), both, (0, 2)),
    numbers((2, 5, 3)),
    numbers((2, 5, 3), low=-2, high=2),
)
for window in ((2, 1), (1, 2), (1, 1)):
    for kind, computation, start in (
        ("_sum", lax.add, 0),
        ("_max", lax.max, -np.inf),
        ("_min", lax.min, np.inf),
        ("", last, 1),
    ):
        fun = functools.partial(
            lax.reduce_window,
            computation=computation,
            window_dimensions=window,
            window_strides=(1, 1),
            padding="SAME",
        )
        case(f"reduce_window{kind}", fun, numbers((5, 3)), init_value=F32(start))
case(  # the gradient of max pooling
    "select_and_scatter_add",
    lambda x: jax.grad(
        lambda x: jnp.sum(
            lax.reduce_window(
                x,
                F32(-np.inf),
                lax.max,
                (1, 2, 2, 1),
                (1, 2, 2, 1),
                ((0, 0), (0, 0), (1, 0), (0, 0)),
            )
            ** 2
        )
    )(x),
    numbers((5, 4, 3, 7)),
)
case(
    "reduce_window_sum",
    lax.reduce_window,
    numbers((5, 1, 3)),
    init_value=F32(0),
    computation=lax.add,
    window_dimensions=(1, 1, 1),
    window_strides=(1, 1, 1),
    padding=((0, 0), (1, 0), (0, 0)),
)

# ------------------------------------------------------------------------------------------- shapes

for shape, out, at in (
    ((5,), (5, 3), (0,)),
    ((3,), (5, 3), (1,)),
    ((5, 1), (5, 3), (0, 1)),
    ((1, 3), (5, 3), (0, 1)),
    ((1,), (7, 1), (1,)),
    ((1,), (1, 7), (1,)),
    ((5, 3), (2, 5, 3), (1, 2)),
    ((5, 3), (5, 2, 3), (0, 2)),
    ((5, 3), (5, 1, 3), (0, 2)),
    ((5, 1, 3), (5, 2, 1, 3), (0, 2, 3)),
    ((5, 1, 3), (5, 1, 1, 3), (0, 2, 3)),
    ((5, 1, 3), (5, 4, 3), (0, 1, 2)),
    ((1, 1), (1, 5, 1), (0, 2)),
    ((5, 3), (1, 5, 3, 1), (1, 2)),
    ((5, 3, 2), (5, 1, 3, 1, 2), (0, 2, 4)),
    ((), (5, 3), ()),
):
    case(
        "broadcast_in_dim", lax.broadcast_in_dim, numbers(shape), shape=out, broadcast_dimensions=at
    )
for shape, out in (
    ((5, 3), (15,)),
    ((15,), (5, 3)),
    ((2, 5, 3), (10, 3)),
    ((2, 5, 3), (2, 15)),
    ((6, 5), (2, 3, 5)),
    ((6, 5), (2, 15)),
    ((6, 5), (5, 6)),
    ((4, 6), (6, 4)),
    ((5, 12), (15, 4)),  # blocks of 4, as quantised states have
    ((2, 6, 5), (3, 4, 5)),
    ((5, 1, 3), (5, 3)),
    ((5, 3), (5, 1, 3)),
    ((5, 3), (1, 5, 1, 3, 1)),
    ((5, 1, 3), (15,)),
    ((1, 7), (7, 1)),
    ((1, 7, 1), (7,)),
    ((1, 1), ()),
    ((1,), (1, 1, 1)),
    ((2, 3, 5, 7), (6, 35)),
    ((6, 35), (2, 3, 5, 7)),
    ((12,), (2, 2, 3)),
):
    case("reshape", lax.reshape, numbers(shape), new_sizes=out)
case("reshape", lax.reshape, numbers((5, 3)), new_sizes=(3, 5), dimensions=(1, 0))
for shape, gone in (
    ((5, 1, 3), (1,)),
    ((1, 7), (0,)),
    ((7, 1), (1,)),
    ((5, 1, 1, 3), (1,)),
    ((5, 1, 1, 3), (2,)),
    ((1, 5, 1, 3, 1), (0, 2, 4)),
    ((1,), (0,)),
):
    case("squeeze", lax.squeeze, numbers(shape), dimensions=gone)
for shape, order in (
    ((5, 3), (1, 0)),
    ((3, 3), (1, 0)),
    ((2, 5, 3), (1, 2, 0)),
    ((2, 5, 3), (2, 0, 1)),
    ((2, 5, 3), (1, 0, 2)),
    ((2, 5, 3), (0, 2, 1)),
    ((5, 1, 3), (1, 0, 2)),
    ((1, 5, 3), (1, 0, 2)),
    ((5, 1, 3), (2, 1, 0)),
    ((2, 3, 5, 7), (2, 3, 0, 1)),
    ((2, 1, 5, 1, 7), (1, 3, 0, 2, 4)),
):
    case("transpose", lax.transpose, numbers(shape), permutation=order)
for shape, start, limit, strides in (
    ((7,), (2,), (6,), None),
    ((7,), (0,), (7,), (2,)),
    ((5, 3), (1, 0), (4, 3), None),
    ((5, 3), (0, 1), (5, 2), (1, 1)),
    ((2, 5, 3), (0, 1, 0), (2, 5, 3), (1, 2, 1)),
    ((2, 5, 3), (0, 2, 0), (2, 3, 3), None),
    ((5, 1, 3), (0, 0, 1), (5, 1, 3), None),
    ((5, 1, 3), (0, 0, 0), (5, 1, 3), (1, 2, 1)),
):
    case(
        "slice",
        lax.slice,
        numbers(shape),
        start_indices=start,
        limit_indices=limit,
        strides=strides,
    )
for shape, config in (
    ((7,), ((1, 2, 0),)),
    ((5, 3), ((0, 0, 0), (1, 0, 1))),
    ((5, 3), ((1, -1, 0), (0, 0, 0))),
    ((2, 5, 3), ((0, 0, 0), (0, 1, 0), (0, 0, 0))),
    ((5, 1, 3), ((0, 0, 0), (1, -1, 0), (0, 0, 0))),
    ((5, 1, 3), ((0, 0, 0), (0, 0, 2), (0, 0, 0))),
    ((5, 1, 3), ((0, 0, 0), (2, 0, 0), (0, 0, 0))),
    ((5, 3), ((0, 0, 0), (0, 0, 0))),
):
    case("pad", lax.pad, numbers(shape), F32(8), padding_config=config)


def concatenate(*xs: Any, dimension: int) -> Any:
    return lax.concatenate_p.bind(*xs, dimension=dimension)


for sizes, dim in (
    (((7,), (3,)), 0),
    (((5, 3), (2, 3)), 0),
    (((5, 3), (5, 2), (5, 3)), 1),
    (((2, 5, 3), (2, 1, 3)), 1),
    (((5, 1, 3), (5, 1, 3)), 1),
    (((5, 1), (5, 1)), 1),
    (((5, 1, 3),), 1),
):
    xs = [numbers(shape, high=9 - k) for k, shape in enumerate(sizes)]
    case("concatenate", concatenate, *xs, dimension=dim)


def stack(*xs: Any, axis: int) -> Any:
    return jnp.stack(xs, axis)


for shape, d in (((5, 3), 0), ((5, 3), 1), ((5, 3), 2), (THIN, 1), ((7,), 0), ((7,), 1), ((), 0)):
    case("stack", stack, numbers(shape), numbers(shape, high=5), axis=d)
case("stack", stack, numbers((5, 3)), axis=1)
for shape, d in (((5, 3), 0), ((5, 3), 1), ((2, 5, 3), 1), ((7,), 0), (THIN, 1), ((5, 1), 1)):
    case("unstack", jnp.unstack, numbers(shape), axis=d)
    case(
        "split", lax.split, numbers(shape), sizes=(shape[d] - shape[d] // 3, shape[d] // 3), axis=d
    )
case("split", lax.split, numbers((5, 3)), sizes=(2, 2, 1), axis=0)
case("split", lax.split, numbers(THIN), sizes=(1,), axis=1)
for shape, reps in (
    ((5, 3), (2, 1)),
    ((5, 3), (1, 3)),
    ((5, 1, 3), (1, 2, 1)),
    ((5, 3), (1, 1)),
    ((1, 7), (3, 1)),
    ((7,), (2,)),
):
    case("tile", lax.tile, numbers(shape), reps=reps)
for shape, dims in (
    ((5, 3), (0,)),
    ((5, 3), (1,)),
    ((2, 5, 3), (0, 2)),
    ((5, 1, 3), (1,)),
    ((5, 1, 3), (0, 1)),
    ((7,), (0,)),
):
    case("rev", lax.rev, numbers(shape), dimensions=dims)
for shape, d in (((7,), 0), ((5, 3), 0), ((5, 3), 1), ((5, 1, 3), 1), ((2, 5, 3), 2)):
    case("iota", lax.broadcasted_iota, dtype=I32, shape=shape, dimension=d)

# ----------------------------------------------------------------------------------------- indexing


def dynamic_slice(x: Any, *starts: Any, slice_sizes: tuple[int, ...]) -> Any:
    return lax.dynamic_slice(x, starts, slice_sizes)


def dynamic_update_slice(x: Any, update: Any, *starts: Any) -> Any:
    return lax.dynamic_update_slice(x, update, starts)


for shape, part, start in (
    ((7,), (3,), (2,)),
    ((5, 3), (2, 3), (1, 0)),
    ((5, 3), (5, 2), (0, 1)),
    ((5, 3), (5, 3), (2, 1)),
    ((2, 5, 3), (2, 1, 3), (1, 4, 0)),
    ((5, 1, 3), (5, 1, 2), (0, 0, 1)),
):
    starts = tuple(I32(i) for i in start)
    case("dynamic_slice", dynamic_slice, numbers(shape), *starts, slice_sizes=part)
    case(
        "dynamic_update_slice", dynamic_update_slice, numbers(shape), numbers(part, high=5), *starts
    )

# What is indexed, by an index array `i`; the shapes of the operand and of the index.
PLACES: list[tuple[Callable[[Any, Any], Any], tuple[int, ...], tuple[int, ...]]] = [
    (lambda x, i: x.at[i], (7,), (4,)),
    (lambda x, i: x.at[i], (5, 3), (4,)),
    (lambda x, i: x.at[i], (5, 3), (4, 2)),
    (lambda x, i: x.at[:, i], (5, 3), (4,)),
    (lambda x, i: x.at[:, i], (2, 5, 3), (4,)),
    (lambda x, i: x.at[i, i], (5, 3), (4,)),
    (lambda x, i: x.at[:, i], (5, 2, 1), (4,)),
    (lambda x, i: x.at[i], (7,), (5, 1, 3)),
]
VERBS = {
    "scatter": "set",
    "scatter-add": "add",
    "scatter-sub": "subtract",
    "scatter-mul": "multiply",
    "scatter-min": "min",
    "scatter-max": "max",
}


def taken(x: Any, i: Any, place: Any, mode: str) -> Any:
    return place(x, i).get(mode=mode)


def written(x: Any, i: Any, update: Any, place: Any, verb: str) -> Any:
    return getattr(place(x, i), verb)(update)


for place, shape, of in PLACES:
    for mode, n in (("fill", 4), ("clip", 4), ("promise_in_bounds", 3)):
        if mode != "fill" and place is not PLACES[1][0]:
            continue
        case("gather", taken, numbers(shape), below(n, of), place=place, mode=mode)
    for name, verb in VERBS.items():
        if name in ("scatter-sub", "scatter-mul", "scatter-min") and len(shape) < 2:
            continue  # as scatter-add
        # Where two updates meet, `set` is not defined.
        index = np.array([2, 0], I32) if verb == "set" else below(3, of)
        whole = jax.eval_shape(lambda x, i, place=place: place(x, i).get(), numbers(shape), index)
        update = numbers(whole.shape, low=-3, high=3)
        case(name, written, numbers(shape), index, update, place=place, verb=verb)
case("scatter", lambda x, i: x.at[i].apply(jnp.square), numbers((5, 3)), I32([2, 0]), dull=True)
case("gather", jnp.take_along_axis, numbers((5, 3)), below(3, (5, 2)), axis=1)
case("gather", jnp.take_along_axis, numbers((5, 3)), below(3, (4, 3)), axis=0)
case("gather", jax.vmap(lambda x, i: x[i]), numbers((2, 5, 3)), below(5, (2, 4)))
case("gather", jax.vmap(lambda x, i: x[i], 1, 1), numbers((5, 2, 3)), below(5, (4, 2)))
case(
    "scatter-add",
    jax.vmap(lambda x, i, u: x.at[i].add(u)),
    numbers((2, 5, 3)),
    below(5, (2, 4)),
    numbers((2, 4, 3)),
)
case(
    "scatter-add",
    jax.ops.segment_sum,
    numbers((5, 3)),
    below(4, (5,)),
    num_segments=4,
    dull=True,
)

# ----------------------------------------------------------------------------------- linear algebra


for a, b, contract, batch in (
    ((5, 3), (3, 7), ((1,), (0,)), ((), ())),
    ((3, 5), (3, 7), ((0,), (0,)), ((), ())),
    ((5, 3), (7, 3), ((1,), (1,)), ((), ())),
    ((7,), (7,), ((0,), (0,)), ((), ())),
    ((5,), (3,), ((), ()), ((), ())),
    ((2, 5, 3), (2, 3, 7), ((2,), (1,)), ((0,), (0,))),
    ((5, 2, 3), (3, 7, 2), ((2,), (0,)), ((1,), (2,))),
    ((2, 5, 3), (5, 3, 7), ((1, 2), (0, 1)), ((), ())),
    ((5, 1), (1, 7), ((1,), (0,)), ((), ())),
    ((5, 1, 3), (3, 2), ((2,), (0,)), ((), ())),
    ((3, 3), (3, 3), ((1,), (0,)), ((), ())),
):
    x, y = numbers(a), numbers(b, high=5)
    case("dot_general", lax.dot_general, x, y, dimension_numbers=(contract, batch))
case(
    "dot_general",
    lax.dot,
    numbers((5, 3), np.int8),
    numbers((3, 7), np.int8),
    preferred_element_type=I32,
)
for lhs, rhs, options in (
    ((5, 2, 4), (3, 2, 2), {}),
    ((5, 4, 4), (6, 2, 2), {"feature_group_count": 2}),
    ((4, 2, 4), (6, 2, 2), {"batch_group_count": 2}),
    ((5, 2, 4), (3, 2, 2), {"rhs_dilation": (2,)}),
    ((5, 4, 2), (2, 2, 3), {"dimension_numbers": ("NHC", "HIO", "NHC")}),
):
    case(
        "conv_general_dilated",
        lax.conv_general_dilated,
        numbers(lhs),
        numbers(rhs, high=5),
        window_strides=(1,),
        padding="SAME",
        **options,
    )

STACK = (5, 3, 3)
case("cholesky", linalg.cholesky, symmetric(STACK))
case("cholesky_update", linalg.cholesky_update, symmetric((3, 3)), numbers((3,)))
case("eig", linalg.eig, regular(STACK))
case("eigh", linalg.eigh, symmetric(STACK))
for name in ("geqrf", "ormqr"):
    case(name, jax.scipy.linalg.qr_multiply, regular((3, 3)), numbers((3, 3)))
case(
    "geqp3",
    jax.scipy.linalg.qr_multiply,
    regular((3, 3)),
    numbers((3, 3)),
    pivoting=True,
    dull=True,
)
case("hessenberg", linalg.hessenberg, regular(STACK))
case("householder_product", linalg.householder_product, regular(STACK), numbers((5, 2)))
case("lu", linalg.lu, regular(STACK))
case(
    "lu_pivots_to_permutation",
    linalg.lu_pivots_to_permutation,
    below(3, (5, 3)),
    permutation_size=4,
)
case("qr", linalg.qr, regular(STACK))
case("schur", linalg.schur, regular(STACK))
case("svd", linalg.svd, regular(STACK))
case("symmetric_product", linalg.symmetric_product, regular(STACK), symmetric(STACK))
for left, shape in ((True, (5, 3, 2)), (False, (5, 2, 3))):
    case(
        "triangular_solve", linalg.triangular_solve, regular(STACK), numbers(shape), left_side=left
    )
case("tridiagonal", linalg.tridiagonal, symmetric(STACK))
case(
    "tridiagonal_solve",
    linalg.tridiagonal_solve,
    numbers((5, 3)),
    numbers((5, 3)) + 20,
    numbers((5, 3), high=5),
    numbers((5, 3, 2)),
)
case("ragged_dot_general", lax.ragged_dot, numbers((5, 4)), numbers((2, 4, 3)), I32([2, 3]))
case("custom_linear_solve", jnp.linalg.solve, regular(STACK), numbers((5, 3, 2)))
case("fft", jnp.fft.fft, numbers((5, 3)), tolerance=CLOSE)
case("fft", jnp.fft.rfft2, numbers((2, 5, 3)), tolerance=CLOSE)

# ------------------------------------------------------------------------------------------- random

KEY = jax.random.key(3)
case("random_bits", jax.random.bits, KEY, shape=(5, 3))
case("random_clone", jax.random.clone, KEY)
case("random_fold_in", jax.random.fold_in, KEY, np.uint32(5))
case("random_gamma", jax.random.gamma, KEY, positive((5, 3)))
case("random_seed", lambda seed: jax.random.key_data(jax.random.key(seed)), I32(5))
case("random_split", jax.random.split, KEY, num=5)
case("random_unwrap", jax.random.key_data, KEY)
case("random_wrap", jax.random.wrap_key_data, np.uint32([3, 5]))
case("rng_bit_generator", lax.rng_bit_generator, np.uint32([0, 1, 2, 3]), shape=(5, 3))
case("rng_uniform", lax.rng_uniform, F32(1), F32(7), shape=(5, 3))
case(
    "threefry2x32",
    extend_random.threefry2x32_p.bind,
    *(np.uint32([k, 3, 7, 9]) for k in range(4)),
)
