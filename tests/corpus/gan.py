"""A GAN: the discriminator's update and then the generator's, with optimizers of their own."""

import jax
import optax
from jax import lax
from jax.sharding import Mesh

from tests.corpus import gan_jit
from tests.corpus.case import MANUAL, Case

MODES = MANUAL


def train_step(params, opt_states, real, z):
    gen, disc = params["gen"], params["disc"]
    d_loss, grads = lax.pmean(jax.value_and_grad(gan_jit.disc_loss)(disc, gen, real, z), "data")
    updates, disc_state = gan_jit.disc_tx.update(grads, opt_states["disc"], disc)
    disc = optax.apply_updates(disc, updates)

    g_loss, grads = lax.pmean(jax.value_and_grad(gan_jit.gen_loss)(gen, disc, z), "data")
    updates, gen_state = gan_jit.gen_tx.update(grads, opt_states["gen"], gen)
    gen = optax.apply_updates(gen, updates)

    losses = {"disc": d_loss, "gen": g_loss}
    return {"gen": gen, "disc": disc}, {"gen": gen_state, "disc": disc_state}, losses


def make(mesh: Mesh) -> Case:
    case = gan_jit.make(mesh)
    return Case(train_step, case.state[:2], case.batch, all_reduced_bytes=12)
