"""`dsjob.generate`: lets the model of a checkpoint continue prompts. It is a prediction whose data are the prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dsjob import storage
from dsjob.contract.masked_output import watch_output
from dsjob.errors import UsageError
from dsjob.files import temporary_folder
from dsjob.front.checkpoint import Chosen, choose_checkpoint
from dsjob.front.run import one_at_a_time
from dsjob.front.source import Source, allowing, list_words, make_flags, quote, require_path, telling_places
from dsjob.front.tasks import make_task, perform
from dsjob.front.weights import load_model
from dsjob.training.form import showing
from dsjob.trust.named import name_place
from dsjob.trust.user import Flags

_FORM = ("++predict.outputs=null", "++predict.format=jsonl")  # what `read_rows` reads
_DEFAULT = "bytes"  # of dsjob.text.Text, whose module imports torch


@dataclass(frozen=True)
class Generation:
    """The result of generating.

    texts: what the model wrote, in the order of the prompts. file: JSONL with `prompt`, `generated` (token ids) and
    `text`. checkpoint: the folder of the checkpoint, whose weights were used. step: the step at which it was saved.
    run_dir: the folder with the files of this generation.
    """

    texts: Sequence[str]
    file: str
    checkpoint: str
    step: int
    run_dir: str


def generate(
    checkpoint: str | os.PathLike[str],
    prompts: Sequence[str],
    *,
    tag: str | None = None,
    best: bool = False,
    ema: bool = False,
    tokenizer: str | None = None,
    overrides: Sequence[str] = (),
    trust: Sequence[str] = (),
    trust_remote_code: bool = False,
    unpinned: bool = False,
    **settings: Any,
) -> Generation:
    """Lets the model of a checkpoint continue prompts, like the command `dsjob generate`.

    prompts: texts. tokenizer: `bytes`, or the folder of a tokenizer; by default that of the job's section `generation`
    or of its training texts. settings: keys of the section `generation`, such as `max_new_tokens=64`. The other
    arguments, and what is raised, are as for `dsjob.evaluate`.
    """
    flags = make_flags(trust, trust_remote_code, unpinned)
    if isinstance(prompts, str) or not prompts or not all(isinstance(each, str) and each for each in prompts):
        raise UsageError("prompts must be a list of texts that are not empty", hint='prompts=["Once upon a time"]')
    with one_at_a_time(), allowing(flags), watch_output(), telling_places(), writing(prompts) as file:
        chosen = choose_checkpoint(require_path(checkpoint, "a checkpoint"), tag, best=best)
        words = list_words(None, overrides)
        section = choose_settings(chosen, tokenizer, settings, words)
        source = make_generation(chosen, file, section, words, tokenizer=tokenizer, ema=ema)
        with showing("quiet"):
            result = perform(source, chosen.grant(flags))
    (written,) = result["predictions"]
    texts = [row["text"] for row in read_rows(written)]
    return Generation(texts, written, result["checkpoint"], result["step"], result["run_dir"])


@contextmanager
def writing(prompts: Sequence[str]) -> Iterator[str]:
    """A file with the prompts. They do not go through the document, which would interpolate `${...}` in them."""
    with temporary_folder() as folder:
        path = os.path.join(folder, "prompts.jsonl")
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps({'prompt': each})}\n" for each in prompts)
        yield path


def choose_settings(
    chosen: Chosen, tokenizer: str | None, settings: Mapping[str, Any], overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """The section `generation`: that of the job, with these changes. Raises UsageError without a tokenizer."""
    document = chosen.file.value if chosen.file is not None else {}
    own = dict(document.get("generation") or {})
    train = document.get("data", {}).get("train") or {}
    if _names_tokenizer(overrides):
        return {**own, **settings}
    named = tokenizer or own.get("tokenizer") or _find_tokenizer(train)
    if named is None:
        raise UsageError(
            "the job of this checkpoint names no tokenizer", hint="add --tokenizer FOLDER, or --tokenizer bytes"
        )
    return {**own, **settings, "tokenizer": named}


def _find_tokenizer(data: Any) -> str | None:
    """The tokenizer of a dataset of texts, or of the first one in a mixture."""
    target = data.get("_target_") if isinstance(data, Mapping) else None
    if target == "dsjob.text.Mixture":
        return next(filter(None, map(_find_tokenizer, data.get("datasets") or ())), None)
    return str(data.get("tokenizer") or _DEFAULT) if target == "dsjob.text.Text" else None


def make_generation(
    chosen: Chosen,
    file: str,
    settings: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    tokenizer: str | None = None,
    ema: bool = False,
) -> Source:
    """The job that continues the prompts in a file: the job that saved the checkpoint, with them as its test data.

    settings: see `choose_settings`. tokenizer: the one that the user has named."""
    document = chosen.file.value if chosen.file is not None else {}
    section = [f"++generation.{key}={_write(value)}" for key, value in settings.items()]
    # A test set of the job's own would keep its arguments beside those of the prompts.
    own = ["~data.test"] if document.get("data", {}).get("test") is not None else []
    # Stages have no cache from token to token: each rank has the whole model instead.
    own += ["~pipeline"] if document.get("pipeline") is not None else []
    data = [*own, f"+data.test={{_target_: dsjob.text.Prompts, path: {quote(file)}}}", "++data.collate=null"]
    source = make_task("generate", chosen, [*section, *data, *_FORM, *overrides], ema=ema)
    named = tokenizer is not None or _names_tokenizer(overrides)
    return replace(source, derived=() if named else (("generation", "tokenizer"),))


def _names_tokenizer(overrides: Sequence[str]) -> bool:
    return any(each.lstrip("+").startswith("generation.tokenizer") for each in overrides)


def _write(value: Any) -> str:
    """A value in the grammar of overrides."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_write(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_write, value)) + "]"
    return quote(value) if isinstance(value, str) else json.dumps(value)


def read_rows(file: str) -> list[dict[str, Any]]:
    """What a generation has written: an object for each prompt, in their order."""
    return [json.loads(line) for line in storage.read_text(file).splitlines()]


def load_writer(
    checkpoint: str,
    *,
    tag: str | None,
    best: bool,
    ema: bool,
    tokenizer: str | None,
    settings: Mapping[str, Any],
    flags: Flags,
) -> Callable[[str], str]:
    """A function that continues one prompt, in this process. Raises the errors of `load_model`, UsageError."""
    import torch

    from dsjob.training.build import make_generator

    chosen = choose_checkpoint(checkpoint, tag, best=best)
    section = choose_settings(chosen, tokenizer, settings)
    model = load_model(
        checkpoint,
        tag=tag,
        best=best,
        ema=ema,
        trust=flags.prefixes,
        trust_remote_code=flags.remote_code,
        unpinned=flags.unpinned,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trust = chosen.grant(flags)
    generator = make_generator(section, name_place(trust, tokenizer) if tokenizer is not None else trust)
    model.to(device)
    return lambda prompt: str(generator.write(model, device, {"prompt": [prompt]})["text"][0])
