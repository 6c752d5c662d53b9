"""Several processes, joined by JAX over loopback: the numbers of one process, and what faults do.

The set-up is shared: starting processes is what takes time.
"""

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from benchmarks import processes
from tests.process_worker import CASES, STEPS, Training, WholeStep
from tests.runs import assert_same_bits, relative_error
from wusharding import checkpoint

TIMEOUT_SECONDS = 240  # of the whole; the machine may be busy


def run_in_processes(command: str, directory: Path, count: int) -> None:
    started = processes.start(
        ["tests.process_worker", command, str(directory)], count, 2, directory
    )
    codes = processes.wait(started, TIMEOUT_SECONDS)
    assert codes == [0] * count, "\n".join(p.output[-5000:] for p in started)
    assert all(p.output.endswith("done\n") for p in started)


def seen(directory: Path, process: int = 0) -> dict[str, np.ndarray]:
    with np.load(directory / f"seen_by_{process}.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes of two devices each have trained and saved."""
    directory = tmp_path_factory.mktemp("two")
    run_in_processes("train", directory, 2)
    return directory


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_two_processes_have_the_numbers_of_one(name, mode, trained):
    loop = Training(name, mode, 4)
    loop.run(0, STEPS)
    found, wanted = seen(trained / f"{name}_{mode}"), loop.seen()
    # The sums of gradients are exact; the programs are others, and fuse their products otherwise.
    assert relative_error(found, wanted) <= 1e-6
    assert_same_bits(seen(trained / f"{name}_{mode}", 1), found)


def test_a_whole_step_in_two_processes_goes_on_from_its_checkpoint_as_one_does(trained):
    loop = WholeStep(4)
    loop.run(0, STEPS)
    found = seen(trained / "whole")
    assert relative_error(found, loop.seen()) <= 1e-6
    assert_same_bits(seen(trained / "whole", 1), found)


def restored(directory: Path, count: int) -> tuple[Any, Training]:
    """What two processes saved, on some devices of this one."""
    loop = Training("adam", "manual", count)
    manager = ocp.CheckpointManager(directory)
    found = checkpoint.restore(manager, loop.tx, loop.params)
    loop.params, loop.state = found.params, found.state
    return found.step, loop


@pytest.fixture(scope="module")
def resumed(trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by two processes, restored and saved by one, restored and saved by four."""
    directory = tmp_path_factory.mktemp("four")
    for name in ("adam", "lamb"):
        loop = Training(name, "manual", 3)
        manager = ocp.CheckpointManager(trained / f"{name}_manual")
        found = checkpoint.restore(manager, loop.tx, loop.params)
        again = ocp.CheckpointManager(directory / f"{name}_manual")
        checkpoint.save(again, found.step, loop.tx, found.params, found.state)
        again.wait_until_finished()
    run_in_processes("resume", directory, 4)
    return directory


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.filterwarnings("ignore::wusharding.ReplicatedUpdateWarning")
def test_saved_by_two_processes_restored_by_one(count, trained):
    step, loop = restored(trained / "adam_manual", count)
    assert step == STEPS
    assert_same_bits(loop.seen(), seen(trained / "adam_manual"))


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_from_two_processes_to_one_to_four(name, trained, resumed):
    for process in range(4):
        assert_same_bits(
            seen(resumed / f"{name}_resumed", process), seen(trained / f"{name}_manual")
        )


def check_fault(what: signal.Signals, victim: int, directory: Path) -> None:
    """A process dies or hangs: the other ends and says why, and one process goes on."""
    saved = directory / "saved"
    started = processes.start(["tests.process_worker", "endless", str(saved)], 2, 2, directory)
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (saved / "2").exists() and time.monotonic() < deadline:
            assert all(p.popen.poll() is None for p in started), started[0].output
            time.sleep(0.02)
        started[victim].popen.send_signal(what)
        assert started[1 - victim].popen.wait(90) != 0
    finally:
        processes.kill(started)
    said = started[1 - victim].output
    if victim:
        assert "unhealthy (stopped sending heartbeats):\n1\n" in said
    assert "another task died" in said or "Connection" in said

    step, loop = restored(saved, 3)
    assert step >= 2
    wanted = Training("adam", "manual", 4)
    wanted.run(0, step)
    assert relative_error(loop.seen(), wanted.seen()) <= 1e-6
    loop.run(step, step + 1)


def test_a_process_is_killed_and_one_goes_on(tmp_path):
    check_fault(signal.SIGKILL, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "victim"), [(signal.SIGSTOP, 1), (signal.SIGKILL, 0), (signal.SIGSTOP, 0)]
)
def test_a_process_hangs_or_the_first_is_lost(what, victim, tmp_path):
    check_fault(what, victim, tmp_path)
