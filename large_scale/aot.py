"""Compile a step for a cluster that is not there, and read off what the compiler made of it.

XLA's TPU compiler comes in the `libtpu` wheel (`pip install 'wusharding[tpu-aot]'`) and needs no
TPU: it takes the shapes of the arguments, on a mesh of the devices that `devices` describes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from large_scale import hlo
from large_scale.topology import Topology


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
    # No look for a TPU, nor for the metadata server of a cloud machine; several processes may
    # compile at the same time.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
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


@dataclasses.dataclass(frozen=True)
class Report:
    """What one device does in a compiled step.

    Args:
      name: of the step.
      topology: that it was compiled for.
      argument_bytes: what it holds between steps, batch included.
      output_bytes: what it gives back.
      alias_bytes: the part of that which takes the place of donated arguments.
      temp_bytes: what it needs besides.
      hbm_bytes: what a device has; 0 where it has none of its own.
      collectives: as the compiler left them.
      cycles: the compiler's estimates summed by kind (`hlo.WORK`), with what it gives no estimate
        for priced by its bytes. Empty but on TPU. A loop's body counts once.
      unpriced: bytes of each kind that it gives no estimate for.
      instructions: number of instructions of the whole program.
      compile_seconds: what compiling took.
    """

    name: str
    topology: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    hbm_bytes: int
    collectives: tuple[hlo.Collective, ...]
    cycles: Mapping[str, float]
    unpriced: Mapping[str, int]
    instructions: int
    compile_seconds: float

    @property
    def peak_bytes(self) -> int:
        """Memory that the step needs."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends, each collective done on a ring."""
        return sum(c.sent_bytes for c in self.collectives)

    @property
    def total_cycles(self) -> float:
        """Everything but collectives."""
        return sum(self.cycles.values())

    @property
    def update_cycles(self) -> float:
        """Everything that is neither forward, backward nor collective."""
        return sum(n for kind, n in self.cycles.items() if kind in ("update", "relayout"))

    def largest(self, kind: str) -> int:
        """Bytes of the largest operand of any collective of a kind; 0 where there is none."""
        return max((c.operand_bytes for c in self.collectives if c.kind == kind), default=0)

    def to_json(self) -> str:
        """All of it, totals included; equal collectives once, with their number."""
        data = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name != "collectives"
        }
        data |= {
            "peak_bytes": self.peak_bytes,
            "sent_bytes": self.sent_bytes,
            "total_cycles": self.total_cycles,
            "collectives": [
                {
                    "kind": kind,
                    "dtype": dtype,
                    "group_size": size,
                    "emitter": emitter,
                    "in_loop": in_loop,
                    "count": len(same),
                    "operand_bytes": sum(c.operand_bytes for c in same),
                    "sent_bytes": sum(c.sent_bytes for c in same),
                    "largest_operand_bytes": max(c.operand_bytes for c in same),
                }
                for (kind, dtype, size, emitter, in_loop), same in _alike(self.collectives).items()
            ],
        }
        return json.dumps(data, indent=2)


def _alike(found: Sequence[hlo.Collective]) -> dict[Any, list[hlo.Collective]]:
    groups: dict[Any, list[hlo.Collective]] = {}
    for c in found:
        groups.setdefault((c.kind, c.dtype, c.group_size, c.emitter, c.in_loop), []).append(c)
    return groups


def compile_step(
    step: Callable[..., Any],
    *args: Any,
    name: str = "step",
    donate_argnums: Sequence[int] = (),
) -> Report:
    """Compiles a step for the devices of its arguments' shardings, and reports on it.

    Args:
      step: a function, or one that `jax.jit` has wrapped already.
      *args: trees of `jax.ShapeDtypeStruct` with a `NamedSharding` over a mesh of `devices(...)`.
      name: what the report calls it.
      donate_argnums: as for `jax.jit`, where `step` is not wrapped already.

    Raises:
      DoesNotFitError: it needs more memory than a device has; the largest buffers are named.
      ValueError: no argument has a sharding.
    """
    mesh = _mesh_of(args)
    topology = Topology.of(list(mesh.devices.flat))
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step, donate_argnums=donate_argnums)
    lowered = jitted.lower(*args)
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        raise _explained(e, name, topology, args) from e
    seconds = time.perf_counter() - start
    text: str = compiled.as_text()
    memory: Any = compiled.memory_analysis()
    priced: dict[str, float] = {}
    unpriced: dict[str, int] = {}
    if topology.chip.platform == "tpu":
        for item in hlo.work(text):
            cycles = item.cycles
            if cycles is None:
                unpriced[item.kind] = unpriced.get(item.kind, 0) + item.nbytes
                cycles = item.nbytes / bytes_per_cycle(topology.chip.name)
            priced[item.kind] = priced.get(item.kind, 0) + cycles
    report = Report(
        name=name,
        topology=str(topology),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        hbm_bytes=topology.device_hbm_bytes,
        collectives=tuple(hlo.collectives(text)),
        cycles=priced,
        unpriced=unpriced,
        instructions=len(re.findall(r"^\s+(?:ROOT )?%[\w.\-]+ = ", text, re.MULTILINE)),
        compile_seconds=seconds,
    )
    if 0 < report.hbm_bytes < report.peak_bytes:
        raise DoesNotFitError(_too_large(name, topology, as_bytes(report.peak_bytes), args))
    return report


def _mesh_of(args: Sequence[Any]) -> Any:
    for x in jax.tree.leaves(args):
        mesh = getattr(getattr(x, "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty:
            return mesh
    raise ValueError(
        "compile_step: no argument has a NamedSharding, so nothing says what to compile for. Give "
        "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) with a mesh of "
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
_USED = re.compile(
    r"Used (?P<used>[\d.]+[KMGT]?) of [\d.]+[KMGT]? hbm"
    r"|\((?P<needed>[\d.]+[KMGT]?)\) exceeds available HBM \([\d.]+[KMGT]?\)"
)


def _explained(error: Exception, name: str, topology: Topology, args: Sequence[Any]) -> Exception:
    found = _USED.search(str(error))
    if found is None:
        return error
    needed = found["used"] or f"{found['needed']}iB for temporaries alone"
    return DoesNotFitError(_too_large(name, topology, needed, args))


def _too_large(name: str, topology: Topology, needed: str, args: Sequence[Any]) -> str:
    sizes = sorted(
        (
            (_local_bytes(x), jax.tree_util.keystr(path), x)
            for path, x in jax.tree_util.tree_leaves_with_path(args)
        ),
        key=lambda item: -item[0],
    )
    held = "; ".join(
        f"{as_bytes(n)} argument{path} {x.dtype}{list(x.shape)}" for n, path, x in sizes[:5]
    )
    return (
        f"{name}: does not fit {topology}: needs {needed} of the "
        f"{as_bytes(topology.device_hbm_bytes)} of a device. Largest on each device: {held}. "
        "Split weights over a model axis, shard the state, or take a larger chip."
    )


def _local_bytes(x: Any) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def as_bytes(n: float) -> str:
    """A number of bytes for people.

    >>> as_bytes(96), as_bytes(3 << 20)
    ('96 B', '3.00 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    raise AssertionError
