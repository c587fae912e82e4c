"""Generation in evaluation and prediction: what the model writes for each sample, beside what it returns for it.

At ZeRO stages 1 to 3 each call of a layer gathers its weights, which all ranks must do together. The `generate` of
transformers therefore lets ranks that have finished go on until all have (`synced_gpus`). A model with a `generate` of
its own has to do the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsjob.errors import ContractError

IGNORED = -100  # label of tokens without a loss, as in torch's cross entropy
_LABELS = ("labels", "decoder_input_ids", "decoder_attention_mask")


class Generated(dict[str, Any]):
    """A model's outputs by name, and beside them `generated`: int64 [samples, tokens]; with a tokenizer also `text` and
    `reference`, lists of strings; with texts as prompts also `prompt`. reference: the labels, if there are any. pad:
    the id that fills up `generated`."""

    pad: int = 0

    @property
    def predictions(self) -> Any:
        """What metrics compare: the texts, or without a tokenizer the ids."""
        return self.get("text", self["generated"])


class Generator:
    """Generates for batches with `input_ids`, with the settings of the document's section `generation`."""

    def __init__(self, settings: Mapping[str, Any], tokenizer: Any = None) -> None:
        """tokenizer: an object with `batch_decode` or `decode`."""
        self._settings, self._tokenizer = dict(settings), tokenizer

    def add(self, engine: Any, batch: Any, outputs: Any = None) -> Generated:
        """`write` for an `Engine`. A collective if the model is sharded or divided."""
        pipelined = engine.world.pipe.size > 1
        model = engine.strategy.pipeline.as_whole(engine.strategy) if pipelined else engine.module
        return self.write(model, engine.device, batch, outputs, autocast=engine.precision.autocast)

    @torch.no_grad()
    def write(
        self,
        model: nn.Module,
        device: torch.device,
        batch: Any,
        outputs: Any = None,
        *,
        autocast: torch.dtype | None = None,
    ) -> Generated:
        """`outputs`, if there are any, with what the model generates for `batch`: one with `input_ids`, or with
        `prompt`, a list of texts.

        Raises ContractError if the model or the batch is not made for it.
        """
        if isinstance(batch, Mapping) and "prompt" in batch and "input_ids" not in batch:
            given = self._encode(model, device, batch["prompt"])
            generated = self._generate(model, device, given, autocast)
            found = Generated({"prompt": batch["prompt"], "generated": generated})
        else:
            generated = self._generate(model, device, batch, autocast)
            found = Generated({**_by_name(outputs), "generated": generated})
        found.pad = self._find_pad(model)
        if self._tokenizer is not None:
            special = self._list_special(model)
            found["text"] = self._decode(generated, special)
            if "labels" in batch:
                found["reference"] = self._decode(batch["labels"], special)
        return found

    def _encode(self, model: nn.Module, device: torch.device, texts: Sequence[str]) -> dict[str, Tensor]:
        """The batch of `texts`: `input_ids` and `attention_mask`, int64 [texts, longest]. Raises ContractError."""
        if not callable(self._tokenizer):
            found = "there is no tokenizer" if self._tokenizer is None else "the tokenizer cannot encode"
            raise ContractError(
                f"generation: prompts are texts, but {found}",
                hint="set generation.tokenizer to bytes, a tokenizer's folder, or an object that is called with a text",
            )
        rows = [torch.tensor(self._tokenizer(text)["input_ids"], dtype=torch.int64) for text in texts]
        self._require_room(model, max(map(len, rows)))
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self._find_pad(model))
        masks = [torch.ones_like(row) for row in rows]
        mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    def _require_room(self, model: nn.Module, longest: int) -> None:
        """Raises ContractError for a prompt that leaves no room below the model's longest sequence."""
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        if isinstance(limit, int) and longest >= limit:
            raise ContractError(
                f"generation: a prompt has {longest} tokens, but the model takes {limit} with what it writes",
                hint="shorten the prompt",
            )

    def _generate(self, model: Any, device: torch.device, batch: Any, autocast: torch.dtype | None) -> Tensor:
        require_generate(model)
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            raise ContractError("generation: the batch has no input_ids", hint="make the data return a dict with them")
        config = getattr(model, "config", None)
        with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            if getattr(config, "is_encoder_decoder", False):
                given = {key: value for key, value in batch.items() if key not in _LABELS}
                return _require_ids(model.generate(**given, **self._settings))
            prompts, mask = cut_prompts(batch, self._find_pad(model))
            written = _require_ids(model.generate(input_ids=prompts, attention_mask=mask, **self._settings))
        return written[:, prompts.shape[1] :]

    def _find_pad(self, model: nn.Module) -> int:
        """The id that fills up short prompts and texts; by default the id that ends a text, as in transformers."""
        configs = [self._settings]
        for name in ("generation_config", "config"):
            config = getattr(model, name, None)
            configs += [vars(config)] if config is not None else []
        for key in ("pad_token_id", "eos_token_id"):
            for config in configs:
                value = config.get(key)
                if value is not None:
                    return int(value[0] if isinstance(value, (list, tuple)) else value)
        return 0

    def _list_special(self, model: nn.Module) -> set[int]:
        """The ids that begin, end and fill up a text, which are no part of it."""
        found: set[Any] = set()
        for name in ("generation_config", "config"):
            config = getattr(model, name, None)
            for key in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
                value = getattr(config, key, None)
                found |= set(value) if isinstance(value, (list, tuple)) else {value}
        return found - {None}

    def _decode(self, ids: Tensor, special: Collection[int]) -> list[str]:
        rows = [[each for each in row if each >= 0 and each not in special] for row in ids.tolist()]
        if callable(getattr(self._tokenizer, "batch_decode", None)):
            return list(self._tokenizer.batch_decode(rows))
        return [self._tokenizer.decode(row) for row in rows]


