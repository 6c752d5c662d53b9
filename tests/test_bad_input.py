"""What users get wrong, answered in our own words: where, what was found, needed, the remedy."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import wusharding as wus
from tests.runs import mesh_of, training

Tree = Any


@contextlib.contextmanager
def refused(kind: type[Exception], *parts: str) -> Iterator[None]:
    """An exception of this kind whose message says all of this."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


def test_refused_wants_every_part():
    """Negative control."""
    with (
        pytest.raises(AssertionError, match="'moon' is not in"),
        refused(ValueError, "sun", "moon"),
    ):
        raise ValueError("the sun")


def good_params() -> Tree:
    return {"layer": {"w": np.ones((17, 4), np.float32), "b": np.ones((13,), np.float32)}}


def params_with(path: str, value: Any) -> Tree:
    params = good_params()
    params["layer"][path] = value
    return params


def optimizer_of(**options: Any) -> Any:
    return wus.shard_updates(
        optax.adam(0.1), **{"mesh": mesh_of({"data": 8}, auto=True), **options}
    )


def manual(body: Callable[..., Any], *args: Any, check_vma: bool = True) -> Any:
    """Traces `body` in `shard_map`: stacked gradients first, everything else replicated."""
    mapped = jax.shard_map(
        body,
        mesh=mesh_of({"data": 8}, auto=True),
        in_specs=(P("data"), *(P() for _ in args[1:])),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    return jax.eval_shape(mapped, *args)


def stacked(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: np.ones((8, *x.shape), x.dtype), tree)


def first(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x[0], tree)


# ------------------------------------------------------------------------ arguments of the wrapper

ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "reduce": ({"reduce": "avg"}, ValueError, ("reduce='avg'", "'mean'", "'sum'", "None")),
    "formats": ({"formats": "x"}, ValueError, ("formats='x'", "'auto'", "'dim'", "'flat'")),
    "target": ({"target": "abacus"}, ValueError, ("target='abacus'", "'cpu'", "'gpu'", "'tpu'")),
    "no axis": ({"axis": ()}, ValueError, ("axis=()", "mesh axis name")),
    "empty shard_axis": ({"shard_axis": ()}, ValueError, ("shard_axis=()", "mesh axis name")),
    "double axis": ({"axis": ("data", "data")}, ValueError, ("('data', 'data')", "different")),
    "axis that is no name": ({"axis": (0,)}, ValueError, ("axis=(0,)", "mesh axis name")),
    "axis that is a number": ({"axis": 0}, ValueError, ("axis=0", "mesh axis name")),
    "axis that is nothing": ({"axis": None}, ValueError, ("axis=None", "mesh axis name")),
    "shard_axis elsewhere": (
        {"shard_axis": "model"},
        ValueError,
        ("shard_axis=('model',)", "axis=('data',)"),
    ),
    "examples over other axes": (
        {"shard_axis": ("data", "model"), "per_example": True},
        ValueError,
        ("shard_axis=('data', 'model')", "per_example=True", "axis=('data',)"),
    ),
    "negative bucket": ({"bucket_bytes": -1}, ValueError, ("bucket_bytes=-1", "at least 1")),
    "no bucket": ({"bucket_bytes": 0}, ValueError, ("bucket_bytes=0", "at least 1")),
    "bucket of a fraction": (
        {"bucket_bytes": 1e6},
        ValueError,
        ("bucket_bytes=1000000.0", "integer"),
    ),
    "bucket of truth": ({"bucket_bytes": True}, ValueError, ("bucket_bytes=True", "integer")),
    "negative threshold": (
        {"min_shard_elems": -2},
        ValueError,
        ("min_shard_elems=-2", "at least 0"),
    ),
    "integer master": (
        {"master_dtype": jnp.int32},
        ValueError,
        ("master_dtype", "int32", "floating"),
    ),
    "master that is no dtype": (
        {"master_dtype": "big"},
        ValueError,
        ("master_dtype='big'", "floating"),
    ),
    "integer gather": (
        {"gather_dtype": jnp.int8},
        ValueError,
        ("gather_dtype", "int8", "floating"),
    ),
    "mesh that is none": ({"mesh": 8}, TypeError, ("mesh", "int", "jax.sharding.Mesh")),
    "missing axis": (
        {"axis": "batch"},
        wus.ContextError,
        ("axis=('batch',)", "no axis ['batch']", "('data',)"),
    ),
    "one missing axis": (
        {"axis": ("data", "batch")},
        wus.ContextError,
        ("no axis ['batch']", "('data',)"),
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument(name):
    options, kind, parts = ARGUMENTS[name]
    with refused(kind, *parts):
        optimizer_of(**options)


def test_unknown_option():
    with refused(TypeError, "zero"):
        wus.shard_updates(optax.adam(0.1), zero=1)


@pytest.mark.parametrize("thing", [optax.adam, 0.1, None, (optax.adam(0.1).init,)])
def test_optimizer_that_is_none(thing):
    found = type(thing).__name__
    with refused(TypeError, "optimizer", found, "optax.GradientTransformation"):
        wus.shard_updates(thing)


def test_optimizer_whose_init_fails():
    def init(params: Tree) -> Tree:
        raise RuntimeError("no ink")

    broken = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    with refused(wus.UnsupportedOptimizerError, "init", "RuntimeError: no ink"):
        wus.shard_updates(broken, mesh=mesh_of({"data": 8})).init(good_params())


def needs_temperature() -> optax.GradientTransformationExtraArgs:
    def update(grads: Tree, state: Any, params: Tree = None, *, temperature: Any, **_: Any) -> Any:
        return jax.tree.map(lambda g: -g * temperature, grads), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def test_unknown_extra_argument_without_an_example():
    tx = wus.shard_updates(needs_temperature(), mesh=mesh_of({"data": 8}))
    with refused(wus.UnsupportedOptimizerError, "update", "temperature", "extra_args=dict("):
        tx.init(good_params())


def test_unknown_extra_argument_with_an_example():
    """Control: with the remedy that the message names it works."""
    mesh = mesh_of({"data": 8}, auto=True)
    example = {"temperature": jax.ShapeDtypeStruct((), jnp.float32)}
    tx = wus.shard_updates(needs_temperature(), mesh=mesh, extra_args=example)
    state = tx.init(good_params())
    updates, _ = tx.update(good_params(), state, temperature=jnp.float32(2.0))
    np.testing.assert_array_equal(updates["layer"]["b"], -2 * np.ones(13, np.float32))


def test_extra_argument_forgotten_at_the_update():
    mesh = mesh_of({"data": 8}, auto=True)
    tx = wus.shard_updates(optax.contrib.reduce_on_plateau(), mesh=mesh)
    state = tx.init(good_params())
    with refused(Exception, "value"):
        tx.update(good_params(), state, good_params())


# ------------------------------------------------------------------------------- where it is called


@pytest.mark.parametrize("call", ["init", "plan", "state_specs", "abstract_state"])
def test_no_mesh_at_all(call):
    tx = wus.shard_updates(optax.adam(0.1))
    with refused(wus.ContextError, "no mesh", "('data',)", "mesh=mesh", "jax.set_mesh"):
        getattr(tx, call)(good_params())


def test_update_without_a_mesh():
    with jax.set_mesh(mesh_of({"data": 8})):
        tx = wus.shard_updates(optax.adam(0.1))
        state = tx.init(good_params())
    with refused(wus.ContextError, "no mesh", "mesh=mesh", "jax.set_mesh"):
        tx.update(good_params(), state)


def test_ambient_mesh_without_the_axis():
    with (
        jax.set_mesh(mesh_of({"batch": 8})),
        refused(wus.ContextError, "axis=('data',)", "no axis ['data']", "('batch',)"),
    ):
        wus.shard_updates(optax.adam(0.1)).init(good_params())


def test_another_mesh_around_than_the_one_given():
    with jax.set_mesh(mesh_of({"rows": 4})), refused(wus.ContextError, "'rows'", "'data'"):
        optimizer_of(mesh=mesh_of({"data": 8})).init(good_params())


def test_shard_map_over_a_part_of_the_axes():
    mesh = mesh_of({"a": 2, "b": 4})
    tx = wus.shard_updates(optax.adam(0.1), mesh=mesh, axis=("a", "b"))
    mapped = jax.shard_map(
        lambda p: tx.init(p).inner[0].count,
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        axis_names={"a"},
    )
    with (
        jax.set_mesh(mesh),
        refused(wus.ContextError, "axis=('a', 'b')", "['b'] are not bound", "manual over all"),
    ):
        jax.eval_shape(mapped, good_params())


@pytest.mark.parametrize("name", ["state_shardings", "abstract_state"])
def test_descriptions_of_global_arrays_asked_for_in_shard_map(name):
    tx = optimizer_of(mesh=mesh_of({"data": 8}))

    def body(grads: Tree, params: Tree) -> Any:
        getattr(tx, name)(params)

    with refused(wus.ContextError, name, "outside of shard_map"):
        manual(body, stacked(good_params()), good_params())


# -------------------------------------------------------------------------------------- parameters

PARAMS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "int": (np.ones((8,), np.int32), TypeError, ("int32", "floating", "Take it out")),
    "bool": (np.ones((8,), bool), TypeError, ("bool", "floating", "Take it out")),
    "a number": (0.5, TypeError, ("float", "need an array", "out of the parameter tree")),
    "a string": ("relu", TypeError, ("str", "need an array", "out of the parameter tree")),
    "a function": (jnp.tanh, TypeError, ("need an array", "out of the parameter tree")),
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("call", ["init", "plan", "state_specs"])
def test_parameter(call, name):
    value, kind, parts = PARAMS[name]
    with refused(kind, "params['layer']['b']", *parts):
        getattr(optimizer_of(), call)(params_with("b", value))


def test_parameters_split_over_the_replica_axis():
    mesh = mesh_of({"data": 8})
    value = jax.device_put(np.ones((16,), np.float32), NamedSharding(mesh, P("data")))
    with refused(
        wus.ContextError, "params['layer']['b']", "dim 0", "['data']", "axis=('data',)", "Name only"
    ):
        optimizer_of(mesh=mesh).init(params_with("b", value))


def test_parameters_on_another_mesh():
    few = mesh_of({"data": 4})
    value = jax.device_put(np.ones((17, 4), np.float32), NamedSharding(few, P()))
    with refused(wus.ContextError, "[17, 4]", "another mesh", "[0, 1, 2, 3]", "jax.device_put"):
        optimizer_of().init(params_with("w", value))


def test_parameters_on_another_mesh_are_named():
    few = mesh_of({"data": 4})
    value = jax.device_put(np.ones((17, 4), np.float32), NamedSharding(few, P()))
    with refused(wus.ContextError, "params['layer']['w']"):
        optimizer_of().init(params_with("w", value))


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("what", ["params", "gradients"])
def test_arrays_of_another_mesh_at_the_update(what, auto):
    mesh, few = mesh_of({"data": 8}, auto=auto), mesh_of({"data": 4}, auto=auto)
    tx = optimizer_of(mesh=mesh)
    state = tx.init(good_params())
    params = jax.device_put(good_params(), NamedSharding(mesh, P()))
    grads = params
    if what == "params":
        params = jax.device_put(good_params(), NamedSharding(few, P()))
    else:
        grads = jax.device_put(good_params(), NamedSharding(few, P()))
    with refused(wus.ContextError, "another mesh", "[0, 1, 2, 3]", "jax.device_put"):
        tx.update(grads, state, params)


def test_varying_params():
    tx = optimizer_of(mesh=mesh_of({"data": 8}))

    def body(grads: Tree, params: Tree) -> Any:
        own = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        return tx.init(own).inner[0].mu

    with refused(
        wus.ReplicationError,
        "params['layer']['b']",
        "varies over ['data']",
        "spec that does not name",
    ):
        manual(body, stacked(good_params()), good_params())


def test_varying_params_at_the_update():
    tx = optimizer_of(mesh=mesh_of({"data": 8}))

    def body(grads: Tree, params: Tree) -> Any:
        state = tx.init(params)
        own = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        return tx.update(first(grads), state, own)[0]

    with refused(wus.ReplicationError, "params['layer']['b']", "varies over ['data']"):
        manual(body, stacked(good_params()), good_params())


def test_auto_mesh_with_a_model_axis_and_no_specs():
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)
    tx = optimizer_of(mesh=mesh)
    with refused(wus.ContextError, "['model']", "cannot be seen", "init eagerly", "param_specs"):
        jax.eval_shape(tx.init, good_params())


def test_param_specs_of_another_tree():
    tx = optimizer_of(param_specs={"layer": {"w": P()}})
    with refused(ValueError, "param_specs", "tree"):
        tx.init(good_params())


def on_data_and_model(body: Callable[..., Any], spec: P, tree: Tree, **options: Any) -> Any:
    """Traces `body` on a tree whose arrays are all split as `spec` says."""
    mesh = mesh_of({"data": 4, "model": 2})
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=P(), **options)
    tree = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree)
    return jax.eval_shape(mapped, tree)


