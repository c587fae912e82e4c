"""Which places a document may use: private ones never, others if it is the user's own or the user has named them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job

from dsjob import storage
from dsjob.contract import access
from dsjob.contract.access import Access, check_keys, restricting
from dsjob.contract.schema import Schema, job_schema
from dsjob.errors import StorageError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home, whose folder `work` is the current one."""
    (folder := tmp_path / "home").mkdir()
    for path in ("work/data/a.txt", "documents/a.txt", ".aws/credentials", "keys/id_ed25519", "sa.json"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("a text\n")
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "SCRATCH", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(folder / "sa.json"))
    monkeypatch.chdir(folder / "work")
    return folder


PRIVATE = [
    "~/.aws/credentials", "~/.ssh", "../.aws/credentials", "./.env", "data/.git/config", "/mnt/x/.hidden/a.txt",
    "file:~/.aws/credentials", "file://{home}/.aws/credentials", "local://{home}/.netrc", "{home}/work/../.aws/x",
    "/tmp/krb5cc_1000", "~/keys/id_ed25519", "deploy.pem", "client.P12", "credentials.json", "~/sa.json",
    "~/.cache/mozilla/x", "~/.cache/huggingface/token", "~/.cache/huggingface/stored_tokens", "/etc/passwd", "/etc",
    "/home/.snapshot/daily/me/.ssh/id", "~/.cache/kagglehub/../x", "/var/run/secrets/token",
    "/run/user/0/bus", "/var/mail/me", ".dvc/config", ".git/config",
]  # fmt: skip
KERNEL = ["/proc/self/environ", "/dev/zero", "/sys/x", "file:/proc/1/mem", "/dev/shm/../fd/0", "/proc/self/fd/0"]
OPEN = [
    "a.txt", ".", "..", "~", "data/a.txt", "~/documents/a.txt", "/mnt/data/a.txt", "/dev/shm/a",
    "/run/media/me/usb/a", ".dvc/cache/files/a", "data/.git/annex/objects/a",
    "~/.cache/huggingface/hub/models--a--b/x", "s3://bucket/a", "~/.cache/kagglehub/a.csv",
    "/drive/.shortcut-targets-by-id/1/a.txt", "/home/.snapshot/daily/me/a.txt", "https://host/a", "memory://a",
    "/usr/share/dict/words", "tokens.bin", "a..b/c", "keys.txt",
]  # fmt: skip


def find_rule(place: str, document: Access | None = None, *, write: bool = False) -> str:
    return (document or Access()).explain(place.replace("{home}", os.environ["HOME"]), write=write)[0]


@pytest.mark.parametrize("place", PRIVATE)
def test_private_places_are_closed_to_every_document(place: str) -> None:
    assert find_rule(place) == "private-file"
    assert find_rule(place, Access(own=False)) == "private-file"
    if ".cache" not in place:  # which holds nothing that a document could spoil
        assert find_rule(place, write=True) == "private-file"


@pytest.mark.parametrize("place", KERNEL)
def test_files_of_the_kernel_are_always_closed(place: str) -> None:
    assert find_rule(place, Access(writes=("/", place))) == "kernel-file"


@pytest.mark.parametrize("place", OPEN)
def test_other_places_are_open_to_documents_of_the_users_own(place: str) -> None:
    assert find_rule(place) == ""


def test_a_document_writes_to_no_folder_of_the_system() -> None:
    for place in ("/usr/bin/x", "/bin", "/lib/x", "/boot/x", "/etc/cron.d/x", "~/.config/autostart/x", "~/.ssh/x"):
        assert find_rule(place, write=True) == "private-file", place
    for place in ("outputs", "~/runs/a", "/mnt/runs", "s3://bucket/a", "memory://a", "/tmp/x", ".cache/x"):
        assert find_rule(place, write=True) == "", place


def test_a_link_is_followed_before_a_place_is_judged(home: Path) -> None:
    (home / "work" / "link.txt").symlink_to(home / ".aws" / "credentials")
    (home / "work" / "way").symlink_to(home / ".aws")
    (home / "work" / "environ").symlink_to("/proc/self/environ")
    for place in ("link.txt", "way/credentials", "way/new.txt", "way", "data/../link.txt"):
        assert find_rule(place) == "private-file", place
    assert find_rule("environ") == "kernel-file"
    (home / "work" / "fine").symlink_to(home / "documents")
    assert find_rule("fine/a.txt") == ""
    # Libraries may resolve `..` before links, or after.
    (home / "x" / ".hidden").mkdir(parents=True)
    (home / "work" / "deep").symlink_to(home / "x" / ".hidden")
    assert find_rule("deep/../a.txt") == ""
    assert find_rule("deep/a.txt") == "private-file"


