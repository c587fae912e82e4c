"""`dsjob generate` and `dsjob.generate`: continuing prompts with the model of a run."""

from __future__ import annotations

import json
import os
import pty
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from jobs import dsjob
from programs import Program
from text_jobs import JOB, SENTENCES

import dsjob as dsjob_module
from dsjob.errors import DataError
from dsjob.text.prompts import read_prompts

PROMPTS = ["some", "words ${oc.env:HOME} 'quoted' \"twice\" \\ and\nmore", "x"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose model, GPT-2 over bytes, has taken one step."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "sentences.py").write_text(SENTENCES)
    (folder / "job.yaml").write_text(JOB)
    done = dsjob("job.yaml", "tasks=[train]", "output.dir=run", "~metrics", "~data.eval", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def read_rows(file: Path) -> list[tuple[str, str]]:
    return [(row["prompt"], row["text"]) for row in map(json.loads, file.read_text().splitlines())]


def test_prompts_are_continued_alike_on_every_number_of_ranks(run: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps({'prompt': each})}\n" for each in PROMPTS))
    found = []
    for ranks in (1, 2):
        out = tmp_path / "new" / f"out-{ranks}.jsonl"
        options = ("--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "4", "--out", str(out))
        done = dsjob("generate", str(run), *options, f"launch.nproc={ranks}", cwd=run.parent)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("> some\n")
        found.append(read_rows(out))
    assert [prompt for prompt, _ in found[0]] == PROMPTS
    assert found[0] == found[1]
    each = [
        dsjob("generate", str(run), "--prompt", text, "--max-new-tokens", "4", "--json", cwd=run.parent)
        for text in PROMPTS[:2]
    ]
    assert [json.loads(done.stdout)["text"] for done in each] == [text for _, text in found[0][:2]]


def test_a_pipelined_run_generates_without_its_stages(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.copy(run.parent / "sentences.py", tmp_path)
    resolved = tmp_path / "run/resolved.json"
    resolved.write_text(json.dumps({**json.loads(resolved.read_text()), "pipeline": {"stages": 2}}))
    words = ("--prompt", "some", "--max-new-tokens", "4")
    done, expected = (dsjob("generate", "run", *words, cwd=folder) for folder in (tmp_path, run.parent))
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr


@pytest.mark.full
def test_the_checkpoint_of_a_mesh_generates_as_a_whole_model(tmp_path: Path) -> None:
    """A checkpoint of two stages, each divided between two ranks: what one process loads, and what any number of ranks
    continues with, also those of the mesh."""
    (tmp_path / "sentences.py").write_text(SENTENCES)
    (tmp_path / "job.yaml").write_text(JOB.replace("lr: 0.0", "lr: 0.01"))
    mesh = ("launch.nproc=4", "pipeline.stages=2", "tensor_parallel.size=2", "zero_optimization.stage=1")
    done = dsjob("job.yaml", "output.dir=run", "trainer.max_steps=3", *mesh, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model = dsjob_module.load_model(str(tmp_path / "run"), trust=["sentences"])
    ids = torch.tensor([list(b"some")])
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    words = ("generate", "run", "--prompt", "some", "--max-new-tokens", "4", "--json")
    one, stages = ("launch.nproc=1", "tensor_parallel.size=1"), "+pipeline={stages: 2}"
    for options in (one, ("launch.nproc=2",), (), (stages,)):
        done = dsjob(*words, *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["generated"] == written[0, 4:].tolist()


TEXT = "{_target_: dsjob.text.Text, source: texts.txt, cache_dir: cache}"
OF_TEXTS = {"text": TEXT, "mixture": f"{{_target_: dsjob.text.Mixture, datasets: [{TEXT}, {TEXT}]}}"}


@pytest.mark.full("mixture")
@pytest.mark.parametrize("train", OF_TEXTS.values(), ids=OF_TEXTS)
def test_texts_without_a_tokenizer_are_bytes(tmp_path: Path, train: str) -> None:
    (tmp_path / "sentences.py").write_text(SENTENCES)
    own = "{_target_: sentences.Sentences, size: 8}"
    (tmp_path / "job.yaml").write_text(JOB.replace(own, f"{train}\n  collate: {{_target_: dsjob.text.Pad}}"))
    (tmp_path / "texts.txt").write_text("some words\n" * 8)
    changes = ("tasks=[train]", "output.dir=run", "~metrics", "~generation", "~data.eval")
    done = dsjob("job.yaml", *changes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = dsjob("generate", "run", "--prompt", "some", "--max-new-tokens", "3", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["generated"]) == 3


@pytest.mark.full
def test_a_tokenizer_of_transformers_is_loaded_from_its_folder(run: Path, tmp_path: Path) -> None:
    """The one of ByT5, whose ids are those of bytes, three higher."""
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "tokenizer")
    options = ("--prompt", "some", "--tokenizer", str(tmp_path / "tokenizer"), "--max-new-tokens", "4", "--json")
    done = dsjob("generate", str(run), *options, "--num-beams", "1", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["text"] == bytes(each - 3 for each in row["generated"] if 3 <= each < 256).decode(errors="ignore")
    found = dsjob_module.generate(run, ["some"], overrides=["generation.tokenizer=bytes"], max_new_tokens=4)
    assert len(found.texts) == 1


def test_without_a_prompt_the_terminal_is_asked(run: Path) -> None:
    ours, theirs = pty.openpty()
    open_terminal = f"import os, sys; os.dup2(os.open({os.ttyname(theirs)!r}, os.O_RDWR), 0); sys.stdin = open(0)"
    code = f"{open_terminal}; from dsjob.cli import main; sys.exit(main())"
    process = Program([sys.executable, "-c", code, "generate", run, "--max-new-tokens", "4"], cwd=run.parent)
    os.write(ours, b"\n" + b"a" * 70 + b"\nsome\n\x04")
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    expected = dsjob("generate", str(run), "--prompt", "some", "--max-new-tokens", "4", cwd=run.parent).stdout
    told = "error: generation: a prompt has 70 tokens, but the model takes 64 with what it writes\n  shorten the prompt"
    assert out == f"{run}: write a prompt; Ctrl-D ends\n> > {told}\n> {expected}> \n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "there is no prompt"),
        (("--prompt", "a", "--prompts", "b"), "--prompt and --prompts exclude each other"),
        (("--prompt", "a", "--max-new-tokens", "0"), "generation.max_new_tokens: must be at least 1, but is 0"),
        (("--prompt", "a" * 70), "a prompt has 70 tokens, but the model takes 64 with what it writes"),
        (("--prompts", "nowhere.txt"), "nowhere.txt"),
        (("--prompt", "a", "--tokenizer", "nowhere"), "nowhere"),
    ],
)
def test_mistakes_are_told(run: Path, options: tuple[str, ...], message: str) -> None:
    done = dsjob("generate", str(run), *options, cwd=run.parent)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_temperature_samples(run: Path) -> None:
    words = ("generate", str(run), "--prompt", "a", "--max-new-tokens", "20")
    greedy, hot = dsjob(*words, cwd=run.parent), dsjob(*words, "--temperature", "1000", cwd=run.parent)
    assert greedy.returncode == hot.returncode == 0
    assert greedy.stdout != hot.stdout
    assert "ignored" not in hot.stderr


def test_prompts_are_lines_or_json() -> None:
    text = 'one\r\n\n"two\\nlines"\n{"prompt": "three", "id": 3}\n'
    assert read_prompts(text, "file") == ["one", "two\nlines", "three"]
    for bad, message in (
        ("", "contains no prompts"),
        ('a\n{"text": 1}', "file:2: no prompt"),
        ("{", "file:1: not JSON"),
    ):
        with pytest.raises(DataError, match=message):
            read_prompts(bad, "file")
