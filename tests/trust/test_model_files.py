"""The files of a model meet the policy of a document's arguments: in a folder, on a hub, wherever they name another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile import HARMFUL, HARMLESS
from jobs import clean_env

from dsjob.contract.spec import Target
from dsjob.errors import TargetError
from dsjob.trust import model_files
from dsjob.trust.grant import Trust, check_document
from dsjob.trust.hub import check_models
from dsjob.trust.targets import call_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOAD = "transformers.AutoModelForCausalLM.from_pretrained"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model's folder `m` in it."""
    monkeypatch.chdir(tmp_path)
    write("m/config.json", HARMLESS)
    return tmp_path


def write(path: str, value: Any) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_text(json.dumps(value))


def find(arguments: dict[str, Any], **granted: Any) -> list[tuple[str, str, str]]:
    found = check_document({"model": {"_target_": LOAD, **arguments}}, Trust(**granted))
    return [(problem.rule, problem.dotted, problem.message) for problem in found]


def test_a_harmless_folder_needs_no_flag() -> None:
    assert find({"_args_": ["m"]}) == find({"pretrained_model_name_or_path": "./m"}) == []


@pytest.mark.parametrize("place", HARMFUL)
def test_what_a_document_may_not_ask_for_a_local_folder_may_not(place: str, folder: Path) -> None:
    write("m/config.json", {**HARMLESS, **HARMFUL[place]})
    ((rule, dotted, message),) = find({"_args_": ["m"]})
    assert (rule, dotted) == ("remote-code", "model._args_")
    assert message.startswith(f"{folder}/m/config.json: {place}: ")
    assert find({"_args_": ["m"]}, remote_code=True) == []
    ((rule, dotted, _),) = find({"_args_": ["./other"], **HARMFUL[place]})  # as arguments
    assert (rule, dotted) == ("remote-code", f"model.{place}")


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        ({"_args_": ["m"]}, "m/config.5.0.json"),
        ({"_args_": ["m"]}, "m/adapter_config.json"),
        ({"_args_": ["m"], "subfolder": "inner"}, "m/inner/config.json"),
        ({"_args_": ["m"], "subfolder": "../n"}, "n/config.json"),
        ({"_args_": ["m"], "config": "./n"}, "n/config.json"),
        ({"_args_": ["m"], "config": "./n/any.json"}, "n/any.json"),
        ({"_args_": ["./n/any.json"]}, "n/any.json"),
        ({"_args_": ["m"], "adapter_kwargs": {"_adapter_model_path": "./n"}}, "n/adapter_config.json"),
    ],
)
def test_every_file_that_transformers_reads_is_looked_at(arguments: dict[str, Any], file: str) -> None:
    assert find({"_args_": ["m"]}) == []
    write(file, {"text_config": {"_attn_implementation": "x/kernel"}})
    assert [message.rpartition(f"/{file}: ")[2] for rule, _, message in find(arguments) if rule == "remote-code"] == [
        "text_config._attn_implementation: names a kernel on a hub, whose code would be run"
    ]


def test_a_model_that_another_one_names_is_looked_at_as_well() -> None:
    write("adapter/adapter_config.json", {"base_model_name_or_path": "./m"})
    assert find({"_args_": ["adapter"]}) == []
    write("m/config.json", {**HARMLESS, "_attn_implementation": "x/kernel"})
    assert [rule for rule, _, _ in find({"_args_": ["adapter"]})] == ["remote-code"]
    write("m/config.json", {**HARMLESS, "use_pretrained_backbone": True, "backbone": "./m"})  # in a circle
    assert find({"_args_": ["adapter"]}) == []


def test_a_name_on_a_hub_in_a_local_file_is_pinned_too(folder: Path) -> None:
    write("adapter/adapter_config.json", {"base_model_name_or_path": "x/model"})
    ((rule, dotted, message),) = find({"_args_": ["adapter"]})
    assert (rule, dotted) == ("unpinned", "model._args_")
    assert message.startswith(f"{folder}/adapter/adapter_config.json: base_model_name_or_path: 'x/model' is a name")
    assert find({"_args_": ["adapter"]}, unpinned=True) == find({"_args_": ["adapter"], "revision": COMMIT}) == []
    write("adapter/config.json", HARMLESS)  # then the adapter is loaded into this model
    assert find({"_args_": ["adapter"]}) == []
    assert [rule for rule, _, _ in find({"_args_": ["m"], "config": "x/model"})] == ["unpinned"]


