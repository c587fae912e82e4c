"""`validate --deep` calls the model, the losses and the metrics with one batch of each set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs import dsjob
from text_jobs import JOB, SENTENCES

MODULE = """
import torch
print("noise")
def points(n=8, as_pairs=False):
    items = [(torch.ones(4) * i, torch.ones(1) * i) for i in range(n)]
    return items if as_pairs else [{"x": x, "y": y, "flat": y[0]} for x, y in items]
class Broken(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): raise OSError("no such file")
class Large(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 300_000_000)
    def forward(self, x): return self.layer(x)[:, :1]
def compare(prediction, target):
    raise ValueError("mine")
"""
SOUND = """
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}
inputs: [x]
targets: [y]
loss: {_target_: torch.nn.MSELoss}
data: {train: {_target_: points_module.points}}
trainer: {train_batch: 4, max_steps: 2}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
""".lstrip()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "points_module.py").write_text(MODULE)
    return tmp_path


def validate(job: Path, document: str) -> tuple[int, list[str]]:
    (job / "cfg.yaml").write_text(document)
    done = dsjob("validate", "--deep", "cfg.yaml", cwd=job)
    told = [line for line in (done.stdout + done.stderr).splitlines() if line != "noise"]
    return done.returncode, told


@pytest.mark.parametrize(
    "change",
    [
        ("", ""),
        ("loss: {_target_: torch.nn.MSELoss}", "losses: {a: {_target_: torch.nn.MSELoss, weight: 2}}"),
        ("torch.nn.Linear, in_features: 4, out_features: 1", "points_module.Large"),
        ("points_module.points", "points_module.points, as_pairs: true"),
    ],
    ids=["one loss", "losses", "large", "pairs"],
)
def test_a_document_that_works_is_ok(job: Path, change: tuple[str, str]) -> None:
    document = SOUND.replace(*change)
    if "as_pairs" in document:
        document = document.replace("[x]", "[0]").replace("[y]", "[1]")
    assert validate(job, document) == (0, ["cfg.yaml: ok"])


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        (
            "[x]",
            "[z]",
            "cfg.yaml:2:10: error[one-batch]: inputs[0]: the batch, of type dict, has no 'z', but x, y, flat",
        ),
        ("[y]", "{target: z}", "cfg.yaml:3:11: error[one-batch]: targets.target: the batch, of type dict, has no 'z'"),
        (
            "[x]",
            "[x, y]",
            "cfg.yaml:2:1: error[one-batch]: inputs: the model's forward does not match the batch: too many positional",
        ),
        ("in_features: 4", "in_features: 5", "cfg.yaml:2:1: error[one-batch]: inputs: RuntimeError: mat1 and mat2"),
        (
            "MSELoss",
            "MSELoss, reduction: none",
            "cfg.yaml:4:8: error[one-batch]: loss._target_: the loss function (MSELoss) returned a tensor",
        ),
        ("[y]", "[y, x]", "cfg.yaml:4:8: error[target]: loss._target_: torch.nn.MSELoss takes 2 positional arguments"),
        (
            "torch.nn.MSELoss",
            "points_module.compare",
            "cfg.yaml:4:8: error[one-batch]: loss._target_: ValueError: mine",
        ),
        ("points_module.points", "points_module.Broken", "cfg.yaml:5:16: error[one-batch]: data.train._target_: "),
        (
            "loss: {_target_: torch.nn.MSELoss}",
            "losses: {a: {_target_: torch.nn.MSELoss, weight: 2, targets: [z]}}",
            "cfg.yaml:4:63: error[one-batch]: losses.a.targets[0]: the batch, of type dict, has no 'z'",
        ),
        ("targets: [y]", "", "cfg.yaml:3:8: error[one-batch]: loss._target_: AttributeError"),
    ],
)
def test_what_one_batch_shows_has_its_place(job: Path, right: str, wrong: str, told: str) -> None:
    assert right in SOUND
    code, (first, *more) = validate(job, "\n".join(filter(None, SOUND.replace(right, wrong).splitlines())))
    assert (code, more) == (2, [])
    assert first.startswith(told)


def test_what_torch_warns_of_is_a_warning(job: Path) -> None:
    code, (first, *_) = validate(job, SOUND.replace("[y]", "[flat]"))
    assert first.startswith("cfg.yaml:4:8: warning[one-batch]: loss._target_: Using a target size (torch.Size([4]))")
    assert code == 0


EVALUATED = SOUND.replace(
    "data: {train: {_target_: points_module.points}}",
    "data:\n"
    "  train: {_target_: points_module.points}\n"
    "  eval:\n"
    "    near: {_target_: points_module.points}\n"
    "    far: {_target_: points_module.points, n: 2}\n"
    "  test: {_target_: points_module.unlabelled}\n"
    "metrics:\n"
    "  error: {_target_: points_module.measure}",
)


@pytest.mark.parametrize(
    ("right", "wrong", "code", "told"),
    [
        ("", "", 0, "cfg.yaml: ok"),
        (
            "far: {_target_: points_module.points, n: 2}",
            "far: {_target_: points_module.Broken}",
            2,
            "cfg.yaml:9:11: error[one-batch]: data.eval.far._target_: ",
        ),
        (
            "far: {_target_: points_module.points, n: 2}",
            "far: {_target_: points_module.unlabelled}",
            2,
            "cfg.yaml:3:11: error[one-batch]: targets[0]: the batch, of type dict, has no 'y', but x (on a batch",
        ),
        (
            "test: {_target_: points_module.unlabelled}",
            "test: {_target_: points_module.Broken}",
            2,
            "cfg.yaml:10:10: error[one-batch]: data.test._target_: ",
        ),
        (
            "points_module.measure",
            "points_module.fail",
            2,
            "cfg.yaml:12:11: error[one-batch]: metrics.error._target_: ValueError: mine",
        ),
        (
            "points_module.measure",
            "points_module.measure, inputs: {preds: outputs, target: batch.z}",
            2,
            "cfg.yaml:12:",
        ),
    ],
)
def test_metrics_and_each_set_are_tried(job: Path, right: str, wrong: str, code: int, told: str) -> None:
    with (job / "points_module.py").open("a") as module:
        module.write(
            "def unlabelled(): return [{'x': torch.ones(4)}] * 4\n"
            "def measure(preds, target): return (preds - target).abs().mean()\n"
            "def fail(preds, target): raise ValueError('mine')\n"
        )
    assert right in EVALUATED
    found, (first, *more) = validate(job, EVALUATED.replace(right, wrong))
    assert (found, more) == (code, [])
    assert first.startswith(told)


OWN = """
import torch
import dsjob
def points(n=8): return [{"x": torch.ones(4) * i, "y": torch.ones(1) * i} for i in range(n)]
def evaluate(engines, batch):
    out = engines.first(batch["x"])
    return {"loss": (out - batch["y"]).square().mean(), "out": out}
