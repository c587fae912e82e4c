"""The dataset of texts that a document names as `dsjob.text.Text`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dsjob.data.batches import IGNORED
from dsjob.errors import DataError
from dsjob.text.cache import open_cache, write_cache
from dsjob.text.records import HubSource, Source, list_files
from dsjob.text.tokenizers import BYTES, load_tokenizer

_VERSION = 2  # of what a cache contains


class Text(Dataset[dict[str, Tensor]]):
    """Tokenised texts for causal language models: `input_ids` and `labels`, int64 [tokens].

    Labels equal the ids, since models shift them; they are -100 where nothing is to be learnt: in prompts. With `pack`,
    a sample is a window of `max_length` ids of all texts joined; `position_ids` begin at 0 with each text in it, so
    that models of transformers attend to nothing outside of a text, and the first label of each text is -100.

    The texts are tokenised once. The ids are in a cache of the user's, which is mapped into memory, so a dataset may be
    larger than the memory, and the processes of a machine share it. A file that has changed gets a new cache; on a web
    server, which tells no time of change, only one whose size has changed.

    Args:
        source: a file (.jsonl, .json, .csv, .tsv, .parquet, .txt; also .gz), a folder of such files (hidden ones are
            left out), a folder that `datasets` has saved, or a list of these; paths or URLs.
        dataset: instead of `source`, the name of a dataset on the hub of Hugging Face.
        dataset_revision: the commit of `dataset`.
        dataset_config: the configuration of `dataset`, if it has several.
        split: the part of `dataset`, as `datasets.load_dataset` takes it, such as "train[:10%]".
        tokenizer: "bytes" (ids 0 to 255, and 256 as end marker), the folder of a tokenizer, or its name on the hub.
        revision: the commit of a tokenizer on the hub.
        columns: the names of the columns with the `text`, and with the `prompt` before it, if any.
        max_length: the most ids in a sample; texts that are longer are cut. Required with `pack`.
        max_samples: the most texts.
        pack: join the texts and cut them into windows.
        end: put the tokenizer's end marker after each text.
        lines: of text files, whether each line is a text of its own; otherwise the file is one.
        cache_dir: where the cache is; by default $XDG_CACHE_HOME/dsjob/text or ~/.cache/dsjob/text.

    Raises:
        DataError: no such file, no text, an unknown format, a missing column or package.
        StorageError: a file cannot be read, or the cache cannot be written.
    """

    def __init__(
        self,
        source: str | Sequence[str] | None = None,
        *,
        dataset: str | None = None,
        dataset_revision: str | None = None,
        dataset_config: str | None = None,
        split: str = "train",
        tokenizer: str = BYTES,
        revision: str | None = None,
        columns: Mapping[str, str] | None = None,
        max_length: int | None = None,
        max_samples: int | None = None,
        pack: bool = False,
        end: bool = True,
        lines: bool = True,
        cache_dir: str | None = None,
    ) -> None:
        for name, value in (("max_length", max_length), ("max_samples", max_samples)):
            if value is not None and (type(value) is not int or value < 1):
                raise DataError(f"{name} is {value!r}", hint="write a whole number of at least 1")
        if pack and max_length is None:
            raise DataError("pack needs max_length", hint="max_length is the number of ids in a window")
        if columns is not None and not isinstance(columns, Mapping):
            raise DataError(f"columns is {columns!r}", hint=f"write columns: {{text: {columns}}}")
        named = {"text": "text"} | dict(columns or {})
        if unknown := sorted(named.keys() - {"text", "prompt"}):
            raise DataError(f"columns has no key {unknown[0]!r}", hint="its keys are text and prompt")
        texts: Source
        if dataset is not None and source is None:
            texts = HubSource((dataset,), named, revision=dataset_revision, config=dataset_config, split=split)
        elif source is not None and dataset is None:
            texts = Source(list_files(source), named, lines)
        else:
            what = "both source and dataset are" if source is not None else "neither source nor dataset is"
            raise DataError(f"{what} given", hint="source names files, dataset names a dataset on the hub")
        words = load_tokenizer(tokenizer, revision)
        made_of = [_VERSION, words.fingerprint, named, max_samples, end, lines, texts.describe()]
        digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]
        self._cache = open_cache(
            _find_folder(cache_dir) / digest,
            lambda folder, tell: write_cache(folder, texts, words, end=end, most=max_samples, tell=tell),
            texts.label,
        )
        self._length, self._pack = max_length, pack
        if pack and not len(self):
            raise DataError(f"{texts.label} has {len(self._cache.tokens):,} tokens; a window needs {max_length:,}")

    def __len__(self) -> int:
        if self._pack and self._length is not None:
            return len(self._cache.tokens) // self._length
        return len(self._cache.ends)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of ids in each sample. int64 [len(self)]."""
        if self._pack:
            return np.full(len(self), self._length, np.int64)
        found = np.diff(self._cache.ends, prepend=0)
        return found if self._length is None else np.minimum(found, self._length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._read_window(index) if self._pack else self._read_text(index)

    def _read_text(self, index: int) -> dict[str, Tensor]:
        begin, end = self._cache.find(index)
        if self._length is not None:
            end = min(end, begin + self._length)
        ids = self._take(begin, end)
        labels = ids.clone()
        labels[: int(self._cache.prompts[index])] = IGNORED
        return {"input_ids": ids, "labels": labels}

    def _read_window(self, index: int) -> dict[str, Tensor]:
        assert self._length is not None
        first, last = index * self._length, (index + 1) * self._length
        ids = self._take(first, last)
        labels, positions = ids.clone(), torch.empty_like(ids)
        text = int(np.searchsorted(self._cache.ends, first, side="right"))
        begin = first
        while begin < last:
            start, end = self._cache.find(text)
            end = min(end, last)
            # A text that began in the window before counts from 0 again: what came before cannot be seen.
            positions[begin - first : end - first] = torch.arange(end - begin)
            hidden = max(start + int(self._cache.prompts[text]), begin + 1)  # labels before it are not learnt
            labels[begin - first : hidden - first] = IGNORED
            begin, text = end, text + 1
        return {"input_ids": ids, "labels": labels, "position_ids": positions}

    def _take(self, begin: int, end: int) -> Tensor:
        return torch.from_numpy(self._cache.tokens[begin:end].astype(np.int64))


def _find_folder(given: str | None) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(given or os.path.join(home, "dsjob", "text")))
