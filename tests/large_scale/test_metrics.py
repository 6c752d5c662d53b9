"""Metrics of a data set that does not divide among the replicas are exact."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from large_scale.hlo import collectives
from large_scale.metrics import Mean, padded, reduced
from tests.runs import mesh_of

EXAMPLES, BATCH, CLASSES = 61, 16, 3


def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    return {
        "logits": rng.integers(-8, 9, (EXAMPLES, CLASSES)).astype(np.float32) / 4,
        "label": rng.integers(0, CLASSES, EXAMPLES).astype(np.int32),
    }


def measured(batch: dict[str, jax.Array], counts: jax.Array) -> dict[str, object]:
    guess = jnp.argmax(batch["logits"], -1)
    hit = jax.nn.one_hot(batch["label"], CLASSES) * counts[:, None]
    return {
        "accuracy": Mean.of(guess == batch["label"], counts),
        "largest": Mean.of(batch["logits"].max(-1), counts),
        "confusion": jnp.einsum("na,nb->ab", hit, jax.nn.one_hot(guess, CLASSES)),
        "examples": counts.astype(jnp.int32).sum(),
    }


def step() -> object:
    return jax.jit(
        jax.shard_map(
            lambda batch, counts: reduced(measured(batch, counts), "data"),
            mesh=mesh_of({"data": 8}, auto=True),
            in_specs=P("data"),
            out_specs=P(),
        )
    )


def test_a_data_set_of_61_examples_on_8_replicas():
    whole, run, found = data(), step(), None
    for start in range(0, EXAMPLES, BATCH):
        part = {k: x[start : start + BATCH] for k, x in whole.items()}
        filled, counts = padded(part, BATCH)
        filled["logits"][int(counts.sum()) :] = np.nan  # padding counts for nothing
        sums = run(filled, counts)
        found = sums if found is None else jax.tree.map(jnp.add, found, sums)
    guess = whole["logits"].argmax(-1)
    assert int(found["examples"]) == EXAMPLES
    assert float(found["accuracy"].value) == np.float32((guess == whole["label"]).mean())
    assert float(found["largest"].value) == np.float32(whole["logits"].max(-1).mean())
    wanted = np.zeros((CLASSES, CLASSES))
    np.add.at(wanted, (whole["label"], guess), 1)
    np.testing.assert_array_equal(found["confusion"], wanted)


def test_all_metrics_travel_together():
    filled, counts = padded({k: x[:BATCH] for k, x in data().items()}, BATCH)
    found = collectives(step().lower(filled, counts).compile().as_text())
    assert {c.kind for c in found} == {"all-reduce"}
    # Two means and a confusion matrix in float32, one count in int32.
    assert sum(c.operand_bytes for c in found) == 4 * (2 * 2 + CLASSES**2 + 1)
    assert len(found) <= 2


def test_the_mean_of_batch_means_would_be_wrong():
    """Negative control: what is usual gives another number."""
    values = data()["logits"].max(-1)
    means = [values[i : i + BATCH].mean() for i in range(0, EXAMPLES, BATCH)]
    assert abs(np.mean(means) - values.mean()) > 1e-3


def test_batches_that_cannot_be_padded_are_named():
    with pytest.raises(ValueError, match=re.escape("has 5 examples, need 1 to 4")):
        padded(np.ones(5), 4)
    with pytest.raises(ValueError, match=re.escape("has 0 examples")):
        padded(np.ones(0), 4)
    with pytest.raises(ValueError, match=re.escape("its arrays have [2, 3] examples")):
        padded([np.ones(3), np.ones(2)], 4)
    with pytest.raises(ValueError, match=re.escape("batch['step']: is one number, need arrays")):
        padded({"x": np.ones(3), "step": np.float32(2)}, 4)
    with pytest.raises(ValueError, match=re.escape("weights: found shape [4], need one for each")):
        Mean.of(jnp.ones(5), jnp.ones(4))
