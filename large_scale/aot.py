"""Compile a step for a cluster that is not there, and read off what the compiler made of it.

XLA's TPU compiler comes in the `libtpu` wheel (`pip install 'wusharding[tpu-aot]'`) and needs no
TPU: it takes the shapes of the arguments, on a mesh of the devices that `devices` describes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from large_scale import hlo, libtpu
from large_scale.buffers import Dump, Peak
from large_scale.mesh import place_names, places
from large_scale.record import Report as Report
from large_scale.record import as_bytes
from large_scale.topology import Topology, slice_of

_WHOLE = PartitionSpec()


class MissingCompilerError(RuntimeError):
    """The compiler for a kind of chip is not installed."""


class DoesNotFitError(RuntimeError):
    """The program needs more memory than a device has."""


def devices(topology: str | Topology) -> list[Any]:
    """Devices of a topology to compile for; nothing can run on them.

    Args:
      topology: "v5e:16x16", or a `Topology`.

    Raises:
      MissingCompilerError: the compiler for it is not installed.
      ValueError: an unknown name, a topology that the compiler does not take.
    """
    topology = Topology.of(topology)
    if topology.chip.platform == "cpu":
        return _cpu_devices(topology)
    return (_gpu_devices if topology.chip.platform == "gpu" else _tpu_devices)(topology)


def _cpu_devices(topology: Topology) -> list[Any]:
    found = jax.devices("cpu")
    if len(found) < topology.num_devices:
        raise ValueError(
            f"{topology}: this process has {len(found)} CPU devices. Start it with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={topology.num_devices}."
        )
    return found[: topology.num_devices]


@functools.lru_cache(maxsize=8)
def _tpu_devices(topology: Topology) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise MissingCompilerError(
            f"{topology}: XLA's TPU compiler is not installed. It needs no TPU: "
            "pip install 'wusharding[tpu-aot]'"
        )
    libtpu.prepare()
    name = f"{topology.chip.name}:{'x'.join(map(str, topology.dims))}"
    more = {"num_slices": topology.num_slices} if topology.num_slices > 1 else {}
    try:
        return list(topologies.get_topology_desc(name, platform="tpu", **more).devices)
    except Exception as e:
        raise ValueError(f"{topology}: the TPU compiler does not take it: {e}") from e


# What XLA's GPU compiler has to know of a chip that is not there, as its GpuTargetConfigProto.
# Sources: NVIDIA's H100 datasheet and the CUDA guide's table of compute capability 9.0.
_GPU_TARGETS = {
    "h100": """
        gpu_device_info {
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          shared_memory_per_block: 49152 shared_memory_per_core: 233472
          shared_memory_per_block_optin: 232448
          core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          memory_bandwidth: 3350000000000 l2_cache_size: 52428800 device_memory_size: 80000000000
          cuda_compute_capability { major: 9 minor: 0 }
        }
        platform_name: "CUDA"
        dnn_version_info { major: 9 minor: 8 patch: 0 }
        runtime_version { major: 13 }
        device_description_str: "NVIDIA H100 80GB HBM3"
    """
}


@functools.lru_cache(maxsize=8)
def _gpu_devices(topology: Topology) -> list[Any]:
    # The plugin would look for a driver and its libraries, none of which compiling needs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if _spec_of_gpu_compiler() is None:
        raise MissingCompilerError(
            f"{topology}: XLA's GPU compiler is not installed. It needs no GPU: "
            "pip install 'wusharding[cuda-aot]'"
        )
    domains, gpus = topology.dims
    try:
        found = topologies.get_topology_desc(
            topology.chip.name,
            platform="cuda",
            target_config=_GPU_TARGETS[topology.chip.name],
            topology=f"1x{domains}x{gpus}",
        )
    except Exception as e:
        raise ValueError(f"{topology}: the GPU compiler does not take it: {e}") from e
    return list(found.devices)


def _spec_of_gpu_compiler() -> Any:
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    return importlib.util.find_spec("jax_plugins.xla_cuda13")


# ------------------------------------------------------------------------------------------ report


def placed(tree: Any, mesh: jax.sharding.Mesh, spec: PartitionSpec = _WHOLE) -> Any:
    """The shapes of a tree's arrays on a mesh: arguments for `compile_step`.

    Args:
      tree: arrays, or shapes as `jax.eval_shape` gives them; a whole Flax state, for example.
        Shapes that lie on this mesh already keep their sharding, such as those of
        `tx.abstract_state(params)`.
      mesh: of `devices(...)`.
      spec: how each of the others is split; as it is, every device holds them whole.

    Raises:
      ValueError: an array has fewer dims than the spec.

    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> x = placed({"x": jnp.ones((16, 5))}, mesh, PartitionSpec("data"))["x"]
    >>> x.shape, x.sharding.shard_shape(x.shape)
    ((16, 5), (2, 5))
    """
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"placed: found {type(spec).__name__} for spec, need a PartitionSpec.")
    default = NamedSharding(mesh, spec)

    def place(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        x = x if hasattr(x, "shape") else jnp.asarray(x)  # a number, such as a step counter
        sharding = getattr(x, "sharding", None)
        kept = isinstance(sharding, NamedSharding) and sharding.mesh == mesh
        if not kept and len(spec) > len(x.shape):
            raise ValueError(
                f"placed: {jax.tree_util.keystr(path) or 'the array'} of shape {x.shape} has fewer "
                f"dims than {spec}; place it apart"
            )
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if kept else default)

    return jax.tree_util.tree_map_with_path(place, tree)


def compile_step(
    step: Callable[..., Any],
    *args: Any,
    name: str = "step",
    donate_argnums: int | Sequence[int] = (),
) -> Report:
    """Compiles a step for the devices of its arguments' shardings, and reports on it.

    Args:
      step: a function, or one that `jax.jit` has wrapped already.
      *args: trees of `jax.ShapeDtypeStruct` with a `NamedSharding` over a mesh of `devices(...)`,
        as `placed` makes them.
      name: what the report calls it.
      donate_argnums: as for `jax.jit`, where `step` is not wrapped already.

    Raises:
      DoesNotFitError: it needs more memory than a device has; the largest buffers are named.
      ValueError: no argument has a sharding; `donate_argnums` for a step that is wrapped already.
    """
    if isinstance(donate_argnums, int):
        donate_argnums = (donate_argnums,)
    if hasattr(step, "lower") and donate_argnums:
        raise ValueError(
            f"compile_step: {name} is wrapped by jax.jit or shard_step already, which take "
            "donate_argnums themselves; give it there"
        )
    mesh = _mesh_of(args)
    topology = Topology.of(list(mesh.devices.flat))
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step, donate_argnums=donate_argnums)
    lowered = jitted.lower(*args)
    log = libtpu.PassLog()
    with Dump() as dump:
        start = time.perf_counter()
        try:
            compiled = lowered.compile(compiler_options=dump.options)
        except jax.errors.JaxRuntimeError as e:
            raise _explained(e, name, topology, args, dump.read()) from e
        seconds = time.perf_counter() - start
        peak = dump.read()
    text: str = compiled.as_text()
    memory: Any = compiled.memory_analysis()
    work = hlo.work(text) if topology.chip.platform == "tpu" else []
    priced = [_priced(item, topology) for item in work]
    report = Report(
        name=name,
        topology=str(topology),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        hbm_bytes=topology.device_hbm_bytes,
        collectives=_along(hlo.collectives(text), mesh, topology),
        cycles={
            kind: sum(item.cycles or 0 for item in priced if item.kind == kind)
            for kind in dict.fromkeys(item.kind for item in priced)
        },
        unpriced={
            kind: sum(item.nbytes for item in work if item.kind == kind and item.cycles is None)
            for kind in dict.fromkeys(item.kind for item in work if item.cycles is None)
        },
        instructions=len(re.findall(r"^\s+(?:ROOT )?%[\w.\-]+ = ", text, re.MULTILINE)),
        compile_seconds=seconds,
        relayouts=tuple(
            sorted(
                (item for item in priced if item.kind == "relayout"),
                key=lambda item: -(item.cycles or 0),
            )
        ),
        peak=peak,
        paper_pass=log.said(),
    )
    if 0 < report.hbm_bytes < report.peak_bytes:
        raise DoesNotFitError(_too_large(name, topology, as_bytes(report.peak_bytes), args, peak))
    return report


def _priced(item: hlo.Work, topology: Topology) -> hlo.Work:
    if item.cycles is not None:
        return item
    cycles = item.nbytes / bytes_per_cycle(topology.chip.name)
    return dataclasses.replace(item, cycles=round(cycles))


def _along(
    found: Sequence[hlo.Collective], mesh: Any, topology: Topology
) -> tuple[hlo.Collective, ...]:
    """The collectives, with what the devices of their groups differ in."""
    devices = list(mesh.devices.flat)
    order = list(range(len(devices)))
    if topology.num_slices > 1:
        # A program is that of one slice, whose devices it numbers as they come in the mesh.
        order.sort(key=lambda i: slice_of(devices[i]))
    where = places([devices[i] for i in order], topology)
    names = place_names(topology)
    axes = {name: size for name, size in mesh.shape.items() if size > 1}

    @functools.cache
    def label(c: hlo.Collective) -> str:
        numbered = tuple(tuple(order[i] for i in group) for group in c.groups)
        crossed = dataclasses.replace(c, groups=numbered).crossed_axes(mesh.shape)
        told = [a for a in axes if a in crossed]
        if topology.chip.platform == "cpu":
            return "+".join(told)
        if c.group_size == mesh.size > 1:
            return "all devices"
        differ = np.zeros(len(names), bool)
        for group in c.groups:
            differ |= np.ptp(where[list(group)], axis=0) > 0
        dims = "+".join(name for name, d in zip(names, differ, strict=True) if d)
        return f"{dims} ({'+'.join(told)})" if len(axes) > 1 else dims

    # Collectives with the same groups are labelled once.
    bare = {c.groups: c for c in found if c.groups}
    return tuple(
        dataclasses.replace(c, along=label(bare[c.groups])) if c.groups else c for c in found
    )


def _mesh_of(args: Sequence[Any]) -> Any:
    for x in jax.tree.leaves(args):
        mesh = getattr(getattr(x, "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty:
            return mesh
    raise ValueError(
        "compile_step: no argument has a NamedSharding, so nothing says what to compile for. Give "
        "large_scale.aot.placed(tree, mesh, spec) with a mesh of "
        "large_scale.make_mesh(topology, devices=large_scale.aot.devices(topology))."
    )


@functools.lru_cache(maxsize=8)
def bytes_per_cycle(chip: str) -> float:
    """Bytes a cycle that the TPU compiler counts on for a plain elementwise operation in HBM."""
    from_name = Topology.of(f"{chip}:{'x'.join(['2', '2', '1'][: _num_dims(chip)])}")
    device = devices(from_name)[0]
    mesh = jax.sharding.Mesh([device], ("one",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.float32, sharding=sharding)
    text: Any = jax.jit(lambda x: x * 2.0 + 1.0).lower(x).compile().as_text()
    (item,) = hlo.work(text)
    assert item.cycles
    return item.nbytes / item.cycles


def _num_dims(chip: str) -> int:
    return 3 if chip in ("v4", "v5p") else 2


# ------------------------------------------------------------------------------------------ memory

# What the TPU compiler says of a program that its memory does not hold, in either of two forms.
# The second speaks of temporaries, but means all: arguments are in the sum.
_USED = re.compile(
    r"Used (?P<used>[\d.]+)(?P<used_unit>[KMGT]?) of [\d.]+[KMGT]? hbm"
    r"|\((?P<needed>[\d.]+)(?P<needed_unit>[KMGT]?)\) exceeds available HBM"
)


def _explained(
    error: Exception, name: str, topology: Topology, args: Sequence[Any], peak: Peak | None
) -> Exception:
    found = _USED.search(str(error))
    if found is None:
        return error
    needed = f"{found['used'] or found['needed']} {found['used_unit'] or found['needed_unit']}iB"
    return DoesNotFitError(_too_large(name, topology, needed, args, peak))


def _too_large(
    name: str, topology: Topology, needed: str, args: Sequence[Any], peak: Peak | None
) -> str:
    arguments = [
        (_local_bytes(x), f"argument{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}")
        for path, x in jax.tree_util.tree_leaves_with_path(args)
    ]
    temporaries = [
        (b.nbytes, f"temporary {b.name} {b.type}" + (f" of {b.op_name}" if b.op_name else ""))
        for b in (peak.buffers if peak else ())
    ]
    largest = [
        f"{as_bytes(nbytes)} {what}"
        for buffers, count in ((arguments, 5), (temporaries, 3))
        for nbytes, what in sorted(buffers, key=lambda item: -item[0])[:count]
        if nbytes >= topology.device_hbm_bytes / 100
    ]
    return (
        f"{name}: does not fit {topology}: needs {needed} of the "
        f"{as_bytes(topology.device_hbm_bytes)} of a device. Largest on each device: "
        f"{'; '.join(largest) or 'nothing large'}. "
        "Split weights over a model axis, shard the state, or take a larger chip."
    )


def _local_bytes(x: Any) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize
