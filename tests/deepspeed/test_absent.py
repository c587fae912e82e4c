"""What DeepSpeed has and dsjob has not is absent as any other name is, and whoever asks is told what to use."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from programs import run_program

import dsjob.deepspeed as deepspeed
from dsjob.deepspeed.absent import ALTERNATIVES


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from dsjob.deepspeed import init_inference", "no deepspeed.init_inference: dsjob trains; engine.module"),
        ("import dsjob.deepspeed.sequence.layer", "no deepspeed.sequence: set sequence_parallel_size in the config"),
        ("from dsjob.deepspeed.moe.layer import MoE", "no deepspeed.moe.layer: expert parallelism is not built"),
        (
            "from dsjob.deepspeed.ops.sparse_attention import SparseSelfAttention",
            "no deepspeed.ops.sparse_attention: use torch's",
        ),
        (
            "from dsjob.deepspeed.ops.adam import FusedLion",
            "no deepspeed.ops.adam.FusedLion: it is deepspeed.ops.lion",
        ),
        ("from dsjob.deepspeed.ops.adam import FuzedAdam", "no deepspeed.ops.adam.FuzedAdam: did you mean FusedAdam?"),
        ("from dsjob.deepspeed.comm import Pipe", "no deepspeed.comm.Pipe; docs/explanation/deepspeed-tests.md"),
        ("from dsjob.deepspeed.runtime.lr_schedules import OneCycel", "did you mean OneCycle?"),
        ("from dsjob.deepspeed import set_log_level_from_string", ": it is deepspeed.utils.logging.set_log_level_from"),
        ("import dsjob.deepspeed.comm.torch", "no deepspeed.comm.torch: its names are in deepspeed.comm"),
        ("from dsjob.deepspeed.accelerator import cuda_accelerator", "no deepspeed.accelerator.cuda_accelerator"),
        (
            "from dsjob.deepspeed.ops.op_builder.cpu_adam import CPUAdamBuilder",
            "no deepspeed.ops.op_builder.cpu_adam: its names are in deepspeed.ops.op_builder",
        ),
        (
            "from dsjob.deepspeed.runtime.sequence_parallel import ulysses_sp",
            "set sequence_parallel_size in the config",
        ),
        ("import dsjob.deepspeed.inferense", "no deepspeed.inferense; docs/explanation/deepspeed-tests.md"),
    ],
)
def test_an_import_says_what_to_use_instead(statement: str, message: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(statement)
    assert message in str(caught.value)


def test_an_attribute_says_so_too() -> None:
    with pytest.raises(AttributeError, match=r"dsjob has no deepspeed\.init_inference: dsjob trains; engine\.module"):
        _ = deepspeed.init_inference


def test_programs_may_look_before_they_ask() -> None:
    assert not hasattr(deepspeed, "init_inference")
    assert hasattr(deepspeed, "initialize")
    assert getattr(deepspeed, "default_inference_config", None) is None
    assert not hasattr(deepspeed.ops.adam, "FusedLion")
    assert getattr(deepspeed.zero, "NoSuchLinear", None) is None
    with suppress(ImportError):
        from dsjob.deepspeed.ops.adam import FusedLion  # noqa: F401

        raise AssertionError


def test_programs_may_ask_for_a_module_without_importing_it() -> None:
    assert importlib.util.find_spec("dsjob.deepspeed.sequence") is None
    assert importlib.util.find_spec("dsjob.deepspeed.comm.torch") is None
    assert importlib.util.find_spec("dsjob.deepspeed.utils.groups") is not None


def test_modules_are_attributes_without_an_import_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(deepspeed.utils, "zero_to_fp32", raising=False)  # as if nothing had imported it
    monkeypatch.delitem(sys.modules, "dsjob.deepspeed.utils.zero_to_fp32", raising=False)
    assert callable(deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint)
    assert not hasattr(deepspeed.utils, "absent_name")


# Modules that DeepSpeed lacks.
OWN = ("absent", "breakdowns", "defaults", "entry", "program_monitors", "settings", "tensor_model")


def test_all_modules_explain_the_names_that_they_lack() -> None:
    for found in pkgutil.walk_packages(deepspeed.__path__, f"{deepspeed.__name__}."):
        if found.name.rpartition(".")[2] not in OWN:
            with pytest.raises(AttributeError, match=r"dsjob has no deepspeed\.[\w.]*\.absent_name"):
                _ = importlib.import_module(found.name).absent_name


def test_no_alternative_is_given_for_what_is_there() -> None:
    for name in ALTERNATIVES:
        assert name not in vars(deepspeed)
        module, _, last = f"dsjob.deepspeed.{name}".rpartition(".")
        assert last not in vars(sys.modules.get(module, deepspeed)), name
        try:
            found = importlib.util.find_spec(f"dsjob.deepspeed.{name}")
        except ModuleNotFoundError:
            found = None
        assert found is None, name


def test_other_packages_are_missing_in_python_s_own_words(tmp_path: Path) -> None:
    program = "import dsjob.deepspeed\ntry: import no_such_package\nexcept ImportError as error: print(error)"
    found = run_program([sys.executable, "-c", program], cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "No module named 'no_such_package'"
