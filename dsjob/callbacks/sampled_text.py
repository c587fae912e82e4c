"""Shows what a language model writes while it trains."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dsjob.callbacks.callback import Callback, RunView
from dsjob.checkpoint.live.rng import keep_rng
from dsjob.contract.check import check_shape
from dsjob.contract.schema import job_schema
from dsjob.errors import ContractError
from dsjob.files import append_bytes
from dsjob.text.generation import Generator, require_generate
from dsjob.text.tokenizers import BYTES, ByteTokenizer

_SHOWN = 200  # characters of a text on the terminal


class SampledText(Callback):
    """Lets the model continue `prompts` after each evaluation, at every ZeRO stage.

    The texts go to `samples.jsonl` in the run's folder, one line for each with `step`, `prompt` and `text`. The first
    one is also printed.

    tokenizer: `bytes`, or an object of transformers such as `{_target_: transformers.AutoTokenizer.from_pretrained,
    pretrained_model_name_or_path: FOLDER}`. settings: as in the section `generation`, such as `max_new_tokens`.
    Random generators are left as they were. Raises ContractError for invalid arguments, and for a model without a
    method `generate`.
    """

    def __init__(self, prompts: Sequence[str], tokenizer: Any = BYTES, **settings: Any) -> None:
        if isinstance(prompts, str) or not prompts or not all(isinstance(each, str) and each for each in prompts):
            raise ContractError("prompts must be a list of texts that are not empty", hint='prompts: ["Once upon"]')
        if isinstance(tokenizer, str) and tokenizer != BYTES:
            target = "{_target_: transformers.AutoTokenizer.from_pretrained, pretrained_model_name_or_path: FOLDER}"
            raise ContractError(f"tokenizer is {tokenizer!r}", hint=f"write bytes, or {target}")
        for problem in check_shape(settings, job_schema()["properties"]["generation"]):
            raise ContractError(f"{'.'.join(map(str, problem.path))}: {problem.message}", hint=problem.hint)
        self._prompts = list(prompts)
        self._generator = Generator(settings, ByteTokenizer() if tokenizer == BYTES else tokenizer)

    def on_start(self, run: RunView) -> None:
        if not run.spec.data.eval:
            raise ContractError("SampledText needs evaluations", hint="set data.eval")
        require_generate(run.engine.module)

    def on_eval(self, run: RunView, metrics: Mapping[str, float]) -> None:
        run.engines.eval()
        with keep_rng(run.engine.device):
            texts = self._generator.add(run.engine, {"prompt": self._prompts})["text"]
        run.engines.train()
        if run.engine.global_rank != 0:
            return
        pairs = zip(self._prompts, texts, strict=True)
        lines = "".join(f"{json.dumps({'step': run.step, 'prompt': p, 'text': text})}\n" for p, text in pairs)
        append_bytes(os.path.join(run.folder, "samples.jsonl"), lines.encode())
        shown = "".join(each if each.isprintable() else " " for each in texts[0])
        run.say("sample", f"{self._prompts[0]} -> {shown[:_SHOWN]}{'...' * (len(shown) > _SHOWN)}")
