"""The command line: what it prints, writes and refuses, and with which exit codes."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from large_scale.topology import CHIPS
from wusharding.analysis.step_plan import StepPlan
from wusharding.analysis.times import NETWORKS, estimate, flows
from wusharding.analysis.traffic import Traffic
from wusharding.cli import main

ROOT = Path(__file__).parent.parent
EXAMPLE = """
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sizes import ROWS  # a file beside this one

MESH = AbstractMesh((64,), ("data",), axis_types=(AxisType.Explicit,))
TX = optax.adam(1e-3)


def shape(dims, spec=P(), dtype=jnp.float32, mesh=MESH):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))


def step(params, state, x):
    grads = jax.grad(lambda p: jnp.mean((x @ p["<w>"]) ** 2))(params)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def arguments(mesh=MESH):
    params = {"<w>": shape((ROWS, 512), mesh=mesh)}
    state = jax.eval_shape(TX.init, params)
    state = jax.tree.map(lambda x: shape(x.shape, dtype=x.dtype, mesh=mesh), state)
    return params, state, shape((128, ROWS), P("data"), mesh=mesh)


def example():
    return step, arguments()


def split():
    return step, arguments(), {"weights": "split", "formats": "dim", "donate_argnums": (0, 1)}


def on_devices():
    return step, arguments(jax.make_mesh((jax.device_count(),), ("data",)))


def one():
    return step, arguments(AbstractMesh((1,), ("data",), axis_types=(AxisType.Explicit,)))


def all_small():
    return step, arguments(), {"min_shard_elems": 10**6}


def nothing_goes_round():
    return (lambda w, x: jnp.mean(x @ w)), (shape((ROWS, 3)), shape((64, ROWS), P("data")))


def no_mesh():
    return step, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments())


def other_axis():
    return step, arguments(), {"axis": "model"}


def raises():
    return {}["absent"]


def unknown_option():
    return step, arguments(), {"wieghts": "split"}


def ends():
    raise SystemExit(0)


def interrupts():
    raise KeyboardInterrupt


def step_ends():
    def bad(params, state, x):
        raise SystemExit(3)

    return bad, arguments()


def talks():
    print("a word of the user's")
    return example()


def umlaut():
    def renamed(params, state, x):
        params, state = step({"<w>": params["größe"]}, state, x)
        return {"größe": params["<w>"]}, state

    params, state, x = arguments()
    return renamed, ({"größe": params["<w>"]}, state, x)


def few():
    return step, arguments()[:1]


def other_shapes():
    params, state, x = arguments()
    return step, (params, state, shape((128, ROWS + 1), P("data")))


def step_raises():
    def bad(params, state, x):
        raise RuntimeError("not today")

    return bad, arguments()


def no_pair():
    return step


def no_args():
    return step, 3


def no_step():
    return 3, ()


def no_options():
    return step, (), 3


CONSTANT = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "train.py").write_text(EXAMPLE, encoding="utf-8")
    (folder / "sizes.py").write_text("ROWS = 1000\n")
    (folder / "broken.py").write_text("import no_such_module\n")
    (folder / "ends.py").write_text("raise SystemExit(7)\n")
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("train", "broken", "sizes"):
        sys.modules.pop(name, None)


def test_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "train.py:example", "--target", "v5e"]) == 0
    text, errors = capsys.readouterr()
    assert "sharded 64 ways over data" in text
    assert re.search(r"\[1\]\[0\]\.mu\['<w>'\] +float32\[1000, 512\] +.+, \d+ each", text)
    assert "not-donated" in text
    assert re.search(r"update +\S+ us before, \S+ us sharded", text)
    assert errors == ""


def test_the_page_of_the_documentation_shows_what_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "analyze.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    (folder / "shown.py").write_text(code)
    assert main(["analyze", "shown.py:example"]) == 0
    printed = capsys.readouterr().out.splitlines()
    for line in shown.splitlines():
        assert any(p.startswith(line) for p in printed), line


