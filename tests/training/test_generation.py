"""Generation by sharded models on several ranks, whose ranks finish at different times: the tokens of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import transformers
from engines import make_config
from ranks import run_ranks
from safetensors.torch import load_file
from text_jobs import JOB, SENTENCES
from torch import Tensor, nn

import dsjob
from dsjob.errors import ContractError
from dsjob.ranks.mesh import World
from dsjob.text.generation import Generated, Generator, cut_prompts, require_decoding
from dsjob.text.tokenizers import ByteTokenizer
from dsjob.training.metric_inputs import Inputs, Seen

SIZES: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1}


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "t5":
        # Else such a small model would generate a single token, padding.
        varied: dict[str, Any] = {"initializer_factor": 3.0, "tie_word_embeddings": False}
        config = transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=2, decoder_start_token_id=0, **varied, **SIZES
        )
        return transformers.T5ForConditionalGeneration(config)
    small = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **SIZES)
    return transformers.GPT2LMHeadModel(small)


def make_batch(rank: int) -> dict[str, Tensor]:
    """Two samples whose lengths depend on the rank. The labels of the last two tokens are given."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(2, 64, (2, 5 + 3 * rank), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    ids[1, -1] = mask[1, -1] = 0  # padding
    labels[:, :-2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def generate_alone(kind: str, rank: int, settings: dict[str, Any]) -> list[list[int]]:
    """What one unsharded process generates, sample by sample without padding."""
    model, batch, rows = make_model(kind).eval(), make_batch(rank), []
    for row in range(2):
        kept = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][kept]
        if kind != "t5":
            ids = ids[: len(batch["labels"][row]) - 2]
        written = model.generate(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], **settings)[0]
        rows.append((written if kind == "t5" else written[len(ids) :]).tolist())
    return rows


def generate(world: World, kind: str, stage: int, settings: dict[str, Any]) -> list[list[int]]:
    engine = dsjob.initialize(model=make_model(kind), config=make_config(stage))[0]
    engine.eval()
    found = Generator(settings).add(engine, make_batch(world.data_rank))["generated"]
    # A second time, as in a second evaluation; and a pass as in training, which has to find the weights as they were.
    assert torch.equal(Generator(settings).add(engine, make_batch(world.data_rank))["generated"], found)
    engine.train()
    engine.backward(engine(**make_batch(world.data_rank)).loss)
    engine.step()
    return found.tolist()


@pytest.mark.parametrize("kind", ["t5", "gpt2"])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 2, 3])
@pytest.mark.parametrize("beams", [1, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.full("1-2-t5", "1-3-gpt2", "1-3-t5")
def test_each_rank_generates_what_one_process_does(kind: str, stage: int, beams: int) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 9, "num_beams": beams, "do_sample": False, "use_cache": True}
    settings |= {"length_penalty": 0.0} if beams > 1 else {}  # else beams that have ended lose to longer ones
    # From the third one on, each token that rank 0 generates ends a text, so that rank 0 finishes first.
    start = 1 if kind == "t5" else 0
    ends = sorted({token for row in generate_alone(kind, 0, settings) for token in row[start + 2 :]})
    settings["eos_token_id"] = ends
    expected = [generate_alone(kind, rank, settings) for rank in range(2)]
    first, last = (max(len(row) for row in rows) for rows in expected)
    assert first < last
    for found, alone in zip(run_ranks(generate, 2, kind, stage, settings), expected, strict=True):
        for row, wanted in zip(found, alone, strict=True):
            assert row[: len(wanted)] == wanted
            assert set(row[len(wanted) :]) <= {0, *ends}


def test_prompts_end_before_the_first_label_and_are_filled_up_on_the_left() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0], [12, 13, 14, 15]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]),
        "labels": torch.tensor([[-100, -100, 7, 8], [-100, 10, 11, -100], [-100, -100, -100, -100]]),
    }
    prompts, mask = cut_prompts(batch, pad=1)
    assert prompts.tolist() == [[1, 1, 5, 6], [1, 1, 1, 9], [12, 13, 14, 15]]
    assert mask.tolist() == [[0, 0, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]]
    assert cut_prompts({"input_ids": torch.tensor([[3, 4]])}, pad=1)[0].tolist() == [[3, 4]]
    with pytest.raises(ContractError, match="a sample has no prompt"):
        cut_prompts({"input_ids": torch.tensor([[3, 4]]), "labels": torch.tensor([[3, 4]])}, pad=1)


