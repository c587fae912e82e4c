"""What is due after a step: a log record, an evaluation, a save, the end of the run."""

from __future__ import annotations

from dataclasses import dataclass

from dsjob.contract.lengths import Length
from dsjob.training.occasions import Agreed
from dsjob.training.run import Run


@dataclass
class Due:
    """What is due after a step; the same on all ranks. last: no step follows. stops: the signal that ends the run."""

    last: bool
    logs: bool
    evaluates: bool
    saves: bool
    stops: int

    @classmethod
    def after_step(cls, run: Run, agreed: Agreed) -> Due:
        """What is due after a step."""
        section = run.spec.checkpoint
        by_epochs = Length(section.every_epochs or 0, "epochs", "")
        due = cls(
            last=run.step == run.max_steps,
            logs=run.passed.ends_period(run.spec.trainer.log_every, run.engine),
            evaluates=evaluates_after(run),
            saves=bool(agreed.stops) or any(run.passed.ends_period(n, run.engine) for n in (section.every, by_epochs)),
            stops=agreed.stops,
        )
        due.add(run, agreed)
        return due

    @property
    def waits(self) -> bool:
        """Whether a save must be complete before the run continues."""
        return self.last or self.stops > 0

    def add(self, run: Run, agreed: Agreed) -> None:
        """Adds what the ranks have agreed on. A signal precedes a request for a normal end."""
        if agreed.ends and not self.last and not self.stops:
            self.last, run.requests.ended = True, agreed.ends
        self.logs = self.logs or self.last
        self.saves = self.saves or agreed.saves or (self.last and run.spec.checkpoint.at_end)
        wanted = self.evaluates or agreed.evaluates or self.last
        # A run that is asked to stop does not evaluate first. The next run does so when it resumes.
        self.evaluates = wanted and run.evaluator is not None and (self.last or not self.stops)


def evaluates_after(run: Run) -> bool:
    """Whether an evaluation is due after this step according to the job."""
    last = run.step == run.max_steps
    return run.evaluator is not None and (last or run.passed.ends_period(run.spec.trainer.eval_every, run.engine))
