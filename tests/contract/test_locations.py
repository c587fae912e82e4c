"""Which URLs dsjob opens, and that no text of a document reaches fsspec as anything else.

See also `test_hostile_documents`: the same texts in whole documents.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hostile import CHAINS, MARKER, REFERENCE
from job_documents import make_job, write_json
from jobs import dsjob

from dsjob import storage
from dsjob.contract import locations
from dsjob.contract.locations import explain_url
from dsjob.contract.spec import Target
from dsjob.errors import StorageError, TargetError
from dsjob.trust.grant import Trust, check_document
from dsjob.trust.targets import call_target

LISTED = ["path", "/a/b", "./a:b", "~/a", "C:x", "file:///a", "memory://a", "s3://b/a", "s3a://b/a", "gs://b/a",
          "gcs://b/a", "az://c/a", "abfs://c@a/b", "abfss://c@a/b", "http://host/a", "https://host/a"]  # fmt: skip
UNLISTED = [
    "sftp://host/a", "ssh://host/a", "ftp://host/a", "hf://datasets/a/b", "github://c/d", "zip://a", "dir://a",
    "reference://a", "filecache://a", "simplecache://a", "data:text/plain,a", "DATA:text/plain,a", "data://a",
    "FILE:///a", "S3://b/a", "File:///a", " file:///a", "file ://a", "file%3A//a://b", "://a", "a b://c",
    "/a/b://c", "unknown://a", "fi\u200ble:///a",
]  # fmt: skip


@pytest.fixture
def no_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test fail where fsspec is asked for a file system."""

    def fail(*args: Any, **named: Any) -> None:
        raise AssertionError(f"fsspec was asked for {args} {named}")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    monkeypatch.setattr(fsspec.core, "filesystem", fail)
    monkeypatch.setattr(fsspec.core, "get_filesystem_class", fail)


@pytest.fixture
def nothing_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "_granted", [])


@pytest.mark.parametrize("url", LISTED)
def test_listed_protocols_are_opened(url: str) -> None:
    assert explain_url(url) == ("", "", "")
    assert explain_url(url, write=True)[0] == ("read-only-url" if url.startswith("http") else "")


@pytest.mark.usefixtures("no_file_system", "nothing_granted")
@pytest.mark.parametrize("url", [*CHAINS, *UNLISTED])
def test_nothing_else_reaches_fsspec(url: str) -> None:
    calls: list[Any] = [
        storage.exists,
        storage.size,
        storage.find_files,
        storage.list_names,
        storage.make_folder,
        storage.read_bytes,
        storage.read_text,
        storage.delete,
        lambda url: storage.open_write(url).__enter__(),
        lambda url: storage.write_bytes(url, b""),
        lambda url: storage.create_bytes(url, b""),
        lambda url: storage.abort_uploads(url, hours=1),
    ]
    for call in calls:
        with pytest.raises(StorageError, match=r"chain|not trusted|unknown protocol"):
            call(url)


@pytest.mark.usefixtures("no_file_system")
def test_a_web_server_is_only_read_from() -> None:
    for call in (storage.delete, storage.make_folder, lambda url: storage.write_bytes(url, b"")):
        with pytest.raises(StorageError, match="dsjob only reads from http"):
            call("http://host/a")


