"""Limits what a file may expand to: a few megabytes of a compressed file can hold terabytes of one letter.

Texts in any language compress to a third or a tenth of their size, logs to a thirtieth. gzip can reach a thousandth, a
column of Parquet or Arrow that repeats one value far less than that.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from dsjob.errors import DataError

RATIO, ALWAYS = 200, 64 << 20  # times the size of the file; bytes that any file may expand to


class Expansion:
    """What a file has expanded to so far. measure: the bytes of the file that were read for that."""

    def __init__(self, url: str, measure: Callable[[], int]) -> None:
        self._url, self._measure, self._size = url, measure, 0

    def add(self, size: int) -> None:
        """Notes bytes or characters of its content. Raises DataError if they are too many."""
        self.set(self._size + size)

    def set(self, size: int) -> None:
        """Notes the bytes of its content up to here. Raises DataError if they are too many."""
        self._size = max(self._size, size)
        if self._size > ALWAYS and self._size > RATIO * self._measure():
            raise DataError(
                f"{self._url} expands to more than {RATIO} times its size, which no real texts do",
                hint="check what is in it; if it is what you mean, expand it first: gunzip, or write it as .jsonl",
            )


class Expanded(io.RawIOBase):
    """A decompressing file that ends with DataError where it expands too much. Wrap it in a BufferedReader."""

    def __init__(self, file: Any, expansion: Expansion) -> None:
        self._file, self._expansion = file, expansion

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        count = int(self._file.readinto(buffer))
        self._expansion.set(self._file.tell())
        return count