class Writer(nn.Module):
    """A user's own model, which repeats its prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def generate(self, input_ids: Tensor, attention_mask: Tensor, **settings: Any) -> Tensor:
        return torch.cat([input_ids, input_ids[:, : settings["max_new_tokens"]]], 1)


def test_a_model_of_the_users_own_can_generate_and_metrics_see_texts() -> None:
    engine = dsjob.initialize(model=Writer(), config=make_config(0))[0]
    batch = {"input_ids": torch.tensor([list(b"abc"), list(b"xyz")]), "labels": torch.full((2, 3), -100)}
    found = Generator({"max_new_tokens": 2}, ByteTokenizer()).add(engine, batch, torch.zeros(2))
    assert (found["text"], found["reference"]) == (["ab", "xy"], ["", ""])
    assert set(found) == {"logits", "generated", "text", "reference"}

    def metric(preds: list[str], target: list[str]) -> None: ...

    seen = Seen(found, batch, None, 2)
    assert Inputs("rouge", None, metric).read(seen) == {"preds": ["ab", "xy"], "target": ["", ""]}
    bare = Generated(generated=torch.ones(2, 1))
    assert torch.equal(Inputs("exact", None, metric).read(seen._replace(outputs=bare))["preds"], torch.ones(2, 1))


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (nn.Linear(2, 2), {"input_ids": torch.ones(1, 2)}, "Linear has no method generate"),
        (Writer(), torch.ones(1, 2), "the batch has no input_ids"),
        (Writer(), {"x": torch.ones(1, 2)}, "the batch has no input_ids"),
    ],
)
def test_what_cannot_generate_is_an_error(model: nn.Module, batch: Any, message: str) -> None:
    engine = dsjob.initialize(model=model, config=make_config(0))[0]
    with pytest.raises(ContractError, match=message):
        Generator({}).add(engine, batch)


def test_a_tokenizer_has_to_decode() -> None:
    with pytest.raises(ContractError, match="int cannot decode"):
        require_decoding(3)


MEASURED = (
    "+metrics.rouge={_target_: dsjob.text.Rouge, keys: [rouge1, rougeL]}",
    "+metrics.errors={_target_: torchmetrics.text.CharErrorRate}",
    "+metrics.exact={_target_: dsjob.text.exact_match, inputs: {preds: outputs.text, target: outputs.text}}",
    "+metrics.alike={_target_: dsjob.text.exact_match}",
    "~metrics.share",
)
SAMPLED = "{_target_: dsjob.callbacks.SampledText, prompts: [some, word], max_new_tokens: 4}"


def test_rouge_and_other_metrics_of_texts_are_those_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "sentences.py").write_text(SENTENCES)
    (tmp_path / "job.yaml").write_text(JOB)
    found, sampled = [], []
    for ranks, micro in ((1, 7), (2, 2)):
        options = (f"launch.nproc={ranks}", f"trainer.eval_micro_batch={micro}", f"output.dir=run{ranks}")
        more = (*MEASURED, "tasks=[train]", f"+callbacks.sampled={SAMPLED}")
        done = jobs.dsjob("job.yaml", *options, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads((tmp_path / f"run{ranks}" / "result.json").read_text())["metrics"])
        lines = (tmp_path / f"run{ranks}" / "samples.jsonl").read_text().splitlines()
        sampled.append([json.loads(line) for line in lines])
    scores = {name for name in found[0] if name.startswith(("eval/rouge/", "eval/errors", "eval/alike"))}
    assert {"eval/errors", "eval/alike", "eval/rouge/rouge1_fmeasure", "eval/rouge/rougeL_recall"} <= scores
    assert {name: found[1][name] for name in scores} == pytest.approx({name: found[0][name] for name in scores})
    assert found[0]["eval/errors"] > 0
    assert sampled[0] == sampled[1]
    assert [(row["step"], row["prompt"]) for row in sampled[0]] == [(1, "some"), (1, "word")]


WRITES_AS_MANY = """
def build_varied():
    model = build()
    model.config.pad_token_id = model.generation_config.pad_token_id = 9
    def generate(input_ids, attention_mask, **settings):
        return torch.cat([input_ids, torch.full_like(input_ids, 65)], 1)
    model.generate = generate
    return model
"""


def test_a_job_evaluates_and_predicts_texts_alike_on_every_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "sentences.py").write_text(SENTENCES)
    (tmp_path / "job.yaml").write_text(JOB)
    found = []
    for ranks, micro in ((1, 3), (2, 2)):
        options = (f"launch.nproc={ranks}", f"trainer.eval_micro_batch={micro}", f"output.dir=run{ranks}")
        done = jobs.dsjob("job.yaml", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / f"run{ranks}" / "predictions-eval.jsonl").read_text().splitlines()
        metrics = json.loads((tmp_path / f"run{ranks}" / "result.json").read_text())["metrics"]
        found.append(([json.loads(line) for line in lines], metrics["eval/share"]))
    rows = found[0][0]
    assert [row["index"] for row in rows] == list(range(7))
    assert [row["reference"] for row in rows[:2]] == [" words 00", "words 01"]
    assert [(row["text"], row["reference"]) for row in rows] == [(row["text"], row["reference"]) for row in found[1][0]]
    assert found[0][1] == pytest.approx(found[1][1])


def test_generated_ids_of_different_lengths_are_filled_up_in_safetensors(tmp_path: Path) -> None:
    (tmp_path / "sentences.py").write_text(SENTENCES + WRITES_AS_MANY)
    (tmp_path / "job.yaml").write_text(JOB)
    given = (
        "model._target_=sentences.build_varied",
        "~generation.tokenizer",
        "~metrics",
        "++predict.format=safetensors",
        "++predict.outputs={ids: outputs.generated}",
        "tasks=[train, predict]",
        "trainer.eval_micro_batch=1",
    )
    for ranks in (1, 2):
        done = jobs.dsjob("job.yaml", *given, f"launch.nproc={ranks}", f"output.dir=run{ranks}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        found = load_file(tmp_path / f"run{ranks}" / "predictions-eval.safetensors")["ids"]
        # The prompts have 4, 5 and 6 bytes.
        assert found.tolist() == [[65] * (4 + row % 3) + [9] * (2 - row % 3) for row in range(7)]
