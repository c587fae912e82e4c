"""Checks a composed document before anything that it names is imported.

`validate` reports the problems; runs, plans and comparisons stop at errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsjob.contract.deepspeed_keys import find_origin
from dsjob.document.origins import Composed
from dsjob.document.places import place_problems
from dsjob.document.resolve import Resolved, resolve_job
from dsjob.errors import DocumentError, Problem
from dsjob.monitors import find_missing
from dsjob.run_folder import describe_other_job, list_commits
from dsjob.trust.grant import Trust
from dsjob.trust.named import name_places
from dsjob.trust.user import list_untrusted


@dataclass(frozen=True)
class Checked:
    """The result of checking a document.

    resolved: the resolved document; None if it cannot be resolved. problems: errors and warnings. untrusted: names
    that are not trusted, at places that have no other error.
    """

    resolved: Resolved | None
    problems: list[Problem]
    untrusted: list[Problem]

    def require(self, more: Sequence[Problem] = ()) -> Resolved:
        """The resolved document. Raises DocumentError with all errors at once, including those in `more`."""
        errors = [problem for problem in self.problems if problem.severity == "error"]
        if found := [*errors, *self.untrusted, *more]:
            raise DocumentError(found, [problem for problem in self.problems if problem.severity != "error"])
        assert self.resolved is not None
        return self.resolved


def check_composed(
    composed: Composed, trust: Trust, *, world_size: int, ranks_from: str, unread: Sequence[Problem] = ()
) -> Checked:
    """Checks a document for `world_size` ranks. The places that its overrides name are granted. `ranks_from`: the
    source of that number, for messages. `unread`: problems of parts that were left out of the document."""
    unread, trust = [*composed.unknown, *unread], name_places(trust, composed)
    try:
        resolved = resolve_job(composed.document, world_size=world_size, locate=composed.locate, ranks_from=ranks_from)
    except DocumentError as error:
        wrong = {problem.path for problem in error.problems}
        # What was left out may supply what is missing here.
        found = [one for one in error.problems if not (unread and one.rule in _LEFT_TO_UNREAD)]
        named = list_untrusted(composed, composed.document, trust)
        untrusted = [one for one in named if one.path not in wrong]
        return Checked(None, [*unread, *found, *error.warnings], untrusted)
    config = composed.document.get("deepspeed") or {}
    missing = place_problems(
        [*find_missing(resolved.document), *_check_tokenizers(resolved.document)],
        lambda path: composed.locate(find_origin(path, composed.document, config)),
    )
    return Checked(
        resolved, [*unread, *missing, *resolved.warnings], list_untrusted(composed, resolved.document, trust)
    )


def _check_tokenizers(document: Mapping[str, Any]) -> list[Problem]:
    """See `check_tokenizers`, which takes a while to import."""
    named = str([document.get(key) for key in ("model", "models", "data")])
    if "from_pretrained" not in named and named.count("dsjob.text.Text") < 2:
        return []
    from dsjob.checkpoint.pretrained.vocabularies import check_tokenizers

    return list(check_tokenizers(document))


_LEFT_TO_UNREAD = ("batch", "no-total-steps")


def find_other_job(composed: Composed, document: Mapping[str, Any], run_dir: str) -> list[Problem]:
    """A problem if `run_dir` holds checkpoints of another job, which a run of the resolved `document` would resume."""
    other = describe_other_job(run_dir, document) if list_commits(run_dir, document) else ""
    found = [Problem(other, ("output", "dir"), "another-job", "choose another output.dir")] if other else []
    return place_problems(found, composed.locate)
