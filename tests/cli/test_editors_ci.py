"""What is offered to editors, pre-commit and CI: the hook, and the commands and files of the guide."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator, Draft202012Validator

from dsjob.cli import main

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guides/editors-ci.md").read_text()
HOOKS: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
(HOOK,) = HOOKS
SCHEMA_COMMANDS = re.findall(r"^(dsjob schema[^>\n]*)> \S+\.json", GUIDE, re.MULTILINE)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def test_the_hook_has_what_pre_commit_asks_for() -> None:
    assert {"id", "name", "entry", "language"} <= set(HOOK)
    assert HOOK["id"] == "dsjob-validate"
    assert HOOK["language"] == "python"


def test_the_entry_of_the_hook_is_a_command_that_takes_several_files(tmp_path: Path) -> None:
    command, *words = shlex.split(HOOK["entry"])
    assert command in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "ds_bad.json").write_text('{"train_batch_sise": 8}')
    script = str(Path(sys.executable).with_name(command))
    codes = [
        subprocess.run([script, *words, *files], cwd=tmp_path, capture_output=True, check=False).returncode
        for files in (["ds.json", "ds.json"], ["ds.json", "ds_bad.json"])
    ]
    assert codes == [0, 2]


@pytest.mark.parametrize(
    "name",
    [
        "gpt.job.yaml",
        "jobs/big/gpt.job.yml",
        "gpt.job.json",
        "gpt.job.jsonc",
        "ds.json",
        "ds_config.json",
        "conf/ds_config_zero3.json",
        "examples/deepspeed/ds_z3_config.json",
        "ds-config.json",
        "dsconfig.json",
        "deepspeed.json",
        "deepspeed_zero2.hjson",
        "my-ds_config.json",
        "t5.deepspeed.json",
    ],
)
def test_the_hook_looks_at_jobs_and_deepspeed_configs(name: str) -> None:
    assert re.search(HOOK["files"], name)


@pytest.mark.parametrize(
    "name",
    [
        "package.json",
        "tsconfig.json",
        "fieldsconfig.json",
        "ids.json",
        "job.yaml",  # Kubernetes and CI call theirs so
        "jobs/nightly.yaml",
        ".github/workflows/job.yml",
        "deepspeed_zero3.yaml",  # accelerate's
        "conf/recipe/quickstart.yaml",
        "deepspeed/package.json",
        "ds_config.json.bak",
        "resolved.json",
        "deepspeed.md",
    ],
)
def test_the_hook_leaves_other_files_alone(name: str) -> None:
    assert not re.search(HOOK["files"], name)


def test_the_guide_names_the_hook() -> None:
    hooks = [
        hook
        for block in blocks("yaml")
        for repo in (yaml.safe_load(block).get("repos") or [])
        for hook in repo["hooks"]
    ]
    assert [hook["id"] for hook in hooks] == [HOOK["id"]] * 2
    assert hooks[1]["entry"] == HOOK["entry"]


def test_the_examples_of_the_guide_can_be_read() -> None:
    assert [type(json.loads(block)) for block in blocks("json")] == [dict, dict]
    documents = [yaml.safe_load(block) for block in blocks("yaml")]
    workflow = documents[-1]
    runs = [step["run"] for step in workflow["jobs"]["validate"]["steps"] if "run" in step]
    assert [run.split()[3] for run in runs if run.startswith("dsjob validate")] == ["github", "sarif"]


@pytest.mark.parametrize("command", SCHEMA_COMMANDS)
def test_the_commands_of_the_guide_print_schemas(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main(shlex.split(command)[1:]) == 0
    Draft202012Validator.check_schema(json.loads(capsys.readouterr().out))


def test_the_job_documents_of_the_guide_are_what_the_schema_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(SCHEMA_COMMANDS) >= 4
    main(["schema"])
    published = json.loads(capsys.readouterr().out)
    for document in (json.loads(blocks("json")[0]), yaml.safe_load(blocks("yaml")[0])):
        assert Draft202012Validator(published).is_valid(document)
        assert Draft7Validator(published).is_valid(document)
        for wrong in ({"trainer": {"max_stps": 1}}, {"optimizer": {"type": "AdamW", "params": {"lrr": 1}}}):
            assert not Draft202012Validator(published).is_valid(document | wrong)
            assert not Draft7Validator(published).is_valid(document | wrong)  # for editors that know nothing newer
