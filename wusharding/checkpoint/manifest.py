"""`Manifest`: what a checkpoint says of itself: its arrays, their checksums and the plan."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from wusharding.checkpoint.digest import digests
from wusharding.errors import CorruptCheckpointError
from wusharding.transforms.trees import flatten_with_paths

VERSION = 1
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array: logical shape, dtype by name, and checksum (empty where it is not known)."""

    shape: tuple[int, ...]
    dtype: str
    digest: str = ""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Args:
      entries: for each item ("params", "opt_state", "master") its arrays by path.
      plan: the plan that was in force, as data; None for plain optax.
    """

    entries: Mapping[str, Mapping[str, Entry]]
    plan: Any = None

    @classmethod
    def of(cls, items: Mapping[str, PyTree], plan: Any) -> Manifest:
        """The manifest of these trees of arrays."""
        named = [
            (item, path, x)
            for item, tree in items.items()
            for path, x in zip(*flatten_with_paths(tree)[:2], strict=True)
        ]
        entries: dict[str, dict[str, Entry]] = {item: {} for item in items}
        sums = digests([x for *_, x in named])
        for (item, path, x), digest in zip(named, sums, strict=True):
            entries[item][path] = Entry(tuple(x.shape), str(x.dtype), digest)
        return cls(entries, plan)

    def to_data(self) -> dict[str, Any]:
        """As JSON data, signed."""
        data = {"version": VERSION, "plan": self.plan} | {
            "entries": {
                item: {path: [list(e.shape), e.dtype, e.digest] for path, e in found.items()}
                for item, found in self.entries.items()
            }
        }
        return data | {"sha256": _sign(data)}

    @classmethod
    def from_data(cls, data: Any, where: str) -> Manifest:
        """The manifest that `to_data` wrote.

        Raises:
          CorruptCheckpointError: it is not as it was written.
        """
        if not isinstance(data, dict) or data.get("sha256") != _sign(
            {k: v for k, v in data.items() if k != "sha256"}
        ):
            raise CorruptCheckpointError(f"{where}: the manifest is not as it was written.")
        if data["version"] != VERSION:
            raise CorruptCheckpointError(
                f"{where}: the manifest has version {data['version']}, this release reads "
                f"{VERSION}. Read it with the release of wusharding that wrote it."
            )
        entries = {
            item: {path: Entry(tuple(e[0]), e[1], e[2]) for path, e in found.items()}
            for item, found in data["entries"].items()
        }
        return cls(entries, data["plan"])

    def check(self, items: Mapping[str, PyTree], where: str) -> None:
        """The arrays are bit for bit those that were saved.

        Raises:
          CorruptCheckpointError: they are not; names each array.
        """
        now = Manifest.of(items, None)
        bad = [
            f"{item}{path}"
            for item, found in now.entries.items()
            for path, e in found.items()
            if (wanted := self.entries[item][path]).digest and e != wanted
        ]
        if bad:
            raise CorruptCheckpointError(
                f"{where}: {', '.join(bad)}: what was read is not what was saved (its checksum "
                "differs)."
            )


def _sign(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
