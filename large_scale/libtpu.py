"""How libtpu is loaded where there is no TPU, and what it says of the paper's own pass.

The weight-update sharding of Xu et al. 2020 (arXiv 2004.13336) was a pass of XLA's TPU compiler,
and is in libtpu to this day. What it says of a program goes to libtpu's log.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_FILE = "tpu_cross_replica_sharding"


def prepare() -> None:
    """Sets what libtpu reads once, when it is loaded; what is set already stays."""
    for name, value in {
        # No look for a TPU, nor for the metadata server of a cloud machine, nor complaints that
        # neither names one; several processes may compile at the same time.
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v3-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # The pass is to say what it does, in a file; errors only go to the terminal.
        "TPU_VMODULE": f"{_FILE}=1",
        "TPU_MIN_LOG_LEVEL": "0",
        "TPU_STDERR_LOG_LEVEL": "2",
    }.items():
        os.environ.setdefault(name, value)
    # Each line is to be in that file as soon as it is said.
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    if "--logbuflevel" not in given:
        os.environ["LIBTPU_INIT_ARGS"] = f"{given} --logbuflevel=-1".strip()
    if "TPU_LOG_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="large-scale-libtpu-")
        os.environ["TPU_LOG_DIR"] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


class PassLog:
    """What the paper's pass says of the programs that are compiled from now on."""

    def __init__(self) -> None:
        self._sizes = {path: path.stat().st_size for path in _logs()}

    def said(self) -> tuple[str, ...]:
        """Its sentences, each once; none where the pass is off or its log is not to be had."""
        new = b""
        for path in _logs():
            with path.open("rb") as file:
                file.seek(self._sizes.get(path, 0))
                new += file.read()
        return sentences(new.decode("utf-8", errors="replace"))


def _logs() -> Iterator[Path]:
    folder = os.environ.get("TPU_LOG_DIR")
    for path in sorted(Path(folder).glob("*.INFO.*")) if folder else ():
        if f".{os.getpid()}" in path.suffixes[-1:]:
            yield path


def sentences(log: str) -> tuple[str, ...]:
    """What the pass says in a log, each sentence once.

    >>> sentences("I1130 tpu_cross_replica_sharding.cc:1327] Skip it.")
    ('Skip it.',)
    """
    return tuple(dict.fromkeys(re.findall(rf"{_FILE}\.cc:\d+\] (.*)", log)))
