"""Several sources at once: who wins, what is told, and which files name which others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from imports import get, import_texts, messages, resolve_imported

from dsjob import storage
from dsjob.document import origins
from dsjob.errors import DocumentError, UsageError
from dsjob.importing.command_line import Command, Word, read_command
from dsjob.importing.gather import import_sources
from dsjob.importing.sources import read_source, read_sources

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
}
FIXED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.999]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 500}},
}
COMMAND = (
    "deepspeed --num_gpus=2 train.py --deepspeed ds.json --output_dir out --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 2 --learning_rate 3e-5 --adam_beta2 0.98 --weight_decay 0.01 --warmup_steps 50 "
    "--max_steps 1000 --bf16 --max_grad_norm 0.7"
)


def test_auto_is_what_the_command_says(tmp_path: Path) -> None:
    imported = import_texts(tmp_path, {"ds.json": AUTO}, COMMAND)
    wanted = {
        "trainer": {"micro_batch": 4, "grad_accum": 2, "max_steps": 1000, "log_every": 500},
        "gradient_clipping": 0.7,
        "bf16.enabled": True,
        "fp16.enabled": False,
        "optimizer.params": {"lr": 3e-5, "betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.01},
        "scheduler.params": {
            "total_num_steps": 1000,
            "warmup_min_lr": 0,
            "warmup_max_lr": 3e-5,
            "warmup_num_steps": 50,
        },
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "launch.nproc": 2,
    }
    assert {path: get(imported.document, path) for path in wanted} == wanted
    assert messages(imported, "conflict") == ""
    assert "optimizer.params.lr: auto means 3e-05 (--learning_rate, command line)" in messages(imported, "auto")
    assert resolve_imported(imported)["trainer"]["train_batch"] == 16


def test_the_command_wins_over_a_deepspeed_file_and_both_are_named(tmp_path: Path) -> None:
    imported = import_texts(tmp_path, {"ds.json": FIXED}, COMMAND)
    conflicts = messages(imported, "conflict")
    assert (
        "optimizer.params.lr: --learning_rate=3e-05 (command line) overrides optimizer.params.lr=0.0001 (" in conflicts
    )
    assert "ds.json:9:4)" in conflicts
    assert "trainer.micro_batch: --per_device_train_batch_size=4 (command line) overrides" in conflicts
    assert imported.document["optimizer"]["params"]["lr"] == 3e-5
    assert imported.document["optimizer"]["params"]["betas"] == [0.9, 0.98]
    assert imported.document["scheduler"]["type"] == "WarmupLR"  # nobody chose another
    assert imported.document["scheduler"]["params"] == {"warmup_max_lr": 3e-5, "warmup_num_steps": 50}
    resolve_imported(imported)


def test_a_file_keeps_what_nobody_else_says(tmp_path: Path) -> None:
    command = "python train.py --deepspeed ds.json --output_dir out --max_steps 10"
    imported = import_texts(tmp_path, {"ds.json": FIXED}, command)
    for section in ("optimizer", "scheduler", "bf16"):
        assert imported.document[section] == FIXED[section]
    assert imported.document["trainer"]["micro_batch"] == 2
    assert messages(imported, "conflict") == ""


def test_four_sources_in_their_order(tmp_path: Path) -> None:
    files = {
        "ds.json": {
            "gradient_clipping": 0.1,
            "gradient_accumulation_steps": 1,
            "steps_per_print": 7,
            "bf16": {"enabled": True},
        },
        "acc.yaml": """distributed_type: DEEPSPEED
num_processes: 2
deepspeed_config:
  gradient_clipping: 0.2
  gradient_accumulation_steps: 2
