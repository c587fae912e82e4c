"""Launch commands: their words, their launchers, and what scripts are told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from imports import get, import_command, import_texts, list_unmentioned, messages, resolve_imported

from dsjob.errors import DocumentError, UsageError
from dsjob.importing.command_line import find_commands, parse_value, read_command, split_words


def words(text: str, variables: dict[str, str] | None = None) -> list[list[str]]:
    return [[word.text for word in found] for found in split_words(text, "run.sh", variables or {})]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a b  c", [["a", "b", "c"]]),
        ("a 'b c' \"d e\"", [["a", "b c", "d e"]]),
        ("a \\\n  b", [["a", "b"]]),
        ("a b\\ c", [["a", "b c"]]),
        ("a # not b\nc", [["a"], ["c"]]),
        ("a#b", [["a#b"]]),
        ("a && b; c | d", [["a"], ["b"], ["c"], ["d"]]),
        ("a > log 2>&1 b", [["a", "b"]]),
        ("a &> log b", [["a", "b"]]),
        ("a --x='{\"k\": 1}'", [["a", '--x={"k": 1}']]),
        ('a "say \\"b\\""', [["a", 'say "b"']]),
        ("a $X ${X}y '$X' \"$X\" $Z", [["a", "1", "1y", "$X", "1", "$Z"]]),
        ("a ${Z} $(nvidia-smi -L | wc -l) b", [["a", "$Z", "$(nvidia-smi -L | wc -l)", "b"]]),
        ("a --n=`nproc --all` b", [["a", "--n=`nproc --all`", "b"]]),
        ("a $(never closed", [["a", "$(never closed"]]),
        ("", []),
        ("# nothing", []),
    ],
)
def test_words(text: str, wanted: list[list[str]]) -> None:
    assert words(text, {"X": "1"}) == wanted


def test_words_have_places() -> None:
    found = list(split_words("a \\\n  --b 'c d'", "run.sh", {}))
    assert [word.place for word in found[0]] == ["run.sh:1:1", "run.sh:2:3", "run.sh:2:7"]


def test_a_quote_that_is_never_closed_is_named() -> None:
    with pytest.raises(DocumentError, match=r"run\.sh:2:7: error\[syntax\]: unclosed quote"):
        list(split_words("a\nb --x 'c", "run.sh", {}))


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("3e-5", 3e-5), ("-1", -1), (".5", 0.5), ("01", "01"), ("True", True), ("false", False), ("None", None),
     ('{"a": 1}', {"a": 1}), ("{a", "{a"), ("t5-small", "t5-small"), ("1,2", "1,2")],
)  # fmt: skip
def test_values(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


# command -> launcher, script, ranks
LAUNCHERS = [
    ("deepspeed --num_gpus=2 run.py --deepspeed", "deepspeed", "run.py", 2),
    ("deepspeed --num_gpus 2 --master_port 9994 run.py", "deepspeed", "run.py", 2),
    ("deepspeed run.py", "deepspeed", "run.py", None),
    ("deepspeed --include localhost:0,3 run.py", "deepspeed", "run.py", 2),
    ("deepspeed --include=localhost:1 run.py", "deepspeed", "run.py", 1),
    ("deepspeed --module --num_gpus 4 pkg.train", "deepspeed", "pkg.train", 4),
    ("torchrun --nproc_per_node 4 train.py", "torchrun", "train.py", 4),
    ("torchrun --standalone --nproc-per-node=4 -m pkg.train", "torchrun", "pkg.train", 4),
    ("torchrun --nproc_per_node gpu train.py", "torchrun", "train.py", None),
    ("python -m torch.distributed.launch --nproc_per_node=2 --use_env train.py", "torchrun", "train.py", 2),
    ("python3 -u -m torch.distributed.run --nproc_per_node=2 train.py", "torchrun", "train.py", 2),
    ("accelerate launch --num_processes 8 --multi_gpu train.py", "accelerate", "train.py", 8),
    ("python -m accelerate.commands.launch --num_processes 8 train.py", "accelerate", "train.py", 8),
    ("/usr/bin/python3.11 train.py --x 1", "python", "train.py", None),
    ("python -m pkg.train", "python", "pkg.train", None),
    ("CUDA_VISIBLE_DEVICES=1 OMP_NUM_THREADS=4 python train.py", "python", "train.py", None),
    ("srun -N 2 torchrun --nproc_per_node 4 train.py", "torchrun", "train.py", 4),
    ("./train.py --x 1", "python", "./train.py", None),
]


@pytest.mark.parametrize(("text", "launcher", "script", "ranks"), LAUNCHERS)
def test_launchers(text: str, launcher: str, script: str, ranks: int | None) -> None:
    (found,) = split_words(text, "run.sh", {})
    command = read_command(found)
    assert command is not None
    assert command.script is not None
    assert (command.launcher, command.script.value) == (launcher, script)
    imported = import_command(text)
    assert get(imported.document, "launch.nproc") == ranks
    assert messages(imported, "unknown") in (
        "",
        "unknown: command line: --x=1: not an argument of the Trainer or of its scripts",
    )
    resolve_imported(imported)


def test_what_starts_no_training_is_no_command() -> None:
    assert find_commands("export A=1\nmkdir out\ncd out\necho done\n", "run.sh") == []


def test_variables_of_the_script_are_filled_in(tmp_path: Path) -> None:
    text = """#!/bin/bash
