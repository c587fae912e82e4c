"""Files that somebody else has placed: no pipe is waited for, nothing is written through a link."""

import json
import os
from pathlib import Path

import pytest

from dsjob import storage
from dsjob.errors import StorageError
from dsjob.files import open_append, require_own
from dsjob.trust.grant import Trust, check_document


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "resolved.json")
    with pytest.raises(StorageError, match="not a plain file"):
        storage.read_text(str(tmp_path / "resolved.json"))


def test_nothing_is_appended_through_a_link(tmp_path: Path) -> None:
    os.symlink(tmp_path / "elsewhere", tmp_path / "log")
    for refuse in (open_append, require_own):
        with pytest.raises(StorageError, match="is a link"):
            refuse(str(tmp_path / "log"))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_a_models_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    model = {"_target_": "transformers.AutoModel.from_pretrained", "_args_": [str(tmp_path)]}
    assert "is a pipe" in check_document({"model": model}, Trust())[0].message