def test_params_split_over_an_axis_of_which_no_spec_tells():
    tx = wus.shard_updates(optax.lamb(0.1))
    with refused(
        wus.ContextError, "params['w']", "['model']", "outside of shard_map", "param_specs"
    ):
        on_data_and_model(tx.init, P(None, "model"), {"w": np.ones((17, 4), np.float32)})


def test_gradients_that_vary_over_an_axis_over_which_the_weight_does_not():
    tx = wus.shard_updates(optax.lamb(0.1), reduce=None)

    def body(grads: Tree) -> Any:
        params = jax.tree.map(jnp.zeros_like, grads)
        params = jax.lax.psum(params, "model")
        return tx.update(grads, tx.init(params), params)[0]

    with refused(wus.ReplicationError, "gradients['w']", "['model']", "psum"):
        on_data_and_model(body, P(None, "model"), {"w": np.ones((17, 4), np.float32)})


def test_a_state_with_the_specs_of_all_axes_where_only_some_are_manual():
    mesh = mesh_of({"data": 4, "model": 2}, auto=True)
    params = {"w": np.ones((16, 4), np.float32)}
    placed = jax.device_put(params, NamedSharding(mesh, P(None, "model")))
    tx = optimizer_of(mesh=mesh)
    state = tx.init(placed)
    mapped = jax.shard_map(
        lambda s, p: tx.update(p, s, p)[0],
        mesh=mesh,
        in_specs=(P(), P()),
        out_specs=P(),
        axis_names={"data"},
    )
    with (
        jax.set_mesh(mesh),
        refused(wus.StateMismatchError, "mu['w']", "state_specs(params, axis_names={'data'})"),
    ):
        jax.eval_shape(mapped, state, placed)