export LR=3e-5
OUT=runs/a; N=4
torchrun --nproc_per_node=$N train.py \\
    --learning_rate ${LR} --output_dir "$OUT/x" --max_steps 10 2>&1 | tee log
"""
    imported = import_texts(tmp_path, {"run.sh": text})
    assert imported.document["optimizer"]["params"]["lr"] == 3e-5
    assert imported.document["output"]["dir"] == "runs/a/x"
    assert imported.document["launch"]["nproc"] == 4


def test_what_only_the_shell_knows_is_to_be_filled_in(tmp_path: Path) -> None:
    command = "torchrun --nproc_per_node=$(nvidia-smi -L | wc -l) train.py --output_dir ${OUT}/x"
    text = f"{command} --max_steps 5 --logging_steps $N\n"
    imported = import_texts(tmp_path, {"run.sh": text})
    assert imported.document["output"]["dir"] == "$OUT/x"
    assert imported.document["trainer"]["log_every"] == 1  # the least that is allowed
    assert "run.sh:1:61: --output_dir=$OUT/x" in messages(imported, "fill in")
    assert "launch.nproc" in messages(imported, "fill in")


def test_gpus_to_leave_out_are_taken_over() -> None:
    imported = import_command("deepspeed --num_gpus 2 --exclude localhost:1 train.py")
    assert imported.document["launch"] == {"nproc": 2, "exclude": "localhost:1"}
    assert not messages(imported, "left out")
    assert "launch.nproc" in messages(import_command("deepspeed --exclude=localhost:0 train.py"), "fill in")
    assert "--exclude=worker-1: start dsjob with torchrun" in messages(
        import_command("deepspeed --num_gpus 2 --exclude worker-1 a.py"), "left out"
    )


def test_several_nodes_are_left_to_torchrun() -> None:
    imported = import_command("deepspeed --hostfile hosts --num_nodes 2 --num_gpus 8 --master_addr 10.0.0.1 train.py")
    left_out = messages(imported, "left out")
    assert "--hostfile=hosts: start dsjob with torchrun on each machine" in left_out
    assert "--num_nodes=2" in left_out
    assert imported.document["launch"] == {"nproc": 8}
    assert "--include=worker-1:0,2: start" in messages(
        import_command("deepspeed --include worker-1:0,2 a.py"), "left out"
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("deepspeed --num_gpus=x train.py", "--num_gpus=x: must be a number of ranks, at least 1; -1 would mean all"),
        ("deepspeed --num_gpus 0 train.py", "--num_gpus=0: must be a number of ranks"),
        ("deepspeed --num_gpus 1.5 train.py", "--num_gpus=1.5: must be a number of ranks"),
        (
            "torchrun --nproc_per_node=four train.py",
            "--nproc_per_node=four: must be a number of ranks, at least 1; gpu",
        ),
        ("torchrun --nproc_per_node=4 --nproc-per-node=x train.py", "--nproc-per-node=x: must be a number of ranks"),
    ],
)
def test_a_number_of_ranks_that_is_none_is_refused(command: str, words: str) -> None:
    with pytest.raises(DocumentError, match=f"^command line: error\\[type\\]: {re.escape(words)}"):
        import_command(command)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("deepspeed --num_gpus -1 train.py", "--num_gpus=-1"),
        ("deepspeed --num_gpus $N train.py", "--num_gpus=$N"),
        ("torchrun --nproc_per_node gpu train.py", "--nproc_per_node=gpu"),
        ("deepspeed train.py", "the launcher"),
    ],
)
def test_a_number_of_ranks_that_only_the_machine_knows(command: str, words: str) -> None:
    assert f"launch.nproc: {words} uses all devices of the machine" in messages(import_command(command), "fill in")


# A value that is of no use here, and the note that says so.
DROPPED = [
    ("deepspeed --bind_cores_to_rank --num_gpus 1 t.py", "--bind_cores_to_rank=true: bind ranks with numactl"),
    ("torchrun --max_restarts 1 t.py", "--max_restarts=1: start the job again"),
    ("torchrun --rdzv_id 1 t.py", "--rdzv_id=1: start dsjob with torchrun"),
    ("python t.py --output_dir o --optim sgd --adam_beta1 0.8", "--adam_beta1=0.8: SGD has no such argument"),
    (
        "python t.py --output_dir o --optim adafactor --adam_epsilon 1",
        "--adam_epsilon=1: transformers.Adafactor has no",
    ),
    ("python t.py --output_dir o --eval_steps 5", "--eval_steps=5: --eval_strategy=no disables evaluation"),
    (
        "python t.py --output_dir o --save_strategy no --save_steps 5",
        "--save_steps=5: --save_strategy=no takes precedence",
    ),
    ("python t.py --output_dir o --logging_strategy epoch --logging_steps 5", "--logging_steps=5: --logging_strategy"),
    ("python t.py --output_dir o --fp16 --fp16_opt_level O2", "--fp16_opt_level=O2: only used with apex"),
    ("python t.py --output_dir o --fp16_backend apex", "--fp16_backend=apex: no effect without fp16"),
    (
        "python t.py --output_dir o --overwrite_output_dir --resume_from_checkpoint True",
        "--overwrite_output_dir=true: --resume_from_checkpoint=true takes precedence",
    ),
    (
        "python t.py --model_name_or_path t5-small --train_file a.csv --max_eval_samples 3",
        "--max_eval_samples=3: there is",
    ),
    (
        "python t.py --model_name_or_path t5-small --train_file a.csv --block_size 3",
        "--block_size=3: the T5 recipe only needs",
    ),
    ("python t.py --fsdp_config c.json --output_dir o", "--fsdp_config=c.json: the file is not read"),
    ("env A=b nohup torchrun --nproc_per_node 1 t.py", "env A=b nohup: start dsjob with it"),
]


@pytest.mark.parametrize(("command", "words"), DROPPED)
def test_every_value_that_is_dropped_is_told(command: str, words: str) -> None:
    assert words in messages(import_command(command), "left out")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--optim sgd --adafactor", "--adafactor=true (command line) overrides --optim=sgd"),
        ("--eval_strategy no --evaluation_strategy steps", "eval_strategy: --evaluation_strategy=steps"),
        (
            "--learning_rate 1 --learning_r 2",
            "learning_rate: --learning_r=2 (command line) overrides --learning_rate=1",
        ),
        ("--max_eval_samples 3 --max_val_samples 4", "max_eval_samples: --max_val_samples=4 (command line) overrides"),
    ],
)
def test_of_two_spellings_the_loser_is_told(command: str, words: str) -> None:
    if "no --evaluation" in command:
        assert import_command(f"python t.py --output_dir o {command}").document["trainer"]["eval_every"] == 500
    else:
        assert words in messages(import_command(f"python t.py --output_dir o {command}"), "conflict")


def test_arguments_of_a_placeholder_are_kept() -> None:
    document = import_command(
        "python t.py --model_name_or_path a/b --model_revision r --attn_implementation sdpa"
    ).document
    assert document["model"] == {
        "_target_": "my_module.build_model",
        "pretrained": "a/b",
        "revision": "r",
        "attn_implementation": "sdpa",
    }


def test_what_a_script_exports_is_told_unless_the_command_uses_it(tmp_path: Path) -> None:
    text = "export A=1 OMP_NUM_THREADS=4\nexport HF_TOKEN=hf_x\nB=2\ntorchrun --nproc_per_node $A t.py\n"
    imported = import_texts(tmp_path, {"run.sh": text})
    left_out = messages(imported, "left out")
    assert "run.sh:1:12: OMP_NUM_THREADS: set it for dsjob too" in left_out
    assert "HF_TOKEN: set it" in left_out
    assert "hf_x" not in left_out
    assert len(left_out.splitlines()) == 2


@pytest.mark.parametrize(
    "text", ["9" * 5000, "1e999", "[1e999]", "[" * 5000, '{"a": NaN}', "[1], 2", '{"a": %s}' % ("9" * 5000)]
)
def test_values_without_bounds_stay_text(text: str) -> None:
    assert parse_value(text) == text


def test_variables_that_grow_without_end_are_refused() -> None:
    text = "A=" + "x" * 100 + "\n" + "A=$A$A\n" * 40 + "python $A.py\n"
    with pytest.raises(DocumentError, match="variables expand to more than"):
        find_commands(text, "run.sh")


def test_ranks_on_several_machines_count_in_the_length_of_the_run() -> None:
    imported = import_command(
        "torchrun --nnodes 2 --nproc_per_node 2 t.py --output_dir o --num_train_epochs 1 --max_train_samples 320 "
        "--per_device_train_batch_size 4 --warmup_ratio 0.5"
    )
    assert imported.document["scheduler"]["params"]["num_warmup_steps"] == 10  # of 20: 320 samples, 16 a step


def test_every_gpu_is_a_number_to_fill_in() -> None:
    assert "launch.nproc" in messages(import_command("deepspeed train.py"), "fill in")
    assert "launch.nproc" in messages(import_command("torchrun --nproc_per_node auto train.py"), "fill in")


def test_an_option_given_twice_is_a_conflict() -> None:
    imported = import_command("python train.py --output_dir o --seed 1 --max_steps 5 --seed 2")
    assert imported.document["trainer"]["seed"] == 2
    assert "seed: --seed=2 (command line) overrides --seed=1" in messages(imported, "conflict")


def test_unknown_options_are_named_with_a_suggestion() -> None:
    imported = import_command("deepspeed --num_gpu 2 train.py --output_dir o --warmup_stepz 10 --my_flag --api_key abc")
    unknown = messages(imported, "unknown")
    assert '--num_gpu=2: did you mean "num_gpus"?' in unknown
    assert '--warmup_stepz=10: did you mean "warmup_steps"?' in unknown
    assert "--my_flag=true" in unknown
    assert "abc" not in unknown


def test_an_argument_of_the_trainer_alone_names_its_optimizer() -> None:
    imported = import_command("python train.py --learning_rate 3e-5 --warmup_steps 10")
    assert imported.document["optimizer"] == {"type": "AdamW", "params": {"lr": 3e-5}}
    assert imported.document["scheduler"] == {"type": "linear", "params": {"num_warmup_steps": 10}}
    assert "optimizer.type=AdamW: the Trainer's default, to which --learning_rate=3e-05 belongs" in messages(
        imported, "changed"
    )
    assert list_unmentioned(imported) == []


def test_a_script_without_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"error\[too-large\]: the launch command has more than 1 MiB"):
        import_texts(tmp_path, {"run.sh": "python t.py " + "x " * (1 << 20)})


def test_a_script_of_ones_own_gets_no_defaults_of_the_trainer() -> None:
    imported = import_command("deepspeed --num_gpus 2 train.py --lr 0.1 --deepspeed --local_rank 0")
    assert set(imported.document) == {"model", "data", "launch"}
    assert "--lr=0.1" in messages(imported, "unknown")


def test_secrets_of_the_environment_stay_out_of_notes() -> None:
    imported = import_command(
        "WANDB_API_KEY=abc HF_TOKEN=def python train.py --token ghi --hub_token jkl --output_dir o"
    )
    told = "\n".join(map(str, imported.notes))
    assert "WANDB_API_KEY" in told
    assert [secret for secret in ("abc", "def", "ghi", "jkl") if secret in told] == []


def test_two_commands_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"2 launch commands \(a\.py, b\.py\)"):
        import_texts(tmp_path, {"run.sh": "python a.py\npython b.py\n"})
    with pytest.raises(UsageError, match="two launch commands"):
        import_texts(tmp_path, {"run.sh": "python a.py\n"}, "python b.py")


# command -> values at paths, words of notes: the model and the data
TASKS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    (
        (
            "python run_summarization.py --model_name_or_path t5-small --train_file a.csv --validation_file b.jsonl "
            "--text_column text --summary_column summary --max_train_samples 9 --max_val_samples 3 --max_target_len 6"
        ),
        {
            "model": {"_target_": "dsjob.recipes.t5.build", "pretrained": "t5-small"},
            "data.train": {
                "_target_": "dsjob.recipes.t5.build_dataset",
                "split": "all",
                "path": "a.csv",
                "tokenizer": "t5-small",
                "max_source": 1024,
                "max_target": 6,
                "max_samples": 9,
                "source": "text",
                "target": "summary",
            },
            "data.eval.path": "b.jsonl",
            "data.eval.max_samples": 3,
            "data.collate": {"_target_": "dsjob.recipes.t5.collate", "_partial_": True},
        },
        (),
    ),
    (
        (
            "python run_translation.py --model_name_or_path t5-base --dataset_name wmt16 --dataset_config ro-en "
            "--source_lang en --target_lang ro --source_prefix 'translate: '"
        ),
        {
            "model.pretrained": "t5-base",
            "data.train": {
                "_target_": "my_module.build_train_data",
                "dataset_name": "wmt16",
                "dataset_config_name": "ro-en",
                "source_lang": "en",
                "target_lang": "ro",
            },
        },
        ("dsjob downloads nothing", "--source_prefix=translate: : results will differ"),
    ),
    (
        "python run_summarization.py --model_name_or_path google/flan-t5-xl --train_file a.json",
        {"model._target_": "dsjob.recipes.t5.build", "data.train._target_": "my_module.build_train_data"},
        (".jsonl",),
    ),
    (
        "python run_clm.py --model_name_or_path gpt2 --train_file a.txt --block_size 512",
        {
            "model": {
                "_target_": "transformers.AutoModelForCausalLM.from_pretrained",
                "pretrained_model_name_or_path": "gpt2",
                "dtype": "float32",
            },
            "data.train": {"_target_": "my_module.build_train_data", "path": "a.txt", "block_size": 512},
        },
        ("run_clm.py",),
    ),
    (
        "python run_glue.py --model_name_or_path bert-base-cased --task_name mrpc --max_seq_length 128",
        {
            "model._target_": "transformers.AutoModelForSequenceClassification.from_pretrained",
            "data.train.task_name": "mrpc",
        },
        (),
    ),
    (
        "python finetune.py --model_name_or_path some/model --train_file a.csv",
        {"model": {"_target_": "my_module.build_model", "pretrained": "some/model"}},
        ("with the factory of some/model",),
    ),
    ("python run_mlm.py --config_name roberta-base", {"model._target_": "my_module.build_model"}, ("--config_name",)),
]


@pytest.mark.parametrize(("text", "wanted", "notes"), TASKS)
def test_model_and_data(text: str, wanted: dict[str, Any], notes: tuple[str, ...]) -> None:
    imported = import_command(f"{text} --output_dir o --max_steps 10")
    assert {path: get(imported.document, path) for path in wanted} == wanted
    told = "\n".join(map(str, imported.notes))
    assert [part for part in notes if part not in told] == []
    assert messages(imported, "unknown") == ""
    resolve_imported(imported)
