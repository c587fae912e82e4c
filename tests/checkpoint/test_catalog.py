"""Commit records: what is a checkpoint, what stays of it, and what a crash between two writes leaves."""

from pathlib import Path
from typing import Any

import pytest

from dsjob import storage
from dsjob.checkpoint.catalog import Catalog
from dsjob.errors import CheckpointError, NoCheckpointError


@pytest.fixture(params=["path", "memory"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    return Catalog(str(tmp_path / "c") if request.param == "path" else f"memory://{tmp_path}/c")


def commit(catalog: Catalog, step: int, *, attempt: int = 1, tag: str | None = None, **options: Any) -> str:
    tag = tag or f"step-{step:08d}"
    folder = f"{tag}-a{attempt:04d}"
    storage.make_folder(storage.join(catalog.url, folder))
    catalog.commit(folder, {"tag": tag, "step": step}, attempt, **{"latest": True, **options})
    return folder


def list_folders(catalog: Catalog) -> list[str]:
    return [name for name in storage.list_names(catalog.url) if "-a0" in name]


def test_the_newest_stay(catalog: Catalog) -> None:
    folders = [commit(catalog, step) for step in (1, 2, 3)]
    catalog.retire(2)
    assert [record["step"] for record in catalog.records()] == [2, 3]
    assert list_folders(catalog) == folders[1:]
    catalog.retire(0)
    assert len(catalog.records()) == 2
    assert catalog.newest() == "step-00000003"


def test_a_folder_without_a_record_does_not_exist(catalog: Catalog) -> None:
    commit(catalog, 1)
    storage.make_folder(storage.join(catalog.url, "step-00000002-a0001"))
    storage.write_bytes(storage.join(catalog.url, "step-00000002-a0001", "manifest.json"), b"{}")
    assert catalog.newest() == "step-00000001"
    with pytest.raises(NoCheckpointError):
        catalog.find("step-00000002")
    assert catalog.next_attempt() == 2


def test_what_latest_says_is_not_trusted(catalog: Catalog) -> None:
    commit(catalog, 1)
    commit(catalog, 2, latest=False)
    assert storage.read_text(storage.join(catalog.url, "latest")) == "step-00000001\n"
    assert catalog.newest() == "step-00000002"


def test_a_tag_has_one_winner_unless_it_is_to_be_replaced(catalog: Catalog) -> None:
    commit(catalog, 1, tag="best")
    with pytest.raises(CheckpointError, match="holds a checkpoint best already"):
        commit(catalog, 2, attempt=2, tag="best")
    catalog.discard("best", "best-a0002")
    assert list_folders(catalog) == ["best-a0001"]
    commit(catalog, 2, attempt=3, tag="best", replace=True)
    assert catalog.find("best")["step"] == 2
    assert list_folders(catalog) == ["best-a0003"]
    catalog.discard("best", "best-a0003")
    assert list_folders(catalog) == ["best-a0003"]


def test_going_back_keeps_what_came_later_out_of_the_way(catalog: Catalog) -> None:
    folders = [commit(catalog, step) for step in (1, 2, 3)]
    catalog.set_aside(1)
    assert [record["step"] for record in catalog.records()] == [1]
    assert storage.list_names(storage.join(catalog.url, "superseded")) == [f"{name}.json" for name in folders[1:]]
    commit(catalog, 2, attempt=2)
    assert catalog.newest() == "step-00000002"