def test_what_is_hidden_above_a_document_or_the_current_folder_is_not_its_doing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := home / ".jenkins" / "workspace").mkdir(parents=True)
    assert find_rule(f"{folder}/a.txt") == "private-file"
    assert find_rule(f"{folder}/a.txt", Access(folders=(os.getcwd(), str(folder)))) == ""
    assert find_rule(f"{folder}/.env", Access(folders=(os.getcwd(), str(folder)))) == "private-file"
    monkeypatch.setenv("TMPDIR", str(folder))
    assert find_rule(f"{folder}/a.txt") == ""
    monkeypatch.delenv("TMPDIR")
    monkeypatch.chdir(folder)
    assert find_rule("a.txt") == ""


def test_a_document_from_elsewhere_reads_and_writes_near_itself(home: Path) -> None:
    here, own = str(home / "work"), str(home / "theirs")
    stranger = Access(own=False, folders=(here, own))
    for place in ("data/a.txt", f"{own}/a.txt", "~/.cache/huggingface/hub/x", "s3://bucket/a", "http://host/a"):
        assert find_rule(place, stranger) == "", place
    for place in ("~/documents/a.txt", "../a.txt", "/mnt/data", "~", "/"):
        assert find_rule(place, stranger) == "outside-folder", place
    for place in ("outputs/a", "memory://a"):
        assert find_rule(place, stranger, write=True) == "", place
    for place in (f"{own}/a", "~/runs", "/tmp/x", "s3://bucket/a", "gs://bucket/a"):
        assert find_rule(place, stranger, write=True) == "outside-folder", place


def test_what_the_user_names_is_open(home: Path) -> None:
    stranger = Access(
        own=False, reads=("/mnt/data", f"{home}/.data/a.txt"), writes=("s3://bucket/runs", f"{home}/runs")
    )
    for place in ("/mnt/data", "/mnt/data/x/a.txt", "~/.data/a.txt", "~/runs/a.txt"):
        assert find_rule(place, stranger) == "", place
    for place in ("/mnt/data/.env", "~/.data/b.txt", "/mnt/data/a.pem"):
        assert find_rule(place, stranger) == "private-file", place
    for place in ("s3://bucket/runs", "s3://bucket/runs/a", "~/runs/a"):
        assert find_rule(place, stranger, write=True) == "", place
    for place in ("s3://bucket/runs2", "s3://bucket", "/mnt/data/a", "~/runs2"):  # what is read is not written
        assert find_rule(place, stranger, write=True) == "outside-folder", place
    named = Access(writes=(f"{home}/.ssh/id_rsa", "/etc/data"))
    assert [find_rule(place, named) for place in ("~/.ssh/id_rsa", "/etc/data/a", "/etc/a")] == ["", "", "private-file"]


def test_documents_from_elsewhere_are_recognised(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in ("http://host/a.json", "memory://a.json", "file:///a.json"):
        assert not Access.of_source(source).own
    for name in ("cfg.yaml", "run/resolved.json", "ck/step-00000001-a0001/job.json"):
        (home / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "work" / name).write_text("{}")
    assert Access.of_source("cfg.yaml").own
    assert Access.of_source("run/resolved.json").own
    assert Access.of_source("<dict>").own
    folder = str(home / "work" / "run")
    assert Access.of_source(f"file://{folder}/resolved.json").folders == (str(home / "work"), folder)
    assert not Access.of_source("ck/step-00000001-a0001/job.json").own
    monkeypatch.setattr(access, "find_other_owner", lambda _: "the user eve")
    assert not Access.of_source("run/resolved.json").own


@pytest.mark.skipif(os.getuid() != 0, reason="gives a file to another user")
def test_another_users_document_is_one_of_the_users_own_in_the_working_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := home / "work" / "cfg.yaml").write_text("{}")
    os.chown(file, 65534, 65534)
    assert Access.of_source(str(file)).own
    monkeypatch.chdir(home / "documents")
    assert not Access.of_source(str(file)).own


# ---- the document's own keys


