"""Values in streams of output: however the stream is cut into pieces, and in whatever form they are written."""

from __future__ import annotations

import base64
import io
import random
import time
from urllib.parse import quote

import pytest

from dsjob.contract import masking
from dsjob.contract.masked_output import watch_output
from dsjob.contract.masking import add_value, list_spellings, mask
from dsjob.contract.output_filter import Mask

SECRET = "hunter2/öl+key=="


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(masking, "_spellings", set())
    monkeypatch.setattr(masking, "_mask", None)
    add_value(SECRET)
    return SECRET


def cut(text: str, draw: random.Random) -> list[str]:
    places = sorted(draw.sample(range(len(text) + 1), draw.randint(0, min(9, len(text)))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(100))
def test_a_stream_in_any_pieces_is_masked_as_a_whole(seed: int) -> None:
    draw = random.Random(seed)
    words = ["aab", "ab", "abcabc", "aba", "b", "c", "xabcx"]
    texts = draw.sample(["abcabd", "aabaab", "bcabca", "caba", "abca"], draw.randint(1, 3))
    text = "".join(draw.choice([*words, *texts]) for _ in range(draw.randint(0, 12)))
    stream = Mask(texts)
    shown = "".join([*map(stream.add, cut(text, draw)), stream.end()])
    assert all(each not in shown for each in texts)
    whole = Mask(texts).mask(text)
    if not any(a != b and a in b for a in texts for b in texts):  # else what counts depends on what is known
        assert shown == whole


def test_only_what_may_be_a_value_is_held_back() -> None:
    """A progress bar that no value begins with is shown at once, and so is all that precedes a beginning."""
    stream = Mask(["hunter22"])
    for bar in ("\r 10%|#   | 1/10 [00:01<00:09]", "\r 20%|##  | 2/10 [00:02<00:08]", "> "):
        assert stream.add(bar) == bar
    assert stream.add("loss 0.1 h") == "loss 0.1 "
    assert stream.add("igh\n") == "high\n"
    assert stream.add("hunter") == ""
    assert stream.add("22\n") == "***\n"
    assert stream.add("hunt") == ""
    assert stream.end() == "hunt"


def test_a_long_key_costs_little() -> None:
    key = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz0123456789+/\n", k=4000))
    add_value(key)
    stream = Mask(list_spellings())
    begun = time.perf_counter()
    for number in range(1000):
        stream.add(f"step {number}/1000  loss 0.1234  lr 1e-3  grad 0.12\n")
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize("before", ["", "u", "us", "user:", "Basic dXNlcjo"])
@pytest.mark.parametrize("after", ["", "\n", "@host"])
def test_base64_of_a_text_around_a_value_is_masked(before: str, after: str) -> None:
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        text = encode(f"{before}{SECRET}{after}".encode()).decode()
        shown = mask(text)
        assert "***" in shown
        assert len(shown) - len("***") <= len(encode(f"{before}{after}".encode()).decode()) + 4


def test_other_forms_are_masked() -> None:
    raw = SECRET.encode()
    forms = [quote(SECRET), quote(SECRET, safe="").lower(), quote(SECRET, safe=""), raw.hex(), raw.hex().upper()]
    for form in forms:
        assert mask(f"<{form}>") == "<***>"


def test_base64_of_a_long_value_in_lines_is_masked() -> None:
    value = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=200))
    add_value(value)
    lines = base64.encodebytes(value.encode()).decode().rstrip("=\n")  # 76 characters each, as the command writes them
    assert "\n" in lines
    assert len(mask(lines)) <= len("***") + 1


def test_a_value_in_two_writes_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    with watch_output(descriptors=False):
        import sys

        for piece in ("token: ", SECRET[:5], SECRET[5:], "\n", SECRET[:3]):
            sys.stdout.write(piece)
            sys.stdout.flush()
        assert out.getvalue() == "token: ***\n"
    assert out.getvalue() == f"token: ***\n{SECRET[:3]}"
