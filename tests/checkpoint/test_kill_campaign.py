"""kill -9 at random moments of training, saving, retention and resuming, again and again, until the run is through.

Nothing that the run has said to be saved may be lost, what it goes on from has to be what was saved, and it ends as the
run that nobody killed, bit for bit. A run that goes on with other pipeline stages and ranks ends with the same numbers
as one process, but for rounding. A table of what happened is printed at the end.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import killed_model
import pytest
import torch
from killed import Killable, wait_until

from dsjob import storage
from dsjob.checkpoint.live.weights import read_weights
from dsjob.checkpoint.offline.verify import verify

STEPS = 24
STAGES = {(1, False): 0, (1, True): 0, (2, False): 0, (2, True): 2, (4, False): 3, (4, True): 3}
PARTS: dict[str, dict[str, Any]] = {  # layouts but for the data-parallel one, with other sections of the document
    "stages": {"pipeline": {"stages": 2}},  # x data on four ranks
    "mesh": {"pipeline": {"stages": 2}, "tensor_parallel": {"size": 2}},
    "changing": {"pipeline": {"stages": 2}, "tensor_parallel": {"size": 1}},
}
CHANGES = [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 2, 1), (4, 4, 1), (4, 2, 2)]  # ranks, stages, tensor-parallel ranks
KILLS = 5  # of one test in the full campaign
SEEDS = range(5)


@dataclass(frozen=True)
class Cell:
    """Which jobs are killed: their ranks, their store, whether they save in the background, and their layout."""

    world: int
    store: str
    behind: bool
    parts: str = "data"

    def __str__(self) -> str:
        own = "" if self.parts == "data" else f"-{self.parts}"
        return f"{self.world}-{self.store}-{'async' if self.behind else 'sync'}{own}"

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return STAGES[self.world, self.behind] if self.parts == "data" else int(self.behind)

    @property
    def changes(self) -> bool:
        """Whether each start has another layout."""
        return self.parts == "changing"


@dataclass
class Kill:
    """One kill: of what (`all` processes, one `rank`, the `launcher`), where it found the job, and what it cost.

    `acknowledged`: saves that the job had told of; `lost`: whether the newest checkpoint is older than the last one;
    `wrong`: checkpoints that are not what the unbroken run had then, and a resume from another than the newest.
    """

    cell: Cell
    kind: str
    place: str
    acknowledged: int
    lost: int
    wrong: int
    seconds: float  # until all processes were gone


CELLS = [
    *(Cell(*of) for of in itertools.product((1, 2, 4), ("file", "s3"), (False, True))),
    Cell(2, "file", False, "stages"),
    Cell(4, "file", True, "stages"),
    Cell(4, "file", False, "mesh"),
    Cell(4, "file", False, "changing"),
]


@dataclass
class Tally:
    """What all tests of this module have seen."""

    kills: list[Kill] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)  # jobs by whether they ended as the unbroken one

    def lines(self) -> Iterator[str]:
        yield "kills  store  ranks  parts     saves  of        acknowledged  lost  wrong  slowest end"
        for (cell, kind), group in _group(self.kills, lambda kill: (kill.cell, kill.kind)):
            saves = "async" if cell.behind else "sync"
            places = f"{cell.store:5}  {cell.world:5}  {cell.parts:8}  {saves:5}  {kind:8}"
            yield (
                f"{len(group):5}  {places}  {_sum(group, 'acknowledged'):12}  {_sum(group, 'lost'):4}"
                f"  {_sum(group, 'wrong'):5}  {max(kill.seconds for kill in group):8.1f} s"
            )
        for place, group in _group(self.kills, lambda kill: kill.place):
            yield f"{len(group):5}  {place}"
        yield (
            f"{len(self.kills):5}  kills, {_sum(self.kills, 'acknowledged')} acknowledged saves:"
            f" {_sum(self.kills, 'lost')} lost, {_sum(self.kills, 'wrong')} wrong;"
            f" {self.ended['same']} jobs ended as the unbroken one, {self.ended['other']} otherwise"
        )


def _group(kills: list[Kill], key: Callable[[Kill], Any]) -> list[tuple[Any, list[Kill]]]:
    found = sorted(kills, key=lambda kill: str(key(kill)))
    return [(name, list(group)) for name, group in itertools.groupby(found, key)]


def _sum(kills: list[Kill], name: str) -> int:
    return sum(getattr(kill, name) for kill in kills)


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    found = Tally()
    yield found
    plugins = request.config.pluginmanager
    reporter, capture = plugins.getplugin("terminalreporter"), plugins.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for line in ("", *found.lines()) if found.kills else ():
            reporter.write_line(line)


@dataclass(frozen=True)
class Whole:
    """The run that nobody kills."""

    saved: dict[int, tuple[dict[str, list[str]], dict[str, Any]]]  # digests and state after each step
    losses: dict[int, float]
    root: str  # of its checkpoints


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cell], Whole]:
    found: dict[tuple[int, int, str], Whole] = {}

    def give(cell: Cell) -> Whole:
        key = (cell.world, cell.stage, cell.parts)
        if key not in found:
            folder = tmp_path_factory.mktemp("whole")
            make_job(folder, cell)
            alone = lay_out(CHANGES[0]) if cell.changes else []
            with Killable("cfg.json", "checkpoint.every=1", "checkpoint.keep=0", *alone, cwd=folder) as job:
                assert job.wait() == 0, job.errors
            root = str(folder / "run" / "checkpoints")
            saved = {step: read_saved(root, step) for step in range(1, STEPS + 1)}
            found[key] = Whole(saved, dict(read_losses(folder)), root)
        return found[key]

    return give


def make_job(folder: Path, cell: Cell) -> None:
    document = killed_model.describe(cell.world, cell.stage, STEPS)
    if cell.parts != "data":
        document |= {"model": {"_target_": "killed_model.Deep"}, **PARTS[cell.parts]}
    if cell.changes:  # random numbers depend on the layout
        document["model"]["drop"], document["data"]["train"]["noise"] = 0.0, 0.0
        document["optimizer"]["params"]["eps"] = 1e-3
        del document["callbacks"]
    (folder / "cfg.json").write_text(json.dumps(document))
    shutil.copy(str(killed_model.__file__), folder)


def lay_out(layout: tuple[int, int, int]) -> list[str]:
    """Puts a job on other ranks, stages and tensor-parallel ranks."""
    names = ("launch.nproc", "pipeline.stages", "tensor_parallel.size")
    return [f"{name}={size}" for name, size in zip(names, layout, strict=True)]


def read_saved(root: str, step: int) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """The sha256 of each chunk of a checkpoint, and its plain state."""
    record = json.loads(storage.read_bytes(storage.join(root, "commits", f"step-{step:08d}.json")))
    manifest, state = (
        json.loads(storage.read_bytes(storage.join(root, record["dir"], name)))
        for name in ("manifest.json", "state.json")
    )
    return {name: [c["sha256"] for c in tensor["chunks"]] for name, tensor in manifest["tensors"].items()}, state


def read_losses(folder: Path) -> list[tuple[int, float]]:
    """All losses that the runs of a job have noted, by step, those of steps that were taken anew first."""
    return [loss for name in ("metrics-superseded.jsonl", "metrics.jsonl") for loss in read_file(folder, name)]


def read_file(folder: Path, name: str) -> list[tuple[int, float]]:
    path = folder / "run" / name
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def list_steps(root: str) -> list[int]:
    return sorted(int(name[5:13]) for name in storage.list_names(f"{root}/commits") if name.endswith(".json"))


def find_place(root: str, committed: list[int], keep: int, moved: bool) -> str:
    """Where a kill found the job, by what it has left in the store; `moved`: it had taken a step."""
    names = storage.list_names(root)
    open_ones = [n for n in names if re.fullmatch(r"step-\d{8}-a\d+", n) and int(n[5:13]) not in committed]
    newest = committed[-1] if committed else 0
    for name in open_ones:
        if int(name[5:13]) > newest:
            complete = "manifest.json" in storage.list_names(f"{root}/{name}")
            return "save, before the commit record" if complete else "save, writing shards"
    if open_ones or len(committed) > keep:
        return "save, retention"
    latest = storage.read_bytes(f"{root}/latest").decode().strip() if "latest" in names else ""
    if committed and latest != f"step-{newest:08d}":
        return "save, after the commit record"
    return "training" if moved else "resume"


class Campaign:
    """Kills jobs of one cell."""

    def __init__(self, cell: Cell, seed: int, whole: Whole) -> None:
        self.cell, self.whole = cell, whole
        self.chance = random.Random(f"{cell}-{seed}")
        self.kills: list[Kill] = []
        self.same: list[bool] = []  # of each job, whether it ended as the unbroken one
        self._world = cell.world
        self._start_up = 1.0  # seconds from the start of a job to its first step, as it was the last time

    def run_job(self, folder: Path, root: str, most: int) -> None:
        """Kills a job and lets it go on, until it was killed `most` times, or is through before."""
        make_job(folder, self.cell)
        keep = self.chance.choice((1, 2, 3))
        every = self.chance.choice((1, 2) if self.cell.store == "file" else (2, 3))
        options = [f"checkpoint.every={every}", f"checkpoint.keep={keep}"]
        options += [f"checkpoint.dir={root}", f"checkpoint.async={str(self.cell.behind).lower()}"]
        newest = told = claimed = 0
        first = len(self.kills)
        while True:
            noted = len(read_losses(folder))
            placed = []
            if self.cell.changes:
                self._world, *_ = layout = self.chance.choice(CHANGES)
                placed = lay_out(layout)
            with Killable("cfg.json", *options, *placed, cwd=folder) as job:
                kind = self._kill(job, folder) if len(self.kills) - first < most else ""
                began = time.monotonic()
                code, output, errors = job.wait(), job.output, job.errors
            seconds = time.monotonic() - began
            assert "Traceback" not in errors, errors
            moved = len(read_losses(folder)) > noted
            if len(self.kills) > first:
                self.kills[-1].wrong += self._is_wrong(output, newest, moved)
            if not kind or code == 0:
                assert code == 0, errors
                self.same.append(self._is_same(folder, root))
                return
            assert kind != "rank" or "was killed by SIGKILL" in errors, errors
            saves = [int(step) for step in re.findall(r"^saved  (?:\S*/)?step-(\d{8})", output, re.MULTILINE)]
            told = max([told, *saves])
            steps, before, claimed = list_steps(root), claimed, len(storage.list_names(f"{root}/attempts"))
            place = find_place(root, steps, keep, moved) if claimed > before else "start"
            newest = max(steps, default=0)
            wrong = self._count_wrong(root, steps)
            self.kills.append(Kill(self.cell, kind, place, len(saves), int(told > newest), wrong, seconds))

    def _kill(self, job: Killable, folder: Path) -> str:
        """Kills at a random moment; what. "" where the job was through before."""
        noted, started = len(read_losses(folder)), time.monotonic()
        if self.chance.random() < 0.15:
            time.sleep(self.chance.uniform(0, self._start_up))
        else:
            done = max((step for step, _ in read_losses(folder)), default=0)
            wanted = noted + self.chance.randint(1, max(1, STEPS - done))
            wait_until(lambda: job.ended or len(read_losses(folder)) > noted, 60, "the job takes no step")
            self._start_up = time.monotonic() - started
            wait_until(lambda: job.ended or len(read_losses(folder)) >= wanted, 60, "the job stands still")
            time.sleep(self.chance.uniform(0, 0.03 if self.cell.store == "file" else 0.2))
        kind, ranks = self.chance.choice(("all", "rank", "launcher")), job.ranks
        if self._world == 1 or len(ranks) < self._world:
            kind = "all"
        targets = {"all": [job.pid, *ranks], "rank": ranks, "launcher": [job.pid]}[kind]
        self.chance.shuffle(targets)
        if job.ended:
            return ""
        job.kill(*targets[: None if kind == "all" else 1])
        return kind

    def _is_wrong(self, output: str, newest: int, moved: bool) -> bool:
        """Whether a job that has said `output` went on from another step than the newest that was saved."""
        found = re.search(r"resumed\s.* at step (\d+)", output)
        return int(found[1]) != newest if found else moved and newest > 0

    def _count_wrong(self, root: str, steps: list[int]) -> int:
        """Checkpoints that are damaged, or hold anything but what the unbroken run had after that step."""
        damaged = {found.tag for found in verify(root, every=True) if found.damages} if steps else set()
        return sum(f"step-{s:08d}" in damaged or not self._is_saved(root, s) for s in steps)

    def _is_saved(self, root: str, step: int) -> bool:
        """Whether a checkpoint holds what the unbroken run had then."""
        if not self.cell.changes:
            return read_saved(root, step) == self.whole.saved[step]
        found, expected = (read_weights(each, tag=f"step-{step:08d}") for each in (root, self.whole.root))
        return found.keys() == expected.keys() and all(
            torch.allclose(found[name], tensor, rtol=0, atol=1e-5) for name, tensor in expected.items()
        )

    def _is_same(self, folder: Path, root: str) -> bool:
        """Whether weights, optimizer, schedule, generators, callbacks and all losses are those of the unbroken run."""
        most = 1e-5 if self.cell.changes else 0.0
        losses = self.whole.losses
        same = all(abs(loss - losses[step]) <= most * losses[step] for step, loss in read_losses(folder))
        same = same and [step for step, _ in read_file(folder, "metrics.jsonl")] == list(losses)  # each step once
        return same and list_steps(root)[-1] == STEPS and self._is_saved(root, STEPS)


CUT = [(Cell(1, "file", True), 2), (Cell(2, "file", False), 2), (Cell(1, "s3", False), 2), (CELLS[-1], 1)]
CASES = [
    *(pytest.param(cell, 0, kills, id=f"{cell}") for cell, kills in CUT),
    *(pytest.param(c, s, KILLS, marks=pytest.mark.full, id=f"{c}-seed-{s}") for s in SEEDS for c in CELLS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "seed", "kills"), CASES)
@pytest.mark.full("1-s3-sync", "1-file-async", "2-file-sync")
def test_what_is_killed_goes_on_from_what_it_has_saved_and_ends_as_if_it_had_not_been(
    tmp_path: Path,
    cell: Cell,
    seed: int,
    kills: int,
    tally: Tally,
    wholes: Callable[[Cell], Whole],
    request: pytest.FixtureRequest,
) -> None:
    base = request.getfixturevalue("s3") if cell.store == "s3" else str(tmp_path)
    campaign = Campaign(cell, seed, wholes(cell))
    try:
        for number in itertools.count():
            folder = tmp_path / f"job-{number}"
            folder.mkdir()
            campaign.run_job(folder, f"{base}/{folder.name}/checkpoints", kills - len(campaign.kills))
            if len(campaign.kills) >= kills:
                break
    finally:
        tally.kills += campaign.kills
        tally.ended += Counter("same" if same else "other" for same in campaign.same)
    assert all(campaign.same)
    assert [kill for kill in campaign.kills if kill.lost or kill.wrong] == []
