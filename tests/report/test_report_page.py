"""The report of runs: what is in the page, what a browser draws, and how large files are thinned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser

from dsjob import provenance
from dsjob.cli import main
from dsjob.report.gather import gather
from dsjob.report.series import BUCKETS, Curve, read_curves

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"


def write_run(folder: Path, name: str, lr: float, **document: object) -> None:
    folder.mkdir(parents=True)
    content = {
        "name": name,
        "optimizer": {"type": "AdamW", "params": {"lr": lr}},
        "checkpoint": {"keep": 7},
        **document,
    }
    (folder / "resolved.json").write_text(json.dumps(content))
    memory = {"memory/weights_gib": 1.5}
    records = [{"step": step, "loss": lr / step, "lr": lr, HOSTILE: 1.0, **memory} for step in range(1, 50)]
    lines = [*map(json.dumps, records), '{"step": 50, "loss": null}', '{"step": 51, "lo']
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "result.json").write_text(json.dumps({"status": "failed", "error": HOSTILE}))
    provenance.append(str(folder), {"packages": {HOSTILE: "1.0"}, "git": {"commit": "c0ffee", "diff": f"+{HOSTILE}"}})


def read_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture
def page(tmp_path: Path) -> Path:
    pytest.importorskip("plotly")
    write_run(tmp_path / "runs/a", HOSTILE, 0.1, model={"_target_": HOSTILE, "size": 2})
    pipe = {"pipeline": {"stages": 2}, "trainer": {"grad_accum": 4}}
    write_run(tmp_path / "runs/b", "b", 0.02, model={"_target_": "my.Net", "size": 10}, **pipe)
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")]) == 0
    return tmp_path / "page.html"


def test_the_page_holds_the_curves_and_settings_and_escapes_names(page: Path) -> None:
    text = page.read_text()
    data = read_data(text)
    assert set(data["runs"]) == {HOSTILE, "b"}
    titles = [(chart["title"], chart["unit"]) for chart in data["charts"]]
    assert titles == [("Training loss", ""), ("Learning rate", ""), (HOSTILE, ""), ("Memory: weights", "GiB")]
    assert [(len(line["x"]), line["notFinite"]) for line in data["charts"][0]["lines"]] == [(49, 1)] * 2
    assert {"optimizer.params.lr", "model.size", "loss"} <= {axis["label"] for axis in data["axes"]}
    assert "<td>checkpoint.keep</td>" in text
    assert "<td>c0ffee</td>" in text
    assert text.count("Timeline of 2 pipeline stages") == 1
    assert HOSTILE not in text
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=", text.split('<script type="application/json"')[0])


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"lr": 0.1}, "the settings of the runs are equal"),
        (
            {"lr": 0.2, "checkpoint": {"keep": 7, "best": {"metric": "lr"}}},
            r"the runs have different metrics \(loss, lr\)",
        ),
    ],
)
def test_the_page_says_why_it_draws_no_settings(tmp_path: Path, second: dict[str, Any], why: str) -> None:
    pytest.importorskip("plotly")
    write_run(tmp_path / "runs/a", "a", 0.1)
    write_run(tmp_path / "runs/b", "b", **second)
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")]) == 0
    assert re.search(f'<p class="note">Not drawn: {why}', (tmp_path / "page.html").read_text())


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome")
@pytest.mark.parametrize(("width", "dark"), [(390, True), (390, False), (1280, True)])
@pytest.mark.full("390-False", "1280-True")
def test_a_browser_draws_every_curve(page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    with Browser(tmp_path / "profile", width=width, height=800, dark=dark) as browser:
        browser.open(page.as_uri(), "document.querySelectorAll('#parallel .trace').length === 2")
        assert browser.problems == []
        assert [url for url in browser.requests if not url.startswith(("file:", "data:", "blob:"))] == []
        assert browser.evaluate("document.title") == "2 runs · dsjob"
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        assert browser.evaluate("document.querySelectorAll('#curves .scatterlayer .trace').length") == 4 * 2 + 2 * 2
        # Charts and text fit their cards, and the axes lie on a phone.
        edges = "[...document.querySelectorAll('.main-svg text')].map((each) => each.getBoundingClientRect())"
        assert browser.evaluate(f"{edges}.every((box) => box.left >= 0 && box.right <= {width})")
        size = browser.evaluate(
            "(({width, height}) => [width, height])(document.getElementById('parallel').getBoundingClientRect())"
        )
        assert (size[0] < size[1]) == (width == 390)
        ink = browser.evaluate("getComputedStyle(document.querySelector('#parallel text')).fill")
        assert ink == ("rgb(230, 234, 240)" if dark else "rgb(28, 36, 48)")

        order = "[...document.querySelectorAll('table.sortable tbody tr')].map((row) => row.cells[0].textContent)"
        heads = "[...document.querySelectorAll('table.sortable th button')]"
        click = f"{heads}.find((each) => each.textContent === 'loss').click()"
        browser.evaluate(click)
        assert browser.evaluate(order) == ["b", HOSTILE]
        browser.evaluate(click)
        assert browser.evaluate(order) == [HOSTILE, "b"]
        browser.evaluate("document.querySelector('#controls button').click()")
        assert browser.evaluate("document.querySelectorAll('#curves .scatterlayer .trace').length") == 4 + 2
        # A constant is not drawn at the height of 0.
        rates = "document.querySelectorAll('#curves .plot')[1]._fullLayout.yaxis.range"
        assert browser.evaluate(rates) == [0, 0.2]
        assert browser.evaluate("document.title") == "2 runs · dsjob"


def test_settings_that_nobody_has_set_are_no_changes(tmp_path: Path) -> None:
    trainer = {"train_batch": 64, "micro_batch": 16, "grad_accum": 4, "max_steps": 9, "log_every": 5}
    write_run(tmp_path / "a", "a", 0.1, trainer=trainer)
    assert {f"trainer.{key}" for key in trainer} <= gather([str(tmp_path)])[0].changed.keys()
    first = {
        "trainer.train_batch": "a.yaml:1:1",
        "trainer.micro_batch": "derived: ...",
        "trainer.grad_accum": "default",
    }
    resumed = {path: f"runs:a/resolved.json:{line}:5" for line, path in enumerate(first)}
    more = {"trainer.max_steps": "command line: trainer.max_steps=9", "trainer.log_every": "default"}
    lines = [json.dumps({"origins": origins}) for origins in (first, {**resumed, **more})]
    (tmp_path / "a/job.jsonl").write_text("\n".join([*lines, '{"origins": {"trainer.train_batch": "def']))
    changed = [path for path in gather([str(tmp_path)])[0].changed if path.startswith("trainer.")]
    assert changed == ["trainer.train_batch", "trainer.max_steps"]


def test_infinite_settings_and_broken_characters_are_shown(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    write_run(tmp_path / "runs/a", "a", 0.1, model={"limit": float("inf")})
    write_run(tmp_path / "runs/b", "\ud800", 0.1, model={"limit": 1})
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")]) == 0
    (limit, _) = read_data((tmp_path / "page.html").read_text())["axes"]
    assert sorted(limit["texts"]) == ["1", "inf"]


def test_a_run_without_metrics_has_a_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/resolved.json").write_text('{"name": "a"}')
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "new" / "page.html")]) == 0
    text = (tmp_path / "new" / "page.html").read_text()
    assert "No metrics were logged" in text
    assert "Not recorded." in text


def test_a_curve_keeps_its_peaks_in_little_memory() -> None:
    curve = Curve()
    for step in range(100_000):
        curve.add(step, 1000.0 if step == 54_321 else -1000.0 if step == 77_777 else step % 10)
    points = curve.list_points()
    assert len(points) <= 2 * BUCKETS + 1
    assert points == sorted(points)
    assert {(54_321, 1000.0), (77_777, -1000.0), (99_999, 9)} <= set(points)


def test_a_run_without_metrics_has_no_curves(tmp_path: Path) -> None:
    assert read_curves(str(tmp_path)) == {}


def test_a_folder_without_runs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 2
    assert "no runs in" in capsys.readouterr().err
