"""The places in the arguments of targets, and what their folders lead to. Each of these attacks once worked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job, write_json
from jobs import dsjob

from dsjob.contract.spec import Target
from dsjob.errors import DsjobError, TargetError
from dsjob.trust.data_folders import check_links
from dsjob.trust.grant import Trust, check_document
from dsjob.trust.targets import call_target

BYTES, TEXT, LOAD = "dsjob.recipes.text.ByteText", "dsjob.text.Text", "datasets.load_dataset"
PRETRAINED = "transformers.AutoModelForCausalLM.from_pretrained"
SECRET = "a secret text\n" * 50


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home with secrets in it; the current folder is `work`, with links to them."""
    home, work = tmp_path / "home", tmp_path / "home" / "work"
    for path in (".aws/credentials", ".ssh/id_rsa", ".netrc", ".model/config.json", ".data/x.jsonl", "keys/id_rsa"):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(SECRET)
    for folder in ("data", "links", "zero", "tokenizer", "card", "adapter"):
        (work / folder).mkdir(parents=True)
        (work / folder / "a.txt").write_text("one text\n" * 50)
    (work / "link.txt").symlink_to(home / ".aws" / "credentials")
    (work / "way").symlink_to(home / ".ssh")
    (work / "links" / "b.txt").symlink_to(home / ".aws" / "credentials")
    (work / "zero" / "b.txt").symlink_to("/dev/zero")
    (work / "tokenizer" / "vocab.txt").symlink_to(home / ".aws" / "credentials")
    (work / "card" / "README.md").write_text(f"---\nconfigs:\n- data_files: {home}/.aws/credentials\n---\n")
    (work / "index").mkdir()
    (work / "index" / "config.json").write_text("{}")
    strays = {"a": "a.safetensors", "b": "..\\u002f..\\u002f.data\\u002fx.jsonl"}
    text = json.dumps({"weight_map": strays}).replace("\\\\", "\\")
    (work / "index" / "model.safetensors.index.json").write_text(text)
    (work / "saved").mkdir()
    (work / "saved" / "state.json").write_text("{}")
    (work / "saved" / "data.arrow").symlink_to(home / ".data" / "x.jsonl")
    (work / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": f"{home}/.model"}))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(work)
    return home


ATTACKS: list[dict[str, Any]] = [
    {"_target_": BYTES, "path": "~/.aws/credentials"},
    {"_target_": BYTES, "path": "../.aws/credentials"},
    {"_target_": BYTES, "path": "file://HOME/.aws/credentials"},
    {"_target_": BYTES, "path": "file:HOME/.aws/credentials"},
    {"_target_": BYTES, "path": "/proc/self/root/HOME/.aws/credentials"},
    {"_target_": BYTES, "path": "/proc/self/environ"},
    {"_target_": BYTES, "path": "/etc/passwd"},
    {"_target_": BYTES, "path": "../.data", "pattern": "*"},
    {"_target_": BYTES, "path": "way", "pattern": "*"},
    {"_target_": BYTES, "path": "way/id_rsa"},
    {"_target_": BYTES, "path": "link.txt"},
    {"_target_": BYTES, "path": "links", "pattern": "*.txt"},
    {"_target_": BYTES, "path": "zero", "pattern": "*.txt"},
    {"_target_": BYTES, "path": "../keys", "pattern": "*"},
    {"_target_": BYTES, "path": "../keys/id_rsa"},
    {"_target_": TEXT, "source": "~/.data/x.jsonl"},
    {"_target_": TEXT, "source": ["data/a.txt", "~/.data/x.jsonl"]},
    {"_target_": TEXT, "source": "local://HOME/.data/x.jsonl"},
    {"_target_": TEXT, "source": "links"},
    {"_target_": TEXT, "source": "zero"},
    {"_target_": TEXT, "source": "data", "tokenizer": "./tokenizer"},
    {"_target_": TEXT, "source": "data", "tokenizer": "HOME/.model"},
    {"_target_": TEXT, "source": "data", "cache_dir": "way"},
    {"_target_": TEXT, "source": "http://169.254.169.254/latest/x.txt"},
    {"_target_": TEXT, "source": "http://2852039166/latest/x.txt"},
    {"_target_": "dsjob.text.Prompts", "path": "~/.netrc"},
    {"_target_": "dsjob.recipes.t5.build_dataset", "path": "../.data/x.jsonl"},
    {"_target_": "dsjob.recipes.t5.build", "pretrained": "HOME/.model"},
    {"_target_": LOAD, "path": "text", "data_files": "~/.aws/credentials"},
    {"_target_": LOAD, "path": "text", "data_files": {"train": ["data/a.txt", "HOME/.netrc"]}},
    {"_target_": LOAD, "path": "text", "data_files": "~/.a*/credentials"},
    {"_target_": LOAD, "path": "text", "data_files": "data/*/../../../.aws/credentials"},
    {"_target_": LOAD, "path": "text", "data_dir": "..", "data_files": ".aws/credentials"},
    {"_target_": LOAD, "path": "text", "data_dir": "../keys"},
    {"_target_": LOAD, "path": "text", "data_dir": "links"},
    {"_target_": LOAD, "path": "HOME/.data"},
    {"_target_": LOAD, "path": "./card"},
    {"_target_": "datasets.Dataset.from_text", "_args_": ["~/.aws/credentials"]},
    {"_target_": "datasets.Dataset.from_text", "path_or_paths": "links/*"},
    {"_target_": "datasets.load_from_disk", "dataset_path": "~/.data"},
    {"_target_": PRETRAINED, "pretrained_model_name_or_path": "HOME/.model"},
    {"_target_": PRETRAINED, "pretrained_model_name_or_path": "./adapter"},
    {"_target_": PRETRAINED, "pretrained_model_name_or_path": "./data", "gguf_file": "../../.data/x.jsonl"},
    {"_target_": PRETRAINED, "pretrained_model_name_or_path": "./index"},
    {"_target_": BYTES, "_args_": ["all", 8, None, "links", "*.txt"]},
    {"_target_": TEXT, "_args_": ["links"]},
    {"_target_": TEXT, "source": "saved"},
    {"_target_": "transformers.AutoTokenizer.from_pretrained", "_args_": ["./data"], "vocab_file": "HOME/.netrc"},
    {"_target_": "transformers.AutoTokenizer.from_pretrained", "_args_": ["./tokenizer"]},
]


def fill(value: Any, home: Path) -> Any:
    return json.loads(json.dumps(value).replace("HOME", str(home)))


def find(target: dict[str, Any], **trust: Any) -> set[str]:
    document = make_job()
    document["data"]["train"] = target
    return {problem.rule for problem in check_document(document, Trust(**trust)) if problem.dotted[:10] == "data.train"}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda value: "-".join(map(str, value.values()))[-60:])