def test_param_specs_that_divide_unevenly():
    mesh = mesh_of({"data": 4, "model": 2})
    tx = optimizer_of(mesh=mesh, param_specs={"layer": {"w": P("model"), "b": P()}})
    with refused(
        wus.ContextError, "params['layer']['w']", "dim 0", "length 17", "2 uneven", "Pad it"
    ):
        tx.init(good_params())


def test_param_specs_of_an_unknown_axis():
    tx = optimizer_of(param_specs={"layer": {"w": P(None, "expert"), "b": P()}})
    with refused(wus.ContextError, "params['layer']['w']", "no axis ['expert']"):
        tx.init(good_params())


def test_param_specs_with_more_entries_than_dims():
    tx = optimizer_of(param_specs={"layer": {"w": P(), "b": P(None, "data")}})
    with refused(ValueError, "params['layer']['b']"):
        tx.init(good_params())


# --------------------------------------------------------------------------------------- gradients

MISMATCH = wus.StateMismatchError
GRADS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "missing": (
        {"layer": {"w": np.ones((17, 4), np.float32)}},
        MISMATCH,
        ("missing", "['layer']['b']"),
    ),
    "extra": (
        {**good_params(), "head": np.ones((3,), np.float32)},
        MISMATCH,
        ("unexpected", "['head']"),
    ),
    "renamed": (
        {"layer": {"w": np.ones((17, 4), np.float32), "bias": np.ones((13,), np.float32)}},
        MISMATCH,
        ("missing", "['layer']['b']", "unexpected", "['layer']['bias']"),
    ),
    "another kind of tree": (
        [np.ones((17, 4), np.float32), np.ones((13,), np.float32)],
        MISMATCH,
        ("tree", "[0]", "['layer']['b']"),
    ),
    "nothing": (None, MISMATCH, ("tree", "['layer']['b']")),
    "shape": (
        params_with("w", np.ones((4, 17), np.float32)),
        MISMATCH,
        ("['layer']['w']", "[4, 17]", "need [17, 4]"),
    ),
    "stacked": (
        stacked(good_params()),
        MISMATCH,
        ("['layer']['b']", "[8, 13]", "need [13]", "pmap", "drop that dim"),
    ),
    "integers": (
        params_with("b", np.ones((13,), np.int32)),
        TypeError,
        ("['layer']['b']", "int32", "floating"),
    ),
    "float0": (
        params_with("b", np.zeros((13,), jax.dtypes.float0)),
        TypeError,
        ("['layer']['b']", "float0", "floating"),
    ),
    "complex": (
        params_with("b", np.ones((13,), np.complex64)),
        TypeError,
        ("['layer']['b']", "complex64", "float32"),
    ),
    "a number": (params_with("b", 0.5), TypeError, ("['layer']['b']", "float", "need an array")),
}


