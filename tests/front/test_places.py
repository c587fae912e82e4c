"""Mistakes that a run finds in a target: told with file, line and column, however the ranks were started."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job, resolve
from jobs import dsjob as command
from programs import DSJOB, run_program

import dsjob
from dsjob import errors
from dsjob.document.origins import Composed, read_document
from dsjob.document.resolve import complete_job
from dsjob.front.places import placing_errors
from dsjob.launch.joined import _dropping_foreign_places
from dsjob.trust.frames import describe_failure, put_at

pytestmark = pytest.mark.slow

MODULE = """
import torch
from torch import nn
import dsjob

class Net(nn.Module):
    def __init__(self, hidden=2):
        super().__init__()
        if hidden > 9:
            raise ValueError("hidden is at most 9")
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x).square().mean()

class Data(list):
    def __init__(self, length=8):
        if length < 1:
            raise ValueError("length is at least 1")
        super().__init__({"x": torch.ones(4)} for _ in range(length))

class Hooks(dsjob.Callback):
    def __init__(self, every=1):
        self.every = every

class Accuracy:
    def __init__(self, top=1): ...
    def __call__(self, outputs, batch): return 0.0

class Optimizer(torch.optim.SGD):
    def __init__(self, groups, rate):
        super().__init__(groups, lr=rate)

def loss(outputs, batch, scale=1): return outputs
def collate(samples, pad=0): return torch.utils.data.default_collate(samples)
def step(engines, batch, weight=1): return {}
def three(*_): return 3
def loader(*_): return torch.utils.data.DataLoader(Data(), batch_size=3)

class Unsized:
    def __getitem__(self, index): return {}

class Stuck(torch.optim.SGD):
    def step(self): raise RuntimeError("stuck")
"""
SOUND = """\
model: {_target_: places_module.Net, hidden: 2}
data:
  train: {_target_: places_module.Data, length: 8}
  eval: {_target_: places_module.Data, length: 8}
  collate: {_target_: places_module.collate, pad: 0}
