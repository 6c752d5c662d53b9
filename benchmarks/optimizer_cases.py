"""Every optimizer, transformation and wrapper of optax, each as a case that can be run.

A case builds the transformation and says which parameters, gradients and extra arguments to run it
with, so that a sharded run can be held against the unsharded one of `run_reference`. What makes
that comparison fair is chosen here: gradients whose mean over the replicas is exact in any order of
summation, and hyperparameters under which a difference in the last bit stays in the last bits.

`exported_constructors` finds what has to be in the table, `cases` is the table, and `EXCLUDED` says
why the rest of what optax exports is not in it.
"""

import dataclasses
import functools
import inspect
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import optax.transforms

Tree = Any
Kind = Literal["elementwise", "norm", "matrix"]

STEPS = 10
# Relative difference that a sharded run may have from the unsharded one.
TOLERANCE: dict[Kind, float] = {"elementwise": 1e-6, "norm": 1e-5, "matrix": 1e-5}

_RATE = 0.01
# With the usual 0.999, `1 - b2**step` keeps so few digits in the first steps that the last bit of
# the power shows in the parameters.
_B2 = 0.98
_PER_EXAMPLE = 2  # examples on each replica, where gradients are wanted per example

# ------------------------------------------------------------------------------------- parameters


def _nonzero_integers(shape: tuple[int, ...], seed: tuple[int, ...], limit: int) -> np.ndarray:
    """Odd integers of either sign, of magnitude 1 to `2 * limit - 1`."""
    rng = np.random.default_rng(seed)
    magnitude = 2 * rng.integers(1, limit + 1, size=shape) - 1
    return magnitude * rng.choice([-1, 1], size=shape)


def _parameters(shapes: Tree, dtype: Any = jnp.float32) -> Tree:
    """Parameters of these shapes: multiples of 1/32 between 1/32 and 63/32, of either sign."""
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    arrays = [
        jnp.asarray(_nonzero_integers(shape, (7, index), 32) / 32, dtype)
        for index, shape in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, arrays)


def default_params() -> Tree:
    """Leaves of rank 0 to 4, most of them of odd sizes that no replica count divides."""
    return _parameters(
        {"w": (17, 12), "b": (13,), "deep": {"k": (3, 3, 5, 7), "s": ()}, "tall": (40, 6)}
    )


def positive_params() -> Tree:
    """The default parameters with all signs positive."""
    return jax.tree.map(jnp.abs, default_params())


def factored_params() -> Tree:
    """Matrices and stacks of matrices that factored second moments apply to, and a vector."""
    return _parameters({"w": (17, 12), "stack": (5, 8, 6), "thin": (3, 9), "b": (13,)})


def matrix_params() -> Tree:
    """Matrices only."""
    return _parameters({"layers": [(16, 8)] * 4, "wide": (7, 18), "square": (9, 9)})


def transformer_params() -> Tree:
    """Equal matrices, as of repeated layers, with others and a vector beside them."""
    return {**matrix_params(), "bias": _parameters((11,))}


def complex_params() -> Tree:
    """A complex matrix and a real vector."""
    real, imag = _parameters([(11, 6), (11, 6)])
    return {"z": jax.lax.complex(real, imag), "b": _parameters((13,))}


# -------------------------------------------------------------------------------------- gradients


def _local_leaf(shape: tuple[int, ...], index: int, step: int, num_replicas: int) -> np.ndarray:
    """Odd multiples of 8, the same on all replicas, plus at most 3 by replica; all over 32.

    The common part outweighs what the replicas add, so no mean is zero either. Its sign is that of
    the element at three steps in four, as a loss that can be followed downhill would have it.
    """
    sign = np.sign(_nonzero_integers(shape, (17, index), 1))
    flipped = np.random.default_rng((19, index, step)).random(shape) < 0.25
    common = 8 * np.where(flipped, -sign, sign)
    common = common * np.abs(_nonzero_integers(shape, (11, index, step), 4))
    own = [
        np.random.default_rng((13, index, step, replica)).integers(-3, 4, size=shape)
        for replica in range(num_replicas)
    ]
    return (common + np.stack(own)) / 32


def local_grads(params: Tree, step: int, num_replicas: int) -> Tree:
    """The gradients of each replica, along a new first axis.

    They depend on the shapes of `params`, not on their values. Every one is an integer over 32 of
    magnitude below 2, so sums over replicas are exact in float32 in any order, and so is the
    division where `num_replicas` is a power of two. A replica has the same gradients whatever the
    number of the others.
    """

    def leaf(index: int, param: Any) -> jax.Array:
        real = _local_leaf(jnp.shape(param), 2 * index, step, num_replicas)
        if not jnp.iscomplexobj(param):
            return jnp.asarray(real, param.dtype)
        imag = _local_leaf(jnp.shape(param), 2 * index + 1, step, num_replicas)
        return jnp.asarray(real + 1j * imag, param.dtype)

    leaves, treedef = jax.tree.flatten(params)
    return jax.tree.unflatten(treedef, [leaf(i, param) for i, param in enumerate(leaves)])


def _mean(stacked: Tree) -> Tree:
    return jax.tree.map(lambda g: jnp.sum(g, axis=0) / g.shape[0], stacked)


def mean_grads(params: Tree, step: int, num_replicas: int) -> Tree:
    """The mean of `local_grads` over the replicas: their sum, divided once."""
    return _mean(local_grads(params, step, num_replicas))


def objective(params: Tree) -> jax.Array:
    """A weighted sum of the squared parameters, and the square of their weighted sum.

    It is smooth, and a function of the parameters only. The second part couples them: without it
    the Hessian would be diagonal, and Hutchinson's estimate of it the same for all random signs.
    The minimum is at zero, where floating point numbers lose nothing as they approach it.
    """
    squares, total = jnp.zeros(()), jnp.zeros(())
    for index, param in enumerate(jax.tree.leaves(params)):
        weights = (1 + (37 * np.arange(param.size) + index) % 101).reshape(param.shape) / 80
        squares += jnp.sum(jnp.asarray(weights, param.dtype) * param**2)
        total += jnp.sum(jnp.asarray(weights, param.dtype) * param)
    return squares / 2 + (total / 16) ** 2 / 2