@pytest.fixture(scope="module")
def started() -> tuple[Any, Any]:
    tx = optimizer_of()
    return tx, tx.init(good_params())


@pytest.mark.parametrize("name", GRADS)
@pytest.mark.parametrize("method", ["update", "apply"])
def test_gradient(started, method, name):
    tx, state = started
    grads, kind, parts = GRADS[name]
    with refused(kind, "gradients", *parts):
        getattr(tx, method)(grads, state, good_params())


@pytest.mark.parametrize("name", [n for n in GRADS if n not in ("nothing", "a number", "float0")])
def test_gradient_in_shard_map(name):
    tx = optimizer_of(mesh=mesh_of({"data": 8}))
    grads, kind, parts = GRADS[name]

    def body(grads: Tree, params: Tree) -> Any:
        return tx.update(first(grads), tx.init(params), params)[0]

    with refused(kind, "gradients", *parts):
        manual(body, stacked(grads), good_params())


def test_gradients_of_another_float_are_taken_or_explained(started):
    """`bfloat16` gradients of `float32` weights: optax would change the dtype of its moments."""
    tx, state = started
    grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), good_params())
    plain = optax.adam(0.1)
    _, after = jax.eval_shape(plain.update, grads, plain.init(good_params()), good_params())
    changes = after[0].mu["layer"]["w"].dtype != jnp.float32
    told = contextlib.nullcontext()
    if changes:
        told = refused(MISMATCH, "state", "float32", "bfloat16", "Cast the gradients")
    with told:
        tx.update(grads, state, good_params())


