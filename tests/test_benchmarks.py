import json

import jax
import optax
import pytest
from jax.sharding import Mesh

from benchmarks import step, step_models, step_programs, update, update_programs


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("update")
    paths = {"json": folder / "update.json", "plot": folder / "update.png"}
    options = ["--params=0.0015", "--optimizers=sgd", "--steps=2", "--leaves=12", "--repeats=1"]
    data = update.main([*options, *(f"--{kind}={path}" for kind, path in paths.items())])
    assert paths["plot"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(paths["json"].read_text())["cases"] == json.loads(json.dumps(data["cases"]))
    return data


def test_update_variants_compute_the_same_and_move_what_they_should(report):
    (case,) = report["cases"]
    rows = {row["variant"]: row for row in case["rows"]}
    assert list(rows) == list(update_programs.VARIANTS)
    assert all(row["max_difference"] < 1e-3 for row in rows.values())
    assert rows["replicated"]["collectives"] == {"all-reduce": 1}
    assert rows["replicated"]["sent_ratio"] == pytest.approx(1, abs=1e-3)
    for name in ("ours-manual", "ours-explicit"):
        # Beside the gradients' reduce-scatter and the weights' all-gather there is padding only.
        assert set(rows[name]["collectives"]) == {"reduce-scatter", "all-gather"}
        assert 1 <= rows[name]["sent_ratio"] < 1.25
    whole = rows["replicated"]["state_bytes"]
    for name in ("ours-manual", "ours-explicit", "ours-auto"):
        assert whole / 8 <= rows[name]["state_bytes"] < 1.25 * whole / 8


def test_update_times_every_part_and_every_stage(report):
    (case,) = report["cases"]
    for row in case["rows"]:
        assert row["step_ms"]["low"] <= row["step_ms"]["median"] <= row["step_ms"]["high"]
        update_program, moves = update.PARTS[row["variant"]]
        for part in (update_program, *moves):
            assert case["phases_ms"][part]["median"] > 0
            assert f"empty:{part}" in case["phases_ms"]
    assert [s["name"] for s in report["stages"]] == ["0.0015 M", "many small"]
    assert all(s["ours"]["compile"] > 0 for s in report["stages"])


@pytest.mark.parametrize("millions", [0.0015, 0.1, 25, 50])
def test_transformer_shapes_have_about_the_elements_asked_for(millions):
    shapes = update_programs.transformer_shapes(round(millions * 1e6))
    assert update_programs.num_elems(shapes) == pytest.approx(millions * 1e6, rel=0.02)


@pytest.fixture(scope="module")
def step_report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step")
    sizes = ["--cases=mlp-adam", "--depth=1", "--width=8", "--rounds=2"]
    growth = ["--leaves", "2", "4", "--layers"]
    data = step.main([*sizes, *growth, f"--page={folder}/step.md", f"--json={folder}/step.json"])
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "step.json").read_text())["growth"] == data["growth"]
    return data, (folder / "step.md").read_text()


def test_steps_learn_the_same_and_hold_and_move_what_they_should(step_report):
    data, _ = step_report
    (case,) = data["cases"]
    assert len(case["rows"]) == 8
    assert all(row["loss_difference"] < 1e-5 for row in case["rows"])
    rows = {(row["written"], row["variant"]): row for row in case["rows"]}
    for written in step_programs.WRITTEN:
        plain, zero1, whole, split = (rows[written, v] for v in step_programs.VARIANTS)
        assert set(plain["collectives"]) == {"all-reduce"}
        for row in (zero1, whole, split):
            assert plain["state_bytes"] / 8 <= row["state_bytes"] < plain["state_bytes"] / 7
        assert split["weight_bytes"] == plain["weight_bytes"] / 8
        assert whole["weight_bytes"] == plain["weight_bytes"]
        # Beside the gradients' scatter and the weights' gather there is the loss, in 4 bytes.
        for row in (whole, split):
            assert row["collectives"] == dict.fromkeys(row["collectives"], 1)
            assert {"reduce-scatter", "all-gather"} < set(row["collectives"])
            assert row["sent_bytes"] <= plain["sent_bytes"] + 8


def test_the_page_has_every_step_and_every_size(step_report):
    data, page = step_report
    assert "![steps and growth](step.png)" in page
    for row in data["cases"][0]["rows"]:
        assert f"| {row['written']} | {row['variant']} |" in page
    assert [g["num_leaves"] for g in data["growth"]] == [2, 4]
    assert "from 2 to 4 arrays" in page


@pytest.mark.parametrize("written", step_programs.WRITTEN)
def test_every_weight_of_the_transformer_is_split(written, mesh8_auto: Mesh):
    model = step_models.decoder(16, layers=1, examples=8, length=8)
    steps = step_programs.Steps(model, optax.lamb(1e-3), written, mesh8_auto)
    plan = steps.sharded("shard_step").plan_for(*steps.abstract())
    assert len(plan.updates) == len(jax.tree.leaves(model.abstract_params()))
    assert {leaf.why for leaf in plan.updates} == {""}
    assert "replicated" not in {leaf.format for leaf in plan.updates}


def test_growth_is_the_power_of_the_number_of_arrays():
    a, b = (
        step.Growth("", n, n, {}, {"plan": n**2, "lower": 0.0, "compile": 1.0}) for n in (10, 40)
    )
    assert step.exponent(a, b) == pytest.approx(2)
