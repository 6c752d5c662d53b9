import json

import pytest

from benchmarks import update, update_programs


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