def test_reduce_none_and_gradients_that_vary():
    tx = optimizer_of(mesh=mesh_of({"data": 8}), reduce=None)

    def body(grads: Tree, params: Tree) -> Any:
        return tx.update(first(grads), tx.init(params), params)[0]

    with refused(
        wus.ReplicationError,
        "gradients['layer']['b']",
        "reduce=None",
        "vary over ['data']",
        "reduce='mean' or 'sum'",
    ):
        manual(body, stacked(good_params()), good_params())


def test_gradients_reduced_over_a_part_of_the_axes():
    mesh = mesh_of({"a": 2, "b": 4}, auto=True)
    tx = optimizer_of(mesh=mesh, axis=("a", "b"))

    def body(grads: Tree, params: Tree) -> Any:
        grads = jax.tree.map(lambda g: lax.pmean(g[0], "a"), grads)
        return tx.update(grads, tx.init(params), params)[0]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(("a", "b")), P()), out_specs=P())
    with refused(
        wus.ReplicationError, "gradients['layer']['b']", "['b']", "not over ['a']", "reduce=None"
    ):
        jax.eval_shape(mapped, stacked(good_params()), good_params())


def test_gradients_unreduced_over_a_part_of_the_axes():
    mesh = mesh_of({"a": 2, "b": 4})
    tx = optimizer_of(mesh=mesh, axis=("a", "b"))
    grads = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, P(unreduced={"a"}))
        ),
        good_params(),
    )
    with jax.set_mesh(mesh):
        state = tx.init(good_params())
        with refused(
            wus.ReplicationError,
            "gradients['layer']['b']",
            "unreduced over ['a']",
            "not over ['b']",
        ):
            jax.eval_shape(tx.update, grads, state)


