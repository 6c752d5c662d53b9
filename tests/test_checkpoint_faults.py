"""What is killed, full, truncated or flipped: the newest whole checkpoint is found, none wrong."""

import contextlib
import gc
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import orbax.checkpoint as ocp
import pytest

import wusharding as wus
from tests.checkpoint_worker import save, sharded, state_at, tree_at
from tests.runs import assert_same_bits
from wusharding import checkpoint

# When a read fails, Orbax closes its event loop before TensorStore is done with the other arrays.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def leftovers_of_orbax() -> Iterator[None]:
    """Lets go of what a failed read has left, while its complaints are ignored."""
    yield
    gc.collect()


def restore(directory: Path, step: int | None = None) -> int:
    """Restores, checks that all is as it was at that step, and returns the step."""
    tx, where = sharded(5)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree_at(0)
    )
    with ocp.CheckpointManager(directory) as manager:
        found = checkpoint.restore(manager, tx, like, step=step)
    assert_same_bits(found.params, tree_at(found.step))
    assert_same_bits(tx.unshard(found.state), state_at(found.step))
    return found.step


# --------------------------------------------------------------------------------- killed in a save


def unfinished(directory: Path) -> list[str]:
    """Steps that are being written; those that earlier kills left are deleted by Orbax."""
    return [p.name for p in directory.iterdir() if "tmp" in p.name]


def check_kills(directory: Path, times: int, seed: int) -> None:
    rng = random.Random(seed)
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    command = [sys.executable, "-m", "tests.checkpoint_worker", str(directory)]
    with subprocess.Popen(
        command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin and worker.stdout
        newest, in_a_save = 0, 0
        for _ in range(times):
            worker.stdin.write("go\n")
            worker.stdin.flush()
            child = int(worker.stdout.readline())
            # It has begun to save when it has saved one step; from then on it does nothing else.
            deadline = time.monotonic() + 120
            while not (directory / str(newest + 1)).exists():
                assert time.monotonic() < deadline
                time.sleep(0.005)
            if rng.random() < 0.7:  # else at any moment, which is mostly between two saves
                while not unfinished(directory):
                    assert time.monotonic() < deadline
            time.sleep(rng.choice([0, rng.uniform(0, 0.05), rng.uniform(0, 0.3)]))
            os.kill(child, signal.SIGKILL)
            assert worker.stdout.readline() == "dead\n"
            in_a_save += bool(unfinished(directory))
            complete = max(int(p.name) for p in directory.iterdir() if p.name.isdigit())
            assert restore(directory) == complete > newest
            newest = complete
        worker.stdin.close()
    assert in_a_save or times < 10  # not left to luck where there are many


def test_killed_in_a_save(tmp_path):
    check_kills(tmp_path, 3, seed=1)


@pytest.mark.slow
def test_killed_in_a_save_many_times(tmp_path):
    check_kills(tmp_path, 60, seed=2)


# ---------------------------------------------------------------------------------------- disk full


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writing more than this to a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "num_bytes", [2000, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 20_000))]
)
def test_a_full_disk_is_an_error_and_loses_nothing(num_bytes, tmp_path):
    manager = ocp.CheckpointManager(tmp_path)
    save(manager, 1)
    manager.wait_until_finished()
    with largest_file(num_bytes), pytest.raises(Exception, match=r"File too large|Failed writing"):
        save(manager, 2)
        manager.wait_until_finished()
    assert restore(tmp_path) == 1
    manager = ocp.CheckpointManager(tmp_path)
    save(manager, 3)
    manager.wait_until_finished()
    assert restore(tmp_path) == 3


# ----------------------------------------------------------------------------- files that are wrong


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("intact")
    manager = ocp.CheckpointManager(directory)
    for step in (1, 2):
        save(manager, step)
    manager.wait_until_finished()
    return directory


def flipped(where: float) -> Callable[[Path], None]:
    """Changes one bit at a part of the file."""

    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        if data:
            data[int(where * (len(data) - 1))] ^= 0x10
            path.write_bytes(data)

    return change


def truncated(part: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(part * path.stat().st_size))


CHANGES: dict[str, Callable[[Path], None]] = {
    "flipped": flipped(0.5),
    "truncated": truncated(0.5),
    "gone": Path.unlink,
    "first bit": flipped(0.0),
    "last bit": flipped(1.0),
    "empty": truncated(0.0),
    "a quarter": flipped(0.25),
    "three quarters": flipped(0.75),
}


def check_change(intact: Path, path: Path, change: Callable[[Path], None], copy: Path) -> bool:
    """Whether a changed file of step 2 is noticed; if it is not, it must not matter."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(intact, copy)
    change(copy / path)
    try:
        assert restore(copy, step=2) == 2
    except (wus.CheckpointError, wus.CorruptCheckpointError) as e:
        assert "step 2" in str(e)
        noticed = True
    else:
        noticed = False
    return noticed


def files_of(step: Path) -> list[Path]:
    return sorted(p.relative_to(step.parent) for p in step.rglob("*") if p.is_file())


def data_files(intact: Path) -> list[Path]:
    """Those that hold the large arrays."""
    large = 4 * 211 * 64 // 3 // 2
    return [p for p in files_of(intact / "2") if (intact / p).stat().st_size > large]


@pytest.mark.parametrize("kind", ["flipped", "truncated", "gone"])
def test_wrong_data_is_noticed_named_and_the_step_before_is_found(kind, intact, tmp_path):
    path = data_files(intact)[-1]
    copy = tmp_path / "copy"
    shutil.copytree(intact, copy)
    CHANGES[kind](copy / path)
    item = path.parts[1]
    with pytest.raises(wus.CorruptCheckpointError, match=rf"step 2: .*{item}.*\['large'\]"):
        restore(copy, step=2)
    with pytest.warns(wus.CorruptCheckpointWarning, match="step 2: .*Trying the step before"):
        assert restore(copy) == 1
    shutil.rmtree(copy / "1")
    with (
        pytest.warns(wus.CorruptCheckpointWarning),
        pytest.raises(wus.CorruptCheckpointError, match="no step is intact"),
    ):
        restore(copy)


def test_a_wrong_manifest_is_noticed(intact, tmp_path):
    path = next(p for p in files_of(intact / "2") if p.parts[1:] == ("wusharding", "metadata"))
    for kind in ("flipped", "truncated", "gone"):
        assert check_change(intact, path, CHANGES[kind], tmp_path / kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHANGES)
def test_any_file_may_be_wrong(kind, intact, tmp_path):
    noticed = [
        check_change(intact, path, CHANGES[kind], tmp_path / "copy")
        for path in files_of(intact / "2")
    ]
    assert sum(noticed) >= 4


def test_an_item_is_gone(intact, tmp_path):
    copy = tmp_path / "copy"
    for item in ("params", "opt_state", "wusharding"):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(intact, copy)
        shutil.rmtree(copy / "2" / item)
        with pytest.raises(wus.CheckpointError, match=f"step 2.*{item}"):
            restore(copy, step=2)
