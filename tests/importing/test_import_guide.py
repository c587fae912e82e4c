"""The guide's tables are those that the code goes by; run as a program, this module writes them anew."""

from __future__ import annotations

from pathlib import Path

from dsjob.importing import accelerate
from dsjob.importing.arguments_table import ARGUMENTS, SCRIPT_ARGUMENTS, Argument
from dsjob.importing.deepspeed import MOVED
from dsjob.importing.methods import OPTIMIZERS
from dsjob.importing.schedules import SCHEDULES

GUIDE = Path(__file__).parents[2] / "docs" / "guide-import.md"
START, END = "<!-- tables: written by tests/importing/test_import_guide.py -->", "<!-- end of tables -->"


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
    """The part of the guide between the marks."""
    lines = ["### Trainer arguments", "", *list_arguments(ARGUMENTS)]
    lines += ["", "### Arguments of example scripts", "", *list_arguments(SCRIPT_ARGUMENTS)]
    lines += ["", "### Optimizers", "", "| `--optim` | in the job | |", "|---|---|---|"]
    lines += [f"| `{name}` | `{kind}` | {lost} |" for name, (kind, lost) in OPTIMIZERS.items()]
    lines += ["", "Any other name: `AdamW` stands in for it, with a note."]
    lines += ["", "### Schedules", "", "| `--lr_scheduler_type` | in the job |", "|---|---|"]
    lines += [f"| `{name}` | `{kind}` |" for name, kind in SCHEDULES.items()]
    lines += ["", "Any other name: `constant`, or a DeepSpeed file's own, with a note."]
    lines += ["", "### accelerate", "", "| key or option | in the job |", "|---|---|"]
    lines += [f"| `{name}` | {code(keys)} |" for name, keys in {**accelerate.PATHS, **accelerate.READ}.items() if keys]
    lines += ["", "| left out | why |", "|---|---|"]
    lines += [f"| `{name}` | {about} |" for name, (about, _) in accelerate.LEFT_OUT.items()]
    lines += ["", "### Keys of DeepSpeed that have moved", "", "| key | in the job |", "|---|---|"]
    lines += [f"| `{'.'.join(map(str, old))}` | `{'.'.join(map(str, new))}` |" for old, new in MOVED.items()]
    return "\n".join(lines)


def split_guide() -> tuple[str, str, str]:
    before, _, rest = GUIDE.read_text().partition(START)
    tables, _, after = rest.partition(END)
    return before, tables.strip(), after


def test_the_tables_of_the_guide_are_those_of_the_code() -> None:
    assert split_guide()[1] == render(), f"run python {__file__}"


if __name__ == "__main__":
    before, _, after = split_guide()
    GUIDE.write_text(f"{before}{START}\n\n{render()}\n\n{END}{after}")
