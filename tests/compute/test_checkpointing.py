"""DeepSpeed's calls for activation checkpointing, against the same functions without it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import Ledger
from torch import Tensor, nn

from dsjob import checkpointing
from dsjob.compute.activation.rng import CudaRNGStatesTracker
from dsjob.errors import ConfigError, UsageError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    checkpointing.configure(None)
    checkpointing._setup.configured = False
    checkpointing.get_cuda_rng_tracker().reset()


class Layer(nn.Module):
    """Takes and gives all kinds of things."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None, factor: float = 1.0, **named: Any) -> Any:
        out = self.fc(torch.relu(x)).tanh() * factor
        if mask is not None:
            out = out * mask
        if "pair" in named:
            out = out + named["pair"][0] * named["pair"][1]["b"]
        return (out, "text", x.detach()) if "many" in named else out


ON = torch.tensor([True, False, True, True, False])
CALLS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "one tensor": lambda: ((), {}),
    "a mask": lambda: ((ON,), {}),
    "no mask": lambda: ((None, 2.0), {}),
    "a float mask by name": lambda: ((), {"mask": ON.float()}),
    "tensors inside of other things": lambda: ((), {"pair": (torch.ones(5), {"b": torch.full((5,), 3.0)})}),
    "several outputs": lambda: ((), {"many": True}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "on the host": {"checkpoint_in_cpu": True},
    "in buffers": {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 6},
    "timed": {"profile": True, "synchronize": True},
}


def run(layers: list[nn.Module], call: str, through: Any, *, gradient: bool) -> tuple[Tensor, list[Tensor | None]]:
    x = torch.linspace(-1, 1, 10).view(2, 5).requires_grad_(gradient)
    hidden = x
    for layer in layers:
        args, kwargs = CALLS[call]()
        out = through(layer, hidden, *args, **kwargs)
        hidden = out[0] if isinstance(out, tuple) else out
        if isinstance(out, tuple):
            assert out[1] == "text"
            assert not out[2].requires_grad
    hidden.square().sum().backward()
    return hidden.detach(), [x.grad, *(p.grad for layer in layers for p in layer.parameters())]