""",
        "args.json": {"output_dir": "o", "max_grad_norm": 0.3, "max_steps": 9, "gradient_accumulation_steps": 3},
    }
    imported = import_texts(tmp_path, files, "python train.py --max_grad_norm 0.4")
    document = imported.document
    assert document["gradient_clipping"] == 0.4
    assert document["trainer"]["grad_accum"] == 3
    assert document["trainer"]["log_every"] == 7
    assert document["launch"]["nproc"] == 2
    assert document["bf16"] == {"enabled": True}
    conflicts = messages(imported, "conflict")
    for loser in ("0.1", "0.2", "0.3"):
        assert loser in conflicts
    resolve_imported(imported)


def test_a_schedule_that_was_chosen_replaces_the_files(tmp_path: Path) -> None:
    imported = import_texts(tmp_path, {"ds.json": FIXED}, f"{COMMAND} --lr_scheduler_type cosine")
    assert imported.document["scheduler"]["type"] == "cosine"
    assert imported.document["scheduler"]["params"] == {"num_warmup_steps": 50}
    assert "scheduler.type: --lr_scheduler_type=cosine" in messages(imported, "conflict")
    assert "the Trainer itself would keep scheduler.type=WarmupLR" in messages(imported, "changed")
    resolve_imported(imported)


def test_an_optimizer_that_was_chosen_replaces_the_files(tmp_path: Path) -> None:
    imported = import_texts(tmp_path, {"ds.json": FIXED}, f"{COMMAND} --optim adafactor")
    assert imported.document["optimizer"] == {
        "_target_": "transformers.Adafactor",
        "scale_parameter": False,
        "relative_step": False,
        "lr": 3e-5,
        "weight_decay": 0.01,
    }
    assert "overrides optimizer.type=AdamW" in messages(imported, "conflict")
    resolve_imported(imported)


def test_an_apex_switch_and_a_bf16_file(tmp_path: Path) -> None:
    imported = import_texts(tmp_path, {"ds.json": FIXED}, COMMAND.replace("--bf16", "--fp16"))
    assert imported.document["fp16"]["enabled"] is True
    assert imported.document["bf16"]["enabled"] is False
    assert "precision: --fp16=true (command line) overrides bf16.enabled=true" in messages(imported, "conflict")


def test_batch_sizes_that_do_not_multiply_out_are_settled(tmp_path: Path) -> None:
    imported = import_texts(tmp_path, {"ds.json": {"train_batch_size": 64}}, COMMAND)
    assert imported.document["trainer"]["micro_batch"] == 4
    assert "train_batch" not in imported.document["trainer"]
    assert "override train_batch_size=64" in messages(imported, "conflict")
    assert resolve_imported(imported)["trainer"]["train_batch"] == 16


def test_a_batch_size_of_the_file_wins_over_a_default(tmp_path: Path) -> None:
    command = "deepspeed --num_gpus 2 train.py --output_dir o --max_steps 5 --per_device_train_batch_size 4"
    imported = import_texts(tmp_path, {"ds.json": {"train_batch_size": 64}}, command)
    assert resolve_imported(imported)["trainer"]["grad_accum"] == 8


def test_files_that_a_command_names_are_read_beside_it(tmp_path: Path) -> None:
    files = {
        "ds.json": {"zero_optimization": {"stage": 3}},
        "args.json": {"output_dir": "o", "max_steps": 5, "deepspeed": "ds.json"},
        "acc.yaml": "distributed_type: DEEPSPEED\nnum_processes: 3\nmachine_rank: 0\n",
        "run.sh": "accelerate launch --config_file acc.yaml train.py args.json",
    }
    imported = import_texts(tmp_path, files, given=["run.sh"])
    assert imported.document["zero_optimization"] == {"stage": 3}
    assert imported.document["trainer"]["max_steps"] == 5
    assert imported.document["launch"] == {"nproc": 3}
    assert messages(imported, "unknown") == ""


def test_a_file_names_no_private_one(tmp_path: Path) -> None:
    """A file to import can come from anyone. On the command line, the user names what they like."""
    (tmp_path / ".secrets").mkdir()
    (private := tmp_path / ".secrets" / "ds.json").write_text('{"train_batch_size": 7, "password": "x"}')
    arguments = {"args.json": {"deepspeed": str(private), "output_dir": "o", "max_steps": 1}}
    with pytest.raises(DocumentError, match=r"hidden files and folders, such as \.secrets, are private") as caught:
        import_texts(tmp_path, arguments)
    assert "password" not in str(caught.value)
    private.write_text('{"zero_optimization": {"stage": 3}}')
    command = f"deepspeed --num_gpus 1 t.py --output_dir o --max_steps 1 --deepspeed {private}"
    assert import_texts(tmp_path, {}, command).document["zero_optimization"] == {"stage": 3}


def test_a_file_that_is_given_and_named_is_read_once(tmp_path: Path) -> None:
    command = "deepspeed --num_gpus 1 train.py --deepspeed some/where/ds.json --output_dir o --max_steps 1"
    imported = import_texts(tmp_path, {"ds.json": {"zero_optimization": {"stage": 1}}}, command)
    assert imported.document["zero_optimization"] == {"stage": 1}
    assert "ds.json" not in messages(imported, "left out")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("deepspeed --num_gpus 1 t.py --deepspeed_config no.json --deepspeed", "--deepspeed_config=no.json"),
        ("deepspeed --num_gpus 1 t.py --deepspeed no.json", "--deepspeed=no.json"),
        ("accelerate launch --config_file no.yaml t.py", "--config_file=no.yaml"),
        ("python t.py no.json", "argument=no.json"),
    ],
)
def test_a_file_that_is_named_and_nowhere(tmp_path: Path, command: str, words: str) -> None:
    with pytest.raises(DocumentError) as caught:
        import_texts(tmp_path, {}, command)
    assert f"command line: error[unreadable]: {words}: no such file" in str(caught.value)
    assert "pass the file as another FILE" in str(caught.value)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read from anywhere but the local disk."""
    remote: list[str] = []
    read_bytes = storage.read_bytes

    def note(url: str, start: int | None = None, end: int | None = None) -> bytes:
        if not storage.is_local(url):
            remote.append(url)
        return read_bytes(url, start, end)

    monkeypatch.setattr(storage, "read_bytes", note)
    return remote


