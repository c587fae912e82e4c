"""Reports all problems of a document at once, without importing torch; needs Hydra only to compose."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dsjob import document as documents
from dsjob import storage
from dsjob.contract import report
from dsjob.contract.access import PLACE_RULES, Access
from dsjob.contract.job_lengths import describe_lengths
from dsjob.contract.locations import shorten
from dsjob.contract.secrets import list_texts
from dsjob.contract.spec import JobSpec, view
from dsjob.document import Document
from dsjob.document.bare import check_bare_config
from dsjob.document.job_file import require_job_file
from dsjob.document.origins import STDIN, Composed, is_deepspeed, read_text, settle
from dsjob.document.places import Locate, Place
from dsjob.document.sizes import choose_world_size
from dsjob.errors import DocumentError, DsjobError, Problem, UsageError, limit_problems
from dsjob.front.check import Checked, check_composed, find_other_job
from dsjob.front.refused import require_own
from dsjob.run_folder import RESOLVED_NAME
from dsjob.terminal import quote_path
from dsjob.trust.grant import Trust
from dsjob.trust.named import name_places
from dsjob.trust.presence import find_absent
from dsjob.trust.user import Flags, grant, place_origins, read_environment


def validate_file(
    url: str,
    world_size: int | None = None,
    overrides: Sequence[str] = (),
    flags: Flags | None = None,
    *,
    deep: bool = False,
    lengths: list[str] | None = None,
) -> tuple[list[Problem], dict[str, str]]:
    """The problems of a document with `overrides`, including its DeepSpeed config, in the order of their places.

    Also returns the texts of the files, by source. `flags`: what the user trusts. `deep`: import targets and check
    their arguments. `lengths`: receives what each length with a unit comes to, if there is no error.
    """
    texts: dict[str, str] = {}

    def find() -> Iterator[Problem]:
        if os.path.isdir(url):
            raise UsageError("this is a folder, not a job document", hint=_name_documents(url))
        text, source = read_text(url), name_source(url)
        texts[source] = text.replace("\r\n", "\n").replace("\r", "\n")
        document = documents.require_few(documents.parse_open(text, source))
        texts[source] = document.text
        yield from document.duplicates
        yield from _check(document, world_size, overrides, texts, flags, deep=deep, lengths=lengths)

    return _collect(find, name_source(url)), texts


def validate_document(
    document: Document,
    world_size: int | None = None,
    overrides: Sequence[str] = (),
    flags: Flags | None = None,
    *,
    deep: bool = False,
) -> list[Problem]:
    """Like `validate_file`, for a document that is already parsed."""
    return _collect(lambda: _check(document, world_size, overrides, {}, flags, deep=deep), document.source)


def validate_recipe(
    overrides: Sequence[str],
    world_size: int | None = None,
    flags: Flags | None = None,
    *,
    deep: bool = False,
    lengths: list[str] | None = None,
) -> list[Problem]:
    """Like `validate_file`, for a job that `overrides` compose without a document."""
    return _collect(
        lambda: _check_composed(
            _compose_words(overrides, None), None, world_size, [], flags, deep=deep, lengths=lengths
        ),
        "",
    )


def _name_documents(folder: str) -> str:
    """How to check a document in `folder`, such as that of a run; empty if there is none."""
    names = sorted(os.listdir(folder), key=lambda name: (name != RESOLVED_NAME, name))
    found = next((name for name in names if name.endswith((".yaml", ".yml", ".json"))), "")
    path = os.path.normpath(os.path.join(folder, found))
    return f"name a file: dsjob validate {quote_path(path)}" if found else ""


def _collect(find: Callable[[], Iterable[Problem]], source: str) -> list[Problem]:
    problems: list[Problem] = []
    try:
        problems.extend(find())
    except DocumentError as error:
        problems += [*error.problems, *error.warnings]
    except DsjobError as error:
        problems.append(Problem(error.message, rule="unreadable", hint=error.hint, source=source))
    return limit_problems(report.sort_problems(problems))


def name_source(url: str) -> str:
    """The name of a document in messages: `<stdin>` for `-`, otherwise the URL itself."""
    return STDIN if url == "-" else url


def _check(
    document: Document,
    world_size: int | None,
    overrides: Sequence[str],
    texts: dict[str, str],
    flags: Flags | None,
    *,
    deep: bool,
    lengths: list[str] | None = None,
) -> list[Problem]:
    require_own(document)
    if is_deepspeed(document.value):
        if overrides:
            message, hint = f"{overrides[0]} is an override of a job document", "this is a DeepSpeed config: edit it"
            return [Problem(message, (), "override", hint, document.source)]
        return check_bare_config(document.value, world_size=world_size, locate=_locator(document))
    require_job_file(document)
    composed, unread = _compose(document, overrides)
    if composed.deepspeed is not None:
        texts[composed.deepspeed.source] = composed.deepspeed.text
    return _check_composed(composed, document, world_size, unread, flags, deep=deep, lengths=lengths)


def _check_composed(
    composed: Composed,
    document: Document | None,
    world_size: int | None,
    unread: list[Problem],
    flags: Flags | None,
    *,
    deep: bool,
    lengths: list[str] | None = None,
) -> list[Problem]:
    """`unread`: the reason why the DeepSpeed config that the document names was not read; empty if it was."""
    ranks, ranks_from = choose_world_size(composed.document, composed.locate, asked=world_size)
    trust = name_places(grant(document, flags or Flags()), composed)
    checked = check_composed(composed, trust, world_size=ranks, ranks_from=ranks_from, unread=unread)
    found = [*checked.problems, *_look_at_targets(composed, checked, trust, ranks, deep=deep)]
    if lengths is not None and checked.resolved and all(one.severity != "error" for one in found):
        lengths += _describe_lengths(checked.resolved.document, ranks, trust, deep=deep)
    if checked.resolved is None or any(one.rule in PLACE_RULES for one in found):
        return found  # what the document may not read is not looked at
    return found + _find_other_job(composed, checked.resolved.document)


def _describe_lengths(document: dict[str, Any], ranks: int, trust: Trust, *, deep: bool) -> Iterator[str]:
    samples, tokens = None, 0
    if deep:
        from dsjob.front.deep import count_data

        samples, tokens = count_data(document, ranks, trust)
    for key, text in describe_lengths(view(JobSpec, document), samples, tokens):
        yield f"{key}: {text}" if ": " in text or deep else f"{key}: {text}: --deep counts its steps"


def _look_at_targets(composed: Composed, checked: Checked, trust: Trust, ranks: int, *, deep: bool) -> list[Problem]:
    """What a run with this trust rejects, and targets that this machine lacks, which are warnings. `deep`: also
    problems of the targets that a run would import, and of calling them with one batch on one of `ranks`."""
    found = checked.untrusted
    document = checked.resolved.document if checked.resolved else composed.document
    wrong = {problem.path for problem in checked.problems if problem.severity == "error"}
    known = wrong | {one.path for one in found}
    if not deep:
        absent = [one for one in find_absent(document, trust) if one.path not in known]
        return found + place_origins(absent, composed)
    from dsjob.front.deep import check_batch, check_targets  # imports what runs need

    found = found + place_origins(check_targets(document, trust, known), composed)
    if checked.resolved is None or wrong or any(one.severity == "error" for one in found):
        return found  # errors at a first batch would only follow from these
    return found + place_origins(check_batch(document, ranks, trust), composed)


def _find_other_job(composed: Composed, document: dict[str, Any]) -> list[Problem]:
    folder = os.path.expanduser(document["output"]["dir"])
    kept_here = storage.is_local(document["checkpoint"].get("dir") or folder)  # listing a remote folder would connect
    try:
        return find_other_job(composed, document, folder) if kept_here and os.path.isdir(folder) else []
    except (DsjobError, ValueError):  # the files there do not belong to a run
        return []


def _compose(document: Document, overrides: Sequence[str]) -> tuple[Composed, list[Problem]]:
    """The composed document, and why its DeepSpeed config was left out: it is remote or cannot be read."""
    if found := _find_remote(document):
        return _settle(_without_config(document), overrides), [found]
    try:
        return _settle(document, overrides), []
    except DocumentError as error:
        if not isinstance(document.value.get("deepspeed"), str):
            raise
        return _settle(_without_config(document), overrides), list(error.problems)


def _settle(document: Document, overrides: Sequence[str]) -> Composed:
    if not overrides and not any(isinstance(text, str) and "${" in text for _, text in list_texts(document.value)):
        return settle(document.value, file=document)
    return _compose_words(overrides, document)


def _compose_words(overrides: Sequence[str], document: Document | None) -> Composed:
    from dsjob.document.compose import compose_known  # interpolations and overrides are OmegaConf's and Hydra's

    try:
        return compose_known(overrides, file=document, environment=read_environment())
    except UsageError as error:
        raise DocumentError([Problem(error.message, (), "override", error.hint, "command line")]) from error


def _without_config(document: Document) -> Document:
    return replace(document, value={key: value for key, value in document.value.items() if key != "deepspeed"})


def _find_remote(document: Document) -> Problem | None:
    """Nothing that a document names is fetched to check it, nor is a file of this machine read for one from a URL."""
    url = document.value.get("deepspeed")
    if not isinstance(url, str) or ("${" not in url and all(storage.is_local(u) for u in (url, document.source))):
        return None
    rule, message, hint = Access.of_source(document.source).explain(url)
    mark = document.mark(("deepspeed",))
    if rule:
        place = (document.source, mark.line, mark.column)
        return Problem(f"{shorten(url)}: {message}", ("deepspeed",), rule, hint, *place)
    beside = "" if "://" in url or os.path.isabs(url) else document.source.rpartition("/")[0] + "/"
    return Problem(
        f"{url} is not read here: validate opens no connection",
        ("deepspeed",),
        "not-read",
        f"check it separately: dsjob validate {quote_path(beside + url)}" if "${" not in url else "",
        document.source,
        mark.line,
        mark.column,
        "warning",
    )


def _locator(document: Document) -> Locate:
    def locate(path: tuple[str | int, ...]) -> Place:
        mark = document.mark(path)
        return document.source, mark.line, mark.column

    return locate
