"""Whatever document it is given, `dsjob validate` answers with exit code 0 or 2 and a well-formed report; and whatever
checkpoint they are given, the commands that read checkpoints answer soon, in little memory, and in words.

Documents are drawn by walking the contract: hypothesis-jsonschema 0.23, the latest, cannot draw an object with the
hypothesis of today. A document then goes through as it is, spoilt as an object, and spoilt as a text.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile import LORA_CONFIG, MANIFESTS, STATES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import dsjob
from plain_checkpoint import commit_manifest, floats, save
from programs import run_program

from dsjob.cli import main
from dsjob.contract import schema as contract
from dsjob.contract.schema import Schema

ENTRY = {"file", "line", "column", "severity", "rule", "path", "message", "hint"}
SHAPE = {"unknown-key", "type", "enum", "range", "length", "pattern", "required", "type-and-target", "syntax", "number"}
QUIET = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
FEW, MANY = settings(QUIET, max_examples=30), settings(QUIET, max_examples=3000)
OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad", "NAdam", "Lamb")
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", "StepLR")


def values(node: Schema) -> st.SearchStrategy[Any]:
    """What may stand at a key."""
    found = _values(node)
    return found | st.just("auto") if node.get("x-auto") else found


def _values(node: Schema) -> st.SearchStrategy[Any]:
    if "enum" in node or "const" in node:
        return st.sampled_from(node.get("enum") or [node["const"]])
    for several in ("anyOf", "oneOf"):
        if several in node:
            return st.one_of([values(branch) for branch in node[several]])
    kinds = node.get("type", ["string", "number", "boolean"])
    return st.one_of([_of_kind(node, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)])


def _of_kind(node: Schema, kind: str) -> st.SearchStrategy[Any]:
    condition = node.get("if", {})
    branch = node.get("then" if condition == {"type": kind} else "else", {}) if set(condition) == {"type"} else {}
    return st.sampled_from(branch["enum"]) if "enum" in branch else _OF_KIND[kind]({**node, **branch})


def integers(node: Schema) -> st.SearchStrategy[Any]:
    low, high = node.get("minimum"), node.get("maximum")
    low = node["exclusiveMinimum"] + 1 if "exclusiveMinimum" in node else low
    whole = st.integers(low, high)
    return whole | whole.filter(lambda n: abs(n) < 2**53).map(float)


def numbers(node: Schema) -> st.SearchStrategy[float]:
    low, high = (node.get(f"exclusive{name}", node.get(name.lower())) for name in ("Minimum", "Maximum"))
    return st.floats(
        low,
        high,
        exclude_min="exclusiveMinimum" in node,
        exclude_max="exclusiveMaximum" in node,
        allow_nan=False,
        allow_infinity=False,
    )


def strings(node: Schema) -> st.SearchStrategy[str]:
    if "pattern" in node:
        return st.from_regex(node["pattern"].replace("$", r"\Z"))
    return st.text(min_size=node.get("minLength", 0), max_size=20)


def arrays(node: Schema) -> st.SearchStrategy[list[Any]]:
    return st.lists(values(node.get("items", {})), min_size=node.get("minItems", 0), max_size=node.get("maxItems", 4))


_OF_KIND = {
    "integer": integers,
    "number": numbers,
    "string": strings,
    "array": arrays,
    "boolean": lambda node: st.booleans(),
    "null": lambda node: st.none(),
    "object": lambda node: TARGETS if contract.is_target(node) else objects(node),
}
TARGETS = st.fixed_dictionaries(
    {"_target_": st.from_regex(r"[a-z_]{1,8}(\.[A-Za-z_]{1,8}){1,3}", fullmatch=True)},
    optional={"width": st.integers(), "path": st.text(), "nested": st.dictionaries(st.text(), st.floats(0, 1))},
)


@st.composite
def objects(draw: st.DrawFn, node: Schema, always: tuple[str, ...] = ()) -> dict[str, Any]:
    """An object of the contract with a few of its keys, and with what it requires."""
    properties, rest = node.get("properties", {}), node.get("additionalProperties", {})
    if not properties:
        named = st.from_regex(r"[a-z]{1,6}", fullmatch=True)
        return draw(st.dictionaries(named, values(rest) if rest else st.integers(), max_size=2))
    keys = [key for key, below in properties.items() if "x-alias-of" not in below and not key.startswith(("_", "$"))]
    chosen = draw(st.lists(st.sampled_from(keys), max_size=6, unique=True))
    chosen = list(dict.fromkeys([*always, *node.get("required", ()), *chosen]))
    return {key: draw(sections(key, properties[key])) for key in chosen}


def sections(key: str, node: Schema) -> st.SearchStrategy[Any]:
    """What may stand at a key."""
    if key == "deepspeed":
        return objects(contract.deepspeed_schema())
    if key == "data":
        return objects(node, ("train",))  # which a rule requires of jobs that train
    if key in ("optimizer", "scheduler") and "allOf" in node:
        return st.sampled_from(OPTIMIZERS if key == "optimizer" else SCHEDULES).flatmap(lambda k: methods(node, k))
    return values(node)


def methods(node: Schema, kind: str) -> st.SearchStrategy[dict[str, Any]]:
    """An optimizer or schedule with arguments, where the contract lists them."""
    params = contract.params_schema(node, kind)
    return st.fixed_dictionaries({"type": st.just(kind), **({"params": objects(params)} if params else {})})


JOBS = objects(contract.job_schema(), ("model", "trainer", "optimizer"))
DOCUMENTS = JOBS | objects(contract.deepspeed_schema(), ("train_batch_size",))


def validate(content: bytes, suffix: str) -> list[dict[str, Any]]:
    """The report on a text, checked for form."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"job.{suffix}"
        path.write_bytes(content)
        code, report = run("--format", "json", str(path))
        entries = read_report(report, code, content)
        plain_code, plain = run(str(path))
        assert plain_code == code
        assert plain.count("\n") == len(plain.splitlines()) == len(entries) + (code == 0), "one line for each"
        return entries