@pytest.mark.parametrize("text", ["", "[" * 100_000, "null", "[1]", '{"a":', "\xff"])
def test_a_file_that_cannot_be_read_is_left_to_transformers(text: str) -> None:
    Path("m/config.json").write_bytes(text.encode("latin-1"))
    assert find({"_args_": ["m"]}) == []


def test_a_file_is_not_too_large_to_be_checked() -> None:
    write("m/config.json", {"x": "y" * (5 << 20), "_attn_implementation": "x/kernel"})
    told = "config.json: is too large to check"  # for code, and for names that are not pinned
    assert [(rule, message.rpartition("/")[2]) for rule, _, message in find({"_args_": ["m"]})] == [
        ("remote-code", told),
        ("unpinned", told),
    ]
    nested: Any = {"attn_implementation": "x/kernel"}
    for _ in range(900):
        nested = {"a": nested}
    write("m/config.json", nested)
    assert len(find({"_args_": ["m"]})) == 1


@pytest.mark.parametrize("same", [True, False])
def test_decoys_do_not_hide_a_model_from_the_check(same: bool, folder: Path) -> None:
    write("evil/config.json", {**HARMLESS, "_attn_implementation": "x/kernel"})
    decoys = [f"./decoys/{0 if same else number}" for number in range(10)]
    for decoy in decoys:
        write(f"{decoy}/config.json", HARMLESS)
    nested = [{"use_pretrained_backbone": True, "backbone": decoy} for decoy in decoys]
    write("m/config.json", {**HARMLESS, "use_pretrained_backbone": True, "backbone": "./evil", "decoys": nested})
    told = (
        "evil/config.json: _attn_implementation: names a kernel on a hub, whose code would be run"
        if same
        else "m: names more than 8 other models, too many to check"
    )
    found = [(rule, message.replace(f"{folder}/", "")) for rule, _, message in find({"_args_": ["./m"]})]
    assert found == [("remote-code", told if same else f"./{told}")] + [("unpinned", f"./{told}")] * (not same)
    with pytest.raises(TargetError, match=told):  # where it is about to be loaded
        call_target(Target("transformers.AutoConfig.from_pretrained", {"_args_": ["./m"]}))
    assert [rule for rule, _, _ in find({"_args_": ["./m"]}, remote_code=True)] == ([] if same else ["unpinned"])


def test_a_model_whose_files_list_themselves_is_read_once() -> None:
    for name in ("config.json", "config.5.0.json"):
        write(f"m/{name}", {**HARMLESS, "configuration_files": ["config.5.0.json", "config.5.0.json"]})
    assert len(list(model_files.fetch("./m", {}))) == 2 * (1 + 1)


def test_a_pinned_model_of_a_hub_is_looked_at_before_it_is_loaded() -> None:
    """Here one that the local cache holds, which a document may name."""
    place = f"cache/models--x--model/snapshots/{COMMIT}"
    arguments = {"_args_": ["x/model"], "revision": COMMIT, "cache_dir": "cache", "local_files_only": True}
    write(f"{place}/config.json", HARMLESS)
    assert find(arguments) == []
    target = Target("transformers.AutoConfig.from_pretrained", arguments)
    assert call_target(target).n_layer == 1
    write(f"{place}/config.json", {**HARMLESS, "_attn_implementation": "x/kernel"})
    with pytest.raises(TargetError, match=r"config\.json: _attn_implementation: names a kernel on a hub"):
        call_target(target)
    assert call_target(target, trust=Trust(remote_code=True)).n_layer == 1


