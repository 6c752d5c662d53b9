"""The models that are compiled for clusters, cut down, on this machine: they train, all weights."""

import dataclasses
import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from large_scale import aot, hlo, make_mesh, models, shapes
from large_scale.models import MODELS, Model
from large_scale.steps import STEPS, step_program

SMALL_SHAPES = {
    "resnet50": functools.partial(shapes.resnet50, 5, ((2, 8), (1, 16)), 8),
    "transformer-big": functools.partial(shapes.transformer_big, 2, 128, 96, 37),
    "bert-large": functools.partial(shapes.bert_large, 2, 128, 96, 37, 16),
    "gpt2": functools.partial(shapes.gpt2, 2, 128, 37, 16),
}
SMALL_BATCHES = {
    "resnet50": functools.partial(models._images, size=32),
    "transformer-big": functools.partial(models._pairs, length=7),
    "bert-large": functools.partial(models._masked, length=9, masked=3),
    "gpt2": functools.partial(models._sequences, length=8),
}
NUM_WORDS = {"labels": 5, "places": 9, "segments": 2, "follows": 2}


def small(name: str) -> Model:
    return dataclasses.replace(MODELS[name], shapes=SMALL_SHAPES[name], batch=SMALL_BATCHES[name])


def params_of(model: Model):
    """Norms that do nothing, other weights by the number of their inputs."""
    rng = np.random.default_rng(0)

    def one(name, x):
        if x.ndim == 1:
            return np.full(x.shape, float(name.endswith("scale")), x.dtype)
        fan_in = np.prod(x.shape[:-1]) if name.endswith("kernel") else x.shape[1]
        return rng.normal(0, fan_in**-0.5, x.shape).astype(x.dtype)

    return {k: one(k, x) for k, x in model.shapes().items()}


def batch_of(model: Model, examples: int):
    rng = np.random.default_rng(1)
    return {
        k: rng.normal(size=x.shape).astype(x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else rng.integers(0, NUM_WORDS.get(k, 37), x.shape, x.dtype)
        for k, x in model.batch(examples).items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_learns(name):
    model = small(name)
    params, batch = params_of(model), batch_of(model, 4)
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(model.loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, grads

    state = optimizer.init(params)
    losses = []
    for _ in range(6):
        params, state, loss, grads = step(params, state)
        losses.append(float(loss))
        if len(losses) == 1:
            sizes = {k: float(jnp.max(jnp.abs(g))) for k, g in grads.items()}
    # The same number added to all keys of a query changes no attention.
    blind = {k for k in sizes if k.endswith("attention/key/bias")}
    assert not (still := {k: n for k, n in sizes.items() if n < 1e-5 and k not in blind}), still
    assert all(sizes[k] < 1e-5 for k in blind)
    assert losses[5] < 0.9 * losses[0], losses
    assert all(np.diff(losses) < 0), losses


def test_full_models_take_their_batches():
    for name, model in MODELS.items():
        loss = jax.eval_shape(model.loss, model.shapes(), model.batch(model.examples))
        assert loss.shape == () and loss.dtype == jnp.float32, name


def test_computing_in_bfloat16():
    model = small("gpt2")
    params, batch = params_of(model), batch_of(model, 2)
    wide = jax.jit(model.loss)(params, batch)
    narrow, grads = jax.jit(jax.value_and_grad(model.computing_in(jnp.bfloat16).loss))(
        params, batch
    )
    assert 0 < abs(narrow - wide) < 0.03 * wide
    assert {g.dtype for g in grads.values()} == {jnp.dtype("float32")}


# ------------------------------------------------------------------------------------------- steps


@dataclasses.dataclass
class Ran:
    """One variant of a step, compiled, and what it made of weights in two steps."""

    params: dict[str, np.ndarray]
    loss: float
    held: tuple[int, int]
    hlo: list[hlo.Collective]
    donated: int


def ran(variant: str, model: Model, optimizer: optax.GradientTransformation) -> Ran:
    mesh = make_mesh(axis_types=AxisType.Auto)
    program = step_program(variant, optimizer, model, mesh, examples=1)
    compiled = program.step.lower(*program.args).compile()
    params = jax.tree.map(jnp.asarray, params_of(model))
    args = (params, optimizer.init(params), batch_of(model, 8))
    if sharded := variant.startswith("ours"):
        args = program.step.shard(*args)
    args = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), args, program.args)
    params, state, _ = compiled(*args)
    params, _, loss = compiled(params, state, args[2])
    weights, auxiliary = (
        sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))
        for tree in program.args[:2]
    )
    return Ran(
        jax.device_get(program.step.unshard(params) if sharded else params),
        float(loss),
        (weights, auxiliary),
        hlo.collectives(compiled.as_text()),
        compiled.memory_analysis().alias_size_in_bytes,
    )