_objective = jax.jit(objective)
_objective_grads = jax.jit(jax.grad(objective))


def objective_local_grads(params: Tree, step: int, num_replicas: int) -> Tree:
    """Gradients of `objective`, scaled by replica with factors around one whose mean is one.

    Unlike those of `local_grads` they follow the parameters, and their mean is right to rounding
    only: for the methods that look the objective up along their direction.
    """
    del step
    replicas = jnp.arange(num_replicas, dtype=jnp.float32)
    factors = 1 + (2 * replicas - (num_replicas - 1)) / (4 * num_replicas)
    return jax.tree.map(lambda g: factors.reshape(-1, *[1] * g.ndim) * g, _objective_grads(params))


def _nan_on_one_replica(step: int, grads: Tree) -> Tree:
    """At steps 2 and 5, not a number in a single element of a single replica's gradients."""
    if step not in (2, 5):
        return grads
    leaves, treedef = jax.tree.flatten(grads)
    leaves[-1] = leaves[-1].at[(-1,) * leaves[-1].ndim].set(jnp.nan)
    return jax.tree.unflatten(treedef, leaves)


def _spike(step: int, grads: Tree) -> Tree:
    """At steps 3 and 7, gradients sixteen times as large."""
    return jax.tree.map(lambda g: 16 * g, grads) if step in (3, 7) else grads


# ------------------------------------------------------------------------------- extra arguments


def loss_by_step(step: int, grads: Tree, params: Tree) -> dict[str, Any]:
    """A loss that depends on the step only, and neither falls nor rises throughout."""
    del grads, params
    return {"value": jnp.asarray(40 + 2.5 * (3 * step % 5), jnp.float32)}


def line_search_args(step: int, grads: Tree, params: Tree) -> dict[str, Any]:
    """What line searches ask for; `value_fn` is a Python callable of whole parameters."""
    del step
    return {"value": _objective(params), "grad": grads, "value_fn": objective}


def objective_arg(step: int, grads: Tree, params: Tree) -> dict[str, Any]:
    """The objective, which Hutchinson's estimator differentiates twice."""
    del step, grads, params
    return {"obj_fn": objective}


def _grad_fn(params: Tree, adversarial_step: int) -> Tree:
    del adversarial_step
    return jax.grad(objective)(params)


def grad_fn_arg(step: int, grads: Tree, params: Tree) -> dict[str, Any]:
    """The gradients of the objective as a callable, which opaque SAM follows."""
    del step, grads, params
    return {"grad_fn": _grad_fn}


# ------------------------------------------------------------------------------------------ cases


def _unchanged(tree: Tree) -> Tree:
    return tree


@dataclasses.dataclass(frozen=True)
class Loop:
    """What a training loop does besides `update` and `optax.apply_updates`.

    Attributes:
        start: Makes what the optimizer takes for parameters out of those of the model.
        model: The part of it that gradients are taken of.
    """

    start: Callable[[Tree], Tree] = _unchanged
    model: Callable[[Tree], Tree] = _unchanged


_LOOKAHEAD = Loop(optax.LookaheadParams.init_synced, lambda params: params.fast)


@dataclasses.dataclass(frozen=True)
class Case:
    """One transformation, with what it has to be run with.

    Attributes:
        name: Unique in the table.
        exports: The dotted names of optax that `make` calls and this case stands for.
        make: Builds the transformation afresh.
        kind: Which tolerance applies: `elementwise` where an element's update depends on that
            element alone, or on exact reductions; `norm` where it depends on rounded sums over
            others; `matrix` where it depends on matrix products or decompositions.
        params: Builds the parameters of the model.
        gradients: Given the model's parameters, the step and the number of replicas, the gradients
            of each replica along a first axis.
        tamper: Changes those gradients at some steps.
        extra_args: Given the step, the mean gradients and the optimizer's parameters, the keyword
            arguments of `update`: the same on all replicas.
        per_example: Whether `update` takes gradients per example instead of their mean.
        loop: How the training loop treats the parameters.
    """

    name: str
    exports: tuple[str, ...]
    make: Callable[[], Any]
    kind: Kind = "elementwise"
    params: Callable[[], Tree] = default_params
    gradients: Callable[[Tree, int, int], Tree] = local_grads
    tamper: Callable[[int, Tree], Tree] | None = None
    extra_args: Callable[[int, Tree, Tree], dict[str, Any]] | None = None
    per_example: bool = False
    loop: Loop = Loop()

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.kind]

    def start(self) -> Tree:
        """The parameters that the optimizer is initialized with."""
        return self.loop.start(self.params())

    def local_grads(self, params: Tree, step: int, num_replicas: int) -> Tree:
        """The gradients of each replica at the optimizer's `params`, along a first axis.

        Where they are wanted per example, the examples are along a second axis.
        """
        model = self.loop.model(params)
        count = num_replicas * (_PER_EXAMPLE if self.per_example else 1)
        grads = self.gradients(model, step, count)
        if self.tamper is not None:
            grads = self.tamper(step, grads)
        if not self.per_example:
            return grads
        return jax.tree.map(lambda g: g.reshape(num_replicas, _PER_EXAMPLE, *g.shape[1:]), grads)

    def global_grads(self, params: Tree, step: int, num_replicas: int) -> Tree:
        """What the unsharded `update` is given: the mean, or all examples along one axis."""
        local = self.local_grads(params, step, num_replicas)
        if not self.per_example:
            return _mean(local)
        return jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), local)

    def update_args(self, step: int, grads: Tree, params: Tree) -> dict[str, Any]:
        """The keyword arguments of `update`; empty if there are none."""
        return self.extra_args(step, grads, params) if self.extra_args else {}