KEYS: dict[str, Any] = {
    "checkpoint.dir": "{}/x",
    "checkpoint.resume": "{}/x",
    "output.dir": "{}/%name/%time",
    "predict.dir": "{}/x",
    "monitor.csv_monitor.output_path": "{}",
    "monitor.tensorboard.output_path": "{}",
    "zero_optimization.offload_optimizer.nvme_path": "{}/x",
    "zero_optimization.offload_param.nvme_path": "{}/x",
    "models.a.zero_optimization.offload_optimizer.nvme_path": "{}/x",
    "deepspeed": "{}/x",
}


def place(key: str, value: str) -> dict[str, Any]:
    document: dict[str, Any] = make_job(tasks=["train", "predict"])
    *above, last = key.split(".")
    section = document
    for part in above:
        section = section.setdefault(part, {})
    section[last] = value
    if last in ("nvme_path", "output_path"):
        section |= {"device": "nvme"} if last == "nvme_path" else {"enabled": True}
    return document


@pytest.mark.parametrize("key", KEYS)
def test_every_key_that_names_a_place_is_judged(key: str) -> None:
    stranger = Access(own=False)
    for folder, document, rule in (
        ("~/.ssh", Access(), "private-file"),
        ("/mnt/x", Access(), ""),
        ("/mnt/x", stranger, "outside-folder"),
        ("inside", stranger, ""),
        ("/proc/self", Access(), "kernel-file"),
    ):
        found = [(p.rule, p.dotted) for p in check_keys(place(key, KEYS[key].format(folder)), document)]
        assert found == ([(rule, key)] if rule else []), folder


def test_no_key_that_names_a_place_is_forgotten() -> None:
    """A new key must be marked with x-place, or be listed here."""
    known = {
        "monitor.csv_monitor.job_name", "monitor.tensorboard.job_name",  # below output_path
        "monitor.mlflow.tracking_uri",  # see dsjob.trust.services
        "generation.tokenizer",  # judged as a target
        "resolved.file",  # names a folder of modules, if the user owns the document
    }  # fmt: skip
    named = re.compile(r"(?i)dir|path|file|folder|uri|url|hostfile|tokenizer|resume|job_name")
    found = set()

    def walk(schema: Schema, above: str) -> None:
        for key, below in schema.get("properties", {}).items():
            dotted = f"{above}.{key}" if above else key
            if not isinstance(below, dict) or "x-alias-of" in below or key.startswith(("_", "$")):
                continue
            texts = "string" in (kinds := below.get("type", [])) or kinds == "string"
            if named.search(key) and texts and not {"x-status", "x-place"} & below.keys():
                found.add(dotted)
            if "x-status" not in below and key != "deepspeed":
                walk(below, dotted)

    walk(job_schema(), "")
    assert {name for name in found if not name.endswith(("profile", "partition_profile"))} == known


def test_a_monitors_folder_stays_below_its_path() -> None:
    for name, wrong in (("a", False), ("a/b", False), ("..", True), ("a/../../b", True), ("/etc/x", True)):
        document = make_job(monitor={"csv_monitor": {"enabled": True, "output_path": "logs", "job_name": name}})
        rules = {problem.dotted for problem in check_keys(document, Access())}
        assert ("monitor.csv_monitor.job_name" in rules) is wrong, name


def test_places_that_a_run_does_not_use_are_not_judged() -> None:
    evaluation = make_job(
        tasks=["eval"],
        checkpoint={"dir": "inside", "resume": "auto"},
        predict={"dir": "/mnt/x"},
        monitor={"csv_monitor": {"enabled": True, "output_path": "/mnt/x"}},
        zero_optimization={"offload_optimizer": {"device": "cpu", "nvme_path": "/mnt/x"}},
    )
    assert list(check_keys(evaluation, Access(own=False))) == []


# ---- what is opened


def test_what_was_opened_is_judged_not_what_was_there_before(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that changes between the look at a path and its opening leads nowhere."""
    file = home / "work" / "data" / "a.txt"
    with restricting(Access()):
        assert storage.read_bytes("data/a.txt") == b"a text\n"
        before = storage.files.is_plain

        def swap(path: str) -> bool:
            found = before(path)
            file.unlink(missing_ok=True)
            file.symlink_to(home / ".aws" / "credentials")
            return found

        monkeypatch.setattr(storage.files, "is_plain", swap)
        with pytest.raises(StorageError, match=r"leads to .*credentials: hidden|hidden files"):
            storage.read_bytes("data/a.txt")
    assert storage.read_bytes(str(home / ".aws" / "credentials")) == b"a text\n"  # nobody but the user names it
