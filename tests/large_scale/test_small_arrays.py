"""Small arrays of one shape are updated several at a time on TPU, and come out as they would alone.

What needs XLA's TPU compiler runs where it is installed (`pip install 'wusharding[tpu-aot]'`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from large_scale import aot, hlo, make_mesh, programs
from tests.large_scale.compilers import needs_libtpu
from tests.runs import assert_same_bits, batches, leaf, mean_of, reference, relative_error, training
from wusharding.analysis.choose import lanes_of
from wusharding.analysis.placement import Placement, Span
from wusharding.transforms import collectives
from wusharding.transforms.side_by_side import side_by_side


def test_values_stay_what_they_are():
    """To the bit: what is no number, what is infinite and the sign of zero too."""
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, 1.5], np.float32)
    xs = [odd, odd[::-1], -odd, odd[:3], np.arange(5), odd.reshape(1, 5), np.float32(-0.0)]
    xs += [np.zeros((0,), np.float32)] * 3 + [np.ones(2**17, np.float32)] * 3
    xs = [jnp.asarray(x) for x in xs]
    assert_same_bits(jax.jit(side_by_side)(xs), xs)
    # Those of shape (5,), of which there are enough.
    tied = [a is not b for a, b in zip(side_by_side(xs), xs, strict=True)]
    assert tied == [x.shape == (5,) for x in xs]


@pytest.mark.parametrize(
    ("context", "apply", "bucket_bytes"),
    [("checked", True, 2**22), ("explicit", False, 2**22), ("unchecked", True, 256)],
)
def test_the_numbers_are_those_of_one_device(context, apply, bucket_bytes):
    """In one bucket, and in many, over which arrays are cut."""
    shapes = [(24,)] * 4 + [(8, 40)] * 3 + [(1, 1, 16, 8)] * 3 + [(5,), (), (8,)] * 3 + [(0,)]
    params = {f"{i}": leaf(*shape, seed=i) for i, shape in enumerate(shapes)}
    grads = batches(params)
    optimizer = programs.OPTIMIZERS["lamb"]()
    given = {"apply": apply, "target": "tpu", "bucket_bytes": bucket_bytes}
    loop = training(context, optimizer, params, **given).run(grads)
    wanted, state = reference(optimizer, params, [mean_of(g) for g in grads])
    assert relative_error(loop.whole_params, wanted) < 2e-6
    assert relative_error(loop.plain_state, state) < 2e-6


def test_after_dims_of_length_one_shards_are_stored_as_they_are_computed_on():
    tiles = ((),) * 4
    assert lanes_of(Placement(tiles, Span(2, 4, 1024)), (1, 1, 64, 256), "tpu") is None
    assert lanes_of(Placement(tiles, Span(0, 4, 2048)), (2, 2, 32, 256), "tpu") == 128
    assert lanes_of(Placement(((), ()), Span(0, 1, 1024)), (4096, 1), "tpu") == 128


KINDS = {"bias": (1024,), "matrix": (256, 1024), "convolution": (1, 1, 256, 1024)}
WEIGHTS = {
    f"{kind}{i}": jax.ShapeDtypeStruct(shape, jnp.float32)
    for kind, shape in KINDS.items()
    for i in range(8)
}


@needs_libtpu
@pytest.mark.parametrize("name", ["lamb", "lars", "adam"])
def test_operations_are_fewer_than_arrays(name, monkeypatch):
    mesh = make_mesh("v5e:4x4", devices=aot.devices("v5e:4x4"), axis_types=AxisType.Auto)

    def updates():
        program = programs.update_program("ours", programs.OPTIMIZERS[name](), WEIGHTS, mesh)
        text = program.step.lower(*program.args).compile().as_text()
        found = [w for w in hlo.work(text) if w.kind == "update"]
        return len(found), sum(w.cycles or 0 for w in found)

    number, cycles = updates()
    monkeypatch.setattr(collectives, "side_by_side", list)
    number_alone, cycles_alone = updates()
    assert number < 0.7 * len(WEIGHTS)
    assert number < 0.6 * number_alone
    assert cycles < 0.7 * cycles_alone


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:16x16", "v3:16x16"])
def test_arrays_of_one_format_share_the_way_into_a_bucket_and_out_of_it(topology):
    mesh = make_mesh(topology, devices=aot.devices(topology), axis_types=AxisType.Auto)

    def relayout(*sizes):
        weights = {f"{i}": jax.ShapeDtypeStruct((n,), jnp.float32) for i, n in enumerate(sizes)}
        program = programs.update_program("ours", programs.OPTIMIZERS["adam"](), weights, mesh)
        return aot.compile_step(program.step, *program.args).cycles["relayout"]

    alike, unlike = relayout(*[100] * 24), relayout(*range(89, 113))
    assert alike < 0.5 * unlike


@needs_libtpu
def test_pieces_of_two_tiles_and_a_bit_are_padded_to_four():
    """Left as they are they would be padded by the compiler, which takes longer and sends more."""
    mesh = make_mesh("v5e:16x16", devices=aot.devices("v5e:16x16"), axis_types=AxisType.Auto)
    weights = {f"{i}": jax.ShapeDtypeStruct((768, 768), jnp.float32) for i in range(2)}
    program = programs.update_program("ours", programs.OPTIMIZERS["adam"](), weights, mesh)
    found = aot.compile_step(program.step, *program.args).collectives
    scattered = [c for c in found if c.kind == "reduce-scatter"]
    assert {c.kind for c in found} == {"reduce-scatter", "all-gather"}
    assert not any(c.emitter.startswith("fusion") for c in scattered)
    last = [c.operand_bytes for c in scattered if c.phase == 2]
    assert last == [16 * 4 * 4096] * 2