def run_reference(case: Case, steps: int = STEPS, num_replicas: int = 8) -> tuple[Tree, Tree]:
    """Runs the unsharded transformation on one device, on the gradients of all replicas.

    Returns:
        The optimizer's parameters and state after the last step.
    """
    transformation = case.make()

    @functools.partial(jax.jit, static_argnames="functions")
    def update(grads, state, params, arrays, functions):
        updates, state = transformation.update(grads, state, params, **arrays, **dict(functions))
        return optax.apply_updates(params, updates), state

    params = case.start()
    state = transformation.init(params)
    for step in range(steps):
        grads = case.global_grads(params, step, num_replicas)
        args = case.update_args(step, grads, params)
        functions = tuple((key, value) for key, value in args.items() if callable(value))
        arrays = {key: value for key, value in args.items() if not callable(value)}
        params, state = update(grads, state, params, arrays, functions)
    return params, state


# ---------------------------------------------------------------------------- making the table


def _case(exports: str, make: Callable[[], Any], kind: Kind = "elementwise", **fields: Any) -> Case:
    """A case for these exports, separated by spaces, without their `optax.`.

    It is named after them unless a name is given; a name in brackets is put after theirs.
    """
    name = fields.pop("name", "")
    if not name or name.startswith("("):
        name = "+".join(exports.split()) + name
    return Case(name, tuple(f"optax.{export}" for export in exports.split()), make, kind, **fields)