def run(*arguments: str) -> tuple[int, str]:
    """The exit code of `dsjob validate` in this process, and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(["validate", *arguments])
    return code, printed.getvalue()


def read_report(text: str, code: int, content: bytes) -> list[dict[str, Any]]:
    """The entries of a report in JSON, each complete and with a place inside the text."""
    assert code in (0, 2)
    entries: list[dict[str, Any]] = json.loads(text)
    lines = content.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for entry in entries:
        assert set(entry) == ENTRY
        assert entry["severity"] in ("error", "warning")
        assert entry["message"]
        assert entry["rule"]
        assert (entry["line"] is None) == (entry["column"] is None)
        if entry["line"] is not None:
            assert 1 <= entry["line"] <= len(lines)
            assert 1 <= entry["column"] <= len(lines[entry["line"] - 1]) + 1
    assert any(entry["severity"] == "error" for entry in entries) == (code == 2)
    return entries


class Quoting(yaml.SafeDumper):
    """Quotes every string: for PyYAML 1e100 is one, and is written without quotes; YAML 1.2 reads it as a number."""


Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def write(document: Any, suffix: str) -> str:
    if suffix == "yaml":
        return str(yaml.dump(document, Dumper=Quoting, sort_keys=False, allow_unicode=True))
    return json.dumps(document, indent=1)


def check_sound(document: dict[str, Any], suffix: str) -> None:
    entries = validate(write(document, suffix).encode(), suffix)
    assert [entry for entry in entries if entry["rule"] in SHAPE] == []


SUFFIXES = st.sampled_from(["json", "yaml"])


@pytest.mark.slow
@FEW
@given(DOCUMENTS, SUFFIXES)
def test_a_document_of_the_contract_has_no_mistake_of_shape(document: dict[str, Any], suffix: str) -> None:
    check_sound(document, suffix)


@pytest.mark.full
@MANY
@given(DOCUMENTS, SUFFIXES)
def test_thousands_of_documents_of_the_contract(document: dict[str, Any], suffix: str) -> None:
    check_sound(document, suffix)


def nest(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = {"a": value} if levels % 2 else [value]
    return value


ODD = st.sampled_from([
    None, True, False, 0, -1, 1, 2.5, 10**30, 10**400, -(10**400), 1e308, float("nan"), float("inf"), "", "auto", "0",
    "1e-5", "x" * 5000, "\x00", "\x1b[31m", "\U0001f600", "\u202e\u0000a", "\u2028", "a b", "a..b", ".", "/",
    "${trainer}", "${oc.env:NOT_THERE}", "${", "???", "memory://x", "s3:/x", [], {}, [None],
    {"": 1}, {"a": {}}, [[1], {"b": 2}],
    nest(1, 30), nest(1, 31), nest(1, 300), nest(1, 301), list(range(300)), {f"k{i}": i for i in range(300)},
])  # fmt: skip


def list_places(value: Any) -> list[tuple[Any, Any]]:
    """Each object or list inside with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in [(value, key), *list_places(item)]]


