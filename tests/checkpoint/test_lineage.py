"""Whose checkpoints a run may delete: its own, and those of the run that it continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job, write_json
from jobs import dsjob

from dsjob import storage
from dsjob.checkpoint.root.attempts import Attempt, Lineage, claim
from dsjob.checkpoint.root.catalog import Catalog
from dsjob.checkpoint.root.garbage import clear, find_garbage
from dsjob.checkpoint.root.retention import Retention
from dsjob.errors import CheckpointError


@pytest.fixture(params=["path", "memory"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    return Catalog(str(tmp_path / "c") if request.param == "path" else f"memory://{tmp_path}/c")


def begin(catalog: Catalog, file: str | None, run_dir: str = "/runs/a", **named: bool) -> Attempt:
    return claim(catalog.url, lineage=Lineage(file, run_dir, **{"everything": file is None, **named}))


def save(catalog: Catalog, attempt: Attempt, *steps: int) -> None:
    for step in steps:
        folder = attempt.name_folder(tag := f"step-{step:08d}")
        storage.make_folder(storage.join(catalog.url, folder))
        catalog.commit(folder, {"tag": tag, "step": step}, attempt, latest=True)


def steps(catalog: Catalog) -> list[int]:
    return [record["step"] for record in catalog.records()]


def test_a_run_deletes_only_its_own_checkpoints(catalog: Catalog) -> None:
    save(catalog, begin(catalog, "/a.yaml"), 1, 2, 3)
    other = begin(catalog, "/b.yaml")
    save(catalog, other, 4, 5)
    catalog.retire(Retention(1), other)
    assert steps(catalog) == [1, 2, 3, 5]
    again = begin(catalog, "/a.yaml", "/runs/b")  # the same document continues its run, past the other
    save(catalog, again, 6)
    catalog.retire(Retention(1), again)
    assert steps(catalog) == [5, 6]
    assert [again.owns(number) for number in (1, 2, 3)] == [True, False, True]


def test_a_run_continues_what_the_user_names(catalog: Catalog) -> None:
    first = begin(catalog, "/a.yaml")
    assert (
        begin(catalog, "/runs/b/resolved.json", "/runs/b", resumed=True).run != first.run
    )  # only the document has named it
    assert begin(catalog, "/runs/a/resolved.json", resumed=True).run == first.run
    assert begin(catalog, "/c.yaml", "/runs/c", everything=True).owns(first.number)
    assert begin(catalog, None, "/runs/d").owns(first.number)


def test_a_job_without_a_document_is_continued_by_none(catalog: Catalog) -> None:
    first = begin(catalog, None)
    assert not begin(catalog, "/b.yaml").owns(first.number)


def test_attempts_from_before_count_as_the_runs_own(catalog: Catalog) -> None:
    old = begin(catalog, "/a.yaml")
    save(catalog, old, 1)
    record = storage.join(catalog.url, "attempts", "a0001.json")
    known = json.loads(storage.read_bytes(record))
    storage.write_bytes(record, json.dumps({key: known[key] for key in known if key not in ("run", "file")}).encode())
    new = begin(catalog, "/b.yaml")
    save(catalog, new, 2)
    catalog.retire(Retention(1), new)
    assert steps(catalog) == [2]
    assert begin(catalog, "/b.yaml").owns(1)


def test_a_run_does_not_go_back_behind_checkpoints_of_another(catalog: Catalog) -> None:
    first = begin(catalog, "/a.yaml")
    save(catalog, first, 1, 2, 3)
    with pytest.raises(CheckpointError, match="a later checkpoint of another run, step-00000003") as caught:
        catalog.set_aside(1, begin(catalog, "/b.yaml"))
    assert "checkpoint.dir=" in caught.value.hint
    assert steps(catalog) == [1, 2, 3]
    catalog.set_aside(1, begin(catalog, "/a.yaml"))
    assert steps(catalog) == [1]


def test_a_run_leaves_unfinished_saves_of_another(catalog: Catalog) -> None:
    first = begin(catalog, "/a.yaml")
    folder = first.name_folder("step-00000001")
    storage.make_folder(storage.join(catalog.url, folder, "done"))
    storage.write_bytes(storage.join(catalog.url, folder, "done", "r00000.json"), b"{}")
    other = begin(catalog, "/b.yaml")
    assert clear(catalog.url, other) == ()
    assert [item.kept for item in find_garbage(catalog.url, older_than=0.0, asking=other)] == [
        "another run has written it"
    ]
    assert folder in storage.list_names(catalog.url)
    assert clear(catalog.url, begin(catalog, "/a.yaml")) == ()
    assert folder not in storage.list_names(catalog.url)


# ---- whole jobs


def make(name: str, steps: int = 3, **checkpoint: Any) -> None:
    sections: dict[str, Any] = {
        "model": {"_target_": "dsjob.recipes.gpt.build", "layers": 1, "width": 16, "heads": 1, "context": 8},
        "data": {"train": {"_target_": "dsjob.recipes.text.ByteText", "context": 8, "max_bytes": 400}},
        "trainer": {"train_batch": 2, "max_steps": steps},
        "launch": {"device": "cpu"},
        "checkpoint": {"every": 1, "keep": 1, **checkpoint},
    }
    output = {"dir": "runs/victim"} if "dir" not in checkpoint else {"dir": "runs/evil"}
    write_json(Path(name), make_job(**sections, output=output))


def list_kept() -> list[int]:
    return sorted(int(path.stem[5:]) for path in Path("runs/victim/checkpoints/commits").iterdir())


def run(*arguments: str) -> Any:
    return dsjob("run", *arguments, cwd=Path.cwd())


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with three checkpoints, of the job in a.json."""
    monkeypatch.chdir(tmp_path)
    make("a.json", keep=3)
    assert run("a.json").returncode == 0
    assert list_kept() == [1, 2, 3]


