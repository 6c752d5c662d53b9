"""Profiles name what a sharded step does as they name the step that the user wrote."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus

TX = optax.adam(1e-2)


@jax.named_scope("layer")
def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ w)


@jax.named_scope("head")
def head(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    def again(x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        with jax.named_scope("again"):
            return jnp.sin(x @ params["loop"]), None

    x = layer(params["first"], x)
    x, _ = lax.scan(again, x, None, length=2)
    x = jax.checkpoint(layer)(params["second"], x)
    return head(params["last"], x)


def train_step(params: Any, state: Any, x: jax.Array) -> Any:
    grads = jax.grad(loss_fn)(params, x)
    with jax.named_scope("optimizer"):
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state


def replica_step(params: Any, state: Any, x: jax.Array) -> Any:
    grads = lax.pmean(jax.grad(loss_fn)(params, x), "data")
    with jax.named_scope("optimizer"):
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state


def arguments(mesh: Mesh) -> tuple[Any, ...]:
    params = {k: np.ones((16, 16), np.float32) for k in ("first", "loop", "second", "last")}
    params = jax.device_put(params, NamedSharding(mesh, P()))
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, P("data")))
    return params, TX.init(params), x


def names(lowered: Any) -> set[str]:
    """What the compiled program calls its operations, without what is around the step."""
    found = re.findall(r'op_name="([^"]*)"', lowered.compile().as_text())
    return {re.sub(r"^(jit\(\w+\)/|shard_map/)*", "", name) for name in found}


EXPECTED = {
    "jvp(layer)/dot_general",
    "jvp(layer)/jit(relu)/max",
    "jvp(head)/tanh",
    "jvp()/while/body/closed_call/again/sin",
    "transpose(jvp(layer))/dot_general",
    "transpose(jvp(head))/mul",
    "transpose(jvp())/while/body/closed_call/again/dot_general",
    "transpose(jvp(jvp()))/checkpoint/rematted_computation/layer/dot_general",
    "transpose(jvp(jvp()))/checkpoint/layer/dot_general",
    "optimizer/sqrt",
}


def in_shard_map(step: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    specs = (P(), P(), P("data"))
    return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)


@pytest.mark.parametrize("weights", ["whole", "split"])
@pytest.mark.parametrize("manual", [False, True], ids=["global", "shard_map"])
def test_a_step_keeps_its_names(manual: bool, weights: Any, mesh8_auto: Mesh) -> None:
    args = arguments(mesh8_auto)
    written = in_shard_map(replica_step, mesh8_auto) if manual else train_step
    plain = names(jax.jit(written).lower(*args))
    assert plain >= EXPECTED  # the names are those that JAX gives
    lowered = wus.shard_step(written, mesh=mesh8_auto, weights=weights).lower(*args)
    found = names(lowered)
    assert found >= EXPECTED, EXPECTED - found
    assert any(name.startswith("reduce_scatter/") for name in found)
    assert any(name.startswith("all_gather/") for name in found)
    assert lowered.compile().as_text().startswith(f"HloModule jit_{written.__name__}")
    # The update is not counted as forward or backward pass, nor these as update.
    assert not any("jvp" in name and "optimizer" in name for name in found)


def test_operations_come_from_the_users_lines(mesh8_auto: Mesh) -> None:
    lowered = wus.shard_step(train_step, mesh=mesh8_auto).lower(*arguments(mesh8_auto))
    text = lowered.as_text(debug_info=True)
    line = head.__wrapped__.__code__.co_firstlineno + 2
    (at,) = re.findall(r"stablehlo\.tanh .*loc\((#\w+)\)", text)

    def told(loc: str) -> str:
        """A location with all that it refers to."""
        (meaning,) = re.findall(rf"^{loc} = (.*)$", text, re.MULTILINE)
        return meaning + "".join(told(other) for other in re.findall(r"#loc\w+", meaning))

    assert f'test_names.py":{line}:' in told(at)
    assert "interpret.py" not in told(at)


@pytest.mark.parametrize("checked", [False, True])
def test_an_optimizer_keeps_its_names(checked: bool, mesh8_auto: Mesh) -> None:
    params, _, x = arguments(mesh8_auto)
    tx = wus.shard_updates(TX, mesh=mesh8_auto)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        varying = lax.pcast(params, "data", to="varying") if checked else params
        grads = jax.grad(loss_fn)(varying, x)
        with jax.named_scope("optimizer"):
            return tx.apply(grads, state, params)

    specs = tx.state_specs(params)
    mapped = jax.shard_map(
        step,
        mesh=mesh8_auto,
        in_specs=(P(), specs, P("data")),
        out_specs=(P(), specs),
        check_vma=checked,
    )
    found = names(jax.jit(mapped).lower(params, tx.init(params), x))
    assert "optimizer/shard_updates/sqrt" in found
    assert any(name.startswith("optimizer/shard_updates/reduce_scatter/") for name in found)
    assert any(name.startswith("optimizer/shard_updates/all_gather/") for name in found)
    assert found >= {name for name in EXPECTED if "jvp" in name}
