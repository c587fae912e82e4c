"""The tables of docs/reference/import.md are those of the code; run as a program, this module writes the page."""

from __future__ import annotations

from pathlib import Path

from dsjob.contract.trainer_arguments import ARGUMENTS, SCRIPT_ARGUMENTS, Argument
from dsjob.importing import accelerate
from dsjob.importing.deepspeed import MOVED
from dsjob.importing.methods import OPTIMIZERS
from dsjob.importing.schedules import SCHEDULES

PAGE = Path(__file__).parents[2] / "docs/reference/import.md"
HEAD = """\
<!-- Made from the tables of dsjob/importing by `python tests/importing/test_import_guide.py`. -->

# What dsjob import knows

This page lists what each argument, option and key becomes. The [guide](../guides/import.md) explains the command.
"""


def code(words: str) -> str:
    return ", ".join(f"`{word}`" for word in words.split())


def list_arguments(table: dict[str, Argument]) -> list[str]:
    lines = ["| argument | in the job | |", "|---|---|---|"]
    for name, row in table.items():
        if row.keys:
            lines.append(f"| `--{name}` | {code(' '.join(row.keys))} | {row.about} |")
    reasons: dict[str, list[str]] = {}
    for name, row in table.items():
        if not row.keys:
            reasons.setdefault(row.about or "nothing needs to be said", []).append(f"--{name}")
    lines += ["", "Left out, with a note:", "", "| argument | why |", "|---|---|"]
    return lines + [f"| {code(' '.join(names))} | {reason} |" for reason, names in reasons.items()]


def render() -> str:
    lines = [HEAD, "## Trainer arguments", "", *list_arguments(ARGUMENTS)]
    lines += ["", "## Arguments of example scripts", "", *list_arguments(SCRIPT_ARGUMENTS)]
    lines += ["", "## Optimizers", "", "| `--optim` | in the job | |", "|---|---|---|"]
    lines += [f"| `{name}` | `{kind}` | {lost} |" for name, (kind, lost) in OPTIMIZERS.items()]
    lines += ["", "Any other name: `AdamW` stands in for it, with a note."]
    lines += ["", "## Schedules", "", "| `--lr_scheduler_type` | in the job |", "|---|---|"]
    lines += [f"| `{name}` | `{kind}` |" for name, kind in SCHEDULES.items()]
    lines += ["", "Any other name: `constant`, or a DeepSpeed file's own, with a note."]
    lines += ["", "## accelerate", "", "| key or option | in the job |", "|---|---|"]
    lines += [f"| `{name}` | {code(keys)} |" for name, keys in {**accelerate.PATHS, **accelerate.READ}.items() if keys]
    lines += ["", "| left out | why |", "|---|---|"]
    lines += [f"| `{name}` | {about} |" for name, (about, _) in accelerate.LEFT_OUT.items()]
    lines += ["", "## Keys of DeepSpeed that have moved", "", "| key | in the job |", "|---|---|"]
    lines += [f"| `{'.'.join(map(str, old))}` | `{'.'.join(map(str, new))}` |" for old, new in MOVED.items()]
    return "\n".join(lines) + "\n"


def test_the_page_has_the_tables_of_the_code() -> None:
    assert PAGE.read_text() == render(), f"run python {__file__}"


if __name__ == "__main__":
    PAGE.write_text(render())
