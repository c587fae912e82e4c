"""`dsjob plan`: what it prints, what it exits with, and what it says where it cannot know."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job, write_json

from dsjob.cli import main
from dsjob.errors import UsageError


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `dsjob plan` and gives back its exit code, what it printed, and what it complained about."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["plan", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def data(plan: Any) -> Any:
    """The plan as data."""

    def run(*arguments: str) -> Any:
        code, out, err = plan(*arguments, "--format", "json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


def test_a_recipe_is_planned_as_text(plan: Any) -> None:
    code, out, err = plan("+recipe=zero2_gpt", "--device-memory", "1GiB", "--sweep-stages")
    assert (code, err) == (0, "")
    whole = "842,496 parameters", "optimizer state", "activations", "fits in 1 GiB", "all-gather", "reduce-scatter"
    whole += "checkpoint", "convert", "steps over", "learning rate", "peak per rank, by micro batch"
    whole += "9.64 MiB of weights and optimizer", "weights only: 3.21 MiB as fp32"
    assert [part for part in whole if part not in out] == []
    assert "\x1b" not in out


def test_json_holds_the_same_plan(data: Any) -> None:
    found = data("+recipe=zero2_gpt", "--device-memory", "1GiB", "--sweep-stages")
    assert found["model"] == {
        "source": "dsjob.recipes.gpt.build",
        "parameters": 842496,
        "trainable": 842496,
        "blocks": 4,
        "assumed": None,
    }
    assert found["layout"]["stage"] == 2
    assert found["layout"]["world_size"] == 2
    assert found["memory"]["model_states"] == pytest.approx(16 * 842496 / 2, rel=0.01)
    assert found["memory"]["peak"] == max(found["memory"]["total"].values())
    assert found["fits"] is True
    assert found["course"]["steps"] == 400
    assert found["course"]["rates"][0] == [0, 0.0]
    assert found["activations"]["with_checkpointing"] < found["activations"]["whole"]
    assert [row["stage"] for row in found["sweep"]] == [0, 1, 1, 2, 2, 3, 3, 3]


def test_the_world_size_of_the_command_line_counts(data: Any) -> None:
    few, many = (data("+recipe=zero3_t5", "--world-size", str(size)) for size in (2, 8))
    assert few["memory"]["model_states"] == pytest.approx(4 * many["memory"]["model_states"], rel=0.05)


def test_a_job_that_does_not_fit_exits_with_3_and_says_what_would(plan: Any) -> None:
    arguments = ("+recipe=quickstart", "--device-memory", "30MiB")
    assert plan(*arguments)[0] == 0
    code, out, err = plan(*arguments, "--require-fit")
    assert code == 3
    assert "does not fit in 30 MiB" in out
    assert "the biggest item is activations, 70.3 MiB" in err
    assert "trainer.micro_batch=2" in err
    assert plan("+recipe=quickstart", "trainer.micro_batch=2", "--device-memory", "30MiB", "--require-fit")[0] == 0


def test_too_little_memory_of_a_machine_is_a_warning(plan: Any, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("+recipe=zero2_gpt", "--host-memory")  # two ranks, 3.21 MiB of weights each
    assert data(*arguments, "7MiB")["warnings"] == []
    code, out, _ = plan(*arguments, "6MiB")
    assert code == 0
    told = "2 ranks on a machine need 6.43 MiB of host memory (each builds the whole model at its start)"
    assert f"warning  {told}, but the machine has 6 MiB\n" in out
    (offloaded,) = data(*arguments, "12MiB", "--offload", "optimizer")["warnings"]
    assert "of host memory (for what is offloaded), but the machine has 12 MiB" in offloaded
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096}.__getitem__)
    (here,) = data("--params", "1e12")["warnings"]
    assert here.startswith("a rank needs 3.64 TiB of host memory")
    assert here.endswith(", but this machine has 4 GiB")


def test_a_stage_is_built_without_the_others(data: Any) -> None:
    asked = ("--params", "70e9", "--host-memory", "1TiB", "launch.nproc=8")
    whole, stages = data(*asked), data(*asked, "pipeline.stages=8")
    embedding = 4 * 128256 * 8192 * 70 / 70.55
    assert whole["memory"]["host_at_start"] == 280 * 10**9
    assert stages["memory"]["host_at_start"] == pytest.approx(35 * 10**9 + embedding, rel=1e-3)
    assert "each builds the whole model" in whole["warnings"][0]
    assert stages["warnings"] == []
    measured = data(*asked, "pipeline.stages=8", "pipeline.partition=time")
    assert measured["memory"]["host_at_start"] == 280 * 10**9
    # With the model: the larger stage, and the largest parameter, which is the embedding.
    small, model = data("+recipe=pipe_gpt"), data("+recipe=pipe_gpt", "pipeline.stages=1")["memory"]
    sizes = [stage["parameters"] for stage in small["stages"]]
    assert 4 * max(sizes) < small["memory"]["host_at_start"] < model["host_at_start"]


def test_at_stage_3_a_rank_builds_a_share_of_a_large_model(data: Any, plan: Any) -> None:
    asked = ("--params", "70e9", "--host-memory", "1TiB", "launch.nproc=8", "zero_optimization.stage=3")
    shares = data(*asked)
    embedding = 4 * 128256 * 8192 * 70 / 70.55
    assert shares["memory"]["host_at_start"] == pytest.approx(2 * 35 * 10**9 + embedding, rel=1e-3)
    assert shares["warnings"] == []
    assert "69.1 GiB per rank: each rank builds its share of the model" in plan(*asked)[1]
    groups = data(*asked, "zero_optimization.mics_shard_size=4")
    assert groups["memory"]["host_at_start"] == 280 * 10**9


def test_the_plan_of_a_pipeline_offers_what_validates(plan: Any, data: Any) -> None:
    asked = ("+recipe=pipe_gpt", "launch.nproc=8", "--sweep-stages")
    for schedule, stages in (("1f1b", {0, 1, 2, 3}), ("zero-bubble", {0, 1, 2})):
        assert {row["stage"] for row in data(*asked, f"pipeline.schedule={schedule}")["sweep"]} == stages
    assert " per rank: each rank builds its stage" in plan("+recipe=pipe_gpt")[1]
    assert " per rank: each rank builds the whole model" in plan("+recipe=quickstart")[1]


def test_parameters_of_a_pipeline_cannot_be_offloaded(plan: Any) -> None:
    code, _, err = plan("+recipe=pipe_gpt", "zero_optimization.stage=3", "--offload", "param")
    assert code == 2
    assert "parameters cannot be offloaded in a pipeline" in err


def test_a_number_of_parameters_is_shown_once(plan: Any) -> None:
    code, out, _ = plan("--params", "7B")
    assert code == 0
    assert " model    7,000,000,000 parameters, shaped like Llama 3.1 8B: 32 blocks " in out
    assert "assumed to have the shape of Llama 3.1 8B" in out


def test_requiring_a_fit_needs_a_memory_to_fit_into(plan: Any) -> None:
    code, _, err = plan("+recipe=quickstart", "--require-fit")
    assert code == 2
    assert "--device-memory" in err


@pytest.mark.parametrize(("text", "count"), [("7e9", 7e9), ("7B", 7e9), ("350m", 350e6), ("124000000", 124e6)])
def test_a_number_of_parameters_stands_for_a_model(data: Any, text: str, count: float) -> None:
    found = data("--params", text, "--world-size", "8", "zero_optimization.stage=3", "bf16.enabled=true")
    assert found["model"]["parameters"] == count
    assert found["memory"]["model_states"] == pytest.approx(16 * count / 8, rel=1e-4)
    assert found["activations"]["whole"] is None
    assert any("activations" in note for note in found["notes"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--params", "many"),
        ("--params", "-1"),
        ("--params", "nan"),
        ("--device-memory", "big"),
        ("--device-memory", "0"),
    ],
)
def test_numbers_that_are_none_are_refused(plan: Any, arguments: tuple[str, str]) -> None:
    code, _, err = plan("+recipe=quickstart", *arguments)
    assert code == 2
    assert arguments[0] in err
    assert arguments[1] in err


@pytest.mark.parametrize(
    ("offload", "stage", "allowed"),
    [("optimizer", 2, True), ("param", 3, True), ("optimizer", 0, False), ("param", 2, False)],
)
def test_offloading_is_planned_where_a_stage_allows_it(
    plan: Any, data: Any, offload: str, stage: int, allowed: bool
) -> None:
    arguments = ("+recipe=zero2_gpt", f"zero_optimization.stage={stage}", "--offload", offload)
    if allowed:
        found = data(*arguments)
        assert found["memory"]["host"] >= 16 * 842496 / 2
        section = f"zero_optimization.offload_{offload}.device=cpu"
        assert data(*arguments[:2], section)["memory"] == found["memory"]
    else:
        code, _, err = plan(*arguments)
        assert code == 2
        assert "needs stage" in err


def test_a_missing_dataset_leaves_out_what_it_would_tell(plan: Any) -> None:
    code, out, err = plan("+recipe=quickstart", "+data.train.path=nowhere.txt")
    assert (code, err) == (0, "")
    assert "optimizer state" in out
    assert "nowhere.txt" in out
    assert "activations are not counted" in out
    assert "steps over" not in out


def test_a_model_and_data_beside_the_document_are_found(tmp_path: Path, data: Any, monkeypatch: Any) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "plan_beside.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).square().mean()\n"
        "class Data(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n"
        "        return iter(torch.ones(100, 8))\n"
    )
    job = make_job(
        model={"_target_": "plan_beside.Net", "in_features": 8, "out_features": 8},
        data={"train": {"_target_": "plan_beside.Data"}},
    )
    found = data(str(write_json(folder / "job.json", job)))
    assert found["model"]["parameters"] == 72
    assert found["course"]["samples"] is None
    assert found["course"]["steps"] == 10
    assert found["activations"]["whole"] > 0


def test_a_factory_that_cannot_be_built_without_memory_is_pointed_to_params(tmp_path: Path, plan: Any) -> None:
    (tmp_path / "plan_eager.py").write_text("import torch\ndef build():\n    return torch.ones(1).to('meta').item()\n")
    path = str(write_json(tmp_path / "job.json", make_job(model={"_target_": "plan_eager.build"})))
    code, _, err = plan(path)
    assert code == UsageError.exit_code
    assert "plan_eager.build" in err
    assert "--params" in err


def test_mistakes_in_the_document_are_told_as_everywhere(plan: Any) -> None:
    code, _, err = plan("+recipe=quickstart", "trainer.max_steps=-1")
    assert code == 2
    assert "trainer.max_steps" in err


def test_a_plan_says_whose_engine_its_figures_are_of(plan: Any) -> None:
    assert "figures are of dsjob's own engine" not in plan("--params", "1e6")[1]
    assert "figures are of dsjob's own engine" in plan("--params", "1e6", "engine=deepspeed")[1]


@pytest.mark.parametrize("scheduler", ["WarmupLR", "WarmupDecayLR"])
def test_a_trainers_config_of_autos_is_planned(tmp_path: Path, data: Any, scheduler: str) -> None:
    params = dict.fromkeys(["warmup_min_lr", "warmup_max_lr", "warmup_num_steps"], "auto")
    params |= {"total_num_steps": "auto"} if scheduler == "WarmupDecayLR" else {}
    sizes = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"]
    buckets = ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"]
    config = {
        **dict.fromkeys(sizes, "auto"),
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")},
        "scheduler": {"type": scheduler, "params": params},
        "zero_optimization": {"stage": 3, **dict.fromkeys(buckets, "auto")},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    found = data("--params", "7B", "ds.json", "--world-size", "8")
    assert found["model"]["parameters"] == 7_000_000_000


def write_pretrained_job(folder: Path, name: str, **arguments: Any) -> str:
    """A job with a pretrained model; the data is missing, so that activations are left out."""
    target = {"_target_": "transformers.AutoModelForCausalLM.from_pretrained", "pretrained_model_name_or_path": name}
    document = {
        "model": {**target, **arguments},
        "data": {"train": {"_target_": "dsjob.recipes.text.ByteText", "path": "nowhere"}},
        "trainer": {"micro_batch": 1, "max_steps": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    (folder / "job.json").write_text(json.dumps(document))
    return "job.json"


def test_a_pretrained_model_is_planned_by_its_configuration(tmp_path: Path, data: Any) -> None:
    pytest.importorskip("transformers")
    size = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    (tmp_path / "gpt").mkdir()
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    (tmp_path / "gpt/config.json").write_text(json.dumps({"model_type": "gpt2", **size, **tokens}))
    found = data(write_pretrained_job(tmp_path, "gpt"))
    assert found["model"]["parameters"] == 100 * 32 + 64 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32


def test_a_pretrained_model_that_is_not_there_is_not_fetched(
    tmp_path: Path, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    # Else the hub's own client asks the hub, once for each process, for the names of coding agents.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    for call in ("socket.socket.connect", "socket.getaddrinfo"):
        monkeypatch.setattr(call, lambda *_, **__: pytest.fail("a connection was opened"))
    code, _, err = plan(write_pretrained_job(tmp_path, "nobody/nothing", revision="0" * 40))
    assert code == 2
    assert "nobody/nothing is neither a folder nor in this machine's cache" in err
    assert f"hf download nobody/nothing config.json --revision {'0' * 40}, or pass --params 7B" in err


def test_a_mesh_is_planned_by_stage_and_by_axis(plan: Any, data: Any) -> None:
    code, out, err = plan("+recipe=mesh_gpt")
    assert (code, err) == (0, "")
    whole = "2 data-parallel ranks x 2 pipe x 2 tensor", "of stage 0, which needs most", "\n stage 1 "
    whole += "data all-reduce", "pipe send", "tensor all-reduce", "of tied gradients"
    assert [part for part in whole if part not in out] == []
    found = data("+recipe=mesh_gpt", "pipeline.schedule=gpipe", "zero_optimization.stage=1")
    assert [stage["held"] for stage in found["stages"]] == [4, 4]
    assert {transfer["axis"] for transfer in found["communication"]} == {"pipe", "data", "tensor"}
    assert found["memory"]["peak"] == max(stage["peak"] for stage in found["stages"])


def test_parts_of_a_number_of_parameters_are_assumed_to_be_even(data: Any) -> None:
    sizes = ["pipeline.stages=4", "tensor_parallel.size=2", "trainer.grad_accum=4"]
    found = data("--params", "8B", "--world-size", "16", *sizes)
    assert [stage["parameters"] for stage in found["stages"]] == [10**9] * 4
    assert found["model"]["parameters"] == 8 * 10**9
    assert "the model is assumed to divide evenly into 8 parts" in found["notes"]