def cut_prompts(batch: Mapping[str, Any], pad: int) -> tuple[Tensor, Tensor]:
    """The prompts of a causal model, filled up on the left, and their mask: int64 [samples, longest prompt].

    A prompt is the part of `input_ids` before the first label, without padding. Without labels, it is all of it.
    """
    ids, labels = batch["input_ids"], batch.get("labels")
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    if labels is not None:
        # True from the first label on. A row without labels is a prompt as a whole.
        mask = mask & ~(labels != IGNORED).cumsum(1).bool()
    rows = [row[kept] for row, kept in zip(ids, mask, strict=True)]
    if not all(len(row) for row in rows):
        raise ContractError(
            "generation: a sample has no prompt: its labels begin with its first token",
            hint=f"label the tokens of prompts with {IGNORED}",
        )
    longest = max(map(len, rows))
    prompts, taken = ids.new_full((len(rows), longest), pad), torch.zeros_like(ids[:, :1]).repeat(1, longest)
    for number, row in enumerate(rows):
        prompts[number, longest - len(row) :] = row
        taken[number, longest - len(row) :] = 1
    return prompts, taken


def _require_ids(written: Any) -> Tensor:
    """The token ids that `generate` returned: a tensor, or an object with `sequences`."""
    ids = getattr(written, "sequences", written)
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        found = f"a tensor of shape {list(ids.shape)}" if isinstance(ids, Tensor) else type(written).__name__
        raise ContractError(f"generation: generate returned {found}", hint="return token ids: [samples, tokens]")
    return ids


def _by_name(outputs: Any) -> Mapping[str, Any]:
    if outputs is None:
        return {}
    if isinstance(outputs, Mapping):
        return outputs
    return {"logits": outputs} if isinstance(outputs, Tensor) else {"outputs": outputs}


def require_generate(model: Any) -> None:
    """Raises ContractError for a model that cannot generate."""
    if not callable(getattr(model, "generate", None)):
        raise ContractError(
            f"generation: {type(model).__name__} has no method generate",
            hint="use a model of transformers, or write generate(input_ids, attention_mask, **settings)",
        )


def require_decoding(made: Any) -> Any:
    """A tokenizer of the user's, if it can decode. Raises ContractError."""
    if not any(callable(getattr(made, name, None)) for name in ("batch_decode", "decode")):
        raise ContractError(
            f"generation.tokenizer: {type(made).__name__} cannot decode",
            hint="give it a method batch_decode(sequences) or decode(ids)",
        )
    return made