URL = "memory://import-test/ds.json"


@pytest.mark.parametrize(
    ("files", "command"),
    [
        ({"a.yaml": f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {URL}\n"}, ""),
        ({"a.json": {"output_dir": "o", "max_steps": 5, "deepspeed": URL}}, ""),
        ({}, f"deepspeed --num_gpus 2 t.py --deepspeed {URL}"),
        ({"run.sh": f"deepspeed --num_gpus 2 t.py --deepspeed_config {URL}\n"}, ""),
        ({}, f"accelerate launch --config_file {URL} t.py"),
        ({}, f"python t.py {URL}"),
    ],
)
def test_nothing_that_a_source_names_is_fetched(
    tmp_path: Path, opened: list[str], files: dict[str, Any], command: str
) -> None:
    storage.write_bytes(URL, b'{"zero_optimization": {"stage": 3}}')
    imported = import_texts(tmp_path, files, command)
    assert opened == []
    assert "zero_optimization" not in imported.document
    assert f"{URL}: files that a source names are not fetched; pass it as a FILE: dsjob import {URL} ..." in messages(
        imported, "left out"
    )
    given = read_source(URL)
    assert opened == [URL]
    again = import_sources([read_source(str(tmp_path / name)) for name in files] + [given], _read(command))
    assert again.document["zero_optimization"] == {"stage": 3}
    assert "files that a source names" not in messages(again, "left out")


def _read(command: str) -> Command | None:
    return read_command([Word(word, "command line") for word in command.split()])


def test_a_file_from_the_network_has_none_read_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private.json").write_text('{"zero_optimization": {"stage": 3}}')
    url = "memory://import-test/args.json"
    storage.write_bytes(url, b'{"output_dir": "o", "max_steps": 5, "deepspeed": "private.json"}')
    imported = import_sources([read_source(url)])
    assert "zero_optimization" not in imported.document
    assert "deepspeed=private.json: a file from the network may not name local files" in messages(imported, "left out")


def test_another_file_of_that_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ds.json").write_text("{}")
    command = f"deepspeed --num_gpus 1 train.py --deepspeed {tmp_path}/other/ds.json --output_dir o --max_steps 1"
    imported = import_texts(tmp_path, {"ds.json": {"zero_optimization": {"stage": 1}}}, command)
    assert imported.document["zero_optimization"] == {"stage": 1}
    assert f"{tmp_path}/ds.json is read instead, because it was passed directly" in messages(imported, "changed")


def test_a_file_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "MAX_SIZE", 1 << 20)
    text = '{"zero_optimization": {"stage": 1}, "x": "' + "x" * (1 << 20) + '"}'
    with pytest.raises(DocumentError, match=r"big.json: error\[too-large\]: a document of more than 1 MiB"):
        import_texts(tmp_path, {"big.json": text})
    with pytest.raises(DocumentError, match=r"big.json: error\[too-large\]"):  # also where a command names it
        import_texts(tmp_path, {}, f"deepspeed --num_gpus 1 t.py --deepspeed {tmp_path}/big.json")


def test_wrong_values_of_all_sources_are_told_at_once(tmp_path: Path) -> None:
    """Also of those over which others win, and beside files that cannot be read at all."""
    files = {
        "a.json": '{"output_dir": "o",\n"fp16": "perhaps",\n"warmup_steps": "x",\n"logging_strategy": "now"}',
        "b.json": '{"zero_optimization": {"stage": 7},\n"gradient_clipping": "x",\n"optimizer": 5}',
        "c.yaml": "distributed_type: DEEPSPEED\nnum_processes: 1.5\n",
        "d.json": '{"a": }',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found, wrong = read_sources([*(str(tmp_path / name) for name in files), str(tmp_path / "e.json")])
    command = _read("deepspeed --num_gpus=x t.py --max_grad_norm 1 --learning_rate fast --lr_scheduler_kwargs 5")
    with pytest.raises(DocumentError) as caught:
        import_sources(found, command, wrong)
    told = [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]
    starts = [
        "a.json:2:1: error[type]: fp16=perhaps: must be true or false",
        "a.json:3:1: error[type]: warmup_steps=x: must be a number",
        "a.json:4:1: error[enum]: logging_strategy=now: must be one of no, steps, epoch",
        "b.json:1:24: error[enum]: zero_optimization.stage: must be one of 0, 1, 2, 3",
        "b.json:2:1: error[type]: gradient_clipping: must be a number",
        "b.json:3:1: error[type]: optimizer: must be an object",
        "c.yaml:2:1: error[type]: num_processes=1.5: must be an integer",
        "command line: error[type]: --num_gpus=x: must be a number of ranks, at least 1",
        "command line: error[type]: --lr_scheduler_kwargs=5: must be an object",
        "command line: error[type]: --learning_rate=fast: must be a number",
        "d.json:1:7: error[syntax]: expected a value",
        "e.json: error[unreadable]: cannot read",
    ]
    assert [start for start in starts if not any(line.startswith(start) for line in told)] == []
    assert len(told) == len(starts), told
    places = [(problem.source, problem.line, problem.column) for problem in caught.value.problems]
    assert places == sorted(places)


def test_a_deepspeed_config_inside_the_arguments(tmp_path: Path) -> None:
    arguments = {"output_dir": "o", "max_steps": 5, "learning_rate": 2e-5, "deepspeed": AUTO}
    imported = import_texts(tmp_path, {"args.json": arguments})
    assert imported.document["zero_optimization"]["stage"] == 2
    assert imported.document["optimizer"]["params"]["lr"] == 2e-5
    resolve_imported(imported)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.json", '{"train_batch_size": 8, "gradient_accumulation_steps": 2}', "deepspeed"),
        ("a.json", '{"gradient_clipping": 1.0,}', "deepspeed"),
        ("a.json", '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}', "deepspeed"),
        ("a.json", '{"output_dir": "o", "fp16": true, "gradient_accumulation_steps": 2}', "arguments"),
        ("a.yaml", "output_dir: o\nlearning_rate: 1e-4\ngradient_accumulation_steps: 2\n", "arguments"),
        ("a.yaml", "compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\n", "accelerate"),
        ("a.txt", "deepspeed train.py\n", "command"),
        ("run", "#!/bin/sh\nset -e\ntorchrun --nproc_per_node 2 train.py --x y\n", "command"),
        ("run", "{'a'", None),
        ("conf", "distributed_type: FSDP\nnum_machines: 1\n", "accelerate"),
    ],
)
def test_what_a_file_is(tmp_path: Path, name: str, content: str, kind: str | None) -> None:
    (tmp_path / name).write_text(content)
    if kind is None:
        with pytest.raises(DocumentError):
            read_source(str(tmp_path / name))
    else:
        assert read_source(str(tmp_path / name)).kind == kind


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "", "is empty"),
        ("a.json", "{}", "is an empty object"),
        ("a.json", '{"a": 1, "b": 2}', "cannot detect the type of"),
        ("a.json", '{"gradient_accumulation_steps": 2}', "could be those of a DeepSpeed config or Trainer arguments"),
        ("a.json", '{"model": {"_target_": "a.b"}, "data": {}}', "is already a job document"),
        ("train.py", "import torch\n", "is a program"),
        ("a.txt", "python\n", "cannot tell|must be one object"),
    ],
)
def test_files_that_are_nothing_to_import(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises((UsageError, DocumentError), match=words):
        read_source(str(tmp_path / name))


def test_the_kind_can_be_told(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"gradient_accumulation_steps": 2}')
    assert read_source(str(tmp_path / "a.json"), "arguments").kind == "arguments"
    assert read_source(str(tmp_path / "a.json"), "deepspeed").kind == "deepspeed"


def test_a_syntax_error_names_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n "a": }')
    with pytest.raises(DocumentError, match=r"a\.json:2:7"):
        read_source(str(tmp_path / "a.json"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_source(str(tmp_path / "nothing.json"))
