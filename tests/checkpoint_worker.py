"""Saves step after step until it is killed; run as `python -m`, see `test_checkpoint_faults.py`.

Importing takes longer than saving, so it is done once: for each line on standard input a child is
forked, which starts JAX, goes on from the newest step and is killed by whoever reads its number.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from tests.runs import mesh_of
from wusharding import checkpoint

Tree = Any

OPTIMIZER = optax.adam(0.1)


def tree_at(step: int) -> Tree:
    """Weights of a step: one large enough to be a file of its own, and small ones."""
    rng = np.random.default_rng(step)
    shapes = {"large": (211, 64), "small": (17, 3), "scalar": ()}
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def state_at(step: int) -> Tree:
    """The optimizer's state of a step: a function of the step alone."""
    rng = np.random.default_rng([step, 1])
    state = jax.eval_shape(OPTIMIZER.init, tree_at(step))
    return jax.tree.map(lambda x: np.asarray(100 * rng.normal(size=x.shape), x.dtype), state)


def sharded(count: int = 3) -> tuple[wus.ShardedOptimizer, Any]:
    """The optimizer on some devices, and the sharding of its weights."""
    mesh = mesh_of({"data": count})
    return wus.shard_updates(OPTIMIZER, mesh=mesh), NamedSharding(mesh, P())


def save(manager: ocp.CheckpointManager, step: int) -> None:
    """Starts to save a step."""
    tx, where = sharded()
    params = jax.device_put(tree_at(step), where)
    checkpoint.save(manager, step, tx, params, tx.shard(state_at(step), params))


def save_for_ever(directory: Path) -> None:
    manager = ocp.CheckpointManager(directory)
    for step in range((manager.latest_step() or 0) + 1, sys.maxsize):
        save(manager, step)


def main() -> None:
    directory = Path(sys.argv[1])
    warnings.simplefilter("ignore")  # JAX warns of any fork; its threads start in the child
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            save_for_ever(directory)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)


if __name__ == "__main__":
    main()