@st.composite
def spoilt(draw: st.DrawFn, documents: st.SearchStrategy[dict[str, Any]] = DOCUMENTS) -> dict[str, Any]:
    """A document with a few keys renamed, dropped, moved, or given other values."""
    document = copy.deepcopy(draw(documents))
    for _ in range(draw(st.integers(1, 4))):
        places = list_places(document)
        if not places:
            break
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(st.sampled_from(["rename", "drop", "move", "value", "wrap", "unwrap"]))
        value = holder[key]
        if kind == "value" or isinstance(holder, list):
            holder[key] = copy.deepcopy(draw(ODD))
        elif kind == "wrap":
            holder[key] = {key: value}
        elif kind == "unwrap" and isinstance(value, dict):
            del holder[key]
            holder.update(value)
        else:
            del holder[key]
            if kind == "rename":
                at = draw(st.integers(0, len(key)))
                holder[key[:at] + draw(st.text(max_size=3)) + key[at + draw(st.integers(0, 2)) :]] = value
            elif kind == "move":
                others = [item for parent, name in list_places(document) if isinstance(item := parent[name], dict)]
                draw(st.sampled_from([document, *others]))[key] = value
    return document


def check_spoilt(document: dict[str, Any], suffix: str) -> None:
    validate(write(document, suffix).encode(errors="surrogatepass"), suffix)


@pytest.mark.slow
@FEW
@given(spoilt(), SUFFIXES)
def test_a_spoilt_document_gets_a_report(document: dict[str, Any], suffix: str) -> None:
    check_spoilt(document, suffix)


@pytest.mark.full
@MANY
@given(spoilt(), SUFFIXES)
def test_thousands_of_spoilt_documents(document: dict[str, Any], suffix: str) -> None:
    check_spoilt(document, suffix)


@st.composite
def torn(draw: st.DrawFn) -> tuple[bytes, str]:
    """A text that was a document: cut, with lines doubled, characters exchanged, bytes put in or taken out."""
    suffix = draw(SUFFIXES)
    text = write(draw(DOCUMENTS), suffix).encode(errors="surrogatepass")
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        kind = draw(st.sampled_from(["cut", "head", "double", "swap", "insert", "delete"]))
        if kind == "cut":
            text = text[:at]
        elif kind == "head":
            text = text[at:]
        elif kind == "double":
            lines = text.split(b"\n")
            row = draw(st.integers(0, len(lines) - 1))
            text = b"\n".join([*lines[: row + 1], *lines[row:]])
        elif kind == "swap":
            text = text[:at] + text[at : at + 2][::-1] + text[at + 2 :]
        elif kind == "insert":
            more = draw(
                st.binary(max_size=4) | st.sampled_from([b"\t", b"\r\n", b"\xef\xbb\xbf", b"\0", b"{", b"[" * 999])
            )
            text = text[:at] + more + text[at:]
        else:
            text = text[:at] + text[at + draw(st.integers(1, 5)) :]
    return text, suffix


@pytest.mark.slow
@FEW
@given(torn())
def test_a_torn_text_gets_a_report(text: tuple[bytes, str]) -> None:
    validate(*text)


@pytest.mark.full
@MANY
@given(torn())
def test_thousands_of_torn_texts(text: tuple[bytes, str]) -> None:
    validate(*text)


@settings(QUIET, max_examples=12)
@given(torn() | st.tuples(spoilt(), SUFFIXES).map(lambda pair: (write(*pair).encode(errors="surrogatepass"), pair[1])))
def test_the_command_itself_reports_and_shows_no_traceback(text: tuple[bytes, str]) -> None:
    content, suffix = text
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"job.{suffix}").write_bytes(content)
        done = dsjob("validate", "--format", "json", f"job.{suffix}", cwd=Path(folder))
    assert done.stderr == ""
    read_report(done.stdout, done.returncode, content)


# --- checkpoints ---