def test_every_finding_is_in_the_documentation() -> None:
    codes = re.findall(
        r'yield Finding\(\s+"([a-z-]+)"',
        (ROOT / "wusharding" / "analysis" / "findings.py").read_text(),
    )
    listed = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "analyze.md").read_text(), re.M)
    assert sorted(codes) == sorted(listed)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "train.py:split", "--json", "--target", "h100"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_shards"] == 64
    assert plan["state_bytes"] == 2 * 1000 * 512 * 4 + 4
    assert plan["held_bytes"] == 2 * 1000 * 512 * 4 // 64 + 4  # along the dim that divides
    assert plan["weight_bytes"] == [1000 * 512 * 4, 1000 * 512 * 4 // 64]
    assert [f["code"] for f in plan["findings"]] == ["replicated-state"]
    assert plan["times"]["network"] == "h100"


def test_the_page_is_whole_and_loads_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", "train.py:example", "--html", "plan.html", "--target", "v5e"]) == 0
    page = (folder / "plan.html").read_text()
    assert "wrote plan.html" in capsys.readouterr().err
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|@import|https?:", page)
    seen = _Page()
    seen.feed(page)
    assert seen.open == []
    for text in ("[1][0].mu['<w>']", "not-donated", "reduce-scatter", "estimated on v5e"):
        assert text in seen.text
    # the state's bars: all of it as written, a 64th of that in the sharded step
    assert seen.widths("All state")[0] == 100
    assert seen.widths("All state")[1] == pytest.approx(100 / 64, abs=0.01)


class _Page(HTMLParser):
    """The text of a page, the tags left open, and the widths of the bars after a text."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.open = "", []
        self._widths: list[tuple[int, float]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        style = dict(attrs).get("style") or ""
        if style.startswith("width:"):
            self._widths.append((len(self.text), float(style[6:-1])))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def widths(self, name: str) -> list[float]:
        start = self.text.index(name)
        return [w for at, w in self._widths if at >= start][:2]


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("train.py", 2, "need FILE.py:FUNCTION"),
        ("train.py:", 2, "need FILE.py:FUNCTION"),
        ("absent.py:example", 2, "absent.py: there is no such file"),
        ("train.py:absent", 2, "has no function 'absent'. It has shape, step, arguments, example"),
        ("train.py:CONSTANT", 2, "has no function 'CONSTANT'"),
        ("broken.py:example", 1, "No module named 'no_such_module'"),
        ("train.py:raises", 1, 'return {}["absent"]'),
        ("train.py:no_pair", 1, "returned a function, need (step, args)"),
        ("train.py:no_args", 1, "args is a int, need a tuple"),
        ("train.py:no_step", 1, "step is a int, need a function"),
        ("train.py:no_options", 1, "options is a int, need a dict"),
        ("train.py:unknown_option", 1, "options: unknown ['wieghts']; shard_step takes mesh, axis"),
        ("train.py:ends", 1, "train.py:ends ended the process: sys.exit(0)"),
        ("train.py:step_ends", 1, "when it was traced, ended the process: sys.exit(3)"),
        ("ends.py:example", 1, "ends.py, when it was imported, ended the process: sys.exit(7)"),
        ("train.py:interrupts", 130, "wusharding: interrupted"),
        ("train.py:no_mesh", 1, "no mesh: found neither"),
        ("train.py:other_axis", 1, "model"),
        ("train.py:step_raises", 1, "not today"),
        ("train.py:few", 1, "missing 2 required positional arguments"),
        ("train.py:other_shapes", 1, 'jnp.mean((x @ p["<w>"]) ** 2)'),
        ("train.py:one", 3, "to shard over have size 1"),
        ("train.py:all_small", 3, "too small to split"),
        ("train.py:nothing_goes_round", 3, "no weights or state were found"),
    ],
)
def test_refuses(source: str, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", source]) == code
    errors = capsys.readouterr().err
    assert errors.startswith("wusharding: ")
    assert message in errors
    assert not re.search("wusharding/cli.py|jax/_src|contextlib.py|JAX_TRACEBACK", errors)


def test_a_page_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    older = Path("train.py").read_text()
    for path, message in {
        "absent/plan.html": "there is no folder absent; make it first",
        "..": "is a folder; need the name of a file",
        "./train.py": "is what is analysed; need the name of another file",
        "/dev/full": "No space left on device; nothing was written",
    }.items():
        assert main(["analyze", "train.py:example", "--html", path]) == 2
        assert f"--html {Path(path)}: {message}" in capsys.readouterr().err
    assert Path("train.py").read_text() == older


def test_an_older_page_stays_until_the_new_one_is_whole(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "plan.html").write_text("old")
    before = sorted(folder.iterdir())

    def full(self: Path, data: bytes) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    command = ["analyze", "train.py:example", "--html", "plan.html"]
    with monkeypatch.context() as patched:
        patched.setattr(type(folder), "write_bytes", full)
        assert main(command) == 2
    assert (folder / "plan.html").read_text() == "old"
    assert main(command) == 0
    assert "<html" in (folder / "plan.html").read_text()
    assert [p for p in sorted(folder.iterdir()) if p.name != "__pycache__"] == [
        p for p in before if p.name != "__pycache__"
    ]


def test_what_the_file_prints_is_no_part_of_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "train.py:talks", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["num_shards"] == 64 and "a word of the user's" in err


@pytest.mark.parametrize(
    ("shell", "code", "message"),
    [
        ("| true", 1, ""),
        ("> /dev/full", 1, "wusharding: the output: No space left on device\n"),
        (">&-", 0, ""),
    ],
)
def test_readers_that_have_had_enough(shell: str, code: int, message: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m wusharding analyze train.py:example {shell}"
    done = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (code, message)


def test_names_that_the_terminal_cannot_show() -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "wusharding", "analyze", "train.py:umlaut"],
        env=os.environ | plain | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert r"[0]['gr\xf6\xdfe']" in done.stdout


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["analyze"], ["analyze", "train.py:example", "--target", "v9"]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
    assert "v5e" in capsys.readouterr().err


def test_devices_that_come_too_late(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "train.py:on_devices", "--devices", "5"]) == 2
    assert "--devices 5: JAX runs already, with 8 devices" in capsys.readouterr().err
    for count in ("0", "-1", "99999999"):
        assert main(["analyze", "train.py:on_devices", "--devices", count]) == 2
        assert f"--devices: need 1 to 4096, got {count}" in capsys.readouterr().err


def test_virtual_devices_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "wusharding", "analyze", "train.py:on_devices"]
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [*command, "--devices", "4", "--json"],
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout)["num_shards"] == 4


# -------------------------------------------------------------------------------------------- times


def plan_of(before: list[Traffic], after: list[Traffic], shards: int = 8) -> StepPlan:
    return StepPlan(
        num_shards=shards,
        num_replicas=shards,
        axes=("data",),
        weights=(),
        state=(),
        update_ops=(0, 0),
        before=tuple(before),
        traffic=tuple(after),
        whole=(),
        owned=(0, 0),
    )


def test_a_reduce_scatter_and_an_all_gather_take_what_an_all_reduce_takes() -> None:
    size = 8 * 10**9
    plan = plan_of(
        [Traffic("all-reduce", "sums", 1, size)],
        [
            Traffic("reduce-scatter", "gradients", 1, size),
            Traffic("all-gather", "weights", 1, size // 8),
        ],
    )
    for network in NETWORKS.values():
        before, after = estimate(plan, network).collectives
        assert before == pytest.approx(after)
    # seven eighths of the bytes, there and back, over both directions of a ring
    assert estimate(plan, NETWORKS["v5e"]).collectives[0] == pytest.approx(0.14, rel=1e-3)


def test_phases_along_several_axes_count_once() -> None:
    size = 64 * 100
    plan = plan_of(
        [],
        [
            Traffic("reduce-scatter", "gradients along x", 1, size),
            Traffic("reduce-scatter", "gradients along y", 1, size // 8),
            Traffic("all-gather", "weights along y", 1, size // 64),
            Traffic("all-gather", "weights along x", 1, size // 8),
        ],
        shards=64,
    )
    assert [(f.kind, f.whole_bytes) for f in flows(plan.traffic, plan)] == [
        ("reduce-scatter", size),
        ("all-gather", size),
    ]


def test_beyond_a_domain_the_slower_network_counts() -> None:
    row = [Traffic("reduce-scatter", "gradients", 1, 10**9)]
    h100 = NETWORKS["h100"]
    inside = estimate(plan_of([], row, 8), h100).collectives[1]
    beyond = estimate(plan_of([], row, 64), h100).collectives[1]
    assert beyond - inside == pytest.approx(10**9 / 8 * 7 / 8 / 50e9)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_figures_are_those_of_the_topologies(name: str) -> None:
    network, chip = NETWORKS[name], CHIPS[name]
    both_ways = 2 if chip.platform == "tpu" else 1
    assert network.platform == chip.platform
    assert network.bytes_per_second == both_ways * chip.link_bytes_per_second
    assert network.hop_seconds == chip.hop_seconds
    assert network.memory_bytes_per_second == chip.hbm_bytes_per_second
    assert chip.cores == 1
    if network.domain:
        assert network.far_bytes_per_second == chip.far_bytes_per_second