def _descend(*transformations: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformations, and then a small step against their result."""
    return optax.chain(*transformations, optax.scale(-_RATE))


def _adam(rate: Any = _RATE, **kwargs: Any) -> optax.GradientTransformation:
    return optax.adam(rate, b2=_B2, **kwargs)


def _quietly(make: Callable[[], Any]) -> Callable[[], Any]:
    """Builds without the deprecation warnings that optax gives for what it still exports."""

    def wrapped() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return make()

    return wrapped


def _schedule(count: Any) -> Any:
    return 0.02 / (1.0 + 0.25 * count)


def _negative_schedule(count: Any) -> Any:
    return -_schedule(count)


def _is_matrix(params: Tree) -> Tree:
    """A mask over parameters; written, as masks often are, in terms of their rank."""
    return jax.tree.map(lambda param: jnp.ndim(param) > 1, params)


def _labels(params: Tree) -> Tree:
    """Labels over parameters, by rank."""
    return jax.tree.map(lambda param: ("vector", "matrix")[jnp.ndim(param) > 1], params)


def _mask() -> Tree:
    """A mask given as a tree, over the default parameters."""
    return {"w": True, "b": False, "deep": {"k": False, "s": True}, "tall": True}


_ALIASES: tuple[tuple[str, Kind, Callable[[], Any]], ...] = (
    ("adabelief", "elementwise", lambda: optax.adabelief(_RATE, b2=_B2)),
    ("adadelta", "elementwise", lambda: optax.adadelta(1.0, weight_decay=0.01)),
    ("adagrad", "elementwise", lambda: optax.adagrad(0.1)),
    ("adam", "elementwise", _adam),
    ("adam(nesterov)", "elementwise", lambda: _adam(_schedule, nesterov=True)),
    ("adamax", "elementwise", lambda: optax.adamax(_RATE)),
    ("adamaxw", "elementwise", lambda: optax.adamaxw(_RATE, b2=_B2, weight_decay=0.1)),
    ("adamw", "elementwise", lambda: optax.adamw(_RATE, b2=_B2, weight_decay=0.1)),
    (
        "adamw(mask)",
        "elementwise",
        lambda: optax.adamw(_RATE, b2=_B2, weight_decay=0.1, mask=_is_matrix),
    ),
    ("adan", "elementwise", lambda: optax.adan(_RATE, weight_decay=0.1)),
    ("amsgrad", "elementwise", lambda: optax.amsgrad(_RATE, b2=0.9)),
    ("fromage", "norm", lambda: optax.fromage(_RATE)),
    ("lamb", "norm", lambda: optax.lamb(_RATE, weight_decay=0.1, mask=_is_matrix)),
    ("lars", "norm", lambda: optax.lars(0.5, weight_decay=0.1, trust_coefficient=0.01)),
    ("lion", "elementwise", lambda: optax.lion(_RATE, weight_decay=0.1)),
    ("nadam", "elementwise", lambda: optax.nadam(_RATE, b2=_B2)),
    ("nadamw", "elementwise", lambda: optax.nadamw(_RATE, b2=_B2, weight_decay=0.1)),
    ("noisy_sgd", "elementwise", lambda: optax.noisy_sgd(_RATE, key=3)),
    ("novograd", "norm", lambda: optax.novograd(_RATE, weight_decay=0.1)),
    (
        "optimistic_adam",
        "elementwise",
        _quietly(lambda: optax.optimistic_adam(_RATE, optimism=0.005, b2=0.9)),
    ),
    ("optimistic_adam_v2", "elementwise", lambda: optax.optimistic_adam_v2(_RATE, b2=0.9)),
    (
        "optimistic_gradient_descent",
        "elementwise",
        lambda: optax.optimistic_gradient_descent(_RATE),
    ),
    # The default b2 makes its rectification a difference of large numbers.
    ("radam", "elementwise", lambda: optax.radam(_RATE, b2=0.9)),
    ("rmsprop", "elementwise", lambda: optax.rmsprop(_RATE)),
    (
        "rmsprop(centered, momentum)",
        "elementwise",
        lambda: optax.rmsprop(_RATE, initial_scale=1.0, centered=True, momentum=0.9, nesterov=True),
    ),
    ("rprop", "elementwise", lambda: optax.rprop(_RATE)),
    ("sgd", "elementwise", lambda: optax.sgd(_RATE)),
    ("sgd(momentum)", "elementwise", lambda: optax.sgd(_schedule, momentum=0.9, nesterov=True)),
    ("sign_sgd", "elementwise", lambda: optax.sign_sgd(_RATE)),
    ("signum", "elementwise", lambda: optax.signum(_RATE)),
    ("yogi", "elementwise", lambda: optax.yogi(_RATE)),
)

_CONTRIB: tuple[tuple[str, Kind, Callable[[], Any]], ...] = (
    ("acprop", "elementwise", lambda: optax.contrib.acprop(_RATE, b2=0.9, weight_decay=0.1)),
    ("ademamix", "elementwise", lambda: optax.contrib.ademamix(_RATE, b2=_B2, weight_decay=0.1)),
    ("adopt", "elementwise", lambda: optax.contrib.adopt(_RATE)),
    ("cocob", "elementwise", lambda: optax.contrib.cocob(alpha=10.0, weight_decay=0.01)),
    ("dadapt_adamw", "norm", lambda: optax.contrib.dadapt_adamw(betas=(0.9, 0.95), estim_lr0=0.01)),
    # Distances start well above the rounding of the parameters that they are differences of.
    ("dog", "norm", lambda: optax.contrib.dog(init_step=("heuristic", 0.01))),
    ("dowg", "norm", lambda: optax.contrib.dowg(init_estim_sq_dist=0.1, weight_decay=0.01)),
    ("madgrad", "elementwise", lambda: optax.contrib.madgrad(_RATE, weight_decay=0.01)),
    ("mechanize", "norm", lambda: optax.contrib.mechanize(optax.sgd(1.0), s_init=0.05)),
    ("normalize", "norm", lambda: optax.contrib.normalize()),
    ("prodigy", "norm", lambda: optax.contrib.prodigy(betas=(0.9, 0.95), estim_lr0=0.01)),
    ("scale_by_acprop", "elementwise", lambda: _descend(optax.contrib.scale_by_acprop(b2=0.9))),
    ("scale_by_ademamix", "elementwise", lambda: _descend(optax.contrib.scale_by_ademamix(b2=_B2))),
    ("scale_by_adopt", "elementwise", lambda: _descend(optax.contrib.scale_by_adopt())),
    ("scale_by_cocob", "elementwise", lambda: optax.contrib.scale_by_cocob(alpha=10.0)),
    ("scale_by_madgrad", "elementwise", lambda: optax.contrib.scale_by_madgrad(_RATE)),
    (
        "scale_by_simplified_ademamix",
        "elementwise",
        lambda: _descend(optax.contrib.scale_by_simplified_ademamix(b1=0.9, b2=0.5, alpha=0.5)),
    ),
    (
        "schedule_free",
        "elementwise",
        lambda: optax.contrib.schedule_free(_adam(_schedule, b1=0.0), _schedule),
    ),
    (
        "schedule_free_adamw",
        "elementwise",
        lambda: optax.contrib.schedule_free_adamw(_RATE, b2=_B2, warmup_steps=3, weight_decay=0.1),
    ),
    (
        "schedule_free_sgd",
        "elementwise",
        lambda: optax.contrib.schedule_free_sgd(0.1, warmup_steps=3, weight_decay=0.01),
    ),
    (
        "simplified_ademamix",
        "elementwise",
        lambda: optax.contrib.simplified_ademamix(
            _RATE, b1=0.9, b2=0.5, alpha=0.5, weight_decay=0.1
        ),
    ),
)

_TRANSFORMS: tuple[tuple[str, Kind, Callable[[], Any]], ...] = (
    ("adaptive_grad_clip", "norm", lambda: _descend(optax.adaptive_grad_clip(0.5))),
    ("add_decayed_weights", "elementwise", lambda: _descend(optax.add_decayed_weights(0.1))),
    (
        "add_decayed_weights(schedule, mask)",
        "elementwise",
        lambda: _descend(optax.add_decayed_weights(_schedule, mask=_is_matrix)),
    ),
    ("add_noise", "elementwise", lambda: optax.add_noise(eta=0.1, gamma=0.55, key=5)),
    ("apply_every", "elementwise", lambda: _descend(optax.apply_every(3))),
    ("centralize", "norm", lambda: optax.centralize()),
    ("clip", "elementwise", lambda: optax.clip(0.4)),
    ("clip_by_block_rms", "norm", lambda: optax.clip_by_block_rms(0.5)),
    ("clip_by_global_norm", "norm", lambda: optax.clip_by_global_norm(1.0)),
    ("ema", "elementwise", lambda: optax.ema(0.9)),
    ("freeze", "elementwise", lambda: optax.freeze(_mask())),
    ("identity", "elementwise", lambda: optax.identity()),
    ("normalize_by_update_norm", "norm", lambda: optax.normalize_by_update_norm(3.0)),
    ("scale", "elementwise", lambda: optax.scale(-_RATE)),
    ("scale_by_adadelta", "elementwise", lambda: optax.scale_by_adadelta()),
    ("scale_by_adam", "elementwise", lambda: optax.scale_by_adam(b2=0.9)),
    ("scale_by_adamax", "elementwise", lambda: optax.scale_by_adamax()),
    ("scale_by_adan", "elementwise", lambda: _descend(optax.scale_by_adan())),
    ("scale_by_amsgrad", "elementwise", lambda: _descend(optax.scale_by_amsgrad(b2=0.9))),
    ("scale_by_belief", "elementwise", lambda: _descend(optax.scale_by_belief(b2=_B2))),
    ("scale_by_learning_rate", "elementwise", lambda: optax.scale_by_learning_rate(_schedule)),
    ("scale_by_lion", "elementwise", lambda: optax.scale_by_lion()),
    (
        "scale_by_lion(smooth)",
        "elementwise",
        lambda: _descend(optax.scale_by_lion(mode="smooth", smooth_beta=2.0)),
    ),
    ("scale_by_novograd", "norm", lambda: _descend(optax.scale_by_novograd(weight_decay=0.1))),
    (
        "scale_by_optimistic_gradient",
        "elementwise",
        lambda: _descend(optax.scale_by_optimistic_gradient()),
    ),
    ("scale_by_param_block_norm", "norm", lambda: _descend(optax.scale_by_param_block_norm())),
    ("scale_by_param_block_rms", "norm", lambda: _descend(optax.scale_by_param_block_rms())),
    ("scale_by_radam", "elementwise", lambda: _descend(optax.scale_by_radam(b2=0.9))),
    ("scale_by_rms", "elementwise", lambda: optax.scale_by_rms()),
    ("scale_by_rprop", "elementwise", lambda: optax.scale_by_rprop(_RATE)),
    ("scale_by_rss", "elementwise", lambda: optax.scale_by_rss()),
    ("scale_by_schedule", "elementwise", lambda: optax.scale_by_schedule(_negative_schedule)),
    ("scale_by_sign", "elementwise", lambda: optax.scale_by_sign()),
    (
        "scale_by_stddev",
        "elementwise",
        lambda: _descend(optax.scale_by_stddev(initial_scale=1.0)),
    ),
    ("scale_by_trust_ratio", "norm", lambda: _descend(optax.scale_by_trust_ratio())),
    ("scale_by_yogi", "elementwise", lambda: _descend(optax.scale_by_yogi())),
    ("set_to_zero", "elementwise", lambda: optax.set_to_zero()),
    ("trace", "elementwise", lambda: optax.trace(0.9, nesterov=True)),
)


def _from_rows(rows: tuple[tuple[str, Kind, Callable[[], Any]], ...], prefix: str) -> list[Case]:
    """Cases that need nothing special; the rows give name, kind and how to make it."""
    return [
        _case(prefix + name.partition("(")[0], make, kind, name=prefix + name)
        for name, kind, make in rows
    ]


def _factored() -> list[Case]:
    """Second moments kept as rows and columns."""

    def adafactor() -> optax.GradientTransformation:
        return optax.adafactor(0.05, min_dim_size_to_factor=4, weight_decay_rate=0.01)

    def with_momentum() -> optax.GradientTransformation:
        return optax.adafactor(0.05, min_dim_size_to_factor=4, momentum=0.9, factored=False)

    def scale_by_factored_rms() -> optax.GradientTransformation:
        return _descend(optax.scale_by_factored_rms(min_dim_size_to_factor=4))

    shapes = {"kind": "norm", "params": factored_params}
    return [
        _case(
            "scale_by_distance_over_gradients",
            # it gives a parameter of rank 0 an update of rank 1
            lambda: optax.chain(
                optax.scale_by_distance_over_gradients(reps_rel=0.05), optax.scale(-1.0)
            ),
            "norm",
            params=factored_params,
        ),
        _case("adafactor", adafactor, **shapes),
        _case("adafactor", adafactor, "norm", name="(default_params)"),
        _case("adafactor", with_momentum, name="(momentum, not factored)", **shapes),
        _case("scale_by_factored_rms", scale_by_factored_rms, **shapes),
        # SM3 takes no parameters of rank 0.
        _case("sm3", lambda: optax.sm3(0.1), **shapes),
        _case("scale_by_sm3", lambda: optax.scale_by_sm3(b2=0.9), **shapes),
    ]


def _of_matrices() -> list[Case]:
    """Orthogonalization of momenta, and projection of gradients to few dimensions."""
    contrib = optax.contrib

    def of_matrices(params: Tree) -> Tree:
        return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), params)

    whole = {"kind": "matrix", "params": transformer_params}
    matrices = {"kind": "matrix", "params": matrix_params}
    return [
        _case("contrib.muon", lambda: contrib.muon(0.02, weight_decay=0.1), **whole),
        _case(
            "contrib.muon",
            lambda: contrib.muon(0.02, ns_coeffs="dion", adaptive=True, consistent_rms=0.2),
            name="(dion, adaptive)",
            **whole,
        ),
        _case(
            "contrib.scale_by_muon",
            lambda: _descend(contrib.scale_by_muon(weight_dimension_numbers=of_matrices)),
            **matrices,
        ),
        _case(
            "contrib.galore",
            lambda: contrib.galore(0.05, rank=3, update_proj_gap=4, weight_decay=0.01),
            **whole,
        ),
        _case(
            "contrib.scale_by_galore",
            lambda: _descend(contrib.scale_by_galore(rank=3, base_optimizer=optax.trace(0.9))),
            **whole,
        ),
    ]


def _with_loss() -> list[Case]:
    """What takes the value of the loss, as a number."""
    contrib = optax.contrib
    loss = {"extra_args": loss_by_step}
    return [
        _case("polyak_sgd", lambda: optax.polyak_sgd(0.5, scaling=0.5), "norm", **loss),
        _case(
            "scale_by_polyak",
            lambda: optax.chain(optax.scale_by_polyak(variant="sps+"), optax.scale(-0.5)),
            "norm",
            **loss,
        ),
        _case("contrib.momo", lambda: contrib.momo(0.1, weight_decay=0.1), "norm", **loss),
        _case("contrib.momo_adam", lambda: contrib.momo_adam(_RATE), "norm", **loss),
        _case(
            "contrib.momo_adam",
            lambda: contrib.momo_adam(0.05, adapt_lower_bound=True, weight_decay=0.01),
            "norm",
            name="(adapt_lower_bound)",
            **loss,
        ),
        _case(
            "contrib.reduce_on_plateau",
            lambda: optax.chain(
                optax.sgd(_RATE), contrib.reduce_on_plateau(0.5, patience=2, cooldown=1)
            ),
            **loss,
        ),
    ]


def _with_objective() -> list[Case]:
    """What evaluates the objective, or its gradient, on its own."""
    search = {
        "kind": "norm",
        "gradients": objective_local_grads,
        "extra_args": line_search_args,
    }

    # With a step of 0.3 it neither converges within the run nor takes differences of almost equal
    # gradients; either would leave little but rounding in its state.
    def lbfgs() -> optax.GradientTransformation:
        zoom = optax.scale_by_zoom_linesearch(12, max_learning_rate=0.3)
        return optax.lbfgs(memory_size=2, linesearch=zoom)

    def backtracking() -> optax.GradientTransformation:
        return optax.chain(
            optax.sgd(0.2), optax.scale_by_backtracking_linesearch(8, max_learning_rate=2.0)
        )

    def zoom() -> optax.GradientTransformation:
        return optax.chain(optax.sgd(0.2), optax.scale_by_zoom_linesearch(12))

    def scale_by_lbfgs() -> optax.GradientTransformation:
        return optax.chain(optax.scale_by_lbfgs(memory_size=2), optax.scale(-0.3))

    return [
        _case("lbfgs", lbfgs, **search),
        _case("scale_by_backtracking_linesearch", backtracking, **search),
        _case("scale_by_zoom_linesearch", zoom, **search),
        _case("scale_by_lbfgs", scale_by_lbfgs, "norm", gradients=objective_local_grads),
        *_second_order(),
        *_sharpness_aware(),
    ]


def _second_order() -> list[Case]:
    contrib = optax.contrib
    return [
        _case(
            "contrib.hutchinson_estimator_diag_hessian",
            lambda: _descend(contrib.hutchinson_estimator_diag_hessian()),
            "norm",
            extra_args=objective_arg,
        ),
        _case(
            "contrib.sophia",
            lambda: contrib.sophia(_RATE, gamma=0.5, update_interval=3, weight_decay=0.1),
            "norm",
            extra_args=objective_arg,
        ),
    ]


def _sharpness_aware() -> list[Case]:
    def sam(**kwargs: Any) -> optax.GradientTransformation:
        adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
        return optax.contrib.sam(optax.sgd(_RATE, momentum=0.9), adversary, **kwargs)

    return [
        _case("contrib.sam", lambda: sam(sync_period=2), "norm"),
        _case(
            "contrib.sam",
            lambda: sam(sync_period=3, opaque_mode=True),
            "norm",
            name="(opaque_mode)",
            gradients=objective_local_grads,
            extra_args=grad_fn_arg,
        ),
    ]


def _private() -> list[Case]:
    """Aggregation of gradients per example."""
    contrib = optax.contrib
    # A mean over replicas has no examples left to clip: gradients come as they are.
    fields = {"kind": "norm", "per_example": True}
    return [
        _case(
            "contrib.differentially_private_aggregate",
            lambda: _descend(contrib.differentially_private_aggregate(2.0, 0.1, key=9)),
            **fields,
        ),
        _case(
            "contrib.dpsgd",
            _quietly(lambda: contrib.dpsgd(0.1, 2.0, 0.1, seed=9, momentum=0.9)),
            **fields,
        ),
    ]


def _compositions() -> list[Case]:
    """Transformations put together in a row, or each on its part of the parameters."""
    transforms = {"matrix": lambda: optax.adamw(_RATE, b2=_B2), "vector": lambda: optax.sgd(0.1)}

    def partition(labels: Tree) -> optax.GradientTransformation:
        return optax.partition({key: make() for key, make in transforms.items()}, labels)

    def label_tree() -> Tree:
        return {"w": "matrix", "b": "vector", "deep": "vector", "tall": "matrix"}

    def long_chain() -> optax.GradientTransformation:
        decay = optax.masked(optax.add_decayed_weights(0.1), _is_matrix)
        return optax.chain(
            optax.centralize(), decay, optax.trace(0.9), optax.scale_by_learning_rate(_schedule)
        )

    return [
        _case(
            "chain",
            lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(_RATE, b2=_B2)),
            "norm",
            name="chain(clip_by_global_norm, adamw)",
        ),
        _case("chain", long_chain, "norm", name="chain(centralize, masked, trace, schedule)"),
        _case(
            "named_chain",
            lambda: optax.named_chain(("clip", optax.clip_by_block_rms(0.5)), ("adam", _adam())),
            "norm",
        ),
        _case("partition", lambda: partition(_labels), name="(labels by rank)"),
        _case("partition", lambda: partition(label_tree()), name="(tree of labels)"),
        _case(
            "multi_transform",
            lambda: optax.multi_transform(
                {"matrix": optax.lamb(_RATE), "vector": _adam()}, _labels
            ),
            "norm",
        ),
        _case("masked", lambda: _descend(optax.masked(optax.scale_by_adam(b2=_B2), _is_matrix))),
        _case(
            "masked",
            lambda: optax.masked(_adam(), _mask()),
            name="(tree)",
        ),
        _case(
            "selective_transform",
            lambda: optax.selective_transform(_adam(), freeze_mask=_mask()),
        ),
    ]


def _wrappers() -> list[Case]:
    """What changes when, on what, or with what its inner transformation is called."""
    return [
        *_conditional(),
        *_accumulating(),
        *_injecting(),
        *_observing(),
        _case("flatten", lambda: optax.flatten(_adam())),
        _case(
            "flatten",
            lambda: optax.flatten(optax.novograd(_RATE)),
            "norm",
            name="(novograd)",
        ),
        *[
            _case(
                "lookahead",
                functools.partial(_lookahead, reset_state=reset),
                name=name,
                loop=_LOOKAHEAD,
            )
            for name, reset in (("", False), ("(reset_state)", True))
        ],
        _case(
            "contrib.split_real_and_imaginary",
            lambda: optax.contrib.split_real_and_imaginary(_adam()),
            params=complex_params,
        ),
        _case(
            "with_extra_args_support",
            lambda: optax.with_extra_args_support(_adam()),
            extra_args=loss_by_step,
        ),
    ]


def _lookahead(reset_state: bool) -> optax.GradientTransformation:
    fast = optax.sgd(0.05, momentum=0.9)
    return optax.lookahead(fast, sync_period=3, slow_step_size=0.5, reset_state=reset_state)


def _conditional() -> list[Case]:
    def every_other(step: Any) -> Any:
        return step % 2 == 0

    def high_loss(step: Any, value: Any, **extra_args: Any) -> Any:
        del step, extra_args
        return value > 44

    def by_loss(wrapper: Callable[..., Any]) -> optax.GradientTransformation:
        return wrapper(_adam(), high_loss, forward_extra_args=True)

    nan = {"tamper": _nan_on_one_replica}
    return [
        _case(
            "conditionally_mask",
            lambda: optax.conditionally_mask(_adam(), every_other),
        ),
        _case(
            "conditionally_transform",
            lambda: _descend(
                optax.conditionally_transform(optax.scale_by_adam(b2=_B2), every_other)
            ),
        ),
        _case(
            "conditionally_mask",
            lambda: by_loss(optax.conditionally_mask),
            name="(extra_args)",
            extra_args=loss_by_step,
        ),
        _case("apply_if_finite", lambda: optax.apply_if_finite(_adam(), 3), **nan),
        _case("zero_nans", lambda: optax.zero_nans(), **nan),
        _case(
            "keep_params_nonnegative",
            lambda: optax.chain(optax.sgd(0.5), optax.keep_params_nonnegative()),
            params=positive_params,
        ),
    ]


def _accumulating() -> list[Case]:
    large = functools.partial(optax.skip_large_updates, max_squared_norm=5e4)

    def growing(gradient_step: Any) -> Any:
        return 1 + (gradient_step > 1) + (gradient_step > 2)

    def adam_by(every: Any, **kwargs: Any) -> optax.MultiSteps:
        return optax.MultiSteps(_adam(eps=0.01), every, **kwargs)

    return [
        _case("MultiSteps", lambda: adam_by(3).gradient_transformation()),
        _case("MultiSteps", lambda: adam_by(3), name="(the object itself)"),
        _case(
            "MultiSteps",
            lambda: adam_by(growing, use_grad_mean=False).gradient_transformation(),
            name="(schedule, sum)",
        ),
        _case(
            "MultiSteps",
            lambda: adam_by(
                2, should_skip_update_fn=optax.skip_not_finite
            ).gradient_transformation(),
            name="(skip_not_finite)",
            tamper=_nan_on_one_replica,
        ),
        _case(
            "MultiSteps",
            lambda: adam_by(2, should_skip_update_fn=large).gradient_transformation(),
            "norm",
            name="(skip_large_updates)",
            tamper=_spike,
        ),
    ]


class _LossSchedule:
    """A stateful schedule: a rate that follows a moving average of the loss."""

    def init(self) -> dict[str, Any]:
        return {"average": jnp.asarray(40.0, jnp.float32)}

    def update(self, state: dict[str, Any], *, value: Any, **extra_args: Any) -> dict[str, Any]:
        del extra_args
        return {"average": 0.75 * state["average"] + 0.25 * value}

    def __call__(self, state: dict[str, Any], **extra_args: Any) -> Any:
        del extra_args
        return 0.4 / state["average"]


def _injecting() -> list[Case]:
    return [
        _case(
            "inject_hyperparams",
            lambda: optax.inject_hyperparams(optax.adamw)(
                _schedule, b1=0.8, b2=_B2, weight_decay=0.1
            ),
        ),
        _case(
            "inject_stateful_hyperparams",
            _quietly(
                lambda: optax.inject_stateful_hyperparams(optax.sgd)(_LossSchedule(), momentum=0.9)
            ),
            extra_args=loss_by_step,
        ),
    ]


def _observing() -> list[Case]:
    """What leaves the updates alone and keeps a measurement of them in its state."""

    def snapshot(measure: Callable[[Tree], Tree]) -> optax.GradientTransformation:
        return optax.chain(optax.sgd(_RATE, momentum=0.9), optax.snapshot("seen", measure))

    def monitor() -> optax.GradientTransformation:
        large = optax.measure_with_ema(lambda tree: optax.tree.norm(tree) > 20.0, decay=0.9)
        return optax.chain(optax.monitor({"norm": optax.tree.norm, "large": large}), _adam())

    return [
        _case("snapshot", lambda: snapshot(optax.tree.norm), "norm"),
        _case("snapshot", lambda: snapshot(_unchanged), name="(all updates)"),
        _case("monitor measure_with_ema", monitor, "norm"),
    ]


def _handwritten() -> list[Case]:
    """What a user writes: with a function, or with the two functions of a transformation."""

    def heavy_ball() -> optax.GradientTransformation:
        def init(params: Tree) -> dict[str, Tree]:
            velocity = jax.tree.map(jnp.zeros_like, params)
            return {"velocity": velocity, "count": jnp.zeros((), jnp.int32)}

        def update(grads: Tree, state: dict[str, Tree], params: Tree = None) -> tuple[Tree, Tree]:
            velocity = jax.tree.map(
                lambda v, g, p: 0.9 * v - _RATE * (g + 0.1 * p), state["velocity"], grads, params
            )
            return velocity, {"velocity": velocity, "count": state["count"] + 1}

        return optax.GradientTransformation(init, update)

    def by_loss() -> optax.GradientTransformationExtraArgs:
        def update(grads, state, params=None, *, value, **extra_args):
            del params, extra_args
            return jax.tree.map(lambda g: -g / value, grads), state

        return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)

    def with_params(grads: Tree, params: Tree) -> Tree:
        return jax.tree.map(lambda g, p: -_RATE * g * jnp.abs(p), grads, params)

    return [
        _case("GradientTransformation", heavy_ball),
        _case("GradientTransformationExtraArgs", by_loss, extra_args=loss_by_step),
        _case("stateless", lambda: optax.stateless(with_params)),
        _case(
            "stateless_with_tree_map",
            lambda: optax.stateless_with_tree_map(lambda g, p: -_RATE * (g + jnp.sign(p))),
        ),
    ]


def cases() -> list[Case]:
    """The table."""
    return [
        *_from_rows(_ALIASES, ""),
        *_from_rows(_CONTRIB, "contrib."),
        *_from_rows(_TRANSFORMS, ""),
        *_factored(),
        *_of_matrices(),
        *_with_loss(),
        *_with_objective(),
        *_private(),
        *_compositions(),
        *_wrappers(),
        *_handwritten(),
    ]


# ------------------------------------------------------------------------------ what optax exports

_NAMESPACES = {
    "optax": optax,
    "optax.contrib": optax.contrib,
    "optax.transforms": optax.transforms,
}


def _builds(value: Any) -> bool:
    """Whether a value, or a class, has what makes a gradient transformation."""
    if isinstance(value, type) and issubclass(value, optax.GradientTransformation):
        return True  # its fields are not callable before it has an instance
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def exported() -> Iterator[tuple[str, Any]]:
    """The functions that optax exports, and the classes that have `init` and `update`.

    Other classes hold state or describe types; what typing makes is no function either.
    """
    for prefix, module in _NAMESPACES.items():
        for name in dir(module):
            value = getattr(module, name)
            if name.startswith("_") or not callable(value) or typing.get_origin(value):
                continue
            if not isinstance(value, type) or _builds(value):
                yield f"{prefix}.{name}", value


def _promises(annotation: Any) -> bool:
    """Whether a return annotation is a transformation, or a callable that returns one."""
    if isinstance(annotation, type) and issubclass(annotation, optax.GradientTransformation):
        return True
    return any(_promises(part) for part in typing.get_args(annotation))


def _delivers(function: Callable[..., Any], signature: inspect.Signature) -> bool:
    """Whether a call yields a transformation: for functions that do not say what they return."""
    samples = {"measures": {}}
    required = {
        name: samples.get(name, 0.5)
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _builds(function(**required))
    except Exception:  # not made for these arguments: no constructor that we could use
        return False


def _is_constructor(value: Any) -> bool:
    if isinstance(value, type):
        return _builds(value)
    signature = inspect.signature(value)
    if signature.return_annotation is not signature.empty:
        return _promises(signature.return_annotation)
    return _delivers(value, signature)


def exported_constructors() -> dict[str, Any]:
    """What optax exports to build gradient transformations, by dotted name, aliases included.

    A function counts if its return annotation is a gradient transformation or a callable that
    returns one, as that of `optax.inject_hyperparams`. Where it has no annotation, as
    `optax.monitor` and `optax.contrib.dog`, it is called, and counts if the result has `init` and
    `update`. A class counts if it has those two itself, as `optax.MultiSteps`, which is no gradient
    transformation by type but takes the place of one.
    """
    return {name: value for name, value in exported() if _is_constructor(value)}


# What `exported` yields and the table has no case for, by reason.
_EXCLUDED: dict[str, str] = {
    "a schedule: a number for each step, which transformations take as an argument": """
        optax.WrappedSchedule optax.constant_schedule optax.cosine_decay_schedule
        optax.cosine_onecycle_schedule optax.exponential_decay optax.join_schedules
        optax.linear_onecycle_schedule optax.linear_schedule optax.piecewise_constant_schedule
        optax.piecewise_interpolate_schedule optax.polynomial_schedule optax.sgdr_schedule
        optax.warmup_constant_schedule optax.warmup_cosine_decay_schedule
        optax.warmup_exponential_decay_schedule""",
    "a loss, or targets for one: it is differentiated before any optimizer runs": """
        optax.convex_kl_divergence optax.cosine_distance optax.cosine_similarity optax.ctc_loss
        optax.ctc_loss_with_forward_probs optax.generalized_kl_divergence optax.hinge_loss
        optax.huber_loss optax.kl_divergence optax.l2_loss optax.log_cosh optax.ntxent
        optax.safe_softmax_cross_entropy optax.sigmoid_binary_cross_entropy
        optax.sigmoid_focal_loss optax.smooth_labels optax.softmax_cross_entropy
        optax.softmax_cross_entropy_with_integer_labels optax.squared_error""",
    "it makes new parameters from old ones and keeps no state": """
        optax.apply_updates optax.incremental_update optax.periodic_update""",
    "it reads parameters out of a state": "optax.contrib.schedule_free_eval_params",
    "it maps a function over a state that is already there": "optax.tree_map_params",
    "an init function, not a pair of them": "optax.init_empty_state",
    "it computes with moments, counts or norms that transformations keep": """
        optax.bias_correction optax.global_norm optax.safe_increment optax.safe_int32_increment
        optax.safe_norm optax.safe_root_mean_squares optax.update_infinity_moment
        optax.update_moment optax.update_moment_per_elem_norm optax.transforms.unitwise_clip
        optax.transforms.unitwise_norm""",
    "it clips a given batch of gradients and keeps no state": """
        optax.per_example_global_norm_clip optax.per_example_layer_norm_clip""",
    "a condition for `optax.MultiSteps`, whose cases use it": """
        optax.skip_large_updates optax.skip_not_finite""",
    "linear algebra on given matrices": """
        optax.matrix_inverse_pth_root optax.nnls optax.power_iteration""",
    "a probability distribution": "optax.multi_normal",
    "it changes what differentiation or evaluation of a function does": """
        optax.microbatch optax.scale_gradient optax.value_and_grad_from_state""",
}

EXCLUDED: dict[str, str] = {
    name: reason for reason, names in _EXCLUDED.items() for name in names.split()
}


def resolve(name: str) -> Any:
    """The object that a dotted name under `optax` stands for."""
    return functools.reduce(getattr, name.split(".")[1:], optax)
