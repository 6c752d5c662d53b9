"""Starts several JAX processes on this machine, as a cluster's launcher would on many."""

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass
class Process:
    """One of them, and the file that its output goes to."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")


def start(
    arguments: Sequence[str], num_processes: int, devices_each: int, logs: Path
) -> list[Process]:
    """Starts `python -m *arguments` several times, each with its place in the environment.

    Args:
        arguments: a module and its arguments; the module calls `join`.
        num_processes: how many.
        devices_each: virtual CPU devices of each.
        logs: a folder for what they print.
    """
    port = _free_port()
    started = []
    for index in range(num_processes):
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_each}",
            "NPROC": str(8 * devices_each),
            "WORLD_SIZE": str(num_processes),
            "RANK": str(index),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        log = logs / f"process_{index}.log"
        with log.open("wb") as out:
            command = [sys.executable, "-m", *arguments]
            popen = subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=out)
        started.append(Process(popen, log))
    return started


def wait(processes: Sequence[Process], timeout_seconds: float) -> list[int]:
    """Their exit codes; those that take longer are killed, and it is an error.

    Raises:
        TimeoutError: with the end of what each of them printed.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        return [p.popen.wait(max(0.1, deadline - time.monotonic())) for p in processes]
    except subprocess.TimeoutExpired as e:
        outputs = "\n".join(f"{p.log.name}:\n{p.output[-3000:]}" for p in processes)
        raise TimeoutError(f"not done after {timeout_seconds} s\n{outputs}") from e
    finally:
        kill(processes)


def kill(processes: Sequence[Process]) -> None:
    """Ends those that still run."""
    for p in processes:
        p.popen.kill()
        p.popen.wait()


def join() -> None:
    """Joins the processes that `start` started with this one; before JAX looks for devices.

    The timeouts are for one machine. A cluster starts more slowly, and its network may pause.
    """
    jax.distributed.initialize(
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        int(os.environ["WORLD_SIZE"]),
        int(os.environ["RANK"]),
        initialization_timeout=60,
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=20,
    )


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
