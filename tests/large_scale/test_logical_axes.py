"""Names of dims to mesh axes: by a table, from tuples and from what Flax keeps."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from large_scale.sharding import logical_to_specs
from tests.runs import mesh_of

RULES = {
    "batch": ("data", "stage"),
    "embed": None,
    "mlp": "model",
    "heads": "model",
    "vocab": "model",
}
MESH = {"data": 2, "stage": 2, "model": 2}


def test_names_become_axes():
    logical = {
        "x": ("batch", "embed"),
        "up": P("embed", "mlp"),
        "scale": (None,),
        "step": (),
        "plain": None,
    }
    assert logical_to_specs(logical, RULES) == {
        "x": P(("data", "stage")),
        "up": P(None, "model"),
        "scale": P(),
        "step": P(),
        "plain": P(),
    }


def test_a_list_and_a_tuple_of_arrays_are_trees():
    found = logical_to_specs([("mlp",), (("batch",), ("embed", "heads"))], RULES)
    assert found == [P("model"), (P(("data", "stage")), P(None, "model"))]


def test_shapes_that_the_mesh_divides_pass():
    shapes = {"w": jax.ShapeDtypeStruct((5, 8), jnp.float32)}
    found = logical_to_specs({"w": ("embed", "mlp")}, RULES, mesh=mesh_of(MESH), shapes=shapes)
    assert found == {"w": P(None, "model")}


WRONG = {
    "unknown name": (
        {"w": ("embed", "wings")},
        {},
        "array['w']: dim 1 is named 'wings', for which there is no rule",
    ),
    "an axis twice": (
        {"w": ("mlp", "embed", "heads")},
        {},
        "array['w']: dims 0 ('mlp') and 2 ('heads') would both be split over 'model'",
    ),
    "indivisible": (
        {"w": ("batch", "embed")},
        {"shapes": {"w": jnp.ones((6, 3))}},
        "array['w']: dim 0 ('batch') of length 6 is not divisible by 4, the size of "
        "('data', 'stage'). Pad it to 8",
    ),
    "another rank": (
        {"w": ("batch", "embed")},
        {"shapes": {"w": jnp.ones((8,))}},
        "array['w']: has 1 dims, shape [8], and 2 names",
    ),
    "another tree": (
        {"w": ("batch", "embed")},
        {"shapes": {"w": jnp.ones((8, 1)), "b": jnp.ones((8,))}},
        "shapes: has 2 arrays, and logical names 1",
    ),
    "another array": (
        {"w": ("batch", "embed")},
        {"shapes": {"v": jnp.ones((8, 1))}},
        "shapes: has array['v'] where the logical names have array['w']",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(case):
    logical, options, message = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        logical_to_specs(logical, RULES, mesh=mesh_of(MESH), **options)


def test_rules_that_are_none():
    pairs = [("batch", "data")]
    with pytest.raises(TypeError, match=re.escape("found list, need a mapping")):
        logical_to_specs({}, pairs)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=re.escape("rules['batch']: found 0, need a mesh axis")):
        logical_to_specs({}, {"batch": 0})  # pyright: ignore[reportArgumentType]


def test_a_rule_for_an_axis_that_the_mesh_lacks():
    with pytest.raises(
        ValueError, match=re.escape("rules['stage']: the mesh has no axis ['pipe']")
    ):
        logical_to_specs({}, {"stage": "pipe"}, mesh=mesh_of(MESH))


# ------------------------------------------------------------------------------------ from Flax


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
        return nn.Dense(8, kernel_init=init)(x)


def test_linen_metadata():
    variables = jax.eval_shape(Linen().init, jax.random.key(0), jnp.ones((2, 3)))
    wanted = {"params": {"Dense_0": {"kernel": P(None, "model"), "bias": P()}}}
    assert logical_to_specs(nn.get_partition_spec(variables), RULES) == wanted
    # The boxes themselves will do, and their shapes are checked.
    kernel = variables["params"]["Dense_0"]["kernel"]
    assert logical_to_specs({"k": kernel}, RULES, mesh=mesh_of(MESH), shapes={"k": kernel}) == {
        "k": P(None, "model")
    }


def test_nnx_metadata():
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
            self.dense = nnx.Linear(3, 8, kernel_init=init, rngs=rngs)

    with nnx.use_eager_sharding(False):
        state = nnx.state(Model(nnx.Rngs(0)))
    specs = logical_to_specs(nnx.to_pure_dict(nnx.get_partition_spec(state)), RULES)
    assert specs["dense"]["kernel"] == P(None, "model")
    assert specs["dense"]["bias"] == P()
