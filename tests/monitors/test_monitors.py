"""Monitors of jobs that are killed and resumed, each read back by the library that it is for."""

from __future__ import annotations

import csv
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from jobs import dsjob, make_job, read_metrics
from wandb_files import read_wandb

from dsjob.contract.schema import job_schema
from dsjob.monitors import SERVICES, find_missing
from dsjob.monitors.delivery import name_values
from dsjob.monitors.monitor import flatten

MORE = """

import json, os, signal
from dsjob import Callback, Monitor

class Die(Callback):
    def on_log(self, run, record):
        if str(run.step) == os.environ.get("DIE"):
            os.kill(os.getpid(), signal.SIGKILL)
        if str(run.step) == os.environ.get("RAISE"):
            raise ValueError("enough")

class Kept(Monitor):
    def __init__(self, fails=""):
        self.fails = fails

    def keep(self, what, value):
        with open("kept", "a") as file:
            file.write(json.dumps([what, os.environ.get("RANK", "0"), value]) + "\\n")
        if what == self.fails:
            raise OSError("no route to host")

    def begin(self, series):
        self.keep("begin", [series.name, series.key, series.begin])

    def write_events(self, events):
        self.keep("write", events)

    def end(self, failed):
        self.keep("end", failed)
"""
Values = dict[str, list[tuple[int, float]]]  # by name: samples seen, value
STEPS = [8 * step for step in range(1, 9)]


def make(folder: Path, monitor: dict[str, Any], **sections: Any) -> Path:
    """A job of 8 steps of 8 samples that saves at step 4, and evaluates at steps 4 and 8."""
    trainer = {"train_batch": 8, "max_steps": 8, "log_every": 1, "eval_every": 4}
    callbacks = {"die": {"_target_": "my_model.Die"}}
    rest = {"checkpoint": {"every": 4}, "callbacks": callbacks, "name": "mine", **sections}
    make_job(folder, trainer=trainer, monitor=monitor, **rest)
    (folder / "my_model.py").write_text((folder / "my_model.py").read_text() + MORE)
    return folder


def run_killed(folder: Path, monitor: dict[str, Any], how: str = "DIE", **env: str) -> Values:
    """Kills the run at step 6, and resumes it at step 4. The losses of its metrics.jsonl and its evaluations."""
    make(folder, monitor)
    assert dsjob("cfg.json", cwd=folder, **{how: "6"}, **env).returncode == (-9 if how == "DIE" else 1)
    done = dsjob("cfg.json", cwd=folder, **env)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout
    names = {"loss": "Train/Samples/train_loss", "lr": "Train/Samples/lr", "eval/loss": "eval/loss"}
    run = folder / "run"
    return {name: [(8 * step, v) for step, v in read_metrics(run, key).items()] for key, name in names.items()}


def choose(found: Values, wanted: Values) -> Values:
    """The series of `found` that `wanted` has, rounded to what fp32 holds."""
    return {name: [(step, pytest.approx(value, rel=1e-6)) for step, value in found[name]] for name in wanted}


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wanted = run_killed(tmp_path, {"tensorboard": {"enabled": True}})
    reader = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    reader.Reload()
    found = {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in reader.Tags()["scalars"]}
    assert wanted == choose(found, wanted)
    assert [step for step, _ in found["Train/Samples/train_loss"]] == STEPS
    assert [step for step, _ in found["eval/loss"]] == [32, 64]
    assert "Train/Samples/grad_norm" in found
    assert "Train/Samples/step" not in found


