"""`Topology`: chips, how they are joined, what a link carries; by name or from live devices.

`CHIPS` is a table: one row a chip, each figure with the page that states it. A new chip is a row.

>>> pod = Topology.of("v3:128x32")
>>> pod.num_devices, pod.wraps, pod.device_hbm_bytes >> 30
(8192, (False, True), 16)
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

Platform = Literal["tpu", "gpu", "cpu"]

_GIB = 2**30
_CLOUD = "https://cloud.google.com/tpu/docs/"
_BOOK = "https://jax-ml.github.io/scaling-book/tpus/"


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of chip.

    Args:
      name: as it begins a topology's name.
      platform: JAX's name of the platform.
      kinds: how JAX's `device_kind` begins for it.
      num_dims: dims of the network: 2 or 3 for a torus; 2 (domains, chips of a domain) for GPUs.
      cores: devices that JAX lists for a chip.
      hbm_bytes: memory of a chip.
      hbm_bytes_per_second: bandwidth of that memory.
      link_bytes_per_second: what one link carries one way; for GPUs inside a domain.
      far_bytes_per_second: what a chip gets one way beyond: between slices, between domains.
      hop_seconds: time that a small message takes to a neighbour; None where nobody states it.
      wrap_block: a torus dim closes to a ring if its length is a multiple of this ...
      pod: ... and at most that of the pod.
      lanes: shape of a register tile for 32-bit values; None where there are none.
      sources: the pages that state the figures.
    """

    name: str
    platform: Platform
    kinds: tuple[str, ...]
    num_dims: int
    cores: int
    hbm_bytes: int
    hbm_bytes_per_second: float
    link_bytes_per_second: float
    far_bytes_per_second: float | None
    hop_seconds: float | None
    wrap_block: int
    pod: tuple[int, ...]
    lanes: tuple[int, int] | None
    sources: tuple[str, ...]


def _tpu(
    name: str,
    kinds: tuple[str, ...],
    *,
    cores: int,
    hbm_gib: int,
    hbm_gb_s: float,
    link_gb_s: float,
    far_gb_s: float | None,
    wrap_block: int,
    pod: tuple[int, ...],
    page: str,
) -> Chip:
    return Chip(
        name,
        "tpu",
        kinds,
        len(pod),
        cores,
        hbm_gib * _GIB,
        hbm_gb_s * 1e9,
        link_gb_s * 1e9,
        None if far_gb_s is None else far_gb_s * 1e9,
        1e-6,
        wrap_block,
        pod,
        (8, 128),
        (_CLOUD + page, _BOOK),
    )


# The links of v2 are those that Cloud TPU's page gives (496 Gbit/s); of v3 on, those of the book,
# whose chapter on sharding also gives the time of a hop. What a chip gets between slices is stated
# by Cloud TPU's pages for v5e, v5p and v6e; for v3 and v4 it is the book's 25 GB/s of a host,
# shared by the chips that it gives a host; for v2 nobody states it.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu(
            "v2",
            ("TPU v2",),
            cores=2,
            hbm_gib=16,
            hbm_gb_s=700,
            link_gb_s=62,
            far_gb_s=None,
            wrap_block=16,
            pod=(16, 16),
            page="v2",
        ),
        _tpu(
            "v3",
            ("TPU v3",),
            cores=2,
            hbm_gib=32,
            hbm_gb_s=900,
            link_gb_s=100,
            far_gb_s=3.125,
            wrap_block=32,
            pod=(32, 32),
            page="v3",
        ),
        _tpu(
            "v4",
            ("TPU v4",),
            cores=2,
            hbm_gib=32,
            hbm_gb_s=1200,
            link_gb_s=45,
            far_gb_s=6.25,
            wrap_block=4,
            pod=(16, 16, 16),
            page="v4",
        ),
        _tpu(
            "v5e",
            ("TPU v5 lite", "TPU v5e"),
            cores=1,
            hbm_gib=16,
            hbm_gb_s=819,
            link_gb_s=50,
            far_gb_s=3.125,
            wrap_block=16,
            pod=(16, 16),
            page="v5e",
        ),
        _tpu(
            "v5p",
            ("TPU v5p", "TPU v5"),
            cores=1,
            hbm_gib=95,
            hbm_gb_s=2765,
            link_gb_s=100,
            far_gb_s=6.25,
            wrap_block=4,
            pod=(16, 20, 28),
            page="v5p",
        ),
        _tpu(
            "v6e",
            ("TPU v6 lite", "TPU v6e"),
            cores=1,
            hbm_gib=32,
            hbm_gb_s=1638,
            link_gb_s=100,
            far_gb_s=12.5,
            wrap_block=16,
            pod=(16, 16),
            page="v6e",
        ),
        Chip(
            "h100",
            "gpu",
            ("NVIDIA H100",),
            2,
            1,
            80 * 10**9,
            3.35e12,
            450e9,
            50e9,
            None,
            0,
            (),
            None,
            (
                "https://www.nvidia.com/en-us/data-center/h100/",
                "https://docs.nvidia.com/dgx/dgxh100-user-guide/",
            ),
        ),
        # A virtual device of the CPU has no memory, links or tiles of its own.
        Chip("cpu", "cpu", ("cpu",), 1, 1, 0, 0.0, 0.0, None, None, 0, (), None, ()),
    )
}