def assert_same(found: Ran, wanted: Ran, name: str) -> None:
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-5, err_msg=name)
    for k, x in found.params.items():
        np.testing.assert_allclose(x, wanted.params[k], atol=1e-5, err_msg=f"{name} {k}")


def test_steps_are_what_they_say_and_compute_the_same():
    model, optimizer = small("gpt2"), optax.sgd(0.1, momentum=0.9)
    whole = sum(4 * x.size for x in model.shapes().values())
    found = {v: ran(v, model, optimizer) for v in STEPS}
    for variant, one in found.items():
        assert_same(one, found["replicated"], variant)
        weights, state = one.held
        # Odd lengths are padded for a split, and left whole by hand.
        assert weights == whole or (variant == "ours-split" and weights < 1.02 * whole / 8)
        assert state == whole if variant == "replicated" else state < 1.05 * whole / 8
        assert one.donated == weights + state
        kinds = {c.kind for c in one.hlo}
        largest = max((c.operand_bytes for c in one.hlo if c.kind == "all-reduce"), default=0)
        if variant.startswith("ours"):
            assert {"reduce-scatter", "all-gather"} <= kinds and largest <= 8
        else:
            assert "reduce-scatter" not in kinds and largest > 0.3 * whole


def test_batch_norm_by_hand_is_each_devices_own():
    shape = functools.partial(shapes.resnet50, 5, ((1, 8),), 8)
    model = dataclasses.replace(small("resnet50"), shapes=shape)
    optimizer = optax.sgd(0.1)
    one, other = (ran(v, model, optimizer) for v in ("replicated", "zero1"))
    assert_same(other, one, "zero1")
    assert sum(c.sent_bytes for c in other.hlo) < 1.02 * sum(c.sent_bytes for c in one.hlo)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="XLA's TPU compiler is not installed: pip install 'wusharding[tpu-aot]'",
)
def test_a_step_with_split_weights_for_256_devices():
    topology = "v5e:16x16"
    mesh = make_mesh(topology, devices=aot.devices(topology), axis_types=AxisType.Auto)
    shape = functools.partial(
        shapes.gpt2, 1, 512, 5000, 256
    )  # 8 x 128 tiles do not fill 5,000 rows
    model = dataclasses.replace(MODELS["gpt2"], shapes=shape)
    whole = sum(4 * x.size for x in model.shapes().values())
    replicated, ours = (
        aot.compile_step(program.step, *program.args, name=variant)
        for variant in ("replicated", "ours-split")
        for program in [step_program(variant, optax.adam(1e-3), model, mesh, examples=1)]
    )
    assert replicated.largest("all-reduce") > 0.9 * whole  # the check sees what it looks for
    assert ours.largest("all-reduce") < 0.05 * whole
    assert ours.sent_bytes < replicated.sent_bytes
    assert ours.peak_bytes < 0.1 * replicated.peak_bytes
    for kind in ("forward", "backward"):
        assert 0.8 < ours.cycles[kind] / replicated.cycles[kind] < 1.5
    assert ours.cycles["update"] < 0.2 * replicated.cycles["update"]


def test_steps_that_do_not_exist():
    mesh = make_mesh(axis_types=AxisType.Auto)
    with pytest.raises(ValueError, match="need one of replicated, zero1, ours, ours-split"):
        step_program("zero3", optax.sgd(0.1), small("gpt2"), mesh)
    with pytest.raises(ValueError, match=r"axis_types=AxisType\.Auto"):
        step_program("ours", optax.sgd(0.1), small("gpt2"), make_mesh())