def test_csv_files_have_deepspeeds_names_and_columns(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": "logs", "job_name": "a"}
    wanted = run_killed(tmp_path, {"csv_monitor": section})
    for name, values in wanted.items():
        with open(tmp_path / "logs" / "a" / f"{name.replace('/', '_')}.csv", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        assert header == ["step", name.rpartition("/")[2]]
        assert [(int(step), float(value)) for step, value in rows] == values
    aside = (tmp_path / "logs" / "a" / "Train_Samples_train_loss.csv.superseded").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in aside] == [40, 48]  # what the killed run has taken after step 4


def test_csv_files_that_no_monitor_has_written_stay(tmp_path: Path) -> None:
    """A document may name any folder as output_path."""
    texts = {"table.csv": "step,name\n1,a\n9000,b\n", "x.csv": "step\n9000\n", "lr.csv": "", "a_lr.csv": "step,lr,x\n"}
    (tmp_path / "logs" / "a").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / "logs" / "a" / name).write_text(text)
    make(tmp_path, {"csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "a"}})
    assert dsjob("cfg.json", cwd=tmp_path).returncode == 0
    assert {name: (tmp_path / "logs" / "a" / name).read_text() for name in texts} == texts
    assert not list((tmp_path / "logs" / "a").glob("*.superseded"))


@pytest.mark.parametrize("monitor", ["csv_monitor", "tensorboard"])
def test_a_monitors_folder_does_not_lead_out_of_its_path(monitor: str, tmp_path: Path) -> None:
    (folder := tmp_path / "job").mkdir()
    make(folder, {monitor: {"enabled": True, "output_path": "logs", "job_name": "../../out"}})
    for command in ("validate", "run"):
        done = dsjob(command, "cfg.json", cwd=folder)
        assert done.returncode == 2
        assert f"error[outside-folder]: monitor.{monitor}.job_name: ../../out: leads out of output_path" in done.stderr
    assert not (tmp_path / "out").exists()


def test_folders_of_runs_differ(tmp_path: Path) -> None:
    make(tmp_path, {"csv_monitor": {"enabled": True, "output_path": "logs"}})
    for name in ("first", "second"):
        assert dsjob("cfg.json", "trainer.max_steps=1", f"output.dir=runs/{name}", cwd=tmp_path).returncode == 0
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["first", "second"]


@pytest.mark.full
def test_weights_and_biases_offline(tmp_path: Path) -> None:
    # Not killed: wandb itself writes what it has received some seconds later.
    section = {"enabled": True, "project": "mine"}
    wanted = run_killed(tmp_path, {"wandb": section}, how="RAISE", WANDB_MODE="offline")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    found: Values = {}
    for path in files:
        records = list(read_wandb(path))
        (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
        assert (run.project, run.display_name, path.stem) == ("mine", "mine", f"run-{run.run_id}")
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["trainer"]["max_steps"] == 8
        for record in records:
            if record.WhichOneof("record_type") == "history":
                items = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
                for name, value in items.items():
                    found.setdefault(name, []).append((items["_step"], value))
    assert len({path.stem for path in files}) == 1  # one run, in two parts
    assert wanted == choose(found, wanted)


def test_mlflow_in_a_folder(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    store = f"file:{tmp_path}/store"
    section = {"enabled": True, "tracking_uri": store, "experiment": "mine"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        wanted = run_killed(tmp_path, {"mlflow": section})
        client = MlflowClient(tracking_uri=store)
        (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
        found = {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in wanted}
    assert {name: sorted(values) for name, values in found.items()} == wanted
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert run.data.params["optimizer.params.lr"] == "0.01"


@pytest.mark.full
def test_comet_offline(tmp_path: Path) -> None:
    section = {"enabled": True, "online": False, "samples_log_interval": 16}
    make(tmp_path, {"comet": section})
    done = dsjob("cfg.json", cwd=tmp_path)
    assert "monitor comet" not in done.stdout, done.stdout
    (path,) = (tmp_path / "run" / "comet").glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    losses = {metric["step"]: metric["metricValue"] for metric in metrics if "train_loss" in metric["metricName"]}
    assert list(losses) == [8, 24, 40, 56]  # one in 16 samples
    assert losses[8] == pytest.approx(read_metrics(tmp_path / "run")[1])


def read_kept(folder: Path, what: str) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "kept").read_text().splitlines()]
    assert {rank for _, rank, _ in lines} == {"0"}
    return [value for kind, _, value in lines if kind == what]


def kept(**options: Any) -> dict[str, Any]:
    return {"custom": {"mine": {"_target_": "my_model.Kept", **options}}}


def test_a_monitor_of_the_users_own_gets_each_value_once(tmp_path: Path) -> None:
    wanted = run_killed(tmp_path, kept())
    found: Values = {}
    for events in read_kept(tmp_path, "write"):
        for name, value, samples in events:
            found.setdefault(name, []).append((samples, value))
    assert {name: found[name] for name in wanted} == wanted
    first, second = read_kept(tmp_path, "begin")
    assert first[1] == second[1]
    assert (first[0], first[2], second[2]) == ("mine", 0, 32)
    assert read_kept(tmp_path, "end") == [False]


def test_a_run_that_starts_again_is_another_series(tmp_path: Path) -> None:
    make(tmp_path, kept(), checkpoint={"every": 4})
    assert dsjob("cfg.json", cwd=tmp_path, DIE="2").returncode == -9  # before the first checkpoint
    assert dsjob("cfg.json", cwd=tmp_path).returncode == 0
    first, second = read_kept(tmp_path, "begin")
    assert first[1] != second[1]
    assert [events[0][2] for events in read_kept(tmp_path, "write")][:4] == [8, 16, 8, 16]


def test_only_rank_0_writes(tmp_path: Path) -> None:
    make(tmp_path, kept(), launch={"nproc": 2})
    done = dsjob("cfg.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(read_kept(tmp_path, "begin")) == 1
    assert len(read_kept(tmp_path, "write")) == 10  # 8 steps, 2 evaluations


@pytest.mark.parametrize("fails", ["begin", "write", "end"])
def test_a_monitor_that_fails_is_told_once_and_training_continues(tmp_path: Path, fails: str) -> None:
    make(tmp_path, kept(fails=fails))
    done = dsjob("cfg.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = "monitor mine  failed, and receives no more values of this run: OSError: no route to host"
    assert done.stdout.count(told) == 1
    assert len(read_kept(tmp_path, fails)) == 1
    assert list(read_metrics(tmp_path / "run")) == [*range(1, 9)]


def test_a_run_that_fails_ends_its_monitors(tmp_path: Path) -> None:
    make(tmp_path, kept(), model={"_target_": "my_model.NanOnce"})
    assert dsjob("cfg.json", cwd=tmp_path).returncode != 0
    assert read_kept(tmp_path, "end") == [True]


def test_what_is_no_monitor_is_refused(tmp_path: Path) -> None:
    make(tmp_path, {"custom": {"mine": {"_target_": "my_model.Die"}}})
    done = dsjob("cfg.json", cwd=tmp_path)
    assert done.returncode == 1
    assert "monitor.custom.mine: my_model.Die returned Die, not a dsjob Monitor" in done.stderr


def test_sections_of_a_deepspeed_config_take_effect(tmp_path: Path) -> None:
    config = {"csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "b"}}
    make(tmp_path, {}, deepspeed=config)
    done = dsjob("cfg.json", "trainer.max_steps=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no effect" not in done.stderr
    assert (tmp_path / "logs" / "b" / "Train_Samples_train_loss.csv").exists()


def test_a_missing_package_is_found_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    off = {name: {"enabled": False} for name in SERVICES}
    assert list(find_missing({"monitor": off})) == []
    on = {name: {"enabled": True} for name in SERVICES}
    found = {problem.dotted: (problem.message, problem.hint) for problem in find_missing({"monitor": on})}
    assert list(found) == ["monitor.tensorboard", "monitor.wandb", "monitor.comet", "monitor.mlflow"]
    told = "needs the package mlflow, which is not installed", "pip install mlflow-skinny"
    assert found["monitor.mlflow"] == told


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert [problem.dotted for problem in find_missing({"monitor": {"wandb": {"enabled": True}}})] == ["monitor.wandb"]


def test_each_service_has_a_section() -> None:
    assert [*SERVICES, "custom"] == list(job_schema()["properties"]["monitor"]["properties"])


def test_values_have_deepspeeds_names() -> None:
    record = {"step": 3, "loss": 1.0, "lr": 0.1, "loss_scale": 2.0, "eta_seconds": 9.0, "train/f1": 0.5, "d/lr": 0.2}
    assert name_values(record) == {
        "Train/Samples/train_loss": 1.0,
        "Train/Samples/lr": 0.1,
        "Train/Samples/loss_scale": 2.0,
        "train/f1": 0.5,
        "d/lr": 0.2,
    }


def test_tokens_per_second_are_left_out_where_samples_are_no_tokens() -> None:
    for tokens, names in ((0.0, []), (5.0, ["Train/Samples/tokens_per_second"])):
        assert list(name_values({"tokens_per_second": tokens})) == names


def test_documents_are_flattened() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