def test_what_the_user_grants_is_opened(nothing_granted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_it(url: str, **options: Any) -> None:
        raise ValueError("asked for")

    monkeypatch.setattr(fsspec.core, "url_to_fs", open_it)
    with pytest.raises(StorageError, match="'sftp' is not trusted") as caught:
        storage.exists("sftp://host/a")
    assert "--trust protocol:sftp" in caught.value.hint
    locations.allow(lambda: Trust(prefixes=("my_module", "protocol:sftp")).prefixes)
    with pytest.raises(StorageError, match="asked for"):
        storage.exists("sftp://host/a")
    for url in ("SFTP://host/a", "ssh://host/a", "sftp::data:,x", "my_module://a"):
        with pytest.raises(StorageError, match=r"not trusted|chain"):
            storage.exists(url)


def test_a_grant_is_a_protocol_and_no_module() -> None:
    trust = Trust(prefixes=("protocol:sftp", "os"))
    assert trust.protocols == {"sftp"}
    assert Trust.from_text(trust.to_text()).protocols == {"sftp"}
    assert not trust.names("protocol")
    assert not trust.names("sftp")


# ---- documents


def rules(value: dict[str, Any], *granted: str) -> list[tuple[str, str]]:
    return [(problem.rule, problem.dotted) for problem in check_document(value, Trust(prefixes=granted))]


@pytest.mark.parametrize("key", ["checkpoint.dir", "checkpoint.resume", "output.dir"])
@pytest.mark.parametrize("url", CHAINS)
def test_no_key_of_a_document_holds_a_chain(key: str, url: str) -> None:
    section, _, name = key.partition(".")
    assert rules({section: {name: url}}, "protocol:reference", "protocol:data") == [("chained-url", key)]


def test_keys_of_a_document_take_listed_protocols() -> None:
    assert rules({"checkpoint": {"dir": "sftp://host/a"}}) == [("untrusted-protocol", "checkpoint.dir")]
    assert rules({"checkpoint": {"dir": "sftp://host/a"}}, "protocol:sftp") == []
    assert rules({"checkpoint": {"dir": "https://host/a"}}) == [("read-only-url", "checkpoint.dir")]
    assert rules({"checkpoint": {"resume": "https://host/a"}}) == []
    assert rules({"deepspeed": "ftp://host/a"}) == [("untrusted-protocol", "deepspeed")]


LOADERS = [
    "datasets.load_dataset",
    "datasets.load_from_disk",
    "datasets.Dataset.from_json",
    "transformers.AutoModel.from_pretrained",
    "dsjob.recipes.pairs.Pairs",
    "trust_own.load_dataset",
]


@pytest.mark.parametrize("target", LOADERS)
@pytest.mark.parametrize("url", [*CHAINS, "sftp://host/a", "data:,a", " ftp://host/a", "REFERENCE://x"])
def test_no_argument_of_a_listed_constructor_reaches_further(target: str, url: str) -> None:
    places: list[tuple[str, Any]] = [
        ("data_files", url),
        ("data_files.train[1]", {"train": ["a.json", url]}),
        ("features.a.b", {"a": {"b": url}}),
        ("_args_[0]", [url]),
    ]
    for place, value in places:
        key = place.split(".")[0].split("[")[0]
        given = {"_target_": target, "path": "json", "pretrained_model_name_or_path": "./x", key: value}
        found = [dotted for rule, dotted in rules(given) if rule in ("chained-url", "untrusted-protocol")]
        assert found == [place], (place, url)


def test_options_of_a_file_system_name_no_other_one() -> None:
    given = {"_target_": "datasets.load_from_disk", "dataset_path": "x", "options": {"protocol": "reference"}}
    assert rules(given) == [("untrusted-protocol", "options.protocol")]
    given["options"] = {"s3": {"target_protocol": "filecache"}}
    assert rules(given) == [("untrusted-protocol", "options.s3.target_protocol")]
    given["options"] = {"s3": {"anon": True}}
    assert rules(given) == []


def test_texts_that_are_no_urls_pass() -> None:
    for text in ("{{ messages[::-1] }}", "train[:10%]", "see http://host for more", "paged|sdpa", "a: b", "cuda:0"):
        assert rules({"_target_": "transformers.GPT2Config", "text": text}) == []
    for text in ("std::vector", "a.tar::b.tar", "tcp://host:1", "sqlite:///runs.db", "{{ a[::2] }}"):
        assert rules({"_target_": "trust_own.build", "text": text}) == []


def test_of_the_users_own_code_a_chain_needs_its_protocols() -> None:
    given = {"_target_": "trust_own.build", "url": "simplecache::s3://bucket/a"}
    assert rules(given) == [("untrusted-protocol", "url")]
    assert rules(given, "protocol:simplecache") == []
    assert rules({"_target_": "trust_own.build", "url": REFERENCE}) == [("untrusted-protocol", "url")]


def test_a_listed_constructor_is_one_under_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locations_own.py").write_text("from torch.nn import Linear as Layer\n")
    monkeypatch.syspath_prepend(tmp_path)
    trust = Trust(folders=(str(tmp_path),))
    arguments = {"in_features": 1, "out_features": 1, "device": "sftp://host/a"}
    with pytest.raises(TargetError, match=r"locations_own\.Layer: device: sftp://host/a: the protocol 'sftp'"):
        call_target(Target("locations_own.Layer", arguments), trust=trust)


def test_a_default_of_a_variable_is_a_documents_word_too() -> None:
    for url in (REFERENCE, "sftp://host/a"):
        arguments = {"in_features": 1, "out_features": 1, "device": "${oc.env:SLURM_TMPDIR,'" + url + "'}"}
        with pytest.raises(TargetError, match=r"torch\.nn\.Linear: device: .*(chain|not trusted|may not be read)"):
            call_target(Target("torch.nn.Linear", arguments))


# ---- folders that listed constructors write to


WRITTEN = ["cache_dir", "local_dir", "save_dir", "output_dir", "download_dir", "offload_folder", "storage", "save_path"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is not the one of everything."""
    (folder := tmp_path / "here").mkdir()
    (folder / "link").symlink_to(tmp_path)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return folder


@pytest.mark.parametrize("key", WRITTEN)
def test_a_listed_constructor_writes_below_the_current_folder(here: Path, key: str) -> None:
    target = {"_target_": "datasets.load_dataset", "path": "json"}
    for inside in ("cache", "./a/../b", ".", str(here / "x"), str(here.parent / "hf" / "hub")):
        assert rules({**target, key: inside}) == [], inside
    outside = ("..", "../x", "/etc", "~", "~/x", "link", "link/x", "./a/../../x", str(here) + "x", "memory://x", "a\0b")
    for value in outside:
        assert rules({**target, key: value}) == [("outside-folder", key)], value
        assert rules({**target, "deep": [{key.upper(): value}]}) == [("outside-folder", f"deep[0].{key.upper()}")]
    assert rules({**target, key: str(here.parent / "x" / "y")}, f"folder:{here.parent}/x") == []
    assert rules({**target, key: "../x/../y"}, f"folder:{here.parent}/x") == [("outside-folder", key)]


def test_other_arguments_and_other_code_are_free(here: Path) -> None:
    for key in ("path_or_paths", "use_cache", "data_dir", "drop_path_rate", "local_files_only"):
        assert rules({"_target_": "datasets.Dataset.from_json", key: str(here.parent)}) == []
    assert rules({"_target_": "trust_own.build", "cache_dir": "/etc"}) == []
    assert rules({"_target_": "datasets.load_dataset", "path": "json", "cache_dir": None}) == []


def test_positions_hide_no_folder(here: Path) -> None:
    hidden = {"_target_": "datasets.Dataset.from_json", "_args_": ["x.json", None, None, str(here.parent)]}
    assert rules(hidden) == [("remote-code", "_args_")]


def test_a_folder_is_refused_where_the_constructor_is_called(here: Path) -> None:
    target = Target("transformers.AutoConfig.from_pretrained", {"_args_": ["./m"], "cache_dir": "../x"})
    with pytest.raises(TargetError, match=r"cache_dir: \.\./x is outside the current folder") as caught:
        call_target(target)
    assert caught.value.hint.endswith(f"run with --trust folder:{here.parent}/x")


# ---- the attack


def test_validate_places_a_chain_and_run_opens_nothing(tmp_path: Path) -> None:
    document = make_job(checkpoint={"resume": REFERENCE})
    document["data"]["train"] = {"_target_": "datasets.load_from_disk", "dataset_path": REFERENCE}
    write_json(tmp_path / "cfg.json", document)
    done = dsjob("validate", "cfg.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "error[chained-url]: checkpoint.resume: reference::data:" in done.stderr
    assert "error[chained-url]: data.train.dataset_path: reference::data:" in done.stderr
    assert "cfg.json:" in done.stderr
    done = dsjob("run", "cfg.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "error[chained-url]: checkpoint.resume" in done.stderr
    for arguments in (["validate", REFERENCE], ["convert", "--to", "fp32", REFERENCE], ["ckpt", "ls", REFERENCE]):
        assert "chain" in dsjob(*arguments, cwd=tmp_path).stderr
    assert not (tmp_path / MARKER).exists()


def test_a_grant_reaches_the_ranks(tmp_path: Path) -> None:
    """The run gets as far as asking fsspec, in a rank; which protocols there are is then fsspec's to say."""
    write_json(tmp_path / "cfg.json", make_job(checkpoint={"dir": "nowhere://a"}))
    told = dsjob("validate", "cfg.json", cwd=tmp_path)
    assert (told.returncode, "error[untrusted-protocol]: checkpoint.dir" in told.stderr) == (2, True)
    done = dsjob("run", "cfg.json", cwd=tmp_path)
    assert "--trust protocol:nowhere" in done.stderr
    done = dsjob("run", "cfg.json", "--trust", "protocol:nowhere", cwd=tmp_path)
    assert "Protocol not known: nowhere" in done.stderr
    config = tmp_path / "home" / "dsjob" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("trust: [protocol:nowhere]\n")
    env = str(tmp_path / "home")
    for arguments in (["run", "cfg.json"], ["ckpt", "ls", "nowhere://a"], ["validate", "nowhere://a.json"]):
        assert "Protocol not known: nowhere" in dsjob(*arguments, cwd=tmp_path, XDG_CONFIG_HOME=env).stderr


def test_the_attack_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the text does where nothing stands before an older fsspec, and that something stands there."""
    pytest.importorskip("jinja2", reason="the attack needs jinja2")
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(Exception):
        fs, path = fsspec.core.url_to_fs(REFERENCE)
        fs.ls(path)
    if not (tmp_path / MARKER).exists():
        pytest.skip(f"fsspec {fsspec.__version__} runs nothing of it")
    (tmp_path / MARKER).unlink()
    for call in (storage.exists, storage.read_bytes, storage.list_names):
        with pytest.raises(StorageError, match="chain"):
            call(REFERENCE)
    assert not (tmp_path / MARKER).exists()
