"""The storage that several nodes must share, as one rank of two nodes sees it."""

from pathlib import Path

import pytest
import torch

from dsjob.errors import LaunchError
from dsjob.ranks import patience
from dsjob.ranks.mesh import World
from dsjob.ranks.nodes import check_shared

WORLD = World(data_rank=0, local_rank=0, data_size=1, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)  # which says of a rank that it is all of the run
    monkeypatch.setattr(patience, "TO_BE_SEEN", 0.0)


@pytest.mark.parametrize("form", ["{}", "file://{}", "local://{}"])
def test_a_local_folder_is_looked_at_in_whatever_form_it_is_named(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = form.format(tmp_path / "checkpoints")
    check_shared(folder, WORLD)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("os.path.exists", lambda path: False)  # as on a node with a disk of its own
    with pytest.raises(LaunchError, match=f"does not see what rank 0 writes to {tmp_path}"):
        check_shared(folder, WORLD)


def test_memory_is_no_place_that_nodes_share(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="checkpoints would go to memory://run, the memory of one process"):
        check_shared("memory://run", WORLD)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    check_shared("memory://run", WORLD)


def test_a_store_is_shared() -> None:
    check_shared("s3://bucket/run", WORLD)
