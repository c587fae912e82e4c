"""Model and data, as far as a script's arguments determine them. Everything else becomes placeholders for user code."""

from __future__ import annotations

import os
import re
from typing import Any

from dsjob.errors import how_to_install
from dsjob.importing.given import MODULE, Draft, Given, Rank, Settings, is_off

_T5 = re.compile(r"(?:.*/)?(?:flan-)?t5-[\w.-]+/?")  # not mt5 and byt5, which are other classes
_PAIR_FILES = (".jsonl", ".csv")
# Patterns for names of scripts, and the transformers class of their models.
_CLASSES = (
    (r"clm|causal|sft|gpt|llama|finetune_lm", "AutoModelForCausalLM"),
    (r"mlm|bert_pretrain", "AutoModelForMaskedLM"),
    (r"translation|summarization|seq2seq|s2s|t5", "AutoModelForSeq2SeqLM"),
    (r"glue|classification|xnli", "AutoModelForSequenceClassification"),
    (r"_qa|squad|question", "AutoModelForQuestionAnswering"),
    (r"_ner|token_class", "AutoModelForTokenClassification"),
    (r"swag|multiple_choice", "AutoModelForMultipleChoice"),
)
# Arguments that only describe the data: they become arguments of the placeholder.
_DESCRIBES = ("dataset_name", "dataset_config_name", "task_name", "data_dir", "source_lang", "target_lang",
              "text_column", "summary_column", "block_size", "max_seq_length")  # fmt: skip
_NOWHERE = Given(None, "", "", Rank.DEEPSPEED)  # the origin of values that no source gives but the job needs


def draft_task(script: Given | None, settings: Settings, draft: Draft) -> None:
    """Adds model and data to the draft. `settings`: the script's own arguments, as far as they are known."""
    name = settings.get("model_name_or_path")
    t5 = name is not None and _T5.fullmatch(str(name.value)) is not None
    _draft_model(name, t5, script, settings, draft)
    pairs = t5 and _reads_pairs(settings)
    if pairs:
        _draft_pairs("train", "train_file", "max_train_samples", settings, draft)
        if "validation_file" in settings:
            _draft_pairs("eval", "validation_file", "max_eval_samples", settings, draft)
        if "test_file" in settings:
            _draft_pairs("test", "test_file", "max_predict_samples", settings, draft)
        collate = settings["train_file"]
        draft.put("data.collate._target_", collate.to("dsjob.recipes.t5.collate"))
        draft.put("data.collate._partial_", collate.to(True))
    else:
        _draft_other_data(t5, settings, draft)
    _note_data(pairs, settings, draft)


def _draft_model(name: Given | None, t5: bool, script: Given | None, settings: Settings, draft: Draft) -> None:
    further = [
        (key, given)
        for key, given in (
            ("revision", settings.get("model_revision")),
            ("attn_implementation", settings.get("attn_implementation")),
        )
        if given is not None and not is_off(given.value) and given.value != "main"
    ]
    if name is None:
        draft.put("model._target_", _NOWHERE.to(f"{MODULE}.build_model"))
        for key, given in further:
            draft.put(f"model.{key}", given)
        draft.note("fill in", f"model: replace {MODULE}.build_model with the factory of your model", script)
        return
    if t5 and not further:
        draft.put("model._target_", name.to("dsjob.recipes.t5.build"))
        draft.put("model.pretrained", name)
        return
    stem = os.path.basename(str(script.value)).lower() if script is not None else ""
    kind = next((kind for pattern, kind in _CLASSES if re.search(pattern, stem)), None)
    if kind is None:
        draft.put("model._target_", name.to(f"{MODULE}.build_model"))
        draft.put("model.pretrained", name)
        for key, given in further:
            draft.put(f"model.{key}", given)
        draft.note("fill in", f"model: replace {MODULE}.build_model with the factory of {name.value}", name)
        return
    draft.put("model._target_", name.to(f"transformers.{kind}.from_pretrained"))
    draft.put("model.pretrained_model_name_or_path", name)
    draft.put("model.dtype", name.to("float32"))
    draft.note("changed", f"model: scripts named {stem} use {kind}; {how_to_install('transformers')}", name)
    for key, given in further:
        draft.put(f"model.{key}", given)


