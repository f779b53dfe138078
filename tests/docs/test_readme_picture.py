"""The README's picture shows committed numbers, all of one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from script_modules import load_script

render = load_script("render_readme_picture")

FILES = sorted(render.RESULTS.glob("ops_*.json"))


def test_every_bar_is_a_row_of_one_run() -> None:
    run, bars = render.collect(FILES)
    rows = [row for path in FILES for row in json.loads(path.read_text())["rows"] if row["run"] == run.id]
    for bar in bars:
        for measure, value in bar.values.items():
            library = "fla-tilelang" if bar.note else bar.library
            settings = {"shape": str(render.SHAPE), "op": bar.rule, "library": library, "measure": measure}
            [row] = [row for row in rows if settings.items() <= row.items()]
            assert row["value"] == value
    assert {(bar.rule, bar.library) for bar in bars} >= render.NEEDED


def test_where_flash_linear_attention_fails_its_bar_shows_it_with_tilelang(tmp_path: Path) -> None:
    [path] = [path for path in FILES if path.name == "ops_h200_train_small_narrow.json"]
    content = json.loads(path.read_text())
    with_tilelang = [
        row | {"library": "fla-tilelang", "value": 3.0, "error": None}
        for row in content["rows"]
        if (row["op"], row["library"]) == ("gdn", "fla")
    ]
    content["rows"] += with_tilelang + [row | {"library": "flashqla", "value": 1.2} for row in with_tilelang]
    changed = tmp_path / "ops_changed.json"
    changed.write_text(json.dumps(content))
    _, bars = render.collect([changed])
    found = {bar.library: bar for bar in bars if bar.rule == "gdn"}
    assert found["fla"].values["forward_backward_ms"] == 3.0 and found["fla"].note == " with TileLang"
    assert found["flashqla"].values["forward_backward_ms"] == 1.2 and not found["flashqla"].note


def test_a_run_without_a_peer_gives_no_picture(tmp_path: Path) -> None:
    content = json.loads(FILES[0].read_text())
    content["rows"] = [row for row in content["rows"] if row["library"] != "fla"]
    path = tmp_path / "ops_without_fla.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="no run has deltazoo and fla for every rule"):
        render.collect([path])


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    path = render.draw(tmp_path / "picture.png", *render.collect(FILES))
    assert path.stat().st_size > 10_000 and render.PICTURE.exists()
