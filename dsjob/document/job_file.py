"""Rejects sections of a job file that Hydra would act on while it composes the job."""

from __future__ import annotations

from dsjob.document import Document
from dsjob.errors import DocumentError, Problem


def require_job_file(document: Document) -> None:
    """Raises DocumentError if a job file has the sections `hydra` or `defaults`.

    Both would take effect during composition. Hydra calls the targets of its launchers, sweepers and callbacks without
    a trust check.
    """
    advice = {
        "hydra": "choose launchers and sweepers on the command line: hydra/launcher=joblib",
        "defaults": "choose recipes and groups on the command line, +recipe=quickstart, or in a recipe of --config-dir",
    }
    problems = []
    for key in advice.keys() & document.value.keys():
        mark = document.mark((key,))
        place = (document.source, mark.line, mark.column)
        problems.append(Problem("may not be set by a job document", (key,), "hydra-section", advice[key], *place))
    if problems:
        raise DocumentError(problems)
