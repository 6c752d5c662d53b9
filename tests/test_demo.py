import doctest
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import demo
from large_scale import hlo

ROOT = Path(__file__).parents[1]
GRAD_BYTES = 4000


def collective(kind: str, operand_bytes: int) -> hlo.Collective:
    return hlo.Collective(kind, "f32", operand_bytes, operand_bytes, "", 8, False)


GOOD = (collective("reduce-scatter", 3000), collective("reduce-scatter", 1000))
NORM = collective("all-reduce", 40)
WHOLE = collective("all-reduce", GRAD_BYTES)


def make_run(found, name="") -> demo.Run:
    run = demo.Run(name, lambda *_: ({}, {}), (), {"w": np.ones(1000, np.float32)}, ())
    run.collectives = list(found)
    return run


@pytest.mark.parametrize(
    ("found", "faults"),
    [
        ((*GOOD, NORM), []),
        ((*GOOD, WHOLE), ["all-reduces of 3.91 KiB, gradients are 3.91 KiB"]),
        ((*GOOD, *[NORM] * 2), ["all-reduces of 80 B, gradients are 3.91 KiB"]),
        ((NORM,), ["reduce-scatters of 0 B, gradients are 3.91 KiB"]),
        ((GOOD[0], NORM), ["reduce-scatters of 2.93 KiB, gradients are 3.91 KiB"]),
    ],
)
def test_collective_faults(found, faults):
    assert demo.collective_faults(found, GRAD_BYTES) == faults


def test_good_runs_have_no_faults():
    assert demo.find_faults(make_run([WHOLE]), make_run([*GOOD, NORM]), 1e-6) == []


@pytest.mark.parametrize(
    ("plain", "sharded", "difference", "fault"),
    [
        ([WHOLE], [*GOOD, NORM], 2e-4, "weights of shard_step differ by 2.0e-04, more than 1e-04"),
        ([WHOLE], [*GOOD, NORM], float("nan"), "weights of shard_step differ by nan"),
        ([WHOLE], [NORM], 0.0, "the step of shard_step has reduce-scatters of 0 B"),
        ([WHOLE], [*GOOD, WHOLE], 0.0, "the step of shard_step has all-reduces of 3.91 KiB"),
        ([*GOOD], [*GOOD], 0.0, "does not see the replicated step's all-reduce"),
    ],
)
def test_negative_control(plain, sharded, difference, fault):
    faults = demo.find_faults(make_run(plain), make_run(sharded, "shard_step"), difference)
    assert len(faults) == 1, faults
    assert fault in faults[0]


def test_relative_difference():
    a = {"w": np.array([[3.0, 4.0]]), "zero": np.zeros(3)}
    assert demo.relative_difference(a, a) == 0
    assert demo.relative_difference({**a, "w": np.array([[3.0, 4.5]])}, a) == 0.1
    assert demo.relative_difference({**a, "zero": np.ones(3)}, a) == np.inf


@pytest.mark.parametrize("name", ["w", "zero"])
def test_relative_difference_of_nan(name):
    a = {"w": np.ones(3), "zero": np.zeros(3)}
    assert np.isnan(demo.relative_difference({**a, name: np.full(3, np.nan)}, a))


def test_batches_are_the_same_for_a_step_and_differ_between_steps():
    data = demo.Digits.load()
    images, labels = data.batch(3)
    again, labels_again = data.batch(3)
    assert images.shape == (demo.BATCH, 8, 8, 1) and images.any()
    assert np.array_equal(images, again) and np.array_equal(labels, labels_again)
    assert not np.array_equal(images, data.batch(4)[0])


def test_shifted_images_are_moved_whole():
    images = np.zeros((50, 8, 8, 1), np.float32)
    images[:, 3, 4] = 1
    rows, columns = np.nonzero(demo._shifted(images, np.random.default_rng(0)))[1:3]
    assert len(rows) == 50
    assert set(zip(rows - 3, columns - 4, strict=True)) == {
        (dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)
    }


def test_doctests():
    failed, attempted = doctest.testmod(demo)
    assert attempted and not failed


def test_quick_demo(tmp_path):
    picture = tmp_path / "picture.png"
    command = [sys.executable, "-m", "benchmarks.demo", "--quick", "--out", str(picture)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in done.stdout
    rows = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if "│" in line}
    for column in (3, 4):
        ratio = rows["optimizer state on each device"].split("│")[column]
        assert 1 / 8 <= float(ratio.split("×")[1].strip(" )")) < 1.05 / 8
        assert "none" not in rows["reduce-scatter, put in"].split("│")[column]
    assert "none" in rows["reduce-scatter, put in"].split("│")[2]
    assert {
        "step, median",
        "update and collectives, median",
        "sent by each device, on a ring",
    } <= rows.keys()
    for name in ("shard_updates", "shard_step"):
        assert f"{name}\nWeight update sharded 8 ways over data" in done.stdout
