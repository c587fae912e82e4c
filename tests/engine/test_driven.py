"""`engine: deepspeed` where DeepSpeed is not installed, and the config that it is given."""

from __future__ import annotations

import sys

import pytest
import torch
from job_documents import make_job, resolve

from dsjob.contract.spec import JobSpec, view
from dsjob.engine.driven import build_engine, write_config
from dsjob.errors import UsageError
from dsjob.ranks.mesh import World
from dsjob.trust.grant import Trust

ALONE = World(data_rank=0, local_rank=0, data_size=1, device=torch.device("cpu"))


def test_a_missing_package_is_told_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    document = resolve(make_job(engine="deepspeed"))
    spec = view(JobSpec, document)
    with pytest.raises(UsageError, match="needs the package deepspeed") as caught:
        build_engine(torch.nn.Linear(1, 1), spec, ALONE, trust=Trust(), config={}, document=document)
    assert "pip install 'deepspeed>=0.19,<0.20'" in caught.value.hint


def test_deepspeed_is_given_what_the_job_says_of_the_engine() -> None:
    sections = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "overlap_comm": False}}
    job = make_job(**sections, gradient_clipping=0.5, communication_data_type="fp32")
    document = resolve(job, world_size=2)
    written = write_config(document, view(JobSpec, document))
    assert written["train_micro_batch_size_per_gpu"] == 4
    assert (written["gradient_accumulation_steps"], written["gradient_clipping"]) == (1, 0.5)
    assert written["communication_data_type"] == "fp32"
    assert written["bf16"]["enabled"] is True
    assert written["zero_optimization"].items() >= sections["zero_optimization"].items()
    assert not {"optimizer", "scheduler", "compile", "trainer", "model"} & written.keys()