def _reads_pairs(settings: Settings) -> bool:
    """Whether the T5 recipe can read the files: source and target in two columns, not nested by language."""
    files = [settings[name] for name in ("train_file", "validation_file", "test_file") if name in settings]
    suffixes = {os.path.splitext(str(given.value))[1] for given in files}
    return "train_file" in settings and suffixes <= set(_PAIR_FILES) and "source_lang" not in settings


def _draft_pairs(part: str, file: str, limit: str, settings: Settings, draft: Draft) -> None:
    path = settings[file]
    values: dict[str, Given] = {
        "_target_": path.to("dsjob.recipes.t5.build_dataset"),
        "split": path.to("all"),
        "path": path,
        "tokenizer": settings.get("tokenizer_name") or settings["model_name_or_path"],
        "max_source": settings.get("max_source_length") or _NOWHERE.to(1024),
        "max_target": settings.get("max_target_length") or _NOWHERE.to(128),
    }
    for key, name in (("max_samples", limit), ("source", "text_column"), ("target", "summary_column")):
        if name in settings and not is_off(settings[name].value):
            values[key] = settings[name]
    for key, given in values.items():
        draft.put(f"data.{part}.{key}", given)


def _draft_other_data(t5: bool, settings: Settings, draft: Draft) -> None:
    for part, file, limit in (
        ("train", "train_file", "max_train_samples"),
        ("eval", "validation_file", "max_eval_samples"),
        ("test", "test_file", "max_predict_samples"),
    ):
        path = settings.get(file)
        if part != "train" and path is None and limit not in settings:
            continue
        target = f"{MODULE}.build_{part}_data"
        origin = path or settings.get("dataset_name") or settings.get(limit)
        draft.put(f"data.{part}._target_", (origin or _NOWHERE).to(target))
        arguments: dict[str, Any] = {"path": path, "max_samples": settings.get(limit)}
        arguments.update({name: settings.get(name) for name in _DESCRIBES})
        for key, given in arguments.items():
            if given is not None and not is_off(given.value):
                draft.put(f"data.{part}.{key}", given)
        draft.note(
            "fill in",
            f"data.{part}: replace {target} with your tokenised dataset{_hint(t5, path, settings)}",
            origin,
        )


def _hint(t5: bool, path: Given | None, settings: Settings) -> str:
    if t5 and path is not None and str(path.value).endswith(".json"):
        return "; for one JSON object per line, name the file .jsonl and use dsjob.recipes.t5.build_dataset"
    return "; dsjob downloads nothing" if "dataset_name" in settings else ""


def _note_data(pairs: bool, settings: Settings, draft: Draft) -> None:
    """Adds notes on arguments of the script that the job's data does not use."""
    if pairs:
        if not {"text_column", "summary_column"} <= set(settings):
            draft.note(
                "changed", "data: columns are named source and target; set data.train.source and .target for others"
            )
        used = ("source_lang", "text_column", "summary_column")
        left = [(name, "the T5 recipe only needs the file") for name in _DESCRIBES if name not in used]
        if "validation_file" not in settings:
            left.append(("max_eval_samples", "there is no validation file"))
        if "test_file" not in settings:
            left.append(("max_predict_samples", "there is no test file"))
    else:
        names = ("max_source_length", "max_target_length", "tokenizer_name")
        left = [(name, "pass it to your own dataset") for name in names]
    for name, why in left:
        if name in settings and not is_off(settings[name].value):
            draft.note("left out", f"{settings[name].label}: {why}", settings[name])
