"""Commit records: what is a checkpoint, what stays of it, and what a crash between two writes leaves."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.root import garbage
from dsjob.checkpoint.root.attempts import Attempt, claim
from dsjob.checkpoint.root.catalog import Catalog
from dsjob.checkpoint.root.garbage import clear
from dsjob.checkpoint.root.retention import Best, Retention
from dsjob.errors import CheckpointError, NoCheckpointError, StorageError


@pytest.fixture(params=["path", "memory"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    return Catalog(str(tmp_path / "c") if request.param == "path" else f"memory://{tmp_path}/c")


def commit(
    catalog: Catalog, step: int, *, attempt: int = 1, tag: str | None = None, metrics: Any = None, **options: Any
) -> str:
    tag = tag or f"step-{step:08d}"
    folder = f"{tag}-a{attempt:04d}"
    storage.make_folder(storage.join(catalog.url, folder, "done"))
    storage.write_bytes(storage.join(catalog.url, folder, "done", "r00000.json"), b"{}")
    number = Attempt(catalog.url, attempt, True)
    catalog.commit(folder, {"tag": tag, "step": step}, number, metrics=metrics, **{"latest": True, **options})
    return folder


def list_folders(catalog: Catalog) -> list[str]:
    return [name for name in storage.list_names(catalog.url) if "-a0" in name]


def test_the_newest_stay(catalog: Catalog) -> None:
    folders = [commit(catalog, step) for step in (1, 2, 3)]
    catalog.retire(Retention(2))
    assert [record["step"] for record in catalog.records()] == [2, 3]
    assert list_folders(catalog) == folders[1:]
    catalog.retire(Retention(0))
    assert len(catalog.records()) == 2
    assert catalog.find(None)["tag"] == "step-00000003"


def test_a_folder_without_a_record_does_not_exist(catalog: Catalog) -> None:
    commit(catalog, 1)
    storage.make_folder(storage.join(catalog.url, "step-00000002-a0001"))
    storage.write_bytes(storage.join(catalog.url, "step-00000002-a0001", "manifest.json"), b"{}")
    assert catalog.find(None)["tag"] == "step-00000001"
    with pytest.raises(NoCheckpointError):
        catalog.find("step-00000002")
    assert claim(catalog.url).number == 2


def test_latest_is_followed_on_request_alone(catalog: Catalog) -> None:
    assert catalog.follow_latest() == (None, "")
    commit(catalog, 1)
    commit(catalog, 2, latest=False)
    assert storage.read_text(storage.join(catalog.url, "latest")) == "step-00000001\n"
    assert catalog.find(None)["tag"] == "step-00000002"
    assert catalog.follow_latest() == ("step-00000001", "")


def test_a_tag_has_one_winner_unless_it_is_to_be_replaced(catalog: Catalog) -> None:
    commit(catalog, 1, tag="best")
    with pytest.raises(CheckpointError, match="already has a checkpoint best"):
        commit(catalog, 2, attempt=2, tag="best")
    catalog.discard("best", "best-a0002")
    assert list_folders(catalog) == ["best-a0001"]
    commit(catalog, 2, attempt=3, tag="best", replace=True)
    assert catalog.find("best")["step"] == 2
    assert list_folders(catalog) == ["best-a0003"]
    catalog.discard("best", "best-a0003")
    assert list_folders(catalog) == ["best-a0003"]


@pytest.mark.parametrize(
    ("limit", "name"), [("MAX_MANIFEST", "step-00000002-a0001/manifest"), ("MAX_RECORD", "commits/step-00000002")]
)
def test_what_no_reader_takes_is_no_checkpoint(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, limit: str, name: str
) -> None:
    commit(catalog, 1)
    with monkeypatch.context() as patched:
        patched.setattr(layout, limit, 20)
        with pytest.raises(CheckpointError, match=rf"{name}\.json would have \d+ bytes; the limit is 20"):
            commit(catalog, 2)
    assert [record["step"] for record in catalog.records()] == [1]


class Answer(Exception):  # noqa: N818 (as stores' libraries have it)
    def __init__(self, status: int | None) -> None:
        super().__init__("an answer" if status else "no answer")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize("behind", [None, 403, 503])
@pytest.mark.parametrize("status", [None, 400, 403, 404, 408, 409, 412, 429, 500, 503])
def test_a_folder_stays_where_its_record_may_yet_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, behind: int | None
) -> None:
    """`behind`: what came back before, where `status` is of reading back what became of it."""
    catalog = Catalog(f"memory://{tmp_path}/c")

    def refuse(*_: Any, **__: Any) -> None:
        try:
            if behind:
                raise Answer(behind)
            raise Answer(status)
        except Answer as error:
            if not behind:
                raise StorageError("cannot create") from error
            try:
                raise Answer(status)
            except Answer as unread:
                raise StorageError("cannot create") from unread

    monkeypatch.setattr(storage, "create_bytes", refuse)
    with pytest.raises(StorageError):
        commit(catalog, 1)
    catalog.discard("step-00000001", "step-00000001-a0001")
    gone = status in (400, 403, 404) and behind in (None, 403)
    assert bool(list_folders(catalog)) != gone


def test_going_back_keeps_what_came_later_out_of_the_way(catalog: Catalog) -> None:
    folders = [commit(catalog, step) for step in (1, 2, 3)]
    catalog.set_aside(1)
    assert [record["step"] for record in catalog.records()] == [1]
    assert storage.list_names(storage.join(catalog.url, "superseded")) == [f"{name}.json" for name in folders[1:]]
    commit(catalog, 2, attempt=2)
    assert catalog.find(None)["tag"] == "step-00000002"


def test_what_is_to_stay_by_any_rule_stays(catalog: Catalog) -> None:
    losses = [0.5, 0.2, 0.9, 0.3, float("nan"), 0.8, 0.7, 0.6]
    for step, loss in enumerate(losses, start=1):
        commit(catalog, step, metrics={"eval/loss": loss} if loss == loss else None)
    storage.make_folder(storage.join(catalog.url, "pinned"))
    storage.write_bytes(storage.join(catalog.url, "pinned", "step-00000003"), b"")
    catalog.retire(Retention(1, every=5, best=Best("eval/loss", "min", 2)))
    assert [record["step"] for record in catalog.records()] == [2, 3, 4, 5, 8]
    catalog.retire(Retention(1, best=Best("eval/loss", "max", 1)))
    assert [record["step"] for record in catalog.records()] == [3, 8]
    assert list_folders(catalog) == ["step-00000003-a0001", "step-00000008-a0001"]


@pytest.mark.parametrize(
    ("mode", "value", "better"), [("min", 0.4, True), ("min", 0.6, False), ("max", 0.6, True), ("max", 0.4, False)]
)
def test_the_best_are_told_from_the_rest(mode: Any, value: float, better: bool) -> None:
    best = Best("f1", mode, 1)
    assert best.improves({"f1": value}, [{"step": 1, "metrics": {"f1": 0.5}}]) == better
    assert best.improves({"f1": value}, [])
    assert not best.improves({}, [])
    assert not best.improves({"f1": float("nan")}, [])
    equal: list[Any] = [{"step": step, "metrics": {"f1": 0.5}} for step in (2, 1)]
    assert not best.improves({"f1": 0.5}, equal)
    assert best.choose(equal) == equal[1:]


def test_garbage_is_what_older_attempts_never_committed(catalog: Catalog) -> None:
    commit(catalog, 1)
    commit(catalog, 2)
    catalog.set_aside(1)
    unfinished = f"state.json.{'0' * 32}.tmp"
    storage.make_folder(storage.join(catalog.url, "step-00000003-a0001"))
    storage.write_bytes(storage.join(catalog.url, "step-00000003-a0001", unfinished), b"{")
    for name in ("step-00000003-a0001", "step-00000004-a0002", "mine-a0001"):
        storage.make_folder(storage.join(catalog.url, name, "done"))
        storage.write_bytes(storage.join(catalog.url, name, "done", "r00000.json"), b"{}")
    storage.write_bytes(storage.join(catalog.url, "mine-a0001", "notes.txt"), b"not of a checkpoint")
    assert clear(catalog.url, Attempt(catalog.url, 2, True)) == ()
    kept = ["mine-a0001", "step-00000001-a0001", "step-00000002-a0001", "step-00000004-a0002"]
    assert list_folders(catalog) == kept


def test_a_run_looks_at_nothing_but_what_runs_write(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its root may be a bucket's, or a folder that others use too."""
    folder, temporary = commit(catalog, 1), f"x.{'0' * 32}.tmp"
    for name in ("others/deep", "others-a0001", "step-00000002-a0001", "commits", "attempts", "superseded", "pinned"):
        storage.make_folder(storage.join(catalog.url, name))
        storage.write_bytes(storage.join(catalog.url, name, temporary), b"")
    storage.write_bytes(storage.join(catalog.url, temporary), b"")
    original, listed = storage.find_files, []

    def find(url: str, **how: Any) -> Any:
        listed.append((url[len(catalog.url) :], how))
        return original(url, **how)

    monkeypatch.setattr(storage, "find_files", find)
    monkeypatch.setattr(garbage, "HOUR", -1.0)  # all is old
    assert clear(catalog.url, Attempt(catalog.url, 2, True)) == ()
    left = [name for name in original(catalog.url) if name.endswith(".tmp")]
    assert left == [f"others/deep/{temporary}"]
    assert ("", {"deep": False}) in listed
    assert {url for url, how in listed if not how} <= {
        *("/attempts", "/commits", "/pinned", "/superseded", "/others-a0001", "/step-00000002-a0001"),
        f"/{folder}",
    }