def blind(engines, batch): return engines.first(batch["z"])
def vector(engines, batch): return engines.first(batch["x"])
class Losing(dsjob.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        out = model(inputs["x"])
        loss = (out - inputs["y"]).square().mean()
        return (loss, {"logits": out}) if return_outputs else loss
class Forgetful(Losing):
    def compute_loss(self, model, inputs, return_outputs=False):
        return super().compute_loss(model, inputs)
class Predicting(Losing):
    def prediction_step(self, model, inputs, prediction_loss_only=False):
        if self.spec.trainer.seed == 7: raise KeyError("gone")
        return torch.zeros(()), model(inputs["x"]), inputs["y"]
class Reading(Losing):
    def get_eval_dataloader(self, name=""): return points(0)
def measure(preds, labels): return (preds - labels).abs().mean()
"""
OWN_JOB = """
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}
data: {train: {_target_: own_module.points}, eval: {_target_: own_module.points}}
trainer:
  {train_batch: 4, max_steps: 2, OWN}
metrics:
  error: {_target_: own_module.measure, inputs: {preds: PREDS, labels: LABELS}}
optimizer: {type: AdamW}
bf16: {enabled: true}
""".lstrip()
_ON_DISK = "{stage: 3, offload_param: {device: cpu}, offload_optimizer: {device: nvme, nvme_path: own_module.py/below}}"
_STEP = ("eval_step: {_target_: own_module.evaluate}", "outputs.out", "batch.y")
_LOSS = ("parts: {_target_: own_module.Losing}", "outputs.logits", "batch.y")


@pytest.mark.parametrize(
    ("own", "change", "told"),
    [
        (_STEP, ("", ""), "cfg.yaml: ok"),
        # Folders of the machine that will train need not be here.
        (_STEP, ("bf16: {enabled: true}", f"zero_optimization: {_ON_DISK}"), "cfg.yaml: ok"),
        (
            _STEP,
            ("batch.y", "batch.z"),
            "cfg.yaml:9:11: error[one-batch]: metrics.error._target_: metrics.error.inputs.labels: ",
        ),
        (_STEP, ("evaluate", "blind"), "cfg.yaml:7:46: error[one-batch]: trainer.eval_step._target_: KeyError: 'z'"),
        (
            _STEP,
            ("evaluate", "vector"),
            "cfg.yaml:7:46: error[one-batch]: trainer.eval_step._target_: trainer.eval_step returned loss: ",
        ),
        (_LOSS, ("", ""), "cfg.yaml: ok"),
        (
            _LOSS,
            ("batch.y", "batch.z"),
            "cfg.yaml:6:11: error[one-batch]: metrics.error._target_: metrics.error.inputs.labels: ",
        ),
        (
            _LOSS,
            ("Losing", "Forgetful"),
            "cfg.yaml:4:42: error[one-batch]: trainer.parts._target_: compute_loss returned Tensor ",
        ),
        (_LOSS, ("Losing", "Predicting"), "cfg.yaml: ok"),
        (_LOSS, ("Losing}", "Predicting}, seed: 7"), "cfg.yaml:4:42: error[one-batch]: trainer.parts._target_: KeyE"),
        (
            _LOSS,
            ("Losing", "Reading"),
            "cfg.yaml:2:53: error[one-batch]: data.eval._target_: data.eval (list) is empty",
        ),
    ],
)
def test_own_steps_and_methods_are_tried(
    job: Path, own: tuple[str, str, str], change: tuple[str, str], told: str
) -> None:
    (job / "own_module.py").write_text(OWN)
    document = OWN_JOB.replace("OWN", own[0]).replace("PREDS", own[1])
    document = document.replace("LABELS", own[2])
    if own is _STEP:  # the model itself is called with the loss of the document in training
        document = "inputs: [x]\ntargets: [y]\nloss: {_target_: torch.nn.MSELoss}\n" + document
    assert change[0] in document
    code, (first, *more) = validate(job, document.replace(*change))
    assert first.startswith(told)
    assert (code, more) == (2 if "error" in told else 0, [])


SEVERAL = """
import torch
from torch import nn
def points(n=8): return [{"x": torch.ones(4) * i} for i in range(n)]
def step(engines, batch):
    real = batch["x"]
    made = engines["maker"](torch.randn(len(real), 4))
    loss = engines["judge"](made).mean()
    engines["maker"].backward(loss)
    engines["maker"].step()
    return {"loss": loss, "judged": engines["judge"](real).mean()}
