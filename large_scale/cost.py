"""What a reduction costs on the links of a topology, phase by phase, and the cheapest way to do it.

Times come from bandwidth and hops, as if nothing else ran: they rank schemes and promise no speed.

* Along a torus dim that closes, a device sends both ways round, along one that does not, one way:
  its last device has one link, through which all that it sends must go. A reduce-scatter or an
  all-gather of `S` bytes among `n` devices moves `S (n - 1) / n` through that, an all-reduce twice
  as much.
* The cores of a chip share its links, and their own exchange goes through the chip's memory.
* XLA's TPU compiler scatters along lines one dim at a time; the links of the other dims then rest.
  One all-reduce over several dims it cuts in as many parts as there are dims, each of which goes
  over them in another order, so that none rests. It says so in the emitters of the optimized HLO:
  `StrategyRing{colors:1 ...}` and `StrategyND{colors:2 ... dim_used:{0 1},{1 0}}`.

So the scattered update pays on the links what it saves in the update, and `choose` counts both.
Sources: the scaling book's chapter on sharding (https://jax-ml.github.io/scaling-book/sharding) for
the times of rings; Kumar et al. 2020 (arXiv 2011.03641) for one dim after the other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from large_scale.topology import Topology


@dataclasses.dataclass(frozen=True)
class Link:
    """The devices of one phase, and how they are joined.

    Args:
      name: of the dim, as `Topology.dim_names` has it.
      size: devices that one collective runs over.
      bytes_per_second: what each of them sends at most, while all devices of the machine do so.
      hops: messages that have to follow one another in one round.
      hop_seconds: what each of these takes at least; 0 where nobody states it.
      torus: a dim of a torus: one all-reduce may run over several of these at a time.
    """

    name: str
    size: int
    bytes_per_second: float
    hops: int
    hop_seconds: float
    torus: bool

    def seconds(self, nbytes: float) -> float:
        """One reduce-scatter of `nbytes`, or one all-gather that ends with as many."""
        moved = nbytes * (self.size - 1) / self.size / self.bytes_per_second
        return moved + self.hops * self.hop_seconds


def links(topology: str | Topology) -> tuple[Link, ...]:
    """The links of all devices of a topology, the fastest first; of equal ones the longest.

    In this order scattering takes the least time: what is scattered first carries the most bytes.

    Raises:
      ValueError: nobody states a figure that is needed; virtual devices of a CPU have no links.

    >>> [(link.name, link.size, f"{link.bytes_per_second:.3g}") for link in links("v3:128x32")]
    [('core', 2, '2.25e+11'), ('y', 32, '1e+11'), ('x', 128, '5e+10')]
    >>> [(link.name, link.size) for link in links("2*v5e:4x16")]
    [('y', 16), ('x', 4), ('slice', 2)]
    """
    topology = Topology.of(topology)
    return by_speed(_link(topology, name, size) for name, size in topology.named_dims)


def by_speed(found: Iterator[Link] | Sequence[Link]) -> tuple[Link, ...]:
    """Links in the order in which to scatter over them; those of one device are left out."""
    several = (link for link in found if link.size > 1)
    return tuple(sorted(several, key=lambda link: (-link.bytes_per_second, -link.size)))


def torus_link(topology: Topology, dim: int, size: int, stride: int) -> Link:
    """Part of a torus dim: `size` devices, each `stride` from the next.

    Between two of them lie devices of other groups, which use the same links.
    """
    chip = topology.chip
    ring = topology.wraps[dim] and size * stride == topology.dims[dim]
    return Link(
        topology.dim_names[1 + dim],
        size,
        (2 if ring else 1) * chip.link_bytes_per_second / chip.cores / stride,
        stride * (size // 2 if ring else size - 1),
        chip.hop_seconds or 0.0,
        torus=True,
    )


def _link(topology: Topology, name: str, size: int) -> Link:
    chip = topology.chip
    if chip.platform == "cpu":
        raise ValueError(f"{topology}: virtual devices of a CPU have no links to count with.")
    if chip.platform == "tpu" and name not in ("slice", "core"):
        return torus_link(topology, topology.dim_names.index(name) - 1, size, 1)
    if name == "core":
        # No page states this. Each byte is written to the memory of both and read again.
        speed: float | None = chip.hbm_bytes_per_second / chip.cores / 2
    elif name == "gpu":
        speed = chip.link_bytes_per_second
    else:
        speed = chip.far_bytes_per_second
        if size > 1 and speed is None:
            raise ValueError(
                f"{topology}: no public page states what {chip.name} sends between slices. Give a "
                "figure: Topology(dataclasses.replace(CHIPS[...], far_bytes_per_second=...), ...)."
            )
        speed = speed and speed / chip.cores
    hop = chip.hop_seconds if name == "core" else None
    return Link(name, size, speed or 0.0, size - 1, hop or 0.0, torus=False)


# --------------------------------------------------------------------------------------- schemes


@dataclasses.dataclass(frozen=True)
class Phase:
    """One collective of a scheme, or the update.

    Args:
      kind: "reduce-scatter", "all-reduce", "all-gather" or "update".
      over: names of the links.
      size: devices of a group.
      dtype: of what is sent.
      operand_bytes: what a device puts in, as in the optimized HLO; what the update reads and
        writes.
      seconds: estimated.
    """

    kind: str
    over: tuple[str, ...]
    size: int
    dtype: str
    operand_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One way to reduce gradients, update weights and give them to all devices."""

    phases: tuple[Phase, ...]

    @property
    def scattered(self) -> tuple[str, ...]:
        """The links that gradients are scattered over, in this order."""
        return tuple(p.over[0] for p in self.phases if p.kind == "reduce-scatter")

    @property
    def num_shards(self) -> int:
        return math.prod(p.size for p in self.phases if p.kind == "reduce-scatter")

    @property
    def seconds(self) -> float:
        return sum(p.seconds for p in self.phases)

    def __str__(self) -> str:
        """A line for each phase."""
        head = ("phase", "over", "group", "dtype", "MiB", "us")
        rows = [
            (
                p.kind,
                "+".join(p.over) or "-",
                str(p.size),
                p.dtype,
                f"{p.operand_bytes / 2**20:.3f}",
                f"{p.seconds * 1e6:.1f}",
            )
            for p in self.phases
        ]
        rows.append(("total", "", "", "", "", f"{self.seconds * 1e6:.1f}"))
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        return "\n".join(
            "  ".join(
                text.ljust(width) if i in (0, 1, 3) else text.rjust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (head, *rows)
        )


def scheme(
    topology: str | Topology,
    elems: int,
    scatter: Sequence[str] | None = None,
    *,
    dtype: Any = "float32",
    scatter_dtype: Mapping[str, Any] | None = None,
    gather_dtype: Any = None,
    state_bytes_per_elem: int = 8,
) -> Scheme:
    """The phases of one scheme, and what each costs.

    Args:
      topology: all of whose devices hold the same weights.
      elems: number of weights.
      scatter: names of the links to scatter gradients over, in this order; what is left is
        all-reduced over the others. () is one all-reduce. None scatters over all, as `links` has
        them.
      dtype: of gradients and weights.
      scatter_dtype: for some links, the dtype in which gradients are sent over them.
      gather_dtype: in which weights are gathered.
      state_bytes_per_elem: of auxiliary state; 8 is Adam in float32.

    Raises:
      ValueError: no such link, one twice, a number that is none.

    >>> print(scheme("v5e:16x16", 2**20))
    phase           over  group  dtype      MiB     us
    reduce-scatter  x        16  float32  4.000   47.3
    reduce-scatter  y        16  float32  0.250   10.5
    update          -         1  -        0.109    0.1
    all-gather      y        16  float32  0.016   10.5
    all-gather      x        16  float32  0.250   47.3
    total                                        115.7
    """
    topology = Topology.of(topology)
    _check_figures(elems=elems, state_bytes_per_elem=state_bytes_per_elem)
    known = {link.name: link for link in links(topology)}
    order = tuple(known) if scatter is None else tuple(scatter)
    for names, option in ((scatter, "scatter"), (scatter_dtype, "scatter_dtype")):
        if isinstance(names, str):
            kind = f"({names!r},)" if option == "scatter" else f"{{link: {names!r}}}"
            raise TypeError(
                f"{option}={names!r}: need it for each link, as {kind}; {_these(known)}"
            )
    if len(set(order)) < len(order):
        raise ValueError(f"scatter={order}: names a link twice")
    for name in (*order, *(scatter_dtype or ())):
        if name not in known:
            raise ValueError(f"{topology}: no link {name!r}; {_these(known)}")
    first = [known[name] for name in order]
    rest = [link for name, link in known.items() if name not in order]
    own = jnp.dtype(dtype)
    sent = {name: jnp.dtype((scatter_dtype or {}).get(name, own)) for name in known}
    phases: list[Phase] = []
    left = elems
    for link in first:
        nbytes = left * sent[link.name].itemsize
        phases.append(_phase("reduce-scatter", link, sent[link.name], nbytes, nbytes))
        left = -(-left // link.size)
    phases += _all_reduces(rest, left, sent)
    phases += _update(topology, left, own.itemsize, state_bytes_per_elem)
    back = jnp.dtype(gather_dtype or own)
    for link in reversed(first):
        nbytes = left * back.itemsize
        phases.append(_phase("all-gather", link, back, nbytes, nbytes * link.size))
        left *= link.size
    return Scheme(tuple(phases))


def _these(links: Mapping[str, Link]) -> str:
    return f"it has {', '.join(links) or 'none'}"


def _check_figures(**figures: float) -> None:
    for name, found in figures.items():
        if not isinstance(found, int | float | np.number) or not 0 <= found < math.inf:
            raise ValueError(f"{name}: found {found!r}, need a number of at least 0")


def _phase(kind: str, link: Link, dtype: Any, operand_bytes: int, whole_bytes: int) -> Phase:
    seconds = link.seconds(whole_bytes)
    return Phase(kind, (link.name,), link.size, dtype.name, operand_bytes, seconds)


def _all_reduces(rest: Sequence[Link], elems: int, sent: Mapping[str, Any]) -> Iterator[Phase]:
    """One all-reduce for all links of a dtype that go together."""
    for dtype in dict.fromkeys(sent[link.name] for link in rest):
        together = [link for link in rest if sent[link.name] == dtype]
        yield Phase(
            "all-reduce",
            tuple(link.name for link in together),
            math.prod(link.size for link in together),
            dtype.name,
            elems * dtype.itemsize,
            2 * _at_once(together, elems * dtype.itemsize),
        )


def _at_once(over: Sequence[Link], nbytes: float) -> float:
    """Half of one all-reduce over several links.

    Over those of a torus it goes in parts, each of which starts with another dim; in every round
    the slowest of them counts. Over others, as cores and slices, it goes before or after.
    """
    seconds = 0.0
    torus = [link for link in over if link.torus]
    for link in [link for link in over if not link.torus and _is_near(link, torus)]:
        seconds += link.seconds(nbytes)
        nbytes /= link.size
    left = [nbytes / max(len(torus), 1)] * len(torus)
    for turn in range(len(torus)):
        round_ = [torus[(part + turn) % len(torus)] for part in range(len(torus))]
        seconds += max(link.seconds(part) for link, part in zip(round_, left, strict=True))
        left = [part / link.size for link, part in zip(round_, left, strict=True)]
    nbytes /= math.prod(link.size for link in torus)
    for link in [link for link in over if not link.torus and not _is_near(link, torus)]:
        seconds += link.seconds(nbytes)
        nbytes /= link.size
    return seconds


def _is_near(link: Link, torus: Sequence[Link]) -> bool:
    return all(link.bytes_per_second >= other.bytes_per_second for other in torus)


def _update(
    topology: Topology, elems: int, itemsize: int, state_bytes_per_elem: int
) -> Iterator[Phase]:
    """Reads gradients, weights and state once, writes weights and state once."""
    touched = elems * (3 * itemsize + 2 * state_bytes_per_elem)
    speed = topology.chip.hbm_bytes_per_second / topology.chip.cores
    yield Phase("update", (), 1, "-", touched, touched / speed)


# --------------------------------------------------------------------------------------- choosing


@dataclasses.dataclass(frozen=True)
class Choice:
    """The cheapest scheme that meets the constraints, and what it was chosen from.

    Args:
      best: the cheapest.
      others: the best of each other set of links to scatter over, cheapest first.
      refused: schemes that do not meet the constraints, each with what it fails.
    """

    best: Scheme
    others: tuple[Scheme, ...]
    refused: tuple[tuple[Scheme, str], ...]

    def __str__(self) -> str:
        lines = [str(self.best)]
        for other in self.others:
            lines.append(f"{_name(other)}: {other.seconds / self.best.seconds:.2f} times as long")
        lines += [f"{_name(other)}: {why}" for other, why in self.refused]
        return "\n".join(lines)


def _name(found: Scheme) -> str:
    if not found.scattered:
        return "one all-reduce"
    return f"scattered over {', '.join(found.scattered)}"


def choose(
    topology: str | Topology,
    elems: int,
    *,
    min_shards: int = 1,
    memory_bytes: int | None = None,
    dtype: Any = "float32",
    scatter_dtype: Mapping[str, Any] | None = None,
    gather_dtype: Any = None,
    state_bytes_per_elem: int = 8,
) -> Choice:
    """The cheapest links to scatter over, and their order.

    Args:
      topology: all of whose devices hold the same weights.
      elems: number of weights.
      min_shards: into how many shards the state has to be split at least.
      memory_bytes: what a device has for weights, gradients and state; None takes its memory.
      dtype: as for `scheme`.
      scatter_dtype: as for `scheme`.
      gather_dtype: as for `scheme`.
      state_bytes_per_elem: as for `scheme`.

    Raises:
      ValueError: no scheme meets the constraints; as `scheme`.
    """
    topology = Topology.of(topology)
    names = [link.name for link in links(topology)]
    _check_figures(elems=elems, min_shards=min_shards, memory_bytes=memory_bytes or 0)
    room = topology.device_hbm_bytes if memory_bytes is None else memory_bytes
    fits: list[Scheme] = []
    refused: list[tuple[Scheme, str]] = []
    for count in range(len(names) + 1):
        for chosen in itertools.combinations(names, count):
            best = min(
                (
                    scheme(
                        topology,
                        elems,
                        order,
                        dtype=dtype,
                        scatter_dtype=scatter_dtype,
                        gather_dtype=gather_dtype,
                        state_bytes_per_elem=state_bytes_per_elem,
                    )
                    for order in itertools.permutations(chosen)
                ),
                key=lambda found: found.seconds,
            )
            held = 2 * elems * jnp.dtype(dtype).itemsize
            held += -(-elems * state_bytes_per_elem // best.num_shards)
            if best.num_shards < min_shards:
                refused.append((best, f"{best.num_shards} shards, needs {min_shards}"))
            elif held > room:
                refused.append((best, f"holds {held / 2**30:.2f} GiB of {room / 2**30:.2f}"))
            else:
                fits.append(best)
    if not fits:
        raise ValueError(
            f"{topology}: no scheme splits the state {min_shards} times and holds "
            f"{elems} weights in {room / 2**30:.2f} GiB: "
            + "; ".join(f"{_name(found)} {why}" for found, why in refused)
        )
    fits.sort(key=lambda found: found.seconds)
    return Choice(fits[0], tuple(fits[1:]), tuple(refused))
