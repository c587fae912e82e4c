"""The report of runs: what is in the page, what a browser draws, and how large files are thinned."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dsjob.cli import main
from dsjob.report.series import BUCKETS, Curve, read_curves

HOSTILE = "</script><script>document.title='owned'</script>"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def write_run(folder: Path, name: str, lr: float) -> None:
    folder.mkdir(parents=True)
    document = {"name": name, "optimizer": {"type": "AdamW", "params": {"lr": lr}}, "checkpoint": {"keep": 7}}
    (folder / "resolved.json").write_text(json.dumps(document))
    records = [{"step": step, "loss": 1 / step, "lr": lr, HOSTILE: 1.0} for step in range(1, 50)]
    lines = [*map(json.dumps, records), '{"step": 50, "loss": null}', '{"step": 51, "lo']
    (folder / "metrics.jsonl").write_text("\n".join(lines))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    pytest.importorskip("plotly")
    write_run(tmp_path / "runs/a", HOSTILE, 0.1)
    write_run(tmp_path / "runs/b", "b", 0.2)
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")]) == 0
    return tmp_path / "page.html"


def test_the_page_holds_the_curves_and_settings_and_escapes_names(page: Path) -> None:
    text = page.read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    data = json.loads(found[1])
    assert set(data["runs"]) == {HOSTILE, "b"}
    assert [chart["metric"] for chart in data["charts"]] == ["loss", "lr", HOSTILE]
    assert [(len(line["x"]), line["notFinite"]) for line in data["charts"][0]["lines"]] == [(49, 1)] * 2
    assert "optimizer.params.lr" in [axis["label"] for axis in data["axes"]]
    assert "<td>checkpoint.keep</td>" in text
    assert HOSTILE not in text
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=", text.split('<script type="application/json"')[0])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome")
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_a_browser_draws_every_curve(page: Path, scheme: int) -> None:
    assert CHROMIUM
    flags = ["--headless", "--no-sandbox", "--virtual-time-budget=8000", "--enable-unsafe-swiftshader"]
    scheme_flag = f"--blink-settings=preferredColorScheme={scheme}"
    command = [CHROMIUM, *flags, scheme_flag, "--dump-dom", page.as_uri()]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert drawn.count('class="trace scatter') == 6  # three metrics of two runs
    assert "<title>2 runs" in drawn
    assert 'class="parcoords' in drawn or "parcoords" in drawn.split('id="parallel"')[1][:5000]
    assert ("rgb(230, 234, 240)" in drawn) == (scheme == 0)


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
