"""The timeline as text and as a picture; what `dsjob plan --schedule` and the report show of it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dsjob.cli import main
from dsjob.pipelines.drawing import draw_svg, draw_text
from dsjob.pipelines.orders import SCHEDULES
from dsjob.pipelines.timeline import Timeline, simulate


def follow(name: str, micro: int, stages: int, chunks: int = 1) -> Timeline:
    made = [SCHEDULES[name](micro, stages, stage, chunks) for stage in range(stages)]
    return simulate([[each for step in one for each in step] for one in made], chunks)


def test_1f1b_as_text() -> None:
    assert draw_text(follow("1f1b", 2, 2)) == [
        "stage 0  F0 F1 ......B0    ...B1    ",
        "stage 1  ...F0 B0    F1 B1    ......",
        "F forward, B backward; . waiting: 33.3% of the time",
    ]


def test_long_timelines_have_no_numbers_and_are_cut() -> None:
    first, *_, told = draw_text(follow("interleaved", 64, 4, 2))
    assert first.endswith("...")
    assert len(first) < 170
    assert "waiting:" in told


def test_the_picture_has_a_box_for_each_pass() -> None:
    timeline = follow("zero-bubble", 4, 3)
    root = ElementTree.fromstring(draw_svg(timeline))
    boxes = [each for each in root if each.tag.endswith("rect")]
    assert len(boxes) == sum(map(len, timeline.ranks))
    assert {box[0].text for box in boxes} >= {"F0", "I3", "W3"}


def test_plan_prints_the_timeline_without_building_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cfg.yaml").write_text("model: {_target_: not.there}\npipeline: {stages: 2, micro_batches: 2}\n")
    assert main(["plan", str(tmp_path / "cfg.yaml"), "--schedule"]) == 0
    assert capsys.readouterr().out.splitlines() == draw_text(follow("1f1b", 2, 2))
    given = ["plan", str(tmp_path / "cfg.yaml"), "--schedule", "--format", "json", "pipeline.schedule=gpipe"]
    assert main(given) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bubble"] == pytest.approx(1 / 3)
    assert told["ranks"][0][0] == {"kind": "F", "chunk": 0, "micro": 0, "start": 0.0, "end": 1.0}
    assert main(["plan", str(tmp_path / "cfg.yaml"), "--schedule", "pipeline.stages=1"]) == 2
    assert "the document has no pipeline" in capsys.readouterr().err