def test_gradients_all_reduced_where_local_ones_were_expected():
    tx = optimizer_of(mesh=mesh_of({"data": 8}))

    def body(grads: Tree, params: Tree) -> Any:
        loss = lambda p: jnp.sum(p["layer"]["w"]) * jnp.sum(grads["layer"]["w"])  # noqa: E731
        tx.update(jax.grad(loss)(params), tx.init(params), params)
        return lax.axis_index("data").reshape(1)

    with pytest.warns(wus.ReducedGradientsWarning, match=r"jax\.lax\.pcast\(params, axis"):
        manual(body, stacked(good_params()), good_params())


def test_gradients_per_example_that_are_not():
    private = optax.contrib.differentially_private_aggregate(1.0, 0.1, key=1)
    tx = wus.shard_updates(private, mesh=mesh_of({"data": 8}, auto=True), per_example=True)
    state = tx.init(good_params())
    with refused(
        MISMATCH, "gradients['layer']['b']", "[13]", "[examples, *[13]]", "per_example=True"
    ):
        tx.update(good_params(), state, good_params())


def test_gradients_per_example_for_an_optimizer_that_does_not_reduce_them():
    with refused(MISMATCH, "params['layer']['b']", "[8, 13]", "[13]", "per_example"):
        optimizer_of(per_example=True).init(good_params())


# ------------------------------------------------------------------------------------------- state


def test_plain_optax_state(started):
    tx, _ = started
    with refused(MISMATCH, "state", "tuple", "ShardedState", "tx.shard(state, params)"):
        tx.update(good_params(), optax.adam(0.1).init(good_params()), good_params())


def test_state_and_params_swapped(started):
    tx, state = started
    with refused(MISMATCH, "state", "dict", "ShardedState"):
        tx.update(good_params(), good_params(), state)


@pytest.mark.parametrize(
    ("shape", "axis", "parts"),
    [
        ({"data": 4}, "data", ("4 shards over ('data',)", "8 over ('data',)")),
        ({"other": 8}, "other", ("('other',)", "('data',)")),
        ({"data": 4, "model": 2}, "data", ("'model': 2", "'data': 8")),
    ],
    ids=["another N", "another axis", "another mesh"],
)
def test_state_of_another_plan(started, shape, axis, parts):
    tx, _ = started
    other = optimizer_of(mesh=mesh_of(shape, auto=True), axis=axis).init(good_params())
    for call in (lambda: tx.update(good_params(), other, good_params()), lambda: tx.unshard(other)):
        with refused(MISMATCH, "state", "another plan", *parts, "other.unshard(state)", "tx.shard"):
            call()


def test_state_of_other_parameters(started):
    tx, _ = started
    other = tx.init({"layer": {"w": np.ones((9, 4), np.float32), "b": np.ones((13,), np.float32)}})
    with refused(MISMATCH, "['layer']['w']", "[17, 4]", "[9, 4]"):
        tx.update(good_params(), other, good_params())


def test_params_of_another_dtype_than_the_state(started):
    tx, state = started
    half = jax.tree.map(lambda x: x.astype(jnp.float16), good_params())
    with refused(MISMATCH, "params['layer']['b']", "float16[13]", "made for float32[13]"):
        tx.update(good_params(), state, half)


def test_params_with_a_leaf_missing(started):
    tx, state = started
    with refused(MISMATCH, "params", "missing", "['layer']['b']"):
        tx.update(good_params(), state, {"layer": {"w": np.ones((17, 4), np.float32)}})


def test_state_of_another_optimizer(started):
    """The state of one wrapper handed to another, over the same parameters."""
    _, state = started
    other = wus.shard_updates(optax.sgd(0.1, momentum=0.9), mesh=mesh_of({"data": 8}, auto=True))
    with refused(MISMATCH, "state"):
        other.update(good_params(), state, good_params())


def test_state_whole_in_shard_map(started):
    """A state that came in with `P()`, so that every device has all of it."""
    mesh = mesh_of({"data": 8})
    tx = optimizer_of(mesh=mesh)
    state = tx.init(good_params())

    def body(grads: Tree, params: Tree, state: Any) -> Any:
        return tx.update(first(grads), state, params)[0]

    with refused(MISMATCH, "state", "[16]", "need [2] on each device", "tx.state_specs(params)"):
        manual(body, stacked(good_params()), good_params(), state)


