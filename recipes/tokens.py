"""Tokenizers for the T5 recipes: bytes with ByT5's ids, or the tokenizer of a pretrained T5.

Nothing is downloaded unless `PretrainedTokenizer` is given a name on the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dsjob.errors import DataError, TargetError, how_to_install

PAD, EOS, FIRST_BYTE, FIRST_SENTINEL, BYTE_VOCAB = 0, 1, 3, 259, 384  # 2 is the unknown token, which bytes never need
HUB_HINT = "give a folder that holds it, or a name on the Hugging Face hub, which needs a network"


def import_transformers() -> Any:
    """The transformers library. Raises TargetError, with the command that installs it, if it is missing."""
    try:
        import transformers
    except ImportError as error:
        raise TargetError("T5 needs transformers", hint=how_to_install("transformers")) from error
    return transformers


class Tokenizer(Protocol):
    """Converts UTF-8 text to ids, without an end marker. `eos` ends a sequence; sentinels replace removed spans."""

    eos: int
    sentinels: Sequence[int]
    bytes_per_token: int  # approximate

    def encode(self, data: bytes) -> list[int]: ...


class ByteTokenizer:
    """ByT5's ids: 0 pad, 1 end, 2 unknown, 3 to 258 the bytes, 259 to 383 the sentinels."""

    eos = EOS
    sentinels: Sequence[int] = range(FIRST_SENTINEL, BYTE_VOCAB)
    bytes_per_token = 1

    def encode(self, data: bytes) -> list[int]:
        """One id per byte."""
        return [byte + FIRST_BYTE for byte in data]

    def __call__(self, text: str) -> dict[str, list[int]]:
        """The ids of a text with an end marker, as a tokenizer of transformers returns them."""
        return {"input_ids": [*self.encode(text.encode()), EOS]}

    def batch_decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of ids, without special tokens and sentinels."""
        bodies = ([each - FIRST_BYTE for each in ids if FIRST_BYTE <= each < FIRST_SENTINEL] for ids in sequences)
        return [bytes(body).decode(errors="replace") for body in bodies]


class PretrainedTokenizer:
    """The tokenizer of a pretrained T5, from the hub (there at a commit, `revision`) or a folder.

    Raises:
        DataError: the tokenizer cannot be loaded.
        TargetError: transformers is not installed.
    """

    bytes_per_token = 3

    def __init__(self, name: str, revision: str | None = None) -> None:
        transformers = import_transformers()
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(name, revision=revision or "main")
        except (OSError, ValueError) as error:
            raise DataError(f"cannot load tokenizer={name!r}: {error}", hint=HUB_HINT) from error
        self.eos: int = self._tokenizer.eos_token_id
        self.sentinels: Sequence[int] = self._tokenizer.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(100)])

    def encode(self, data: bytes) -> list[int]:
        """The ids of text; bytes that are not UTF-8 (a character cut in two) become U+FFFD first."""
        ids: list[int] = self._tokenizer.encode(data.decode(errors="replace"), add_special_tokens=False)
        return ids
