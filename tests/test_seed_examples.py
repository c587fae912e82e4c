"""The JSON examples of the documents this project started from: valid, or refused for a reason that is printed.

tests/data/seeds holds them as they stand there, each with a line on where it is from. Most leave the batch sizes to
the program that uses them: a micro batch is given here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsjob.cli import main

FOLDER = Path(__file__).parent / "data" / "seeds"
BATCH = '{ "train_micro_batch_size_per_gpu": 8,'

EXAMPLES: dict[str, list[tuple[str, str]]] = {  # what is wrong with each: path and rule
    "amp_apex": [],
    "fp16": [],
    "gradient_accumulation": [],
    "gradient_clipping": [],
    "notebook_cell": [],
    "one_gpu_minimum": [],
    "optimizer_adamw": [],
    "scheduler_warmup": [],
    "scheduler_warmup_decay": [],
    "torch_autocast": [("", "syntax")],  # it has dots in it
    "zero2": [],
    "zero2_all_enabled": [],
    "zero2_fp16_adamw": [],
    "zero3": [],
    "zero3_all_enabled": [],
    "zero3_hidden_size_zeros": [],
}


def test_the_table_has_every_example() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(EXAMPLES)


def check(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[tuple[str, str]]]:
    """The exit code of `dsjob validate`, and of each error its path and rule as printed."""
    (folder / "ds.json").write_text(text)
    code = main(["validate", str(folder / "ds.json")])
    found = []
    for line in capsys.readouterr().err.splitlines():
        place, _, rest = line.partition(": error[")
        if rest:  # not a warning
            rule, _, rest = rest.partition("]: ")
            path, _, reason = rest.partition(": ") if rule != "syntax" else ("", "", rest)
            assert place.count(":") == 2, f"{line} has no line and column"
            assert reason
            found.append((path, rule))
    return code, found


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_valid_or_refused_for_the_right_reason(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (FOLDER / f"{name}.json").read_text().replace("{", BATCH, 1)
    expected = EXAMPLES[name]
    assert check(text, tmp_path, capsys) == (2 if expected else 0, expected)


def test_an_example_without_its_dots_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (FOLDER / "torch_autocast.json").read_text().replace("{", BATCH, 1).replace("...", "")
    assert check(text, tmp_path, capsys) == (0, [])