SHAPES = {"base_layer.weight": (8, 6), "lora_A.a.weight": (2, 6), "lora_B.a.weight": (8, 2)}
READERS = (
    ["convert", "--to", "fp32", "c", "fp32"],
    ["convert", "--to", "hf", "c", "hf"],
    ["convert", "--to", "hf", "--merge", "c", "merged"],
    ["convert", "--to", "deepspeed", "--zero-stage", "1", "--world-size", "2", "c", "ds"],
    ["ckpt", "verify", "c"],
    ["ckpt", "info", "c"],
)
MEMORY, SECONDS = 512 << 20, 30  # for each command, on top of what is imported; what a text of a few megabytes may cost
LIMITED = f"""
import resource, sys
most = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + {MEMORY}
resource.setrlimit(resource.RLIMIT_AS, (most, most))
from dsjob.cli import main
sys.exit(main(sys.argv[1:]))
"""


def make_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A sound checkpoint of an adapter over a model of one's own in the folder `c`; its manifest and state.json."""
    tensors = {f"model.base_model.model.q.{name}": floats(*shape) for name, shape in SHAPES.items()}
    step = save(folder / "c", tensors, world=1)
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["pretrained"] = {"config.json": {"model_type": "own", "layers": [1, 2]}, "adapters": {"a": LORA_CONFIG}}
    groups = [{"names": [name.removeprefix("model.") for name in tensors], "lr": 0.1}]
    state = {
        "counters": {"global_steps": 120},
        "optimizer": {"class": "AdamW", "groups": groups, "values": {}},
        "rng": {"0": {"python": {"$tuple": [3, {"$tuple": [1, 2]}, None]}}},
        "client_state": {"mine": [1, 2.5, None]},
    }
    return manifest, state


def commit(folder: Path, manifest: str, state: str) -> None:
    (step,) = (folder / "c").glob("step-*")
    (step / "state.json").write_bytes(state.encode(errors="surrogatepass"))
    (step / "manifest.json").write_bytes(manifest.encode(errors="surrogatepass"))
    commit_manifest(folder / "c", step, "step-00000120", 120)


def check_readers(manifest: dict[str, Any], state: dict[str, Any]) -> None:
    """Each command ends with an exit code of its own; --debug lets through what is no error of the project."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        make_checkpoint(Path(name))
        commit(Path(name), json.dumps(manifest), json.dumps(state))
        for command in READERS:
            printed, started = io.StringIO(), time.monotonic()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                assert main([*command, "--debug"]) in (0, 1, 2), command
            assert time.monotonic() - started < SECONDS


with tempfile.TemporaryDirectory() as _folder:
    MANIFEST, STATE = make_checkpoint(Path(_folder))
CHECKPOINTS = st.tuples(spoilt(st.just(MANIFEST)), st.just(STATE)) | st.tuples(
    st.just(MANIFEST), spoilt(st.just(STATE))
)


@pytest.mark.slow
@FEW
@given(CHECKPOINTS)
def test_a_spoilt_checkpoint_is_refused_or_read(checkpoint: tuple[dict[str, Any], dict[str, Any]]) -> None:
    check_readers(*checkpoint)


@pytest.mark.full
@MANY
@given(CHECKPOINTS)
def test_thousands_of_spoilt_checkpoints(checkpoint: tuple[dict[str, Any], dict[str, Any]]) -> None:
    check_readers(*checkpoint)


@pytest.mark.parametrize("readers", [READERS[::5], pytest.param(READERS, marks=pytest.mark.full)], ids=["some", "all"])
@pytest.mark.parametrize("case", [*MANIFESTS, *STATES])
@pytest.mark.full("columns-some", "cuts-some")
def test_a_hostile_checkpoint_ends_soon_and_in_words(case: str, readers: list[list[str]], tmp_path: Path) -> None:
    manifest, state = (json.dumps(value) for value in make_checkpoint(tmp_path))
    if case in MANIFESTS:
        manifest = MANIFESTS[case](manifest)
    else:
        state = STATES[case](state)
    commit(tmp_path, manifest, state)
    for command in readers if case in MANIFESTS else (["ckpt", "info", "c"], ["ckpt", "verify", "c"]):
        done = run_program([sys.executable, "-P", "-c", LIMITED, *command], cwd=tmp_path, timeout=SECONDS)
        assert done.returncode in (1, 2), (command, done.stdout[-300:], done.stderr[-300:])
        assert "--debug for the traceback" not in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr) < 2000
    assert sorted(os.listdir(tmp_path)) == ["c"]
