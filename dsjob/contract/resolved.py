"""A resolved job as one typed value: made once, before the ranks start, and handed to each of them.

Nothing is derived here. `dsjob.document.resolve` has settled every value; this file only views what it has written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dsjob.contract.directions import Direction
from dsjob.contract.spec import JobSpec, view

Sections = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """One of the models, as if the job had no other.

    sections: the complete document of such a job; spec: the typed view of it; config: the complete DeepSpeed config.
    """

    sections: Sections
    spec: JobSpec
    config: Sections


@dataclass(frozen=True, slots=True)
class ResolvedJob:
    """A job that is ready to run.

    document: what resolved.json and checkpoints hold. It has one place for each setting, so that an override of the
    job's own settings still reaches its models. spec: the typed view of it. models: each model complete, by name, the
    one that counts steps first. given: what the run's folder keeps of the job as it was given.
    """

    document: Sections
    spec: JobSpec
    models: Mapping[str, ResolvedModel]
    given: Sections = field(default_factory=dict)

    @classmethod
    def of(cls, document: Sections, sections: Mapping[str, Sections], configs: Mapping[str, Sections]) -> ResolvedJob:
        """The typed view of a resolved document; `sections` and `configs` of each model by name, both complete."""
        models = {name: ResolvedModel(own, view(JobSpec, own), configs[name]) for name, own in sections.items()}
        return cls(document, view(JobSpec, document), models)

    def resuming(self) -> ResolvedJob:
        """The same job with `checkpoint.resume: auto`."""
        return self._with_checkpoint({"resume": "auto"})

    def choosing(self, mode: Direction) -> ResolvedJob:
        """The same job with this `checkpoint.best.mode`."""
        return self._with_checkpoint({"best": {**self.document["checkpoint"]["best"], "mode": mode}})

    def _with_checkpoint(self, changes: Sections) -> ResolvedJob:
        document = {**self.document, "checkpoint": {**self.document["checkpoint"], **changes}}
        return replace(self, document=document, spec=view(JobSpec, document))

    def to_text(self) -> str:
        """The job as JSON, for the processes of its ranks."""
        models = {name: [model.sections, model.config] for name, model in self.models.items()}
        return json.dumps({"document": self.document, "models": models, "given": self.given})

    @classmethod
    def from_text(cls, text: str) -> ResolvedJob:
        """The job that `to_text` has written."""
        given = json.loads(text)
        models = given["models"].items()
        job = cls.of(
            given["document"],
            {name: sections for name, (sections, _) in models},
            {name: config for name, (_, config) in models},
        )
        return replace(job, given=given["given"])
