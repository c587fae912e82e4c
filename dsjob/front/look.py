"""`dsjob.validate`, `dsjob.resolve` and `dsjob.plan`: inspect a job without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsjob.errors import DocumentError, Problem, UsageError
from dsjob.front.plan import Asked, parse_parameters, plan_composed
from dsjob.front.process import keeping_process
from dsjob.front.resolve import resolve_composed
from dsjob.front.source import (
    Given,
    allowing,
    drop_lines,
    list_words,
    make_flags,
    read_given,
    read_mapping,
    require_path,
    telling_places,
)
from dsjob.front.validate import validate_document, validate_file, validate_recipe
from dsjob.planning.model import Offload
from dsjob.planning.report import Plan
from dsjob.trust.user import grant


def validate(
    document: Given = None,
    *,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    deep: bool = False,
    trust: Sequence[str] = (),
    trust_remote_code: bool = False,
    unpinned: bool = False,
) -> list[Problem]:
    """All problems of a document, errors and warnings, in the order of their places; empty if the document is valid.

    The other arguments are those of `run`. world_size: check batch sizes for this number of ranks. deep: import the
    targets that are trusted, and check their arguments.
    """
    flags = make_flags(trust, trust_remote_code, unpinned)
    with allowing(flags), keeping_process(torch=deep):
        words = list_words(recipe, overrides)
        if document is None:
            read_given(None, recipe, overrides)  # raises UsageError if there is nothing to validate
            return validate_recipe(words, world_size, flags, deep=deep)
        if not isinstance(document, Mapping):
            path = require_path(document, "a document")
            return validate_file(path, world_size, words, flags, deep=deep)[0]
        try:
            return drop_lines(validate_document(read_mapping(document), world_size, words, flags, deep=deep))
        except DocumentError as error:
            return drop_lines(error.problems)


def resolve(
    document: Given = None,
    *,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    world_size: int | None = None,
) -> dict[str, Any]:
    """The complete document that a run would use: defaults filled in, "auto" and batch sizes resolved.

    The other arguments are those of `run`. world_size: the number of ranks (default: launch.nproc). Raises
    DocumentError with all problems.
    """
    with telling_places():
        composed = read_given(document, recipe, overrides, bare=True).compose(config_dir)
        return resolve_composed(composed, world_size).document


def plan(
    document: Given = None,
    *,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    params: int | str | None = None,
    world_size: int | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    offload: Offload | None = None,
    trust: Sequence[str] = (),
    trust_remote_code: bool = False,
    unpinned: bool = False,
) -> Plan:
    """Predicts what a job needs: memory, communication, checkpoint sizes, steps. `.fits` needs `device_memory`.

    The other arguments are those of `run`. params: a number of parameters, such as 7_000_000_000 or "7B",
    instead of the model. world_size: the
    number of ranks. device_memory, host_memory: memory of one device and of the machine, in bytes or as "80GiB".
    offload: as the flag.
    """
    flags = make_flags(trust, trust_remote_code, unpinned)
    count = parse_parameters(str(params)) if params is not None else None
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise UsageError(f"world_size={world_size!r} is not a number of ranks", hint="write an integer of at least 1")
    asked = Asked(count, world_size, _read_size(device_memory), _read_size(host_memory), offload)
    with allowing(flags), telling_places():
        source = read_given(document, recipe, overrides, bare=params is not None)
        composed = source.compose(config_dir)
        with keeping_process(torch=params is None):
            return plan_composed(composed, asked, grant(source.file, flags))


def _read_size(given: int | str | None) -> int | None:
    from dsjob.checkpoint.offline.convert import parse_size

    size = parse_size(given) if isinstance(given, str) else given
    if size is not None and size < 1 << 20:
        raise UsageError(f"{given!r} is not an amount of memory", hint='write "80GiB", or a number of bytes')
    return size