def test_no_document_reads_private_files(attack: dict[str, Any], home: Path) -> None:
    """Neither the check of a document nor the call of a target lets it pass."""
    target = fill(attack, home)
    assert find(target) & {"private-file", "kernel-file", "outside-folder", "metadata-server"}
    with pytest.raises(TargetError, match=r"private|/proc|system|outside|pattern|cloud"):
        call_target(Target(target.pop("_target_"), target))


HONEST: list[dict[str, Any]] = [
    {"_target_": BYTES, "path": "data", "pattern": "*.txt"},
    {"_target_": BYTES, "path": ".", "pattern": "a.txt"},
    {"_target_": BYTES},
    {"_target_": TEXT, "source": "data"},
    {"_target_": TEXT, "source": ["s3://bucket/a.jsonl", "https://host/a.txt", "HOME/work/data/a.txt"]},
    {"_target_": LOAD, "path": "text", "data_files": "data/*.txt", "split": "train[:10%]", "cache_dir": "./.cache/x"},
    {"_target_": LOAD, "path": "csv", "data_files": ["./data/a.txt"], "sep": "/", "quotechar": "~"},
    {"_target_": LOAD, "path": "text", "data_files": "data/**/a.txt"},
    {"_target_": "datasets.Dataset.from_dict", "mapping": {"text": ["~/.aws/credentials", "/etc/passwd"]}},
    {"_target_": PRETRAINED, "pretrained_model_name_or_path": "./data"},
    {"_target_": PRETRAINED, "pretrained_model_name_or_path": "HOME/../cache/huggingface/hub/models--a--b/snapshots/c"},
    {"_target_": "transformers.GPT2Config", "activation_function": ".env", "name": "~/.aws/none"},
]