@pytest.mark.parametrize("what", ["params", "gradients", "state"])
def test_shapes_where_arrays_are_needed(what):
    mesh = mesh_of({"data": 8}, auto=True)
    tx, params = optimizer_of(mesh=mesh), good_params()
    state, shapes = tx.init(params), jax.eval_shape(lambda: good_params())
    calls = {
        "params": [lambda: tx.init(shapes), lambda: tx.update(params, state, shapes)],
        "gradients": [lambda: tx.update(shapes, state, params)],
        "state": [
            lambda: tx.unshard(tx.abstract_state(params)),
            lambda: tx.apply(params, tx.abstract_state(params), params),
            lambda: tx.shard(jax.eval_shape(optax.adam(0.1).init, params), params),
        ],
    }
    for call in calls[what]:
        with refused(TypeError, what, "ShapeDtypeStruct", "jax.eval_shape", "abstract_state"):
            call()


def test_state_stacked_by_pmap():
    state = training("pmap", optax.adam(0.1), good_params()).state
    with refused(MISMATCH, "state", "stacked by pmap", "inside pmap"):
        optimizer_of().unshard(state)


def test_state_with_a_leaf_of_another_dtype(started):
    tx, state = started
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.inner)
    with refused(MISMATCH, "state[0].count", "bfloat16", "need int32"):
        tx.update(good_params(), state._replace(inner=cast), good_params())


def test_state_with_a_leaf_missing(started):
    tx, state = started
    inner = (state.inner[0]._replace(nu={"layer": {}}), *state.inner[1:])
    with refused(MISMATCH, "state", "nu['layer']['b']"):
        tx.update(good_params(), state._replace(inner=inner), good_params())


def test_shard_of_what_is_sharded(started):
    tx, state = started
    with refused(MISMATCH, "sharded already", "unshard"):
        tx.shard(state, good_params())


def test_shard_of_a_state_with_a_leaf_missing(started):
    tx, _ = started
    with refused(MISMATCH, "state", "missing", "mu['layer']['b']"):
        plain = optax.adam(0.1).init({"layer": {"w": np.ones((17, 4), np.float32)}})
        tx.shard(plain, good_params())


def test_shard_of_a_padded_state(started):
    tx, state = started
    with refused(MISMATCH, "state[0].mu['layer']['b']", "[16]", "need [13]"):
        tx.shard(state.inner, good_params())


def test_shard_of_a_state_of_another_dtype(started):
    tx, _ = started
    plain = optax.adam(0.1, mu_dtype=jnp.bfloat16).init(good_params())
    with refused(MISMATCH, "state[0].mu['layer']['b']", "bfloat16", "need float32"):
        tx.shard(plain, good_params())


# ----------------------------------------------------------------------------------------- masters


def in_bf16() -> Tree:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), good_params())


def test_update_with_masters_and_without_params():
    tx = optimizer_of(master_dtype=jnp.float32)
    state = tx.init(in_bf16())
    with refused(ValueError, "params", "master_dtype", "update(grads, state, params)"):
        tx.update(in_bf16(), state)


def test_apply_without_params(started):
    tx, state = started
    with refused(ValueError, "params: found None", "apply(grads, state, params)"):
        tx.apply(good_params(), state, None)


@pytest.mark.parametrize("names", [{"model"}, "model", 3])
def test_specs_for_axes_that_there_are_not(started, names):
    with refused(ValueError, "axis_names=", str(names if names == 3 else ("model",))):
        started[0].state_specs(good_params(), axis_names=names)


def test_masters_where_there_are_none(started):
    tx, state = started
    with refused(ValueError, "master", "master_dtype"):
        tx.shard(tx.unshard(state), good_params(), good_params())


def test_masters_of_another_shape():
    tx = optimizer_of(master_dtype=jnp.float32)
    plain = tx.unshard(tx.init(in_bf16()))
    with refused(MISMATCH, "master['layer']['b']", "[14]", "need [13]"):
        tx.shard(plain, in_bf16(), params_with("b", np.ones((14,), np.float32)))