@pytest.mark.usefixtures("victim")
def test_a_document_deletes_no_checkpoints_of_another_run() -> None:
    make("evil.json", 5, dir="runs/victim/checkpoints", resume="auto")
    done = run("evil.json")
    assert done.returncode == 0, done.stderr
    assert "3 checkpoints of another run, such as step-00000003: this run deletes only its own" in done.stdout
    assert list_kept() == [1, 2, 3, 5]
    make("evil.json", 7)  # in the run's own folder
    assert run("evil.json").returncode == 0
    assert list_kept() == [1, 2, 3, 7]
    make("evil.json", 9, dir="runs/victim/checkpoints", resume="step-00000001")
    done = run("evil.json")
    assert "has a later checkpoint of another run, step-00000003" in done.stderr
    assert list_kept() == [1, 2, 3, 7]


@pytest.mark.usefixtures("victim")
def test_the_name_of_a_document_is_nothing_that_the_user_has_said() -> None:
    """Places of the command line are shown as `command line: KEY=VALUE`."""
    make(name := "command line: checkpoint.dir=.json", 5, dir="runs/victim/checkpoints")
    assert run(name).returncode == 0
    assert list_kept() == [1, 2, 3, 5]


@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize(
    "arguments",
    [
        ["a.json", "trainer.max_steps=5"],
        ["runs/victim", "trainer.max_steps=5"],
        ["b.json", "output.dir=runs/victim", "trainer.max_steps=5"],
        ["b.json", "checkpoint.dir=runs/victim/checkpoints", "output.dir=runs/b", "trainer.max_steps=5"],
    ],
    ids=["the document", "its folder", "the folder by name", "the root by name"],
)
def test_a_run_that_the_user_continues_is_its_own(arguments: list[str]) -> None:
    make("b.json")
    done = run(*arguments, "checkpoint.keep=1")
    assert done.returncode == 0, done.stderr
    assert "another run" not in done.stdout
    assert list_kept() == [5]
