"""Span corruption, the pretraining task of T5: spans are removed from a text, and the model predicts them.

Follows Raffel et al. 2020, section 3.1.4. Works on token ids; knows nothing about models or files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NOISE_DENSITY, MEAN_SPAN = 0.15, 3.0


def corrupt_spans(
    tokens: Sequence[int], sentinels: Sequence[int], rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Removes about 15% of the tokens, in spans of 3 on average, as T5 does.

    The source has a sentinel in place of each span, the target has each sentinel followed by its span. The number
    of removed tokens and of spans depends only on `len(tokens)`. Fewer than two tokens are returned unchanged.
    """
    if len(tokens) < 2:
        return list(tokens), []
    noise, spans = _count_spans(len(tokens))
    source: list[int] = []
    target: list[int] = []
    start = 0
    lengths = zip(_cut_at_random(len(tokens) - noise, spans, rng), _cut_at_random(noise, spans, rng), strict=True)
    for sentinel, (kept, left_out) in zip(sentinels, lengths, strict=False):
        source += [*tokens[start : start + kept], sentinel]
        target += [sentinel, *tokens[start + kept : start + kept + left_out]]
        start += kept + left_out
    return source, target


def _count_spans(length: int) -> tuple[int, int]:
    """The number of tokens to remove from `length` (at least 2), and the number of spans."""
    noise = max(1, round(length * NOISE_DENSITY))
    return noise, max(1, round(noise / MEAN_SPAN))


def find_length(max_source: int, max_target: int, sentinels: int) -> int:
    """The largest number of tokens whose source and target, with end markers, fit the limits."""
    length = 2
    while True:
        noise, spans = _count_spans(length + 1)
        if length + 1 - noise + spans + 1 > max_source or noise + spans + 1 > max_target or spans > sentinels:
            return length
        length += 1


def _cut_at_random(total: int, parts: int, rng: np.random.Generator) -> list[int]:
    """`parts` random lengths, each at least 1, that add up to `total`."""
    borders = 1 + np.sort(rng.choice(total - 1, parts - 1, replace=False))
    lengths: list[int] = np.diff(borders, prepend=0, append=total).tolist()
    return lengths
