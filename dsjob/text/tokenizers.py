"""Tokenizers: bytes, or one of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

from dsjob.errors import DataError, how_to_install

BYTES = "bytes"


class Tokenizer(Protocol):
    """Converts texts to ids.

    size: ids are below it. eos: the id that ends a text; None if there is none. fingerprint: differs for tokenizers
    that give different ids.
    """

    size: int
    eos: int | None
    fingerprint: str

    def encode(self, texts: Sequence[str], *, begins: bool) -> list[list[int]]:
        """The ids of each text. begins: with the special tokens that the tokenizer puts before a text."""
        ...

    def batch_decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of ids, without special tokens."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8 as ids 0 to 255; 256 ends a text."""

    size = 257
    eos: int | None = 256
    fingerprint = BYTES

    def encode(self, texts: Sequence[str], *, begins: bool) -> list[list[int]]:
        """One id per byte."""
        return [list(text.encode("utf-8", "surrogatepass")) for text in texts]

    def __call__(self, text: str) -> dict[str, list[int]]:
        """The ids of a prompt, as a tokenizer of transformers returns them."""
        return {"input_ids": self.encode([text], begins=True)[0]}

    def batch_decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Bytes that are not UTF-8 become U+FFFD."""
        return [bytes(number for number in ids if number < 256).decode("utf-8", "replace") for ids in sequences]


class PretrainedTokenizer:
    """A tokenizer of transformers, from a folder or (at a commit, `revision`) the hub. Raises DataError."""

    def __init__(self, name: str, revision: str | None = None) -> None:
        try:
            import transformers
        except ImportError as error:
            hint = f"{how_to_install('transformers')}, or use tokenizer: {BYTES}"
            raise DataError(f"tokenizer={name!r} needs the package transformers", hint=hint) from error
        try:
            made: Any = transformers.AutoTokenizer.from_pretrained(
                name, revision=revision or "main", trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            hint = "give the folder that save_pretrained() of a tokenizer has written"
            raise DataError(f"cannot load tokenizer={name!r}: {error}", hint=hint) from error
        self._tokenizer = made
        self.size: int = len(made)
        self.eos: int | None = made.eos_token_id
        backend = getattr(made, "backend_tokenizer", None)
        whole = backend.to_str() if backend is not None else json.dumps(sorted(made.get_vocab().items()))
        told = json.dumps([type(made).__name__, whole, made.eos_token_id, str(made.special_tokens_map)])
        self.fingerprint = hashlib.sha256(told.encode()).hexdigest()

    def encode(self, texts: Sequence[str], *, begins: bool) -> list[list[int]]:
        """The ids that the tokenizer gives, without its end marker."""
        if not texts:
            return []
        found: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=begins, verbose=False)["input_ids"]
        return [ids[:-1] if begins and ids and ids[-1] == self.eos else ids for ids in found]

    def batch_decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Without special tokens."""
        texts: list[str] = self._tokenizer.batch_decode([list(ids) for ids in sequences], skip_special_tokens=True)
        return texts


def load_tokenizer(name: str, revision: str | None = None) -> Tokenizer:
    """The tokenizer that a document names: "bytes", a folder, or a name on the hub. Raises DataError."""
    return ByteTokenizer() if name == BYTES else PretrainedTokenizer(name, revision)