@pytest.mark.parametrize("given", [{}, {"revision": "main"}])
def test_what_is_loaded_is_of_the_commit_that_was_looked_at(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although another one is pushed in between."""
    later, fetch = COMMIT[::-1], model_files.fetch
    write(f"cache/models--x--model/snapshots/{COMMIT}/config.json", HARMLESS)
    write(f"cache/models--x--model/snapshots/{later}/config.json", {**HARMLESS, "n_layer": 2})
    write("cache/models--x--model/refs/main", None)
    Path("cache/models--x--model/refs/main").write_text(COMMIT)

    def fetch_before_a_push(name: str, options: dict[str, Any]) -> Any:
        found = list(fetch(name, options))
        Path("cache/models--x--model/refs/main").write_text(later)
        return found

    monkeypatch.setattr(model_files, "fetch", fetch_before_a_push)
    arguments = {"_args_": ["x/model"], "cache_dir": "cache", "local_files_only": True, **given}
    target = Target("transformers.AutoConfig.from_pretrained", arguments)
    assert call_target(target, trust=Trust(unpinned=True)).n_layer == 1


def test_a_commit_is_only_passed_on_where_one_repository_was_looked_at() -> None:
    other = COMMIT[::-1]
    write(f"cache/models--x--model/snapshots/{COMMIT}/config.json", HARMLESS)
    write(f"cache/models--x--base/snapshots/{other}/config.json", HARMLESS)
    for name, commit in (("model", COMMIT), ("base", other)):
        write(f"cache/models--x--{name}/refs/main", None)
        Path(f"cache/models--x--{name}/refs/main").write_text(commit)
    given = {"_target_": LOAD, "cache_dir": "cache", "local_files_only": True}
    assert check_models({**given, "_args_": ["x/model"]}) == ([], COMMIT)
    assert check_models({**given, "_args_": ["./m"]}) == ([], None)
    assert check_models({**given, "_args_": ["x/model"], "config": "x/base"}) == ([], None)
    adapter = {"base_model_name_or_path": "x/base"}
    write("cache/models--x--adapter/refs/main", None)
    Path("cache/models--x--adapter/refs/main").write_text("a" * 40)
    write(f"cache/models--x--adapter/snapshots/{'a' * 40}/adapter_config.json", adapter)
    assert check_models({**given, "_args_": ["x/adapter"]}) == ([], None)


def test_nobody_is_asked_whether_a_models_own_code_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(question: str) -> str:
        raise AssertionError(question)

    monkeypatch.setattr("builtins.input", ask)
    write("m/config.json", {**HARMLESS, "model_type": "of-its-own", "auto_map": {"AutoConfig": "m.Config"}})
    Path("m/m.py").write_text("open('pwned', 'w')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        call_target(Target("transformers.AutoConfig.from_pretrained", {"_args_": ["./m"]}))
    assert not Path("pwned").exists()


KERNELS = """
import types
def get_kernel(name, *args, **named):
    open("pwned", "w")
    return types.SimpleNamespace(flash_attn_varlen_func=None, flash_attn_func=None)
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda self, *args, **named: None})
def use_kernel_forward_from_hub(*args, **named):
    return lambda cls: cls
use_kernelized_func = use_kernel_func_from_hub = use_kernel_forward_from_hub
"""
PROBE = """
from dsjob.trust.targets import call_target
from dsjob.contract.spec import Target
from dsjob.trust.grant import Trust
from dsjob.trust import model_files
from dsjob.errors import TargetError
try:
    config = {"_target_": "transformers.AutoConfig.from_pretrained", "_args_": ["./m"]}
    model = Target("transformers.AutoModelForCausalLM.from_config", {"config": config})
    call_target(model, trust=Trust(remote_code=ALLOWED))
except TargetError as error:
    print(error.message)
except Exception as error:
    print(repr(error))
"""


@pytest.mark.full("True")
@pytest.mark.parametrize("allowed", [True, False])
def test_the_kernel_of_a_local_config_is_loaded_with_the_flag_alone(folder: Path, allowed: bool) -> None:
    """With a stand-in for the package that loads kernels."""
    minimum = subprocess.run(
        [sys.executable, "-c", "from transformers.utils import import_utils as u; print(u.KERNELS_MIN_VERSION)"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    if not minimum:
        pytest.skip("this transformers names no oldest release of kernels")
    write("m/config.json", {**HARMLESS, "_attn_implementation": "x/kernel"})
    (site := folder / "site").mkdir()
    (site / "kernels.py").write_text(KERNELS)
    (site / f"kernels-{minimum}.dist-info").mkdir()
    (site / f"kernels-{minimum}.dist-info" / "METADATA").write_text(f"Name: kernels\nVersion: {minimum}\n")
    (site / f"kernels-{minimum}.dist-info" / "top_level.txt").write_text("kernels\n")
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBE.replace("ALLOWED", str(allowed))],
        env=clean_env(PYTHONPATH=str(site), HF_HUB_OFFLINE="1"),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert (folder / "pwned").exists() == allowed, done.stdout + done.stderr
    assert ("names a kernel on a hub" in done.stdout) == (not allowed)