@pytest.mark.parametrize("target", HONEST, ids=lambda value: "-".join(map(str, value.values()))[-60:])
def test_documents_as_they_are_meant_pass(target: dict[str, Any], home: Path) -> None:
    snapshot = home.parent / "cache" / "huggingface" / "hub" / "models--a--b"
    (snapshot / "snapshots" / "c").mkdir(parents=True)
    (snapshot / "blobs").mkdir()
    (snapshot / "blobs" / "d").write_text("{}")
    (snapshot / "snapshots" / "c" / "config.json").symlink_to("../../blobs/d")
    assert find(fill(target, home)) == set()


def test_data_that_tools_keep_in_hidden_folders_is_found(home: Path) -> None:
    (home / "work" / ".dvc" / "cache" / "files").mkdir(parents=True)
    (home / "work" / ".dvc" / "cache" / "files" / "d").write_text("a text\n" * 50)
    (home / "work" / "data" / "b.txt").symlink_to("../.dvc/cache/files/d")
    call_target(Target(BYTES, {"path": "data", "pattern": "*.txt", "split": "all"}))


def test_hidden_files_of_a_folder_are_left_out(home: Path) -> None:
    (home / "work" / "data" / ".b.txt").write_text(SECRET)
    (home / "work" / "data" / ".c").mkdir()
    (home / "work" / "data" / ".c" / "d.txt").write_text(SECRET)
    for target in (
        Target(BYTES, {"path": "data", "pattern": "*.txt", "split": "all", "context": 8}),
        Target(TEXT, {"source": "data", "max_length": 8, "pack": True}),
    ):
        samples = call_target(target)
        assert (
            bytes(b for sample in samples for b in next(iter(sample.values())).tolist() if b < 256).count(b"secret")
            == 0
        )


def test_a_link_that_no_reader_follows_is_none_of_the_documents(home: Path) -> None:
    (home / "work" / "data" / "bazel-out").symlink_to(home / ".aws")
    (home / "work" / "data" / "python").symlink_to(home / ".ssh" / "id_rsa")
    (home / "work" / "data" / ".link").symlink_to(home / ".aws")
    assert find({"_target_": BYTES, "path": "data", "pattern": "*.txt"}) == set()
    assert find({"_target_": TEXT, "source": "data"}) == set()
    assert find({"_target_": LOAD, "path": "text", "data_files": "data/*.txt"}) == set()
    call_target(Target(BYTES, {"path": "data", "pattern": "*.txt", "split": "all"}))


def test_the_check_of_a_document_takes_no_time_for_large_folders(home: Path) -> None:
    for number in range(50):
        (home / "work" / "data" / f"{number}.txt").symlink_to(home / ".aws" / "credentials")
    trust = Trust()
    assert len(list(check_links("data", trust.access, most=10))) <= 10
    assert len(list(check_links("data", trust.access))) == 50


def test_the_users_own_code_opens_what_it_likes(home: Path) -> None:
    (home / "work" / "places_own.py").write_text("def read(path): return open(path).read()\n")
    trust = Trust(folders=(str(home / "work"),))
    target = {"_target_": "places_own.read", "path": str(home / ".data" / "x.jsonl")}
    document = make_job()
    document["data"]["train"] = target
    assert [p for p in check_document(document, trust) if p.rule == "private-file"] == []
    # Not if the document is another's, which chooses the path.
    document = make_job()
    document["data"]["train"] = {**target, "path": str(home)}
    found = check_document(document, Trust(prefixes=("places_own",), local=False))
    assert [(p.rule, p.dotted) for p in found] == [("outside-folder", "data.train.path")]


def test_another_users_model_folder_cannot_name_the_users_files(home: Path) -> None:
    stranger = {"local": False, "places": (os.getcwd(),)}
    (home / "mine").mkdir()
    (home / "mine" / "config.json").write_text("{}")
    Path("adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": f"{home}/mine"}))
    target = {"_target_": PRETRAINED, "pretrained_model_name_or_path": "./adapter"}
    assert find(target) == set()
    assert find(target, **stranger) == {"outside-folder"}


def test_an_evaluation_reads_no_training_data(home: Path) -> None:
    """The job of a checkpoint comes from elsewhere; its training data are none of an evaluation's."""
    data = {"train": {"_target_": BYTES, "path": str(home)}, "eval": {"_target_": BYTES, "path": "data"}}
    trust = Trust(local=False)
    assert [p.dotted for p in check_document(make_job(data=data), trust)] == ["data.train.path"]
    assert check_document(make_job(data=data, tasks=["eval"]), trust) == []