_NAME = re.compile(r"(?:(?P<slices>\d+)\s*\*\s*)?(?P<chip>[a-z]\w*):(?P<dims>\d+(?:x\d+)*)")


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips in a grid.

    Args:
      chip: what each of them is.
      dims: chips along each torus dim; `(domains, chips of a domain)` for GPUs.
      num_slices: equal grids, joined by the data-center network only.

    >>> Topology.of("v5e:16x16").wraps
    (True, True)
    >>> str(Topology.of("2*v5p:4x4x8")), Topology.of("h100:8x8").num_devices
    ('2*v5p:4x4x8', 64)
    """

    chip: Chip
    dims: tuple[int, ...]
    num_slices: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.chip, Chip):
            raise TypeError(
                f"topology: found {type(self.chip).__name__} for the chip, need a row of "
                f"large_scale.CHIPS. Of a name, such as 'v5e:4x4', Topology.of makes a topology."
            )
        if any(not is_count(n) for n in (*self.dims, self.num_slices)):
            raise TypeError(
                f"topology {self}: need whole numbers, found dims {self.dims!r} and "
                f"{self.num_slices!r} slices."
            )
        object.__setattr__(self, "dims", tuple(self.dims))
        if len(self.dims) != self.chip.num_dims or min(self.dims) < 1 or self.num_slices < 1:
            raise ValueError(
                f"topology {self}: {self.chip.name} needs {_dims_text(self.chip)}, each at least "
                f"1, as in {_example(self.chip)!r}"
                + (
                    f"; slices are told before, as in {f'2*{_example(self.chip)}'!r}"
                    if self.chip.platform == "tpu"
                    else ""
                )
            )
        if self.num_slices > 1 and self.chip.platform != "tpu":
            raise ValueError(f"topology {self}: only TPUs come in slices; join domains by dims.")

    @classmethod
    def of(cls, source: str | Topology | Sequence[Any]) -> Topology:
        """The topology of a name such as "v3:128x32" or "2*v5e:16x16", or of live devices.

        GPUs of one process count as one NVLink domain, for JAX does not tell.

        Raises:
          ValueError: no such chip, or dims that it cannot have; devices that are no whole grid.
        """
        if isinstance(source, Topology):
            return source
        if isinstance(source, str):
            return _parse(source)
        devices = list(source) if isinstance(source, Iterable) else [source]
        if not all(hasattr(d, "device_kind") for d in devices):
            raise TypeError(
                f"topology: found {type(source).__name__}, need a name, a Topology or devices."
            )
        return _of_devices(devices)

    def __str__(self) -> str:
        grid = f"{self.chip.name}:{'x'.join(map(str, self.dims))}"
        return grid if self.num_slices == 1 else f"{self.num_slices}*{grid}"

    @property
    def num_chips(self) -> int:
        return math.prod(self.dims) * self.num_slices

    @property
    def num_devices(self) -> int:
        """Devices that JAX lists: some chips have two."""
        return self.num_chips * self.chip.cores

    @property
    def wraps(self) -> tuple[bool, ...]:
        """For each dim, whether its last chip is linked to its first."""
        chip = self.chip
        if not chip.wrap_block:
            return (False,) * len(self.dims)
        return tuple(
            n % chip.wrap_block == 0 and n <= most
            for n, most in zip(self.dims, chip.pod, strict=True)
        )

    @property
    def dim_names(self) -> tuple[str, ...]:
        """Names of the dims that devices differ in, outer to inner.

        >>> Topology.of("v3:128x32").dim_names, Topology.of("h100:8x8").dim_names
        (('slice', 'x', 'y', 'core'), ('domain', 'gpu'))
        """
        if self.chip.platform == "tpu":
            return ("slice", *"xyz"[: len(self.dims)], "core")
        return ("domain", "gpu") if self.chip.platform == "gpu" else ("device",)

    @property
    def grid_names(self) -> tuple[str, ...]:
        """Names of `[slices, *dims, cores]`, whatever of it the machine has."""
        names = self.dim_names
        return names if self.chip.platform == "tpu" else ("slice", *names, "core")

    @property
    def named_dims(self) -> tuple[tuple[str, int], ...]:
        """Each of them with its length."""
        sizes = (self.num_slices, *self.dims, self.chip.cores)
        sizes = sizes if self.chip.platform == "tpu" else self.dims
        return tuple(zip(self.dim_names, sizes, strict=True))

    @property
    def device_hbm_bytes(self) -> int:
        """Memory of one device; 0 where it has none of its own."""
        return self.chip.hbm_bytes // self.chip.cores


def _example(chip: Chip) -> str:
    if chip.platform == "gpu":
        return f"{chip.name}:2x8"
    return f"{chip.name}:{'x'.join(['4'] * chip.num_dims)}"


def _dims_text(chip: Chip) -> str:
    if chip.platform == "gpu":
        return "2 dims (NVLink domains, and GPUs of one)"
    return "1 dim" if chip.num_dims == 1 else f"{chip.num_dims} dims"


def _parse(name: str) -> Topology:
    found = _NAME.fullmatch(name.strip().lower())
    examples = ", ".join(_example(chip) for chip in CHIPS.values())
    if found is None:
        raise ValueError(
            f"topology {name!r}: need CHIP:DIMS, or SLICES*CHIP:DIMS, such as {examples}. A name "
            "with a number only, such as v5litepod-256 or v4-32, does not tell the dims."
        )
    chip = CHIPS.get(found["chip"])
    if chip is None:
        raise ValueError(
            f"topology {name!r}: no chip {found['chip']!r} is known; known are "
            f"{', '.join(CHIPS)}. A new one is a row in large_scale.topology.CHIPS."
        )
    dims = tuple(int(n) for n in found["dims"].split("x"))
    return Topology(chip, dims, int(found["slices"] or 1))


def _of_devices(devices: Sequence[Any]) -> Topology:
    if not devices:
        raise ValueError("topology: there are no devices.")
    kinds = sorted({d.device_kind for d in devices})
    if len(kinds) != 1:
        raise ValueError(f"topology: need devices of one kind, found {kinds}")
    # The longest beginning wins: "TPU v5 lite" is no "TPU v5".
    rows = sorted(
        ((len(k), chip) for chip in CHIPS.values() for k in chip.kinds if kinds[0].startswith(k)),
        key=lambda row: -row[0],
    )
    if not rows:
        raise ValueError(
            f"topology: no chip of kind {kinds[0]!r} is known; it needs a row in "
            "large_scale.topology.CHIPS"
        )
    chip = rows[0][1]
    if chip.platform == "cpu":
        return Topology(chip, (len(devices),))
    if chip.platform == "gpu":
        domains = {d.process_index for d in devices}
        if len(devices) % len(domains):
            raise ValueError(f"topology: {len(devices)} GPUs in {len(domains)} domains, uneven")
        return Topology(chip, (len(domains), len(devices) // len(domains)))
    slices = {slice_of(d) for d in devices}
    coords = {tuple(d.coords)[: chip.num_dims] for d in devices}
    dims = tuple(
        max(c[k] for c in coords) - min(c[k] for c in coords) + 1 for k in range(chip.num_dims)
    )
    found = Topology(chip, dims, len(slices))
    if found.num_devices != len(devices):
        raise ValueError(
            f"topology: {len(devices)} devices are no whole grid; their coordinates span {found}, "
            f"of {found.num_devices} devices"
        )
    return found


def is_count(x: Any) -> bool:
    """Whether it is a whole number, of Python or numpy."""
    return hasattr(x, "__index__") and not isinstance(x, bool)


def slice_of(device: Any) -> int:
    """The slice that a TPU device is in; 0 where there is one only."""
    return getattr(device, "slice_index", None) or 0
