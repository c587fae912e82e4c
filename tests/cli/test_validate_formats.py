"""`dsjob validate` beyond one file of text: formats, several files, stdin, URLs, --strict, --explain, limits."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import fsspec
import pytest
from job_documents import make_job, write_json
from jobs import DSJOB, clean_env

from dsjob.cli import main
from dsjob.contract.rules import EXPLANATIONS, RULES
from dsjob.document.origins import MAX_SIZE

WARNED = make_job(zero_optimization={"stage": 1, "overlap_comm": True})
KEYS = ["file", "line", "column", "severity", "rule", "path", "message", "hint"]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def build(): ...\n\n\nclass Data: ...\n")
    write_json(Path("good.json"), make_job())
    write_json(Path("warned.json"), WARNED)
    write_json(Path("bad.json"), make_job(traner={}, trainer={"micro_batch": 0, "max_steps": 1}))
    write_json(Path("ds.json"), {"train_batch_size": 8, "gradient_clippin": 1})


@pytest.fixture
def validate(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `dsjob validate` and gives back its exit code, what it printed, and what it complained about."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["validate", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


FILES = ["good.json", "warned.json", "bad.json", "ds.json", "gone.json"]
FOUND = [
    ("bad.json", "trainer.micro_batch", "range", "error"),
    ("bad.json", "traner", "unknown-key", "error"),
    ("ds.json", "gradient_clippin", "unknown-key", "error"),
    ("gone.json", "", "unreadable", "error"),
    ("warned.json", "zero_optimization.overlap_comm", "no-effect", "warning"),
]


def test_json_holds_all_problems_of_all_files(validate: Any) -> None:
    code, out, err = validate("--format", "json", *FILES)
    entries = json.loads(out)
    assert (code, err) == (2, "")
    assert all(list(entry) == KEYS for entry in entries)
    assert sorted((e["file"], e["path"], e["rule"], e["severity"]) for e in entries) == FOUND
    assert [e["file"] for e in entries] == sorted(e["file"] for e in entries)


def test_sarif_holds_all_problems_of_all_files(validate: Any) -> None:
    code, out, err = validate("--format", "sarif", *FILES)
    (run,) = json.loads(out)["runs"]
    assert (code, err) == (2, "")
    found = [
        (result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"], result["ruleId"], result["level"])
        for result in run["results"]
    ]
    assert sorted(found) == sorted((file, rule, level) for file, _, rule, level in FOUND)
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {rule for _, _, rule, _ in FOUND}


def test_github_annotates_all_problems_of_all_files(validate: Any) -> None:
    code, out, err = validate("--format", "github", *FILES)
    assert (code, err) == (2, "")
    starts = [line.split("::")[1] for line in out.splitlines()]
    assert len(starts) == len(FOUND)
    for file, _, rule, level in FOUND:
        (start,) = [start for start in starts if f"file={file}," in start and f"title={rule}" in start]
        assert start.startswith(level)


@pytest.mark.parametrize(("form", "empty"), [("json", []), ("sarif", None), ("github", "")])
def test_nothing_wrong_is_well_formed_too(validate: Any, form: str, empty: Any) -> None:
    code, out, _ = validate("--format", form, "good.json")
    assert code == 0
    if form == "github":
        assert out.strip() == empty
    else:
        read = json.loads(out)
        assert (read if form == "json" else read["runs"][0]["results"]) == []


def test_strict_makes_errors_of_warnings(validate: Any) -> None:
    assert validate("warned.json")[0] == 0
    code, out, err = validate("--strict", "warned.json", "good.json")
    assert (code, out) == (2, "good.json: ok\n")
    assert "error[no-effect]: zero_optimization.overlap_comm" in err
    (entry,) = json.loads(validate("--strict", "--format", "json", "warned.json")[1])
    assert entry["severity"] == "error"


def test_a_document_with_errors_keeps_its_warnings(validate: Any) -> None:
    write_json(Path("both.json"), {**WARNED, "nam": 1})
    code, out, err = validate("both.json")
    assert code == 2
    assert [line.split(": ")[1] for line in (out + err).splitlines()] == ["warning[no-effect]", "error[unknown-key]"]


@pytest.mark.parametrize("rule", ["fp16-with-bf16", "unknown-key"])
def test_a_rule_is_explained(validate: Any, rule: str) -> None:
    level = f" ({RULES[rule].severity})" if rule in RULES else ""
    assert validate("--explain", rule) == (0, f"{rule}{level}: {EXPLANATIONS[rule]}\n", "")


def test_an_unknown_rule_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--explain", "fp16-with-bf6"]) == 2
    err = capsys.readouterr().err
    assert "unknown rule 'fp16-with-bf6'" in err
    assert 'did you mean "fp16-with-bf16"?' in err


def test_all_rules_are_listed(validate: Any) -> None:
    code, out, _ = validate("--explain", "all")
    assert code == 0
    assert [line.split(":")[0].split(" ")[0] for line in out.splitlines()] == sorted(EXPLANATIONS)


def test_a_file_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate"]) == 2
    assert "needs a file" in capsys.readouterr().err


# ---- where documents come from


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (json.dumps(make_job()), 0, "<stdin>: ok"),
        ("model: {_target_: a.b}\ndata: {train: {_target_: a.b}}\ntrainer: {max_steps: 1, micro_batch: 1}\n", 2, "1:1"),
        ("train_batch_size: 8\n", 0, "<stdin>: ok"),
        ('{"train_batch_size": 8, "bf": {}}', 2, "<stdin>:1:25: error[unknown-key]: bf: unknown key"),
        ("train_batch_size: 8\nbf17: {enabled: true}\n", 2, 'did you mean "bf16"?'),
        ("", 2, "<stdin>:1:1: error[not-an-object]"),
    ],
)
def test_standard_input(validate: Any, monkeypatch: pytest.MonkeyPatch, text: str, code: int, said: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    found, out, err = validate("-")
    assert found == code
    assert said in out + err


def test_any_fsspec_url(validate: Any) -> None:
    with fsspec.open("memory://jobs/a.json", "w") as file:
        file.write('{\n\t"train_batch_size": 8,\n\t"bf17": {}}')
    code, _, err = validate("memory://jobs/a.json")
    assert code == 2
    assert 'memory://jobs/a.json:3:2: error[unknown-key]: bf17: unknown key; did you mean "bf16"?' in err


@pytest.mark.parametrize(("ranks", "code"), [("1", 2), ("2", 0), ("4", 2)])
def test_the_world_size_may_be_given(validate: Any, ranks: str, code: int) -> None:
    write_json(
        Path("job.json"), make_job(trainer={"train_batch": 8, "micro_batch": 4, "grad_accum": 1, "max_steps": 1})
    )
    found, _, err = validate("--world-size", ranks, "job.json")
    assert found == code
    assert not code or f"world size {ranks} (--world-size); use launch.nproc=2 (world size 2)" in err


# ---- what people write


@pytest.mark.parametrize("name", ["x.json", "x.yaml"])
def test_a_key_that_is_given_twice_names_both_lines(validate: Any, name: str) -> None:
    text = '{\n"train_batch_size": 8,\n"bf16": {},\n"train_batch_size": 9}\n'
    Path(name).write_text(text)
    code, _, err = validate(name)
    assert code == 2
    assert err.startswith(f"{name}:4:1: error[duplicate-key]: train_batch_size: ")
    assert "first on line 2, again on line 4; keep one of them" in err


def test_tabs_are_fine_in_json(validate: Any) -> None:
    Path("x.json").write_text('{\n\t"train_batch_size":\t8,\n\t"bf16":\t{\t}\n}')
    assert validate("x.json") == (0, "x.json: ok\n", "")


@pytest.mark.parametrize(
    ("document", "place", "hint"),
    [
        ({"stage3_max_live_parameters": 9}, "stage3_max_live_parameters", "zero_optimization"),
        ({"optimizer": {"type": "AdamW", "lr": 1}}, "optimizer.lr", "optimizer.params"),
        ({"overlap_comm": True}, "overlap_comm", "zero_optimization"),
        ({"warmup_num_steps": 5}, "warmup_num_steps", "scheduler.params"),
        (make_job(micro_batch=4), "micro_batch", "trainer"),
        (make_job(stage3_max_live_parameters=4), "stage3_max_live_parameters", "zero_optimization"),
        (make_job(optimizer={"type": "AdamW", "lr": 1}), "optimizer.lr", "optimizer.params"),
        (make_job(deepspeed={"lr": 1}), "deepspeed.lr", "deepspeed.optimizer.params"),
    ],
)
def test_a_key_at_the_wrong_level_says_where_it_belongs(
    validate: Any, document: dict[str, Any], place: str, hint: str
) -> None:
    write_json(Path("x.json"), document if "model" in document else {"train_batch_size": 8, **document})
    code, _, err = validate("x.json")
    assert code == 2
    assert f"error[unknown-key]: {place}: unknown key; it belongs under {hint}\n" in err


def test_a_mistake_in_the_job_is_told_beside_the_same_one_in_its_deepspeed_section(validate: Any) -> None:
    key = {"stage3_max_live_parameters": 9}
    write_json(Path("x.json"), make_job(**key, deepspeed=key))
    found = json.loads(validate("--format", "json", "x.json")[1])
    assert {entry["path"] for entry in found} == {
        "stage3_max_live_parameters",
        "deepspeed.stage3_max_live_parameters",
    }


# ---- limits


def nest(levels: int) -> Any:
    return {"a": nest(levels - 1)} if levels else 1


BIG: dict[str, tuple[Any, int]] = {  # document, and at most how many problems
    "unknown at the top": (make_job(**{f"nonsense{i}": i for i in range(10_000)}), 51),
    "mistyped in a section": (make_job(trainer={"max_steps": 1, **{f"micro_batc{i}": 1 for i in range(10_000)}}), 60),
    "mistyped in a config": ({"train_batch_size": 1} | {f"train_batch_siz{i}": 1 for i in range(10_000)}, 51),
    "wrong in each of many": (make_job(metrics={f"m{i}": 5 for i in range(10_000)}), 10_001),
    "a hundred levels": (make_job(model={"_target_": "a.b", "x": nest(100)}), 10),
    "too large": ({"name": "x" * (MAX_SIZE + 1)}, 1),
}


@pytest.mark.parametrize("name", BIG)
def test_what_is_too_much_ends_in_bounded_time_with_a_report(name: str) -> None:
    document, most = BIG[name]
    Path("big.json").write_text(json.dumps(document))
    done = subprocess.run(
        [DSJOB, "validate", "--format", "json", "big.json"],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    entries = json.loads(done.stdout)
    assert 1 <= len(entries) <= most
    assert all(list(entry) == KEYS for entry in entries)
    assert {"too large": "too-large", "a hundred levels": "too-deep"}.get(name, entries[0]["rule"]) == entries[0][
        "rule"
    ]
    assert done.stderr == ""