def test_garbage_is_not_what_a_listing_forgets(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest covers what a store lists: before a folder goes, the record itself is asked for."""
    folder = commit(catalog, 1)
    original = storage.find_files

    def forget(url: str, **how: Any) -> Any:
        return {} if url.endswith("/commits") else original(url, **how)

    monkeypatch.setattr(storage, "find_files", forget)
    assert clear(catalog.url, Attempt(catalog.url, 2, True)) == ()
    assert list_folders(catalog) == [folder]
    found = garbage.find_garbage(catalog.url, older_than=0.0, asking=Attempt(catalog.url, 2, True))
    assert [(item.path, item.kept) for item in found] == [(folder, garbage.NEEDED)]


def change_record(catalog: Catalog, tag: str, **changes: Any) -> None:
    place = storage.join(catalog.url, "commits", f"{tag}.json")
    storage.write_bytes(place, json.dumps({**json.loads(storage.read_bytes(place)), **changes}).encode())


@pytest.mark.parametrize("changes", [{"step": 66}, {"attempt": 2}, {"dir": "step-00000002-a0011"}])
def test_retention_is_not_misled_by_a_record_that_contradicts_itself(catalog: Catalog, changes: Any) -> None:
    """A flipped bit makes an old checkpoint the newest, or an acknowledged one that of a fenced run."""
    folders = [commit(catalog, step) for step in (1, 2, 3)]
    change_record(catalog, "step-00000002", **changes)
    catalog.retire(Retention(1), Attempt(catalog.url, 1, True, frozenset()))
    assert set(folders[1:]) <= set(list_folders(catalog))
    assert catalog.find(None)["tag"] == "step-00000003"
    assert "step-00000002" in catalog.tags()


def test_a_folder_whose_record_names_another_that_is_not_there_stays(catalog: Catalog) -> None:
    folder = commit(catalog, 1)
    change_record(catalog, "step-00000001", dir="step-00000001-a0003")
    assert clear(catalog.url, Attempt(catalog.url, 2, True)) == ()
    assert list_folders(catalog) == [folder]


@pytest.mark.parametrize(
    ("there", "replaced"),
    [
        (b"an older one", True),
        (b"", True),
        (b'FORMAT, VERSION = "dsjob-checkpoint", 1\nmore\n', True),
        (b'FORMAT, VERSION = "dsjob-checkpoint", 2\n', False),
    ],
)
def test_the_script_in_a_root_is_this_dsjobs_unless_it_reads_later_formats(
    catalog: Catalog, there: bytes, replaced: bool
) -> None:
    storage.make_folder(catalog.url)
    storage.write_bytes(storage.join(catalog.url, "zero_to_fp32.py"), there)
    commit(catalog, 1)
    found = storage.read_bytes(storage.join(catalog.url, "zero_to_fp32.py"))
    assert found == (Path(layout.__file__).read_bytes() if replaced else there)
