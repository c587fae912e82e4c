"""Decides what is due for reasons other than the step: signals, the files `save-now` and `stop-now`, elapsed minutes,
and requests of callbacks.

Signal handlers do little more than set a flag. At the end of a step, all ranks combine their flags in one collective,
at most every half second, so that the cost is negligible even if steps are short.

SIGTERM: save, exit code 75. Ctrl-C: save, exit code 130; a second Ctrl-C ends the process at once. The launcher
forwards both to the ranks, but not to their loader workers. If a run makes no progress for `launch.grace` seconds after
SIGTERM, it ends with the stack of the rank that hangs.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import _exit  # the real one, which `exits` replaces
from typing import Any

import torch
import torch.distributed as dist

from dsjob.contract.spec import Checkpoint
from dsjob.errors import Interrupted
from dsjob.ranks import patience
from dsjob.ranks.agreement import all_gather
from dsjob.ranks.mesh import World
from dsjob.ranks.watchdog import position, wait_until_stuck
from dsjob.run_folder import STOP_REQUEST
from dsjob.terminal import write_now
from dsjob.training.requests import Requests
from dsjob.trust.frames import find_place

_SECONDS = 0.5  # between two agreements, with several ranks
_MOST_STEPS = 1000
_LONGEST_PAUSE = 300.0  # seconds between tries of a requested save that keeps failing
_INTERRUPTED = "\ndsjob: Ctrl-C: saving after the current step; press it again to stop at once"


@dataclass(frozen=True)
class Agreed:
    """What all ranks agreed on. `saves`: a checkpoint is due. `stops`: the signal that ends the run after it, or 0.
    `news`: a background save has ended on some rank. `evaluates`: an evaluation was requested. `ends`: why the run ends
    as after its last step, or empty. `seconds`: those of the run so far; None if ranks have not met."""

    saves: bool = False
    stops: int = 0
    news: bool = False
    evaluates: bool = False
    ends: str = ""
    seconds: float | None = None


class Occasions:
    """Watches signals, the files `request` and `stop_request`, the clock (in seconds), and the requests of callbacks
    for one run. read_clock: the seconds that the run has trained."""

    def __init__(
        self,
        spec: Checkpoint,
        world: World,
        request: str | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        grace: float = math.inf,
        stop_request: str | None = None,
        requests: Requests | None = None,
        read_clock: Callable[[], float] = float,
    ) -> None:
        self._spec, self._world, self._request, self._clock = spec, world, request, clock
        self._grace, self._stop_request = grace, stop_request
        self._requests = requests if requests is not None else Requests()
        self._read_clock = read_clock
        self._asked, self._stopped = False, 0
        self._stuck, self._over = "", threading.Event()
        self._saved_at = self._agreed_at = self._clock()
        self._agreed_step = self._next = 0
        self._granted = False  # the running background save was requested
        self._pause, self._try_at = 0.0, -math.inf

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Handles SIGTERM, SIGINT and SIGUSR1 as requests while the block runs. step: where training begins.

        An ignored SIGINT stays ignored. A second SIGINT ends the process at once. If the block fails on one of
        several ranks, and SIGTERM would end it, SIGTERM is ignored from then on, so that the rank can say why it fails:
        torchrun sends SIGTERM to all ranks within 0.1 s of another rank's end.
        """
        self._saved_at = self._agreed_at = self._clock()
        self._agreed_step = self._next = step
        if not self._spec.on_signal or threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGTERM, signal.SIGUSR1]
        numbers += [signal.SIGINT] if signal.getsignal(signal.SIGINT) != signal.SIG_IGN else []
        before = {number: signal.signal(number, self._take) for number in numbers}
        self._over.clear()
        try:
            yield
        except Exception:
            if self._world.everyone.size > 1 and before[signal.SIGTERM] == signal.SIG_DFL:
                before[signal.SIGTERM] = signal.SIG_IGN
            raise
        finally:
            self._over.set()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and self._stopped:
            raise KeyboardInterrupt
        if self._stuck:
            raise Interrupted(number, f"stopped by SIGTERM, then no progress for {self._grace:g} s: {self._stuck}")
        if number == signal.SIGTERM and not self._stopped and self._world.everyone.size == 1 and self._grace < math.inf:
            threading.Thread(target=self._end_stuck, name="dsjob-grace", daemon=True).start()
        self._asked, self._try_at = True, -math.inf
        # SIGUSR1 asks for a checkpoint, and training continues.
        self._stopped = self._stopped or (number if number != signal.SIGUSR1 else 0)
        if number != signal.SIGINT:
            return
        if self._world.everyone.rank == 0:
            write_now(_INTERRUPTED, indented=False)
        if self._world.everyone.size > 1:  # Python cannot run handlers while a rank waits in a collective
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _end_stuck(self) -> None:
        """Ends a single-rank run that does not reach the end of its step. For several ranks, the launcher does that."""
        stack = wait_until_stuck(self._grace, self._over)
        if not stack:
            return
        self._stuck = f"step {position.step + 1} ({position.doing}) is at {find_place(stack)}"
        os.kill(os.getpid(), signal.SIGTERM)  # raises Interrupted in the main thread, which cleans up without saving
        if self._over.wait(patience.TO_ANSWER) or position.doing == "ending":
            return
        write_now(f"dsjob: stopped by SIGTERM, then no progress for {self._grace:g} s: {self._stuck}")
        write_now("dsjob: nothing newer was saved")
        _exit(128 + signal.SIGTERM)

    def note_save(self, *, behind: bool = False) -> None:
        """A checkpoint was saved: clears the requests, and restarts counting minutes.

        behind: it is running in the background, and `note_settled` will be called.
        """
        self._granted = behind and self._is_wanted()
        self._asked, self._saved_at = False, self._clock()
        self._requests.saves = False
        if self._request is not None and self._is_touched(self._request):
            os.unlink(self._request)
        if not behind:
            self._end_trouble()

    def note_settled(self, saved: bool | None) -> None:
        """The background save has ended. If it failed, its request is repeated. saved: None if there was none."""
        if saved is None:
            return
        if saved:
            self._end_trouble()
        else:
            self._asked = self._asked or self._granted
            self.note_failure()
        self._granted = False

    def note_failure(self) -> None:
        """A save failed. A requested one is repeated at once the first time, then after pauses that double, until one
        succeeds."""
        self._try_at = self._clock() + self._pause
        self._pause = min(_LONGEST_PAUSE, max(1.0, 2 * self._pause))

    def _end_trouble(self) -> None:
        self._pause, self._try_at = 0.0, -math.inf

    def note_end(self) -> None:
        """The run ends normally: clears a request for that."""
        if self._stop_request is not None and self._is_touched(self._stop_request):
            os.unlink(self._stop_request)

    def hear(self) -> Agreed:
        """What callbacks of any rank have asked for. A collective."""
        everyone, asked = self._world.everyone, self._requests
        if everyone.size == 1:
            return Agreed(saves=asked.saves, evaluates=asked.evaluates, ends=asked.stops)
        # fp32 [3]. The reason is only sent if there is one.
        flags = [float(asked.saves), float(asked.evaluates), float(bool(asked.stops))]
        combined = torch.tensor(flags, dtype=torch.float32, device=self._world.device)
        dist.all_reduce(combined, dist.ReduceOp.MAX)
        saves, evaluates, ends = map(bool, combined.tolist())
        return Agreed(saves=saves, evaluates=evaluates, ends=self._agree_on_end(asked.stops) if ends else "")

    def agree(self, step: int, *, news: bool) -> Agreed:
        """What is due after `step`; the same on all ranks. news: this rank's knowledge of the background save."""
        everyone = self._world.everyone
        if everyone.size == 1:
            evaluates, end = self._requests.evaluates, self._find_end()
            return Agreed(self._is_due(), self._stopped, news, evaluates, end, self._read_clock())
        if step < self._next:
            return Agreed()
        now = self._clock()
        pace = (now - self._agreed_at) / max(step - self._agreed_step, 1)
        end = self._find_end()
        # fp64 [7]. With MAX, a request on one rank is enough. Of two signals, the one with the greater number wins.
        asked = [float(self._requests.evaluates), float(bool(end))]
        flags = [float(self._is_due()), float(self._stopped), float(news), *asked, pace, self._read_clock()]
        combined = torch.tensor(flags, dtype=torch.float64, device=self._world.device)
        dist.all_reduce(combined, dist.ReduceOp.MAX)
        saves, stops, any_news, evaluates, ends, seconds, passed = combined.tolist()
        # The next agreement must be at the same step on all ranks, so it follows from the slowest rank's pace.
        self._agreed_at, self._agreed_step = now, step
        self._next = step + min(_MOST_STEPS, max(1, int(_SECONDS / max(seconds, 1e-9))))
        reason = self._agree_on_end(end) if ends else ""
        return Agreed(bool(saves), int(stops), bool(any_news), bool(evaluates), reason, passed)

    def _agree_on_end(self, reason: str) -> str:
        """The first rank's reason that is not empty. A collective."""
        return next(filter(None, all_gather(self._world.everyone, reason)))

    def _find_end(self) -> str:
        """Why this rank wants the run to end as after its last step; empty if it does not."""
        if self._requests.stops or self._stop_request is None or not self._is_touched(self._stop_request):
            return self._requests.stops
        return f"the file {STOP_REQUEST} was created"

    def _is_due(self) -> bool:
        return self._is_wanted() and self._clock() >= self._try_at

    def _is_wanted(self) -> bool:
        minutes = self._spec.every_minutes
        waited = minutes is not None and self._clock() - self._saved_at >= 60 * minutes
        touched = self._request is not None and self._is_touched(self._request)
        return self._asked or self._requests.saves or waited or touched

    def _is_touched(self, file: str) -> bool:
        return self._world.everyone.rank == 0 and os.path.exists(file)
