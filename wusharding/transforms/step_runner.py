"""One device's part of a whole train step, as a function of global arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wusharding.analysis.layout import Leaf
from wusharding.analysis.prompt import scattered_as_they_come
from wusharding.analysis.schedule import Schedule
from wusharding.formats.buckets import BucketSizes
from wusharding.transforms.collectives import Collectives
from wusharding.transforms.context import Context
from wusharding.transforms.interpret import Interpreter
from wusharding.transforms.mapped import mapped
from wusharding.transforms.storage import Storage


def runner(
    context: Context,
    ins: Sequence[Leaf],
    outs: Sequence[Leaf],
    schedule: Schedule,
    buckets: BucketSizes,
    new_weights: Sequence[int],
) -> Callable[[Sequence[Any]], list[Any]]:
    """The step from stored arguments to stored results; `new_weights` are positions of these."""
    replicas = context.replicas
    if buckets.whole_tiles:
        schedule = scattered_as_they_come(schedule, replicas, buckets)
    leaving = frozenset(v for v, _ in schedule.outputs)
    split = [o for o in new_weights if schedule.outputs[o][1].span is not None]

    def body(args: Sequence[Any]) -> tuple[list[Any]]:
        collectives = Collectives.here(replicas, buckets)
        storage = Storage(collectives)
        local = [storage.load(leaf, x) for leaf, x in zip(ins, args, strict=True)]
        done = Interpreter(collectives, checked=False).run(schedule, local, leaving)
        for o, x in zip(split, collectives.together([done[o] for o in split]), strict=True):
            done[o] = x
        return ([storage.store(leaf, x) for leaf, x in zip(outs, done, strict=True)],)

    run = mapped(
        context,
        body,
        [[leaf.spec(replicas) for leaf in ins]],
        [[leaf.spec(replicas) for leaf in outs]],
    )
    return lambda args: run(args)[0]
