"""`dsjob convert --to hf` copies the tokenizer that the job names: by name alone, nothing else, and nothing far."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from plain_checkpoint import commit_manifest, floats, save
from small_jobs import train
from tokenizers import Tokenizer, models, pre_tokenizers

from dsjob.checkpoint.pretrained.tokenizer import MOST_BYTES, find_tokenizer, read_tokenizer
from dsjob.cli import main

COMMIT = "0123456789" * 4


def make_tokenizer(folder: Path) -> Path:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    fast.save_pretrained(str(folder))
    (folder / "secret").write_text("mine")
    return folder


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `some/model` in the cache of the hub's client, with a tokenizer as the client keeps it: links."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub" / "models--some--model"
    snapshot = place / "snapshots" / COMMIT
    for folder in (place / "refs", place / "blobs", snapshot):
        folder.mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(make_tokenizer(tmp_path / "source").iterdir())):
        (place / "blobs" / f"{number:040}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040}")
    return place


def make_job(**train: Any) -> dict[str, Any]:
    return {"data": {"train": {"_target_": "dsjob.recipes.t5.build_dataset", **train}}, "model": {"pretrained": "x/y"}}


def save_with_job(root: Path, job: dict[str, Any] | None) -> Path:
    """A checkpoint of a GPT-2 of one weight, and of a job."""
    folder = save(root, {"model.w": floats(2)})
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["pretrained"] = {"config.json": {"model_type": "gpt2"}}
    if job is not None:
        (folder / "job.json").write_text(json.dumps(job))
        manifest["job_sha256"] = hashlib.sha256((folder / "job.json").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    commit_manifest(root, folder, "step-00000120", 120)
    return root


def convert(root: Path, *more: str) -> tuple[int, set[str]]:
    """The exit code, and the names of the files beside weights and configuration."""
    out = root.parent / "hf"
    code = main(["convert", "--to", "hf", str(root), str(out), *more])
    return code, {path.name for path in out.iterdir()} - {"config.json", "model.safetensors"} if out.exists() else set()


def test_the_folder_that_the_job_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_tokenizer(tmp_path / "tok")
    code, names = convert(save_with_job(tmp_path / "c", make_job(tokenizer=str(folder))))
    assert (code, names) == (0, {path.name for path in folder.iterdir()} - {"secret"})
    assert f"from '{folder}'" in caplog.text
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert again("two one three")["input_ids"] == [2, 1, 0]


@pytest.mark.full
def test_that_of_a_job_that_was_trained(tmp_path: Path) -> None:
    transformers.ByT5Tokenizer().save_pretrained(str(tmp_path / "tok"))
    recipe = {"_target_": "dsjob.recipes.t5.build_dataset", "tokenizer": str(tmp_path / "tok"), "max_samples": 8}
    train(
        tmp_path / "run",
        model={"_target_": "dsjob.recipes.t5.build"},
        data={"train": recipe, "collate": {"_target_": "dsjob.recipes.t5.collate"}},
        trainer={"train_batch": 2, "max_steps": 1},
    )
    assert convert(tmp_path / "run")[0] == 0
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert again("a")["input_ids"] == transformers.ByT5Tokenizer()("a")["input_ids"]


@pytest.mark.parametrize("safe", [True, False])
def test_that_beside_the_checkpoint_where_the_trainer_saves_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, safe: bool
) -> None:
    root = save_with_job(tmp_path / "c", make_job(tokenizer=str(make_tokenizer(tmp_path / "other"))))
    (root / "vocab.txt").write_text("one") if safe else (root / "vocab.txt").symlink_to(tmp_path / "other" / "secret")
    assert convert(root) == (0, {"vocab.txt"} if safe else set())
    told = f"copied the tokenizer beside the checkpoint, from '{root}'" if safe else "is a link to outside its folder"
    assert told in caplog.text


def test_a_folder_of_ones_own_comes_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tokenizer(tmp_path / "theirs")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "vocab.txt").symlink_to(tmp_path / "theirs" / "secret")
    root = save_with_job(tmp_path / "c", make_job(tokenizer=str(tmp_path / "theirs")))
    assert convert(root, "--tokenizer", str(tmp_path / "own")) == (0, {"vocab.txt"})
    assert "tokenizer" not in caplog.text


LOADER: dict[str, Any] = {"_target_": "transformers.AutoTokenizer.from_pretrained"}


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_name_on_the_hub_is_taken_from_the_cache(tmp_path: Path, cached: Path, revision: str | None) -> None:
    loader = LOADER | {"_args_": ["some/model"], "revision": revision}
    beside = make_job(tokenizer="some/model", revision="f" * 40)  # of the dataset
    for number, job in enumerate(({"collate": loader}, beside, {"collate": loader, **beside})):
        code, names = convert(save_with_job(tmp_path / str(number) / "c", job))
        assert code == 0
        assert {"tokenizer.json", "tokenizer_config.json"} <= names


def test_nothing_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert convert(save_with_job(tmp_path / "c", None)) == (0, set())
    assert "no tokenizer was copied: add --tokenizer FOLDER to copy one from FOLDER" in caplog.text


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ({}, "no tokenizer was copied: add --tokenizer"),
        (make_job(tokenizer=None), "no tokenizer was copied: add --tokenizer"),
        (make_job(tokenizer="other/model"), "'other/model' is not on this machine, and dsjob downloads nothing"),
        ({"data": LOADER | {"_args_": ["some/model"], "revision": "f" * 40}}, "'some/model' is not on this machine"),
        (
            {"data": LOADER | {"_args_": ["some/model"], "revision": "../refs/main"}},
            "'some/model' is not on this machine",
        ),
        (make_job(tokenizer="../hub"), "'../hub' is not on this machine"),
        (make_job(tokenizer="s3://bucket/tok"), "is not on this machine"),
        (make_job(tokenizer="a" * 5000), "is not on this machine"),
        (make_job(tokenizer="\x00\x1b[2J"), r"'\x00\x1b[2J' is not on this machine"),
        ({"data": {"train": LOADER | {"_args_": ["a"]}, "eval": {"tokenizer": "b"}}}, "names several ('a', 'b')"),
        (
            {"data": {"collate": {"tokenizer": LOADER | {"pretrained_model_name_or_path": "c/d"}}}},
            "the job's tokenizer 'c/d'",
        ),
        (
            {"data": [LOADER | {"_args_": [7]}, LOADER | {"_args_": {}}, LOADER, 3]},
            "no tokenizer was copied: add --tokenizer",
        ),
    ],
)
def test_what_is_not_here_is_told(job: dict[str, Any], told: str, cached: Path) -> None:
    files, text = find_tokenizer(job, "nowhere")
    assert not files
    assert told in text
    assert text.endswith("add --tokenizer FOLDER to copy one from FOLDER")


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_large(path: Path) -> None:
    path.touch()
    os.truncate(path, MOST_BYTES + 1)


BAD: dict[str, Callable[[Path], Any]] = {
    "a link to a secret": lambda path: path.symlink_to("../secret"),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": make_pipe,
    "too large": make_large,
    "a folder": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("bad", BAD)
def test_only_plain_files_of_the_folder_that_a_checkpoint_names(
    tmp_path: Path, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever makes a checkpoint decides which folder is read, and may have made that as well."""
    (tmp_path / "secret").write_text("mine")
    folder = make_tokenizer(tmp_path / "tok")
    BAD[bad](folder / "vocab.json")
    assert convert(save_with_job(tmp_path / "c", make_job(tokenizer=str(folder)))) == (0, set())
    assert "cannot read the job's tokenizer" in caplog.text


@pytest.mark.parametrize("bad", ["a pipe", "a folder"])
def test_only_plain_files_of_the_folder_that_the_user_names(
    tmp_path: Path, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tok").mkdir()
    BAD[bad](tmp_path / "tok" / "vocab.json")
    code, names = convert(save_with_job(tmp_path / "c", None), "--tokenizer", str(tmp_path / "tok"))
    assert code == 2
    assert "vocab.json' is not a regular file" in capsys.readouterr().err
    assert names == set()


def test_the_users_own_files_may_be_large(tmp_path: Path) -> None:
    BAD["too large"](make_tokenizer(tmp_path / "tok") / "vocab.json")
    assert "vocab.json" in read_tokenizer(str(tmp_path / "tok"))