def blind(engines, batch): return step(engines, {"x": batch["z"]})
def unnamed(engines, batch): return engines["painter"](batch["x"]).mean()
def vector(engines, batch): return engines["maker"](batch["x"])
def evaluate(engines, batch): return {"loss": engines["judge"](engines["maker"](batch["x"])).mean(), "made": batch["x"]}
def measure(preds): return preds.abs().mean()
"""
SEVERAL_JOB = """
models:
  maker: {model: {_target_: torch.nn.Linear, in_features: 4, out_features: 4}}
  judge: {model: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}}
data: {train: {_target_: several.points}, eval: {_target_: several.points}}
trainer:
  train_batch: 4
  max_steps: 2
  step: {_target_: several.step}
  eval_step: {_target_: several.evaluate}
predict: {outputs: {made: outputs.made}}
metrics: {size: {_target_: several.measure, inputs: {preds: outputs.made}}}
optimizer: {type: AdamW, params: {lr: 1.0}}
bf16: {enabled: true}
zero_optimization: {stage: 3}
""".lstrip()
_AT_STEP = "cfg.yaml:8:10: error[one-batch]: trainer.step._target_: "


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("", "", "cfg.yaml: ok"),
        ("zero_optimization: {stage: 3}", "ops: {cpu_optimizers: require}", "cfg.yaml: ok"),
        ("several.step", "several.blind", f"{_AT_STEP}KeyError: 'z'"),
        ("several.step", "several.unnamed", f"{_AT_STEP}KeyError: "),
        ("several.step", "several.vector", f"{_AT_STEP}trainer.step returned loss: Tensor[4, 4]"),
        (
            "outputs.made",
            "outputs.drawn",
            "cfg.yaml:10:21: error[one-batch]: predict.outputs.made: outputs, of",
        ),
        ("in_features: 4, out_features: 1", "in_features: 3, out_features: 1", f"{_AT_STEP}RuntimeError: "),
    ],
)
def test_steps_over_several_models_and_predictions_are_tried(job: Path, right: str, wrong: str, told: str) -> None:
    (job / "several.py").write_text(SEVERAL)
    assert right in SEVERAL_JOB
    code, (first, *more) = validate(job, SEVERAL_JOB.replace(right, wrong, 1))
    assert first.startswith(told), [first, *more]
    assert code == (2 if "error" in told else 0)


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("", "", "cfg.yaml: ok"),
        (
            "outputs.text",
            "outputs.texts",
            "cfg.yaml:8:19: error[one-batch]: metrics.share._target_: metrics.share.inputs.preds: ",
        ),
        ("build", "silent", "cfg.yaml:7:1: error[one-batch]: generation: Silent has no method generate"),
    ],
)
def test_generation_is_tried_with_a_few_tokens(job: Path, right: str, wrong: str, told: str) -> None:
    counting = """
def count(preds):
    assert all(len(each) <= 4 for each in preds), "too many tokens"
    return 1.0
class Silent(torch.nn.Linear):
    def forward(self, input_ids, labels): return {"loss": super().forward(input_ids.float()).sum()}
