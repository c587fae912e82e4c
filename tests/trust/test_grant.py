"""What is trusted and what is not: by name, by the place of a module, by what the user grants. See also
`test_hostile_documents`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from engines import build_net
from job_documents import make_job as make_document
from job_documents import write_json

import dsjob
from dsjob.contract.resources import read_schema
from dsjob.contract.spec import Target
from dsjob.errors import TargetError, UsageError
from dsjob.trust.grant import Trust, check_document, explain_distrust
from dsjob.trust.listed import LISTED, Listed, is_listed
from dsjob.trust.targets import call_target, find_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OWN = """
from fractions import Fraction
from torch.nn import Linear
from dsjob.recipes.gpt import build as build_gpt
from trust_pkg.parts import Part
import trust_pkg.parts as parts
from transformers import T5ForConditionalGeneration

class MyT5(T5ForConditionalGeneration):
    pass

def build():
    return 1
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with modules of the user's own, which is the last on sys.path."""
    (tmp_path / "trust_own.py").write_text(OWN)
    (tmp_path / "trust_pkg").mkdir()
    (tmp_path / "trust_pkg" / "__init__.py").write_text("from trust_pkg.parts import Part\n")
    (tmp_path / "trust_pkg" / "parts.py").write_text("class Part:\n    @classmethod\n    def make(cls): ...\n")
    (tmp_path / "trust_bare").mkdir()
    (tmp_path / "trust_bare" / "inside.py").write_text("def build(): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("trust_")]:
        del sys.modules[name]


def here(**granted: Any) -> Trust:
    return Trust(folders=(os.getcwd(),), **granted)


# ---- what is listed

PUBLIC = [
    "torch.nn.Linear",
    "torch.optim.AdamW",
    "torch.optim.lr_scheduler.StepLR",
    "torch.randn",
    "torch.tensor",
    "torch.Generator",
    "torch.device",
    "torch.utils.data.TensorDataset",
    "torch.utils.data.random_split",
    "torch.utils.data.default_collate",
    "torch.utils.data.WeightedRandomSampler",
    "torchmetrics.MeanMetric",
    "torchmetrics.classification.MulticlassAccuracy",
    "torchmetrics.regression.R2Score",
    "transformers.GPT2Config",
    "transformers.GPT2LMHeadModel",
    "transformers.T5ForConditionalGeneration.from_pretrained",
    "transformers.AutoModelForCausalLM.from_config",
    "transformers.AutoTokenizer.from_pretrained",
    "transformers.DataCollatorForSeq2Seq",
    "transformers.default_data_collator",
    "transformers.get_cosine_schedule_with_warmup",
    "transformers.Adafactor",
    "dsjob.recipes.gpt.build",
    "dsjob.optim.schedules.WarmupLR",
    "torch.utils.data.DataLoader",
]
DANGEROUS = [
    "torch.load",
    "torch.save",
    "torch.from_file",
    "torch.compile",
    "torch.hub.load",
    "torch.nn.Module.load_state_dict",
    "torch.nn.functional.relu",
    "torch.optim.lr_scheduler.Counter",
    "torch.utils.cpp_extension.load",
    "torchmetrics.BLEUScore",
    "torchmetrics.image.FrechetInceptionDistance",
    "transformers.pipeline",
    "transformers.RagModel",
    "transformers.TimmBackboneConfig",
    "transformers.Trainer",
    "transformers.KernelConfig",
    "transformers.AutoModel.register",
    "dsjob.storage.write_bytes",
    "dsjob.recipes.text.Callback",
    "dsjob.recipes.gpt._private",
    "numpy.load",
]


@pytest.mark.parametrize("path", PUBLIC)
def test_listed_constructors_are_found(path: str) -> None:
    assert callable(find_target(path))


@pytest.mark.parametrize("path", DANGEROUS)
def test_what_is_not_listed_is_refused_with_the_flag_to_add(path: str) -> None:
    with pytest.raises(TargetError, match="is not trusted") as caught:
        find_target(path)
    assert caught.value.hint == f"if you know what it does, run with --trust {path}"


def test_what_the_program_itself_defines_belongs_in_a_module() -> None:
    (problem,) = check_document({"model": {"_target_": "__main__.Net"}}, here())
    assert "ranks and checkpoints cannot import what a script or notebook defines" in problem.message
    assert problem.hint == "put it in a module beside the job, such as my_model.py"


def test_every_target_of_the_recipes_is_listed() -> None:
    conf = Path(__file__).parents[2] / "conf"
    lines = [line for file in conf.rglob("*.yaml") for line in file.read_text().splitlines() if "_target_:" in line]
    targets = [line.partition("_target_:")[2].strip() for line in lines]
    assert len(targets) > 5
    assert [target for target in targets if not is_listed(target)] == []


def test_homes_belong_to_the_module_that_is_listed() -> None:
    assert [row for row in LISTED if not row.home.replace("\\", "").startswith(row.module.split(".")[0])] == []


def test_the_schema_lets_no_odd_path_through() -> None:
    assert "pattern" in read_schema("target.json")["properties"]["_target_"]
    for path in ("", ".", "os", "a..b", "a.b()", "a.b\n", "a b.c"):
        with pytest.raises(TargetError):
            find_target(path, here())


# ---- modules of the user's own


@pytest.mark.parametrize(
    "path",
    [
        "trust_own.build",
        "trust_own.Linear",  # listed, by another way
        "trust_own.build_gpt",
        "trust_own.Part",  # the user's own package, by another way
        "trust_own.parts.Part.make",
        "trust_own.MyT5.from_pretrained",  # inherited from what is listed
        "trust_pkg.Part",
        "trust_pkg.parts.Part",
        "trust_bare.inside.build",
    ],
)
def test_own_modules_and_what_they_pass_on_are_trusted(path: str) -> None:
    assert callable(find_target(path, here()))
    assert explain_distrust(path, here()) == ""


def test_what_an_own_module_has_imported_from_elsewhere_is_not() -> None:
    with pytest.raises(TargetError, match=r"trust_own\.Fraction is not trusted: it is defined in fractions"):
        find_target("trust_own.Fraction", here())
    assert find_target("trust_own.Fraction", here(prefixes=("trust_own.Fraction",)))
    assert find_target("trust_own.Fraction", here(prefixes=("fractions",)))


def test_a_name_that_something_installed_has_is_not_local(folder: Path) -> None:
    (folder / "rich.py").write_text("def build(): ...\n")
    assert "rich is an installed package" in explain_distrust("rich.build", here())
    (folder / "json.py").write_text("def build(): ...\n")
    assert "standard library" in explain_distrust("json.build", here())


def test_a_folder_of_installed_packages_is_nobodys_own() -> None:
    folders = (os.path.dirname(os.path.dirname(pytest.__file__)), os.path.dirname(os.__file__))
    for path in ("pytest.main", "hydra.utils.call", "antigravity.fly"):
        assert explain_distrust(path, Trust(folders=folders))


def test_a_clone_of_dsjob_makes_no_more_of_it_nameable(monkeypatch: pytest.MonkeyPatch) -> None:
    clone = Path(dsjob.__file__).parent.parent
    monkeypatch.chdir(clone)
    assert explain_distrust("dsjob.storage.write_bytes", here())
    assert explain_distrust("dsjob.recipes.gpt.build", here(local=False)) == ""
    with pytest.raises(TargetError, match=r"dsjob\.callbacks\.callback"):
        find_target("dsjob.recipes.text.Callback", here())


def test_an_environment_inside_the_folder_is_not_local(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = folder / ".venv" / "site-packages"
    site.mkdir(parents=True)
    (site / "trust_installed.py").write_text("def build(): ...\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    assert "installed package" in explain_distrust("trust_installed.build", here())


def test_a_link_out_of_the_folder_is_not_local(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> None:
    outside = tmp_path_factory.mktemp("outside") / "real.py"
    outside.write_text("def build(): ...\n")
    (folder / "trust_link.py").symlink_to(outside)
    (folder / "trust_pkg" / "link.py").symlink_to(outside)
    assert f"trust_link.py is a link to {outside}" in explain_distrust("trust_link.build", here())
    with pytest.raises(TargetError, match=r"trust_pkg\.link is not in the job's folder"):
        find_target("trust_pkg.link.build", here())


def test_a_document_from_elsewhere_names_no_local_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust = here(local=False)
    assert "comes from elsewhere" in explain_distrust("trust_own.build", trust)
    with pytest.raises(TargetError, match="not trusted"):
        find_target("trust_own.build", trust)
    assert "trust_own" not in sys.modules
    assert find_target("torch.nn.Linear", trust)
    assert find_target("trust_own.build", here(local=False, prefixes=("trust_own",)))
    (folder / "trust_gone.py").write_text("def build(): ...\n")  # a library that is listed, but not installed
    for module in ("grant", "listed"):
        monkeypatch.setattr(f"dsjob.trust.{module}.LISTED", (*LISTED, Listed("trust_gone", "build", "trust_gone")))
    assert "comes from elsewhere" in explain_distrust("trust_gone.build", trust)


def test_deciding_imports_nothing(folder: Path) -> None:
    (folder / "trust_loud.py").write_text("raise SystemExit('imported')\n")
    before = set(sys.modules)
    for path in ("trust_loud.build", "distutils.spawn.spawn", "turtle.Turtle", "trust_none.x", "this.s", "pip.main"):
        explain_distrust(path, here())
    assert {name for name in set(sys.modules) - before if not name.startswith("encodings")} == set()


# ---- what the user grants


def test_a_prefix_is_of_whole_names() -> None:
    trust = Trust(prefixes=("os.path", "json"))
    assert explain_distrust("os.path.join", trust) == explain_distrust("json.loads", trust) == ""
    assert explain_distrust("os.system", trust)
    assert explain_distrust("jsonschema.validate", trust)
    assert find_target("json.loads", trust) is json.loads
    assert find_target("os.getpid", Trust(prefixes=("os",))) is os.getpid  # defined in posix, and public in os
    assert find_target("json.JSONDecoder.decode", Trust(prefixes=("json.JSONDecoder",)))
    with pytest.raises(TargetError, match=r"json\.codecs is the module codecs"):
        find_target("json.codecs.open", trust)


@pytest.mark.parametrize("prefix", ["", "*", "a.", ".a", "a b", "a.*", "../a", "1a"])
def test_a_prefix_is_a_dotted_name(prefix: str) -> None:
    with pytest.raises(UsageError, match="not a dotted name"):
        Trust(prefixes=(prefix,))


def test_trust_survives_the_way_to_another_process() -> None:
    trust = Trust(("a.b", "c"), ("/x:y", "/z"), local=False, remote_code=True, unpinned=True)
    assert Trust.from_text(trust.to_text()) == trust
    assert Trust.from_text(Trust().to_text()) == Trust()


def test_a_config_given_to_initialize_is_checked_too() -> None:
    config = {"train_batch_size": 4, "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.5}}
    assert isinstance(dsjob.initialize(model=build_net(), config=config)[1], torch.optim.SGD)
    config["optimizer"] = {"_target_": "os.system", "command": "true"}
    with pytest.raises(TargetError, match=r"os\.system is not trusted"):
        dsjob.initialize(model=build_net(), config=config)
    config["optimizer"] = {"_target_": "builtins.list"}
    with pytest.raises(TargetError, match="returned list"):
        dsjob.initialize(model=build_net(), config=config, trust=["builtins"])


# ---- arguments


def rules(value: dict[str, Any], **granted: Any) -> list[tuple[str, str]]:
    return [(problem.rule, problem.dotted) for problem in check_document(value, Trust(**granted))]


@pytest.mark.parametrize(
    ("arguments", "rule", "place"),
    [
        ({"pretrained": "gpt2"}, "unpinned", "pretrained"),
        ({"pretrained": "gpt2", "revision": "main"}, "unpinned", "pretrained"),
        ({"pretrained": "gpt2", "revision": COMMIT[:-1]}, "unpinned", "pretrained"),
        ({"deep": [{"pretrained_model_name_or_path": "a/b"}]}, "unpinned", "deep[0].pretrained_model_name_or_path"),
        ({"trust_remote_code": True}, "remote-code", "trust_remote_code"),
        ({"config": {"trust_remote_code": "false"}}, "remote-code", "config.trust_remote_code"),
        ({"weights_only": False}, "remote-code", "weights_only"),
        ({"weights_only": 0}, "remote-code", "weights_only"),
        ({"attn_implementation": "someone/kernel"}, "remote-code", "attn_implementation"),
    ],
)
def test_hubs_and_remote_code_need_their_flags(arguments: dict[str, Any], rule: str, place: str) -> None:
    value = {"_target_": "torch.nn.Linear", **arguments}
    assert rules(value) == [(rule, place)]
    assert rules(value, remote_code=rule == "remote-code", unpinned=rule == "unpinned") == []
    with pytest.raises(TargetError) as caught:
        call_target(Target("torch.nn.Linear", arguments))
    assert ("--trust-remote-code" if rule == "remote-code" else "--unpinned") in caught.value.hint


def test_what_is_local_or_pinned_needs_no_flag(folder: Path) -> None:
    (folder / "weights").mkdir()
    load = "transformers.AutoModel.from_pretrained"
    for arguments in (
        {"_args_": ["weights"], "trust_remote_code": False, "weights_only": True},
        {"_args_": ["./weights"], "attn_implementation": "sdpa"},
        {"pretrained_model_name_or_path": "someone/model", "revision": COMMIT},
        {"pretrained_model_name_or_path": "someone/model", "revision": COMMIT, "use_safetensors": True},
    ):
        assert rules({"_target_": load, **arguments}) == []
    assert rules({"_target_": "dsjob.recipes.t5.build", "pretrained": None}) == []
    assert rules({"_target_": "datasets.load_dataset", "path": "json", "data_files": "x.json"}) == []
    assert rules({"_target_": "datasets.load_dataset", "path": "pandas"}) == [("remote-code", "path")]
    assert rules({"_target_": "datasets.load_dataset", "_args_": ["imdb"]}) == [("unpinned", "_args_")]


@pytest.mark.parametrize(
    ("target", "arguments", "places"),
    [
        ("torchvision.models.resnet18", {"num_classes": 3, "weights": None, "pretrained": False}, []),
        ("torchvision.models.resnet18", {"weights": "DEFAULT"}, ["weights"]),
        ("torchvision.models.resnet18", {"pretrained": True}, ["pretrained"]),
        ("torchvision.models.resnet18", {"weights_backbone": {"_target_": "torch.device"}}, ["weights_backbone"]),
        ("torchvision.models.resnet18", {"_args_": ["DEFAULT"]}, ["_args_"]),
        ("timm.create_model", {"model_name": "resnet10t.c3_in1k", "num_classes": 3}, []),
        ("timm.create_model", {"_args_": ["resnet10t"], "pretrained": False}, []),
        ("timm.create_model", {"_args_": ["resnet10t", True]}, ["_args_"]),
        ("timm.create_model", {"model_name": "resnet10t", "pretrained": True}, ["pretrained"]),
        ("timm.create_model", {"model_name": "resnet10t", "pretrained_cfg": {"url": "x"}}, ["pretrained_cfg"]),
        ("timm.create_model", {"model_name": "resnet10t", "checkpoint_path": "x.pth"}, ["checkpoint_path"]),
        ("timm.create_model", {"model_name": "hf-hub:someone/model"}, ["model_name"]),
        ("timm.create_model", {"_args_": ["local-dir:/tmp/x"]}, ["_args_"]),
    ],
)
def test_models_of_images_start_with_random_weights(target: str, arguments: dict[str, Any], places: list[str]) -> None:
    value = {"_target_": target, **arguments}
    assert [place for rule, place in rules(value) if rule == "remote-code"] == places
    assert rules(value, prefixes=(target,)) == []
    assert is_listed(target)
    problems = check_document(value, Trust())
    assert all(problem.hint.endswith(f"--trust {target}") or "_args_" in problem.dotted for problem in problems)


def test_of_the_libraries_of_images_only_models_that_load_nothing_are_listed() -> None:
    others = ("models.get_model", "models.list_models", "models.detection.ssd300_vgg16", "io.read_image")
    assert not any(is_listed(f"torchvision.{name}") for name in others)
    assert not is_listed("timm.models.load_checkpoint")


def test_models_of_images_under_a_name_of_the_users_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an own module has imported from torchvision is judged as what it is."""
    library, build = ModuleType("torchvision.models"), (lambda weights=None: None)
    build.__module__, build.__qualname__ = "torchvision.models.resnet", "resnet18"
    library.resnet18 = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision.models", library)
    monkeypatch.setattr(importlib.import_module("trust_own"), "resnet18", build, raising=False)
    assert call_target(Target("trust_own.resnet18", {}), trust=here()) is None
    with pytest.raises(TargetError, match="weights: downloads or unpickles weights"):
        call_target(Target("trust_own.resnet18", {"weights": "DEFAULT"}), trust=here())


def test_a_document_is_checked_wherever_its_values_are(folder: Path) -> None:
    document = make_document(model={"_target_": "trust_own.build", "part": [{"x": {"_target_": "os.system"}}]})
    document["data"]["train"]["_target_"] = "trust_own.build"
    write_json(folder / "cfg.json", document)
    (problem,) = check_document(document, here())
    assert (problem.rule, problem.dotted) == ("untrusted-target", "model.part[0].x._target_")