# ---- whole documents


def make_attack(home: Path) -> dict[str, Any]:
    """Sends the user's credentials away: they are data of a prediction that is written to another's bucket."""
    model = {"_target_": "dsjob.recipes.gpt.build", "layers": 1, "width": 16, "heads": 1, "context": 8}
    return make_job(
        model=model,
        data={
            "train": {"_target_": BYTES, "path": "data/a.txt", "context": 8},
            "test": {"_target_": BYTES, "path": "~/.aws/credentials", "context": 8, "split": "all"},
        },
        tasks=["train", "predict"],
        trainer={"train_batch": 2, "max_steps": 1},
        predict={"outputs": {"b": "batch.inputs"}, "dir": str(home / "bucket")},
        launch={"device": "cpu"},
    )


def test_validate_and_run_refuse_to_send_credentials_away(home: Path) -> None:
    write_json(Path("cfg.json"), make_attack(home))
    for command in ("validate", "run"):
        done = dsjob(command, "cfg.json", cwd=Path.cwd(), HOME=str(home))
        assert done.returncode == 2
        assert "error[private-file]: data.test.path: ~/.aws/credentials: hidden files and folders" in done.stderr
        assert "cfg.json:" in done.stderr
    assert not (home / "bucket").exists()
    # It is the user's to say, on the command line alone.
    named = f"data.test.path={home}/.aws/credentials"
    done = dsjob("run", "cfg.json", named, cwd=Path.cwd(), HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert (home / "bucket").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_refuses_a_link_that_appears_after_the_check(ranks: int, home: Path) -> None:
    """The callback of the user's own code puts it there before the test data are read."""
    Path("late.py").write_text(
        "import contextlib, os\nfrom dsjob.recipes.gpt import build\ndef make(**options):\n"
        f"    with contextlib.suppress(FileExistsError): os.symlink('{home}/.netrc', 'test.txt')\n"
        "    return build(**options)\n"
    )
    document = make_attack(home)
    document["model"]["_target_"] = "late.make"
    document["data"]["test"]["path"] = "test.txt"
    document["launch"]["nproc"] = ranks
    write_json(Path("cfg.json"), document | {"trainer": {"train_batch": 2, "max_steps": 1}})
    done = dsjob("run", "cfg.json", cwd=Path.cwd(), HOME=str(home))
    assert done.returncode != 0
    assert "test.txt: leads to" in done.stderr
    assert "hidden files and folders, such as .netrc, are private" in done.stderr
    assert not (home / "bucket").exists()


def test_a_document_of_a_url_uses_what_the_user_names(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsjob import run, storage, validate

    document = make_attack(home)
    document["data"]["test"]["path"] = str(home / "texts.txt")
    (home / "texts.txt").write_text("a text\n" * 50)
    storage.write_bytes("memory://places/cfg.json", json.dumps(document).encode())
    found = {(problem.rule, problem.dotted) for problem in validate("memory://places/cfg.json")}
    assert {("outside-folder", "data.test.path"), ("outside-folder", "predict.dir")} <= found
    with pytest.raises(DsjobError, match="comes from elsewhere"):
        run("memory://places/cfg.json")
    overrides = [f"data.test.path={home}/texts.txt", f"predict.dir={home}/bucket"]
    assert run("memory://places/cfg.json", overrides=overrides).status == "done"
    assert list((home / "bucket").iterdir())
    granted = [f"folder:{home}/texts.txt", f"folder:{home}/other"]
    assert run("memory://places/cfg.json", overrides=[f"predict.dir={home}/other/x"], trust=granted).status == "done"


def test_a_deepspeed_file_is_judged_before_it_is_read(home: Path) -> None:
    write_json(Path("cfg.json"), make_attack(home) | {"deepspeed": "~/.aws/credentials"})
    for command in ("validate", "run", "show"):
        done = dsjob(command, "cfg.json", cwd=Path.cwd(), HOME=str(home))
        assert done.returncode == 2
        assert "deepspeed: ~/.aws/credentials: hidden files and folders" in done.stderr
        assert "secret" not in done.stderr + done.stdout