def silent():
    return Silent(13, 1)
"""
    (job / "sentences.py").write_text(SENTENCES + counting)
    document = JOB.lstrip().replace("max_new_tokens: 5", "max_new_tokens: 50, min_new_tokens: 9")
    document = document.replace(
        "sentences.share, inputs: {preds: outputs.text, target: outputs.reference}",
        "sentences.count, inputs: {preds: outputs.text}",
    )
    assert right in document
    code, lines = validate(job, document.replace(right, wrong))
    first = next(line for line in lines if not line.startswith("[transformers]"))
    assert first.startswith(told)
    assert code == (2 if "error" in told else 0)


@pytest.mark.parametrize(("deep", "epochs"), [(["--deep"], "4 steps of 4 samples"), ([], "--deep counts its steps")])
def test_lengths_with_a_unit_are_shown_in_steps(job: Path, deep: list[str], epochs: str) -> None:
    document = SOUND.replace("max_steps: 2", "max_length: 2ep, log_every: 10sp")
    (job / "cfg.yaml").write_text(document)
    told = dsjob("validate", *deep, "cfg.yaml", cwd=job).stdout.splitlines()
    assert told[-3:] == [
        "cfg.yaml: ok",
        f"  trainer.max_length: 2ep: {epochs}",
        "  trainer.log_every: 10sp: 2.5 steps of 4 samples",
    ]


PLAIN = """
model: {_target_: points_module.Plain}
data: {train: {_target_: points_module.points}, eval: {_target_: points_module.points, n: 3}}
trainer: {train_batch: 4, max_steps: 2}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
""".lstrip()
_PLAIN_MODULE = """
class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1))
    def forward(self, x, y, flat):
        print(len(x), "samples")
        return {"loss": (self.layer(x) - y).square().mean()}
class Narrow(Plain):
    def forward(self, x): return self.layer(x).mean()
def load(n=8, size=4):
    return torch.utils.data.DataLoader(points(n), batch_size=size)
"""
_AT_ONCE = """def __init__(self):
        torch.zeros(1).cuda()"""


def test_a_document_that_says_nothing_of_batches_is_tried_with_few_samples(job: Path) -> None:
    (job / "points_module.py").write_text(MODULE + _PLAIN_MODULE)
    assert validate(job, PLAIN) == (0, ["cfg.yaml: ok", "2 samples", "2 samples"])
    # A loader has its own batch size.
    loaded = PLAIN.replace("points_module.points}", "points_module.load}")
    assert validate(job, loaded) == (0, ["cfg.yaml: ok", "4 samples", "2 samples"])
    code, told = validate(job, PLAIN.replace("Plain}", "Narrow}"))
    assert code == 2
    assert told[0].startswith("cfg.yaml:1:9: error[one-batch]: model._target_: the model's forward does not match the")


@pytest.mark.parametrize(
    "data",
    [
        "{_target_: dsjob.text.Text, dataset: a/b, dataset_revision: " + "0abc" * 10 + "}",
        "{_target_: dsjob.text.Text, source: large.txt}",
        "{_target_: dsjob.text.Mixture, datasets: [{_target_: dsjob.text.Text, source: [large.txt]}]}",
        "{_target_: dsjob.text.Text, source: s3://nowhere/a.txt}",
    ],
    ids=["hub", "large", "inside", "elsewhere"],
)
def test_data_that_take_long_to_build_are_not_built_for_a_document_that_says_nothing(job: Path, data: str) -> None:
    (job / "points_module.py").write_text(MODULE + _PLAIN_MODULE)
    with open(job / "large.txt", "wb") as file:
        file.truncate(17 << 20)
    document = PLAIN.replace("{_target_: points_module.points}", data).replace("Plain}", "Narrow}")
    assert validate(job, document) == (0, ["cfg.yaml: ok"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_model_that_needs_a_gpu_is_no_error_where_there_is_none(job: Path) -> None:
    (job / "points_module.py").write_text(MODULE + _PLAIN_MODULE.replace("def __init__(self):", _AT_ONCE))
    code, told = validate(job, PLAIN)
    assert (code, told[-1]) == (0, "cfg.yaml: ok, 1 warning")
    assert told[0].startswith("cfg.yaml:1:9: warning[one-batch]: model._target_: "), told
    assert "this machine has no GPU" in told[0]


def test_text_that_is_tokenised_at_once_is_tried(job: Path) -> None:
    (job / "points_module.py").write_text(MODULE + _PLAIN_MODULE)
    (job / "small.txt").write_text("a text\n" * 9)
    data = "{_target_: dsjob.text.Text, source: small.txt, cache_dir: cache}"
    code, told = validate(job, PLAIN.replace("{_target_: points_module.points}", data))
    assert code == 2
    assert "error[one-batch]: model._target_: the model's forward does not match the batch" in told[0]