def test_masters_with_a_leaf_missing():
    tx = optimizer_of(master_dtype=jnp.float32)
    plain = tx.unshard(tx.init(in_bf16()))
    with refused(MISMATCH, "master", "missing", "['layer']['b']"):
        tx.shard(plain, in_bf16(), {"layer": {"w": np.ones((17, 4), np.float32)}})


def test_masters_of_another_tree_with_as_many_leaves():
    tx = optimizer_of(master_dtype=jnp.float32)
    plain = tx.unshard(tx.init(in_bf16()))
    swapped = {"x": np.ones((13,), np.float32), "y": np.ones((17, 4), np.float32)}
    with refused(MISMATCH, "master", "['layer']['b']"):
        tx.shard(plain, in_bf16(), swapped)


def test_state_that_lost_its_masters():
    tx = optimizer_of(master_dtype=jnp.float32)
    state = tx.init(in_bf16())._replace(master=())
    with refused(MISMATCH, "master"):
        tx.update(in_bf16(), state, in_bf16())


def test_state_with_masters_of_another_shape():
    tx = optimizer_of(master_dtype=jnp.float32)
    state = tx.init(in_bf16())
    with refused(MISMATCH, "master['layer']['b']", "[13]", "need [16]"):
        tx.update(in_bf16(), state._replace(master=good_params()), in_bf16())


# --------------------------------------------------------------------------------- extra arguments


def test_extra_arguments_that_vary():
    mesh = mesh_of({"data": 8})
    tx = wus.shard_updates(optax.contrib.reduce_on_plateau(), mesh=mesh)

    def body(grads: Tree, params: Tree) -> Any:
        local = first(grads)
        loss = jnp.sum(local["layer"]["b"])
        return tx.update(local, tx.init(params), params, value=loss)[0]

    with refused(wus.ReplicationError, "value=", "varies over ['data']", "jax.lax.pmean"):
        manual(body, stacked(good_params()), good_params())


def test_extra_arguments_that_are_unreduced():
    mesh = mesh_of({"data": 8})
    tx = wus.shard_updates(optax.contrib.reduce_on_plateau(), mesh=mesh)
    value = jax.ShapeDtypeStruct(
        (), jnp.float32, sharding=NamedSharding(mesh, P(unreduced={"data"}))
    )
    with jax.set_mesh(mesh):
        state = tx.init(good_params())
        grads = jax.device_put(good_params(), NamedSharding(mesh, P()))
        with refused(wus.ReplicationError, "value=", "unreduced", "Reduce it first"):
            jax.eval_shape(lambda v: tx.update(grads, state, grads, value=v), value)


# ------------------------------------------------------------------------------- nothing is sharded

NOTHING: dict[str, tuple[dict[str, Any], Tree, str]] = {
    "axis of size 1": ({"mesh": {"data": 1}}, good_params(), r"axes \('data',\) have size 1"),
    "axes of size 1": (
        {"mesh": {"a": 1, "b": 1}, "axis": ("a", "b")},
        good_params(),
        r"axes \('a', 'b'\) have size 1",
    ),
    "all below the threshold": (
        {"min_shard_elems": 100},
        good_params(),
        "smaller than min_shard_elems=100",
    ),
    "scalars only": ({}, {"s": np.float32(1.0)}, "fewer than 2 elements"),
    "no parameters": ({}, {}, "there are no parameters"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_sharded_is_a_warning(name):
    options, params, message = NOTHING[name]
    mesh = mesh_of(options.get("mesh", {"data": 8}), auto=True)
    tx = optimizer_of(**{**options, "mesh": mesh})
    with pytest.warns(wus.ReplicatedUpdateWarning, match=message):
        state = tx.init(params)
    plan = tx.plan(params)
    assert all(leaf.format == "replicated" and leaf.why for leaf in plan.params)
    updates, _ = tx.update(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_the_warning_names_the_line_that_called():
    tx = optimizer_of(min_shard_elems=10**6)
    with pytest.warns(wus.ReplicatedUpdateWarning) as caught:
        tx.init(good_params())
    assert re.search(r"test_bad_input\.py$", caught[0].filename)