@pytest.mark.parametrize("gradient", [True, False], ids=["input needs a gradient", "input needs none"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("call", CALLS)
def test_outputs_and_gradients_are_those_of_a_plain_call(call: str, settings: str, gradient: bool) -> None:
    checkpointing.configure(None, **SETTINGS[settings])
    found = []
    for through in (lambda layer, *args, **kwargs: layer(*args, **kwargs), checkpointing.checkpoint):
        torch.manual_seed(3)
        found.append(run([Layer() for _ in range(3)], call, through, gradient=gradient))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_function_is_run_twice_and_only_then() -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return x.exp()

    x = torch.ones(3, requires_grad=True)
    out = checkpointing.checkpoint(function, x)
    assert calls == [True]
    out.sum().backward()
    assert calls == [True, True]
    with torch.no_grad():
        checkpointing.checkpoint(function, x)
    assert calls == [True, True, False]


def test_dropout_and_the_numbers_after_it_are_the_same() -> None:
    def run_with(through: Any) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(5)
        x = torch.ones(1000, requires_grad=True)
        hidden = through(lambda t: torch.dropout(t.sin(), 0.5, True), x)
        hidden = through(lambda t: torch.dropout(t.cos(), 0.5, True), hidden)
        hidden.sum().backward()
        assert x.grad is not None
        return hidden.detach(), x.grad, torch.get_rng_state()

    torch.testing.assert_close(
        run_with(checkpointing.checkpoint), run_with(lambda function, x: function(x)), rtol=0, atol=0
    )


def test_autocast_is_on_again_in_the_second_run() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return nn.functional.linear(x, torch.ones(4, 4)).exp()

    x = torch.ones(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = checkpointing.checkpoint(function, x)
    out.float().sum().backward()
    assert seen == [True, True]


def test_memory_falls_to_the_inputs() -> None:
    layers = [nn.Sequential(nn.Linear(64, 256), nn.Sigmoid(), nn.Linear(256, 64)) for _ in range(4)]

    def keep(through: Any) -> int:
        x = torch.ones(500, 64, requires_grad=True)
        with Ledger() as ledger:
            ledger.mark("before")
            hidden = x
            for layer in layers:
                hidden = through(layer, hidden)
            ledger.mark("after")
        hidden.sum().backward()
        return ledger.live("after") - ledger.live("before")

    size = 500 * 4
    # Of each layer the sigmoid's result; inputs of all but the first; and the last output.
    assert keep(lambda layer, x: layer(x)) == pytest.approx(size * (4 * 256 + 3 * 64 + 64), rel=0.02)
    # Each state of the random generator is 5,056 bytes.
    assert keep(checkpointing.checkpoint) == pytest.approx(size * (3 * 64 + 64) + 4 * 5056, rel=0.02)


def test_buffers_are_allocated_once_and_rows_come_free_by_themselves() -> None:
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    buffers = checkpointing._setup.store._buffers
    for _ in range(3):
        x = torch.ones(4, requires_grad=True)
        hidden = checkpointing.checkpoint(torch.exp, checkpointing.checkpoint(torch.sin, x))
        (buffer,) = buffers.values()
        rows = buffer._rows
        assert buffer._free == []
        torch.testing.assert_close(rows.sort(0).values, torch.stack([x.sin(), x]).detach().sort(0).values)
        with pytest.raises(UsageError, match="number_checkpoints=2") as caught:
            checkpointing.checkpoint(torch.exp, torch.ones(4, requires_grad=True))
        assert "reset()" in caught.value.hint
        hidden.sum().backward()
        torch.testing.assert_close(x.grad, x.cos() * x.sin().exp())
        del hidden
        assert sorted(buffer._free) == [0, 1]
        assert next(iter(buffers.values()))._rows.data_ptr() == rows.data_ptr()
    checkpointing.reset()
    assert not buffers


def test_a_forward_pass_that_nobody_follows_gives_its_rows_back() -> None:
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=1)
    for _ in range(3):
        checkpointing.checkpoint(torch.exp, torch.ones(4, requires_grad=True))


def test_times_of_both_passes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.configure(None, profile=True)
    caplog.set_level(logging.INFO, "dsjob.checkpointing")
    layer = Layer()
    x = torch.ones(2, 5, requires_grad=True)
    checkpointing.checkpoint(layer, x).sum().backward()
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(" took ")[0] for text in told] == ["Layer: forward", "Layer: backward"]
    assert all(0 < float(text.split(" took ")[1].removesuffix(" ms")) < 10_000 for text in told)


def test_configure_reads_a_config_and_arguments_go_before_it(tmp_path: Path) -> None:
    assert not checkpointing.is_configured()
    config = {"activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 3}}
    (tmp_path / "ds.json").write_text(json.dumps({**config, "train_batch_size": 8}))
    for given in (config, str(tmp_path / "ds.json"), tmp_path / "ds.json"):
        checkpointing.configure(None, given, num_checkpoints=5)
        section = checkpointing._setup.store.section
        assert (section.cpu_checkpointing, section.number_checkpoints, section.profile) == (True, 5, False)
    assert checkpointing.is_configured()
    checkpointing.set_num_layers(9)
    checkpointing.partition_activations_in_checkpoint(True)
    section = checkpointing._setup.store.section
    assert (section.cpu_checkpointing, section.number_checkpoints, section.partition_activations) == (True, 9, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"contiguous_checkpointing": True, "num_checkpoints": 2}, "needs partition_activations"),
        ({"contiguous_checkpointing": True, "partition_activations": True}, "needs number_checkpoints"),
        ({"num_checkpoints": 0}, "number_checkpoints"),
        ({"deepspeed_config": {"activation_checkpointing": {"partition_activation": True}}}, "did you mean"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checkpointing.configure(None, **arguments)
    assert not checkpointing.is_configured()


def test_forked_numbers_are_a_stream_of_their_own() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 11)
    torch.manual_seed(1)
    with tracker.fork("a"):
        first = torch.rand(3)
    after = torch.rand(3)
    with tracker.fork("a"):
        second = torch.rand(3)
    expected = torch.rand(6, generator=torch.Generator().manual_seed(11))
    torch.testing.assert_close(torch.cat([first, second]), expected, rtol=0, atol=0)
    torch.testing.assert_close(after, torch.rand(3, generator=torch.Generator().manual_seed(1)), rtol=0, atol=0)


def test_states_are_put_back() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 11)
    states = tracker.get_states()
    with tracker.fork("a"):
        first = torch.rand(3)
    tracker.set_states(states)
    with tracker.fork("a"):
        torch.testing.assert_close(torch.rand(3), first, rtol=0, atol=0)
    tracker.reset()
    with pytest.raises(UsageError, match="unknown random state a; known states: none"), tracker.fork("a"):
        pass


def test_names_and_seeds_are_taken_once() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 11)
    with pytest.raises(UsageError, match="seed 11"):
        tracker.add("b", 11)
    with pytest.raises(UsageError, match="state a"):
        tracker.add("a", 12)


def test_the_second_run_forks_the_same_numbers_and_leaves_the_stream_where_it_was() -> None:
    def function(x: Tensor) -> Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            x = torch.dropout(x.sin(), 0.5, True)
        return torch.dropout(x.exp(), 0.5, True)

    def run_with(through: Any) -> list[Tensor]:
        checkpointing.model_parallel_cuda_manual_seed(1234)
        x = torch.ones(200, requires_grad=True)
        hidden = through(function, through(function, x))
        hidden.sum().backward()
        assert x.grad is not None
        with checkpointing.get_cuda_rng_tracker().fork():
            forked = torch.rand(4)
        return [hidden.detach(), x.grad, forked, torch.rand(4)]

    plain = run_with(lambda function, x: function(x))
    torch.testing.assert_close(run_with(checkpointing.checkpoint), plain, rtol=0, atol=0)
    assert not torch.equal(plain[2], plain[3])
