"""A GAN under `jit`; the generator is trained in every other step only."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tests.corpus.case import GLOBAL, Case, normal

MODES = GLOBAL

gen_tx = optax.adam(1e-3, b1=0.5)
disc_tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3, b1=0.5))


def generate(gen, z):
    return jnp.tanh(z @ gen["in"]) @ gen["out"]


def logits(disc, x):
    return (jnp.tanh(x @ disc["in"] + disc["bias"]) @ disc["out"])[:, 0]


def disc_loss(disc, gen, real, z):
    fake = jax.lax.stop_gradient(generate(gen, z))
    return jnp.mean(jax.nn.softplus(-logits(disc, real)) + jax.nn.softplus(logits(disc, fake)))


def gen_loss(gen, disc, z):
    return jnp.mean(jax.nn.softplus(-logits(disc, generate(gen, z))))


@jax.jit
def train_step(params, opt_states, step, real, z):
    gen, disc = params["gen"], params["disc"]
    d_loss, grads = jax.value_and_grad(disc_loss)(disc, gen, real, z)
    updates, disc_state = disc_tx.update(grads, opt_states["disc"], disc)
    disc = optax.apply_updates(disc, updates)

    g_loss, grads = jax.value_and_grad(gen_loss)(gen, disc, z)
    updates, gen_state = gen_tx.update(grads, opt_states["gen"], gen)
    new = (optax.apply_updates(gen, updates), gen_state)
    gen, gen_state = jax.tree.map(
        lambda a, b: jnp.where(step % 2 == 0, a, b), new, (gen, opt_states["gen"])
    )
    states = {"gen": gen_state, "disc": disc_state}
    return {"gen": gen, "disc": disc}, states, step + 1, (d_loss, g_loss)


def make(mesh: Mesh) -> Case:
    params = {
        "gen": {"in": normal(1, 5, 14, scale=0.5), "out": normal(2, 14, 17, scale=0.5)},
        "disc": {
            "in": normal(3, 17, 11, scale=0.5),
            "bias": normal(4, 11),
            "out": normal(5, 11, 1),
        },
    }
    params = jax.tree.map(jnp.asarray, params)
    states = {"gen": gen_tx.init(params["gen"]), "disc": disc_tx.init(params["disc"])}
    return Case(
        train_step,
        (params, states, jnp.int32(0)),
        lambda step: (normal(step, 16, 17), normal(step, 16, 5)),
        all_reduced_bytes=12,
    )
