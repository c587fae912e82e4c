"""What people read of the contract: the text of `dsjob schema`, and the pages of docs/reference, kept in step."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsjob.contract import reference, views
from dsjob.contract import schema as contract
from dsjob.contract.reference import (
    COMMAND,
    Entry,
    describe_default,
    describe_type,
    find,
    make_pages,
    name_elsewhere,
    to_text,
)
from dsjob.contract.schema import Schema
from dsjob.contract.views import VIEWS, read_view
from dsjob.errors import UsageError

NO_EFFECT = {"x-status": "no-effect", "x-note": "whatever"}
UNSUPPORTED = {"x-status": "unsupported", "x-note": "why"}
PAGES = Path(__file__).parents[2] / "docs/reference"


def walk(view: str) -> Iterator[Entry]:
    def below(entry: Entry) -> Iterator[Entry]:
        for found in reference._list_keys(entry):
            yield found
            yield from below(found)

    yield from below(Entry(view, (), read_view(view)))


# ---- finding


@pytest.mark.parametrize(
    ("dotted", "path", "types"),
    [
        ("", (), [""]),
        ("trainer", ("trainer",), [""]),
        ("zero_optimization.stage", ("zero_optimization", "stage"), [""]),
        ("zero_optimization.offload_param.device", ("zero_optimization", "offload_param", "device"), [""]),
        ("metrics.accuracy._target_", ("metrics", "<name>", "_target_"), [""]),
        ("optimizer.params", ("optimizer", "params"), [""]),
        ("scheduler.params.total_num_steps", ("scheduler", "params", "total_num_steps"), None),
        ("deepspeed.train_batch_size", ("deepspeed", "train_batch_size"), [""]),
    ],
)
def test_a_key_is_found_by_its_dotted_path(dotted: str, path: tuple[str, ...], types: list[str] | None) -> None:
    found = find("job", dotted)
    assert {entry.path for entry in found} == {path}
    assert [entry.types for entry in found] == (types or ["WarmupDecayLR", "WarmupCosineLR"])


@pytest.mark.parametrize("view", VIEWS)
def test_every_key_of_every_view_is_found_and_told(view: str) -> None:
    entries = list(walk(view))
    assert len(entries) > 100
    for entry in entries:
        assert any(found.schema is entry.schema for found in find(view, entry.dotted)), entry.dotted
        assert entry.schema["description"].split()[0] in to_text(entry)


@pytest.mark.parametrize(
    ("view", "dotted", "message", "hint"),
    [
        ("job", "zero_optimization.stag", "zero_optimization has no key 'stag'", 'did you mean "stage"?'),
        ("job", "stage", "the job view has no key 'stage'", 'did you mean "zero_optimization.stage"?'),
        ("job", "zero_optimisation.stage", "no key 'zero_optimisation'", 'did you mean "zero_optimization.stage"?'),
        ("job", "train_batch_size", "no key 'train_batch_size'", 'did you mean "trainer.train_batch"?'),
        ("deepspeed", "trainer.train_batch", "no key 'trainer'", 'did you mean "train_batch_size"?'),
        ("job", "optimizer.lr", "optimizer has no key 'lr'", 'did you mean "optimizer.params.lr"?'),
        ("job", "optimizer.params.beats", "optimizer.params has no key 'beats'", 'did you mean "betas"?'),
        ("job", "model.width", "model has no key 'width'", "arguments of the callable that `_target_` names"),
        ("job", "learning_rate", "no key 'learning_rate'", "HF Trainer's name for optimizer.params.lr"),
        ("job", "output.qqq", "output has no key 'qqq'", "known keys: dir"),
        ("job", "trainer.seed.x", "trainer.seed has no key 'x'", ""),
        ("job", "trainer..seed", "trainer has no key ''", 'did you mean "trainer.seed"?'),
    ],
)
def test_a_path_that_leads_nowhere_says_what_was_meant(view: str, dotted: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(view, dotted)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("trainer.micro_batch", "train_micro_batch_size_per_gpu"),
        ("zero_optimization.offload_param.device", "zero_optimization.offload_param.device"),
        ("gradient_clipping", "gradient_clipping"),
        ("optimizer.params.lr", "optimizer.params.lr"),
    ],
)
def test_a_key_that_both_have_names_the_other_side(ours: str, theirs: str) -> None:
    assert name_elsewhere(find("job", ours)[0]) == theirs
    assert name_elsewhere(find("deepspeed", theirs)[0]) == ours


@pytest.mark.parametrize("ours", ["trainer.seed", "launch.nproc", "checkpoint", "data.train", "optimizer._target_"])
def test_a_key_of_jobs_alone_names_none(ours: str) -> None:
    assert name_elsewhere(find("job", ours)[0]) == ""


def test_the_schemas_may_name_what_a_key_is_in_deepspeed() -> None:
    assert name_elsewhere(Entry("job", ("launch", "nproc"), {"x-deepspeed": "--num_gpus"})) == "--num_gpus"


# ---- words


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 1, "x-auto": True}, "integer, at least 1, or auto"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "number, greater than 0, at most 1"),
        ({"enum": ["a", 1, True]}, "a, 1, true"),
        ({"const": "x"}, "x"),
        ({"type": ["string", "object"], "properties": {}}, "string or object"),
        ({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}, "list (number), 2 items"),
        ({"type": "array", "minItems": 1}, "list, at least 1 items"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "map (string)"),
        ({"type": "object", "properties": {"_target_": {}}}, "target"),
        ({"type": "string", "minLength": 1, "pattern": "^a"}, "string, not empty, of the form ^a"),
        ({"anyOf": [{"type": "string"}, {"const": 0}]}, "string or 0"),
        ({}, "anything"),
    ],
)
def test_describe_type_says_what_a_key_takes(schema: Schema, text: str) -> None:
    assert describe_type(schema, pattern=True) == text


def test_describe_default_is_json() -> None:
    assert [describe_default({"default": value}) for value in (False, 0, "a", [1, None], {}, None)] == [
        "false",
        "0",
        '"a"',
        "[1, null]",
        "",
        "",
    ]


def test_the_text_of_a_key_says_all_that_is_known() -> None:
    schema: Schema = {
        "type": "integer",
        "minimum": 0,
        "default": 3,
        "deprecated": True,
        "x-status": "mapped",
        "x-note": "that",
        "x-replaced-by": "more",
        "x-aliases": ["old", "older"],
        "description": "What it is.",
    }
    assert to_text(Entry("job", ("trainer", "log_every"), schema, required=True)) == (
        "trainer.log_every\n"
        "  What it is.\n"
        "\n"
        "  type          integer, at least 0\n"
        "  default       3\n"
        "  required      yes\n"
        "  status        deprecated: use more; mapped: that\n"
        "  in DeepSpeed  steps_per_print\n"
        "  also spelt    old, older\n"
    )


def test_the_text_of_params_lists_the_arguments_by_type() -> None:
    text = to_text(find("job", "optimizer.params")[0])
    by_types = {part.partition("\n")[0]: part for part in text.split("\ntype ")[1:]}
    adam, sgd = (next(part for types, part in by_types.items() if name in types) for name in ("AdamW", "SGD"))
    assert "  betas: list" in adam
    assert "  momentum: number" in sgd
    assert "momentum" not in adam
    assert "betas" not in sgd


def test_the_text_of_another_spelling_names_the_real_one() -> None:
    text = to_text(find("job", "zero_optimization.prefetch_bucket_size")[0])
    assert "another spelling of stage3_prefetch_bucket_size" in text


def test_no_line_of_text_is_wider_than_a_terminal_is_read() -> None:
    for entry in walk("job"):
        described = [line for line in to_text(entry).splitlines() if line.startswith("      ")]
        assert all(len(line) <= 100 for line in described)


def test_what_holds_for_a_section_or_type_holds_for_its_keys() -> None:
    inner: Schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null", **NO_EFFECT}}}
    below: Schema = {"type": "object", "properties": {"inner": inner, "c": {"type": "string"}}, **UNSUPPORTED}
    entry = Entry("job", ("made", "up"), {"type": "object", "properties": {"below": below}})
    (section,) = reference._list_keys(entry)
    inside, c = reference._list_keys(section)
    a, b = reference._list_keys(inside)
    assert "status        not supported: why\n" in to_text(c)
    assert "status        not supported: why\n" in to_text(a)
    assert "status        no effect here: whatever\n" in to_text(b)
    assert "  c: string; not supported\n" in to_text(section)
    params: Schema = {"type": "object", "x-variants": {"Old": below, "New": {"properties": {"d": {"type": "null"}}}}}
    text = to_text(Entry("job", ("made", "params"), params))
    assert "\ntype Old (not supported: why)\n" in text
    assert "\ntype New\n\n  d: null\n" in text


# ---- docs/reference


def test_the_pages_are_those_of_the_schemas() -> None:
    pages = make_pages()
    texts = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*")}
    found = {name: text for name, text in texts.items() if text.startswith("<!-- Made from schemas/")}
    stale = sorted(name for name in pages.keys() | found.keys() if pages.get(name) != found.get(name))
    assert stale == [], f"docs/reference is not what schemas/ say now: run `{COMMAND}` and commit what it changes"


def test_every_key_has_a_row() -> None:
    everything = "\n".join(make_pages().values())
    rows = set(re.findall(r"^\| (?:\[)?`([^`]+)`", everything, re.MULTILINE))
    keys = {entry.path[-1] for view in ("job", "deepspeed") for entry in walk(view) if "x-alias-of" not in entry.schema}
    assert keys - rows <= {"<name>"}


def test_every_other_spelling_is_beside_its_key() -> None:
    everything = "\n".join(make_pages().values())
    aliases = [entry for entry in walk("job") if "x-alias-of" in entry.schema]
    assert aliases
    for entry in aliases:
        assert re.search(rf"^\| `{entry.schema['x-alias-of']}` .*`{entry.path[-1]}`", everything, re.MULTILINE)


def test_every_section_has_a_page_with_a_table_for_each_type() -> None:
    pages = make_pages()
    assert {"index.md", "trainer.md", "zero_optimization.md", "deepspeed.md", "target.md"} <= set(pages)
    for name in ("optimizer", "scheduler"):
        for kinds, below in read_view("job")["properties"][name]["properties"]["params"]["x-variants"].items():
            assert not below["properties"] or re.search(
                rf"^### Type {kinds}\n\n(Status: .*\n\n)?\| Key \|", pages[f"{name}.md"], re.MULTILINE
            )


def test_every_row_has_a_status() -> None:
    for name, page in make_pages().items():
        for table in re.findall(r"^\| Key .*\n(?:\|.*\n)+", page, re.MULTILINE):
            heading, _, *rows = [re.split(r"(?<!\\)\|", line) for line in table.splitlines()]
            column = heading.index(" Status ")
            assert [row[1] for row in rows if not row[column].strip()] == [], name


@pytest.mark.parametrize(
    ("dotted", "status"),
    [
        ("checkpoint.best", "implemented"),
        ("trainer.step", "implemented"),
        ("pipeline", "by key"),
        ("zero_optimization", "by key"),
    ],
)
def test_a_section_has_the_status_of_its_keys(dotted: str, status: str) -> None:
    (entry,) = find("job", dotted)
    assert f"\n  status        {status}\n" in to_text(entry)


def test_links_lead_to_pages_and_tables_are_whole() -> None:
    pages = make_pages()
    for name, text in pages.items():
        assert set(re.findall(r"\]\(([^)]+)\)", text)) <= set(pages), name
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table


@pytest.fixture
def new_section(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A contract that somebody has added a section to, with a list of objects and a choice with a bar in it."""
    schema = copy.deepcopy(contract.job_schema())
    schema["x-deepspeed"] = "0.98.7"
    schema["properties"]["novel"] = {
        "type": "object",
        "description": "Something new.",
        "properties": {
            "knob": {"enum": ["a|b"], "description": "A knob.", "x-deepspeed": "old.knob", "x-status": "mapped"},
            "parts": {"type": "array", "items": {"properties": {"size": {"type": "integer"}}}, "description": "Parts."},
        },
    }
    monkeypatch.setattr(contract, "job_schema", lambda: schema)
    caches = (views.read_view, reference._everything, reference._config_paths)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("new_section")
def test_a_new_section_is_picked_up_by_itself() -> None:
    pages = make_pages()
    assert "| [`novel`](novel.md) | object |" in pages["index.md"]
    assert "| `knob` | a\\|b | mapped | A knob. | `old.knob` |" in pages["novel.md"]
    assert "the defaults of DeepSpeed 0.98.7." in pages["index.md"]
    assert "## novel.parts" in pages["novel.md"]
    assert "| `size` | integer | implemented |" in pages["novel.md"]
    assert find("job", "novel.parts.size")[0].schema == {"type": "integer"}


def test_writing_removes_pages_of_sections_that_are_gone_and_nothing_else(tmp_path: Path) -> None:
    names = reference.write_pages(tmp_path / "a" / "b")
    folder = tmp_path / "a" / "b"
    (folder / "gone.md").write_text((folder / "trainer.md").read_text())
    (folder / "mine.md").write_text("# Mine\n")
    (folder / "trainer.md").write_text("edited")
    assert reference.write_pages(folder) == names
    assert {path.name for path in folder.iterdir()} == {*names, "mine.md"}
    assert {name: (folder / name).read_text() for name in names} == make_pages()
