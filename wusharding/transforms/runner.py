"""One device's part of an optimizer step: everything between local gradients and whole weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from wusharding.analysis.choose import Target, bucket_sizes
from wusharding.analysis.layout import Layout, travel_dtype
from wusharding.analysis.schedule import Schedule
from wusharding.transforms.collectives import Collectives
from wusharding.transforms.interpret import Interpreter
from wusharding.transforms.programs import Options, Step
from wusharding.transforms.storage import Storage

Arrival = Literal["local", "unreduced", "reduced"]


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs `init` and `update` where the mesh axes are bound.

    Stored arrays are this device's pieces; weights and gradients are whole (or, with model
    parallelism, this device's tile of them).
    """

    layout: Layout
    options: Options
    storage: Storage
    interpreter: Interpreter

    @classmethod
    def here(cls, layout: Layout, options: Options, target: Target, *, checked: bool) -> Runner:
        """The runner of the device that this runs on."""
        buckets = bucket_sizes(options.bucket_bytes, target)
        collectives = Collectives.here(layout.replicas, buckets)
        return cls(layout, options, Storage(collectives), Interpreter(collectives, checked))

    @property
    def collectives(self) -> Collectives:
        return self.storage.collectives

    # ----------------------------------------------------------------------------------- the steps

    @jax.named_scope("shard_updates")
    def init(self, schedule: Schedule, params: Sequence[jax.Array]) -> tuple[list[Any], list[Any]]:
        """Stored state and masters for weights `params`."""
        local = []
        masters = []
        for leaf, dtype, p in zip(self.layout.params, self.layout.masters, params, strict=True):
            shard = self.storage.take(leaf, p)
            if dtype is not None:
                shard = shard.astype(dtype)
                masters.append(self.storage.store(leaf, shard))
            local.append(shard)
        outs = self.interpreter.run(schedule, local)
        return [
            self.storage.store(leaf, x) for leaf, x in zip(self.layout.state, outs, strict=True)
        ], masters

    @jax.named_scope("shard_updates")
    def update(
        self,
        step: Step,
        grads: Sequence[jax.Array],
        arrivals: Sequence[Arrival],
        state: Sequence[jax.Array],
        masters: Sequence[jax.Array],
        params: Sequence[jax.Array] | None,
        extra: Sequence[jax.Array],
        *,
        apply: bool,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """One step.

        Args:
          step: the program and its schedule.
          grads: local gradients.
          arrivals: for each gradient whether it still varies, is a sum to be made, or is whole.
          state: stored pieces of the state.
          masters: stored pieces of the master weights.
          params: whole weights, or None where the caller gave none.
          extra: array leaves of the extra arguments.
          apply: return new weights rather than updates.

        Returns:
          Whole updates (or weights), stored state, stored masters.
        """
        layout = self.layout
        mine = self._arrived(grads, arrivals)
        stored = iter(masters)
        held = [
            self.storage.load(leaf, next(stored)) if m is not None else None
            for leaf, m in zip(layout.params, layout.masters, strict=True)
        ]
        local: list[Any] = [*mine]
        local += [self.storage.load(leaf, s) for leaf, s in zip(layout.state, state, strict=True)]
        if step.update.has_params:
            assert params is not None
            local += [
                h if h is not None else self.storage.take(leaf, p)
                for leaf, h, p in zip(layout.params, held, params, strict=True)
            ]
        outs = self.interpreter.run(step.schedule, [*local, *extra])
        n = len(layout.params)
        new = [jnp.asarray(x) for x in outs[:n]]
        new_state = [
            self.storage.store(leaf, x) for leaf, x in zip(layout.state, outs[n:], strict=True)
        ]
        new_masters = [
            self.storage.store(leaf, x)
            for leaf, m, x in zip(layout.params, layout.masters, new, strict=True)
            if m is not None
        ]
        return self._delivered(new, params, apply=apply), new_state, new_masters

    def _arrived(self, grads: Sequence[jax.Array], arrivals: Sequence[Arrival]) -> list[jax.Array]:
        """Each gradient as its weight is placed: reduce-scattered, all-reduced or sliced."""
        layout, options = self.layout, self.options
        if options.per_example:
            return list(grads)  # reduced where the program sums over examples
        out: list[Any] = [None] * len(grads)
        scatter, reduce = list[int](), list[int]()
        for i, (leaf, arrival) in enumerate(zip(layout.grads, arrivals, strict=True)):
            if arrival == "reduced":
                out[i] = self.storage.take(leaf, grads[i])
            elif leaf.placement.span is None:
                reduce.append(i)
            else:
                scatter.append(i)
        rest = tuple(a for a in options.reduce_axes if a not in options.shard_axes)
        formats = [f for i in scatter if (f := layout.grads[i].format(layout.replicas)) is not None]
        tiles = [self.storage.tile(layout.grads[i], grads[i]) for i in scatter]
        shards = self.collectives.reduce_scatter(tiles, formats, options.sum_dtypes)
        shards = self.collectives.sum_shards(shards, rest, options.sum_dtypes)
        shards = self.collectives.together(shards)
        whole = self.collectives.all_reduce([grads[i] for i in reduce], "sum", options.reduce_axes)
        for i, x in zip([*scatter, *reduce], [*shards, *whole], strict=True):
            out[i] = x
        for i, (arrival, master) in enumerate(zip(arrivals, layout.grad_masters, strict=True)):
            if master is not None:
                out[i] = out[i].astype(master)
            if arrival == "local" and options.reduce == "mean":
                out[i] = out[i] / layout.replicas.num_replicas
        return out

    def _delivered(
        self, new: Sequence[jax.Array], params: Sequence[jax.Array] | None, *, apply: bool
    ) -> list[jax.Array]:
        """Whole weights or updates, gathered in the dtype that travels."""
        layout = self.layout
        kept = []
        for leaf, master, x in zip(layout.params, layout.masters, new, strict=True):
            kept.append(leaf.dtype if master is not None else x.dtype)
        travel = [travel_dtype(d, self.options.gather_dtype) for d in kept]
        whole = self.storage.gathered(
            layout.params, [x.astype(d) for x, d in zip(new, travel, strict=True)]
        )
        whole = [x.astype(d) for x, d in zip(whole, kept, strict=True)]
        if apply or not any(m is not None for m in layout.masters):
            return whole
        assert params is not None
        return [
            w.astype(m) - p.astype(m) if m is not None else w
            for w, p, m in zip(whole, params, layout.masters, strict=True)
        ]
