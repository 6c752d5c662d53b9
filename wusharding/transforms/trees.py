"""Trees: the paths of their leaves, and those of a step's arguments that come out of it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax


def flatten_with_paths(tree: Any) -> tuple[tuple[str, ...], list[Any], Any]:
    """Leaves of a tree with the path of each, as `['layer']['w']`."""
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = tuple(jax.tree_util.keystr(path) for path, _ in with_paths)
    return paths, [x for _, x in with_paths], treedef


class Node(NamedTuple):
    """A subtree: where its leaves lie among those of the whole tree."""

    treedef: Any
    start: int
    stop: int
    depth: int


def nodes(tree: Any) -> Iterator[Node]:
    """All subtrees, each before its children, the whole tree first.

    >>> [n.stop - n.start for n in nodes({"a": (1, 2), "b": 3})]
    [3, 2, 1, 1, 1]
    """
    yield from _walk(tree, 0, 0)


def _walk(tree: Any, start: int, depth: int) -> Iterator[Node]:
    treedef = jax.tree.structure(tree)
    yield Node(treedef, start, start + treedef.num_leaves, depth)
    if jax.tree_util.treedef_is_leaf(treedef):
        return
    children, _ = jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)
    for child in children:
        yield from _walk(child, start, depth + 1)
        start += jax.tree.structure(child).num_leaves


def matched(ins: Any, outs: Any) -> list[tuple[int, int]]:
    """Positions of input leaves and of the output leaves that may take their place.

    Subtrees are paired that have the same structure, shapes and dtypes, larger ones first and in
    order; single arrays only where they are an argument or a result of their own.

    Args:
      ins: the tuple of arguments.
      outs: what the step returns, as a pytree of anything with `shape` and `dtype`.

    >>> s = jax.ShapeDtypeStruct((2,), "float32")
    >>> matched(({"w": s}, {"m": s}, s), ({"w": s}, {"m": s}, s))
    [(0, 0), (1, 1), (2, 2)]
    """
    in_leaves, out_leaves = jax.tree.leaves(ins), jax.tree.leaves(outs)
    free: dict[Any, list[Node]] = {}
    for node in nodes(ins):
        if node.stop > node.start:
            free.setdefault(node.treedef, []).append(node)
    taken: set[int] = set()
    done: set[int] = set()
    pairs: list[tuple[int, int]] = []
    for out in nodes(outs):
        size = out.stop - out.start
        if size == 0 or out.start in done:
            continue
        for node in free.get(out.treedef, ()):
            places = range(node.start, node.stop)
            alone = size == 1 and jax.tree_util.treedef_is_leaf(out.treedef)
            if not taken.isdisjoint(places) or (alone and (node.depth > 1 or out.depth > 1)):
                continue
            if _alike(in_leaves[node.start : node.stop], out_leaves[out.start : out.stop]):
                taken.update(places)
                done.update(range(out.start, out.stop))
                pairs += zip(places, range(out.start, out.stop), strict=True)
                break
    return sorted(pairs)


def _alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(a, b, strict=True))