loss: {_target_: places_module.loss, scale: 1}
metrics: {a: {_target_: places_module.Accuracy, top: 1}}
callbacks: {b: {_target_: places_module.Hooks, every: 1}}
optimizer: {_target_: places_module.Optimizer, rate: 0.1}
scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 3}
trainer: {micro_batch: 4, max_steps: 1, step: {_target_: places_module.step, weight: 1}}
output: {dir: run}
"""
TRAIN, EVAL = (f"{role}: {{_target_: places_module.Data, length: 8" for role in ("train", "eval"))
TWO = SOUND.replace("model: {", "models: {net: {model: {").replace("hidden: 2}", "hidden: 2}}}")
TWO = TWO.replace("loss: {_target_: places_module.loss, scale: 1}\n", "")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "places_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("places_module", None)


def write(right: str, wrong: str, needle: str = "", text: str = SOUND) -> str:
    """Puts a mistake into the job file; where `needle` is then, as messages tell it."""
    assert right in text
    text = text.replace(right, wrong, 1)
    Path("cfg.yaml").write_text(text)
    before = text[: text.index(needle)].split("\n")
    return f"cfg.yaml:{len(before)}:{len(before[-1]) + 1}: "


def find_problem(**given: Any) -> str:
    with pytest.raises(errors.DocumentError) as caught:
        dsjob.run("cfg.yaml", **given)
    (problem,) = caught.value.problems
    return str(problem).replace("error[target]: ", "").replace("places_module.", "")


@pytest.mark.parametrize(
    ("right", "wrong", "needle", "told"),
    [
        ("hidden:", "hiden:", "hiden", 'model.hiden: Net has no argument "hiden"; did you mean "hidden"?'),
        (
            "e.Net,",
            "e.Nte,",
            "_t",
            "model._target_: cannot import Nte: places_module has no 'Nte'; did you mean \"Net\"?",
        ),
        ("hidden: 2", "_args_: [1, 2]", "_args_", "model._args_: Net takes 1 positional argument, not 2"),
        ("length", "Lengt", "Lengt", 'data.train.Lengt: Data has no argument "Lengt"; did you mean "length"?'),
        (
            "eval: {_target_: places_module.Data, length",
            "eval: {_target_: places_module.Data, lenght",
            "lenght",
            'data.eval.lenght: Data has no argument "lenght"; did you mean "length"?',
        ),
        ("pad:", "padd:", "padd", 'data.collate.padd: collate has no argument "padd"; did you mean "pad"?'),
        ("top", "tpo", "tpo", 'metrics.a.tpo: Accuracy has no argument "tpo"; did you mean "top"?'),
        ("every:", "evry:", "evry", 'callbacks.b.evry: Hooks has no argument "evry"; did you mean "every"?'),
        (", rate: 0.1", "", "_target_: places_module.Opt", 'optimizer._target_: Optimizer needs the argument "rate"'),
        ("step_size:", "step_sise:", "step_sise", "scheduler.step_sise: torch.optim.lr_scheduler.StepLR has no arg"),
        ("weight:", "wait:", "wait", 'trainer.step.wait: step has no argument "wait"; did you mean "weight"?'),
    ],
)
def test_a_wrong_argument_has_its_place_in_the_file(right: str, wrong: str, needle: str, told: str) -> None:
    place = write(right, wrong, needle)
    assert find_problem().startswith(f"{place}{told}")


def test_the_loss_has_its_place() -> None:
    text = SOUND.replace(", step: {_target_: places_module.step, weight: 1}", "")
    place = write("scale:", "scael:", "scael", text)
    assert find_problem() == f'{place}loss.scael: loss has no argument "scael"; did you mean "scale"?'


def test_what_an_optimizer_of_torch_rejects_has_its_place() -> None:
    place = write("_target_: places_module.Optimizer, rate: 0.1", "type: NAdam, params: {lr: 0.1, momentum: 1}", "mom")
    assert find_problem().startswith(f'{place}optimizer.params.momentum: optimizer NAdam has no argument "momentum"')
    place = write("_target_: places_module.Optimizer, rate: 0.1", "type: NAdam, params: {lr: -1.0}", "params")
    assert find_problem().startswith(f"{place}optimizer.params: NAdam: Invalid learning rate: -1.0")


@pytest.mark.parametrize(
    ("right", "wrong", "needle", "told"),
    [
        ("hidden:", "hiden:", "hiden", 'models.net.model.hiden: Net has no argument "hiden"'),
        ("rate:", "raet:", "raet", 'optimizer.raet: Optimizer has no argument "raet"'),
        (
            "hidden: 2}}",
            "hidden: 2}, optimizer: {_target_: places_module.Optimizer, lr: 1}}",
            "lr: 1",
            'models.net.optimizer.lr: Optimizer has no argument "lr"',
        ),
    ],
)
def test_one_of_several_models_has_its_place(right: str, wrong: str, needle: str, told: str) -> None:
    place = write(right, wrong, needle, TWO)
    assert find_problem().startswith(f"{place}{told}")


def test_the_command_line_is_named_where_it_gives_the_value() -> None:
    write("hidden: 2", "hidden: 2")
    said = find_problem(overrides=["~model.hidden", "+model.hiden=3"])
    assert said.startswith('command line: +model.hiden=3: model.hiden: Net has no argument "hiden"; did you mean "hid')


@pytest.mark.parametrize(
    ("right", "wrong", "kind", "told"),
    [
        ("Net, hidden: 2", "three", errors.ContractError, "model: places_module.three returned int, not a torch.nn.Mo"),
        (
            "Hooks, every: 1",
            "three",
            errors.ContractError,
            "callbacks.b: places_module.three returned int, not a dsjob",
        ),
        ("Data, length: 8", "Data, length: 0", errors.DataError, "data.train: ValueError: length is at least 1 (/"),
    ],
)
def test_an_error_of_another_kind_has_a_place_too(right: str, wrong: str, kind: type[Exception], told: str) -> None:
    place = write(right, wrong, f"_target_: places_module.{wrong}")
    with pytest.raises(kind) as caught:
        dsjob.run("cfg.yaml")
    assert str(caught.value).startswith(f"{place}{told}")


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        (
            "train: {_target_: places_module.Data, length: 8",
            "train: {_target_: places_module.three",
            "is of type int, ",
        ),
        (
            "train: {_target_: places_module.Data, length: 8",
            "train: {_target_: places_module.Unsized",
            "(Unsized) has ",
        ),
        (
            "train: {_target_: places_module.Data, length: 8",
            "train: {_target_: places_module.loader",
            "(DataLoader) is ",
        ),
        (EVAL, "eval: {_target_: places_module.three", "is of type int, "),
        (EVAL, "eval: {_target_: places_module.Unsized", "(Unsized) has "),
        ("  collate:", "  loader: {_target_: places_module.loader}\n  collate:", "is a loader with batch_size 3, but "),
    ],
)
def test_data_that_cannot_be_read_has_its_place(right: str, wrong: str, told: str) -> None:
    place = write(right, wrong, wrong.strip().split("{")[1].split("}")[0])
    with pytest.raises(errors.DataError) as caught:
        dsjob.run("cfg.yaml")
    assert str(caught.value).startswith(f"{place}data.{wrong.strip().split(':')[0]} {told}")


def test_an_error_of_a_constructor_keeps_its_type() -> None:
    place = write("hidden: 2", "hidden: 10", "_target_")
    with pytest.raises(ValueError, match="hidden is at most 9") as caught:
        dsjob.run("cfg.yaml")
    assert caught.value.__notes__ == [f"raised by {place}model"]
    done = command("cfg.yaml", cwd=Path())
    assert f"dsjob: error: {place}model: ValueError: hidden is at most 9 (" in done.stderr
    assert done.returncode == 1


def test_of_a_dict_the_path_is_told() -> None:
    document = {
        "model": {"_target_": "places_module.Net", "hiden": 2},
        "data": {"train": {"_target_": "places_module.Data"}},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "trainer": {"micro_batch": 4, "max_steps": 1},
    }
    with pytest.raises(errors.DocumentError) as caught:
        dsjob.run(document, trust=["places_module"])
    assert str(caught.value).startswith("<dict>: error[target]: model.hiden: places_module.Net has no argument")


def test_ranks_tell_the_place() -> None:
    place = write("hidden:", "hiden:", "hiden")
    done = command("cfg.yaml", "launch.nproc=2", cwd=Path())
    # Without the rank where both failed before the launcher ended them.
    said = f'{place}error[target]: model.hiden: places_module.Net has no argument "hiden"'
    assert done.stderr.startswith((f"{said};", f"{said} (rank "))
    assert done.stderr.endswith('did you mean "hidden"?\n')
    assert done.returncode == 2
    place = write("hidden: 2", "hidden: 10", "_target_")
    done = command("cfg.yaml", "launch.nproc=2", cwd=Path())
    said = "model: ValueError: hidden is at most 9 ("
    assert any(f"dsjob: error: {place}{rank}{said}" in done.stderr for rank in ("", "rank 0: ", "rank 1: "))
    assert done.returncode == 1


def test_ranks_of_torchrun_tell_the_place() -> None:
    place = write("hidden:", "hiden:", "hiden")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", DSJOB, "cfg.yaml"]
    done = run_program(torchrun, cwd=Path.cwd())
    said = f'{place}error[target]: model.hiden: places_module.Net has no argument "hiden" (rank '
    assert said in done.stderr  # torchrun may end the second rank before it says so as well


def test_the_results_of_a_sweep_tell_the_place() -> None:
    place = write("hidden: 2", "hiden: 2", "hiden")
    command("-m", "cfg.yaml", "trainer.seed=1,2", "output.dir=sweep", cwd=Path())
    results = [json.loads(path.read_text()) for path in sorted(Path("sweep").glob("*/result.json"))]
    said = f'{place}error[target]: model.hiden: places_module.Net has no argument "hiden"'
    assert [result["error"].startswith(said) for result in results] == [True, True]


def test_a_resumed_run_points_into_its_own_document() -> None:
    write(", step: {_target_: places_module.step, weight: 1}", "")
    assert dsjob.run("cfg.yaml").step == 1
    resolved = Path("run/resolved.json")
    resolved.write_text(resolved.read_text().replace('"hidden"', '"hiden"'))
    sys.modules.pop("places_module")
    with pytest.raises(errors.DocumentError) as caught:
        dsjob.load_model("run")
    assert str(caught.value).startswith(f"{resolved.resolve()}:")
    with pytest.raises(errors.DocumentError) as caught:
        dsjob.run("run", overrides=["trainer.max_steps=2"])
    (problem,) = caught.value.problems
    line = resolved.read_text().split("\n")[problem.line - 1]
    assert (problem.source, line.strip()) == ("run/resolved.json", '"hiden": 2')


def test_a_secret_of_the_command_line_stays_out(tmp_path: Path) -> None:
    composed = Composed({}, None, overrides={("model", "token"): "+model.token=hunter2"})
    error = ValueError("no")
    put_at(error, ("model", "token"))
    with pytest.raises(ValueError, match="no"), placing_errors(composed):
        raise error
    assert "hunter2" not in describe_failure(error) + "".join(error.__notes__)
    assert describe_failure(error).startswith("command line: +model.token=")


def test_no_place_is_told_of_a_document_that_does_not_count(tmp_path: Path) -> None:
    """Under torchrun a rank may have composed another document than rank 0, whose lines it does not know."""
    own, other = (complete_job(resolve(make_job(name=name))) for name in ("own", "other"))
    for counts, path in ((own, ("model",)), (own.resuming(), ("model",)), (other, ())):
        error = errors.ContractError("model: it returned 3")
        error.put_at(("model",))
        with pytest.raises(errors.ContractError), _dropping_foreign_places(own, counts):
            raise error
        assert (error.path, error.message) == (path, "model: it returned 3")


def test_a_plan_tells_the_place() -> None:
    place = write("hidden:", "hiden:", "hiden")
    with pytest.raises(errors.DocumentError) as caught:
        dsjob.plan("cfg.yaml")
    assert str(caught.value).startswith(f"{place}error[target]: model.hiden: ")


def test_a_plan_tells_the_place_of_what_cannot_be_built() -> None:
    place = write("hidden: 2", "hidden: 10", "_target_")
    done = command("plan", "cfg.yaml", cwd=Path())
    assert done.stderr.startswith(f"dsjob: error: {place}model: places_module.Net cannot be built on torch's meta")
    Path("weights").mkdir()
    Path("weights/config.json").write_text("{}")
    loaded = "transformers.AutoModel.from_pretrained, _args_: [./weights]"
    place = write("places_module.Net, hidden: 2", loaded, "_target_")
    with pytest.raises(errors.UsageError) as caught:
        dsjob.plan("cfg.yaml")
    assert str(caught.value).startswith(f"{place}model: transformers.AutoModel.from_pretrained cannot be built from")
    place = write("places_module.Optimizer, rate:", "places_module.Stuck, lr:", "_target_: places_module.Stuck")
    with pytest.raises(errors.DocumentError) as caught_too:
        dsjob.plan("cfg.yaml")
    assert str(caught_too.value).startswith(f"{place}error[target]: optimizer._target_: optimizer places_module.Stuck")


def test_a_place_is_looked_up_once() -> None:
    Path("cfg.yaml").write_text(SOUND)
    composed = Composed({}, read_document("cfg.yaml"))
    error = errors.ContractError("model: it returned 3")
    error.put_at(("model", "_target_"))
    error.put_at(("loss",))
    with pytest.raises(errors.ContractError, match=r"^cfg.yaml:1:9: model: it returned 3$"), placing_errors(composed):
        raise error
