"""Measures the memory that autograd keeps after a forward pass, with fake tensors: these have shapes but no data."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dsjob.compute.activation.recompute import is_costly
from dsjob.compute.find_blocks import find_blocks
from dsjob.compute.precision import Precision, cast_floats
from dsjob.contract.spec import ActivationCheckpointing, JobSpec
from dsjob.planning.report import Activations
from dsjob.torch_private import FakeTensorMode, TorchDispatchMode, address_of, tree_leaves, tree_map_only
from dsjob.training.objective import build_objective
from dsjob.trust.grant import Trust


def measure_activations(
    model: nn.Module,
    batch: Any,
    spec: JobSpec,
    trust: Trust = Trust(),  # noqa: B008 (frozen)
) -> Activations:
    """Measures the activations of `batch`, one rank's micro batch, in a forward pass on fake tensors.

    The result includes the model's outputs. It excludes parameters, their compute copies and the batch. `checkpointed`:
    what remains with activation checkpointing, as the document sets it, or else with all blocks checkpointed in full.
    `recomputed`: the additional peak while the backward pass recomputes a block. `model`: on the meta device, where it
    stays. Operators such as attention choose their CPU kernels, which may keep other tensors than those of a GPU.
    """
    section = spec.activation_checkpointing
    if section.mode == "none":
        section = replace(section, mode="full", interval=1, cpu_checkpointing=False)
    try:
        objective = build_objective(spec, model, torch.device("cpu"), trust)
        with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            warnings.simplefilter("ignore")
            dtype = Precision.of(spec, torch.device("cpu")).compute
            batch = tree_map_only(Tensor, mode.from_tensor, batch)
            tensors = dict(_make_fakes(model, dtype))
            saved = Saved(model, [*tensors.values(), *tree_leaves(batch)], section)

            def call(*args: Any, **kwargs: Any) -> Any:
                if dtype != torch.float32:
                    args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
                return torch.func.functional_call(model, tensors, args, kwargs)

            with saved.watch():
                outputs = objective.call(call, batch)
                objective.find(outputs, batch)
            saved.add(leaf for leaf in find_leaves(outputs) if isinstance(leaf, Tensor))
    except Exception as error:
        told = str(error).strip().splitlines()
        return Activations(reason=f"{type(error).__name__}: {told[0] if told else ''}")
    on = spec.activation_checkpointing.mode != "none"
    return saved.count_checkpointed(Activations(saved.count(), largest=max(saved.sizes.values(), default=0), on=on))


def _make_fakes(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Fake CPU tensors for a model's parameters, in its compute dtype, and for its buffers."""
    for name, parameter in model.named_parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        yield name, torch.empty(parameter.shape, dtype=kind).requires_grad_(parameter.requires_grad)
    for name, buffer in model.named_buffers():
        yield name, torch.empty(buffer.shape, dtype=buffer.dtype)


def find_leaves(outputs: Any) -> list[Any]:
    """The leaves of a model's outputs. Those of transformers are dicts of a type that torch's pytree does not know."""
    return tree_leaves(dict(outputs) if isinstance(outputs, dict) else outputs)


@dataclass
class Saved:
    """The storages that autograd keeps, by address. Storages and not tensors, since views share memory.

    Checkpointed blocks have numbers from 1; 0 stands for the rest of the model. Addresses are recorded in the order of
    the forward pass; the backward pass frees them in reverse.
    """

    model: nn.Module
    known: Iterable[Any]  # tensors that do not count: parameters, buffers and the batch
    section: ActivationCheckpointing
    sizes: dict[int, int] = field(default_factory=dict)  # bytes by address, in the order of the forward pass
    places: dict[int, set[int]] = field(default_factory=dict)  # the blocks in which autograd saved an address
    inputs: dict[int, set[int]] = field(default_factory=dict)  # the addresses of a block's inputs, by its number
    results: set[int] = field(default_factory=set)  # results of costly operators inside blocks
    left: dict[int, int] = field(default_factory=dict)  # len(sizes) at the end of each block
    _alive: list[Any] = field(default_factory=list)  # keeps all tensors alive, so that no address is reused
    _block: int = 0  # the block that the forward pass is in

    def __post_init__(self) -> None:
        self._skipped = {address_of(t) for t in self.known if isinstance(t, Tensor)}
        # Only recomputed blocks get a number; the others count as the rest of the model.
        self._blocks = find_blocks(self.model, sharing=True)[:: self.section.interval]

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside this context, records everything that autograd saves."""
        handles = []
        for number, block in enumerate(self._blocks, 1):
            handles.append(block.register_forward_pre_hook(self._make_entry(number), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave))
        try:
            with _Results(self), torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _make_entry(self, number: int) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._block = number
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            found = {address for leaf in given if (address := self._note(leaf)) is not None}
            self.inputs.setdefault(number, set()).update(found)

        return enter

    def _leave(self, *_: Any) -> None:
        self.left[self._block] = len(self.sizes)
        self._block = 0

    def _save(self, tensor: Tensor) -> Tensor:
        self.add([tensor])
        return tensor

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Records tensors as kept."""
        for tensor in tensors:
            address = self._note(tensor)
            if address is not None:
                self.places.setdefault(address, set()).add(self._block)

    def add_results(self, outputs: Any) -> None:
        """Records the outputs of a costly operator: selective checkpointing keeps them."""
        if self._block:
            leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            self.results |= {address for leaf in leaves if (address := self._note(leaf)) is not None}

    def _note(self, tensor: Tensor) -> int | None:
        address = address_of(tensor)
        if address in self._skipped:
            return None
        self._alive.append(tensor)
        self.sizes[address] = tensor.untyped_storage().nbytes()
        return address

    def count(self) -> int:
        """Bytes kept without activation checkpointing."""
        return self._sum(self.places)

    def count_checkpointed(self, found: Activations) -> Activations:
        """`found`, completed with the bytes under activation checkpointing."""
        if not self._blocks:
            return found
        outside = {address for address, places in self.places.items() if 0 in places}
        results = self.results if self.section.mode == "selective" else set()
        inputs = set[int]().union(*self.inputs.values())
        # A checkpointed block keeps only its inputs, on the host with cpu_checkpointing.
        moved = inputs - outside - results if self.section.cpu_checkpointing else set()
        kept = (inputs | outside | results) - moved
        # What comes back for the backward pass of each block: inputs from the host, and all that the block recomputes.
        inside = {number: self.inputs[number] & moved for number in self.inputs}
        for address, places in self.places.items():
            for number in places if address not in kept else ():
                inside[number].add(address)
        order = {address: number for number, address in enumerate(self.sizes)}
        # When the backward pass recomputes a block, it has already freed everything after that block.
        peaks = [
            self._sum(address for address in kept if order[address] < self.left[number]) + self._sum(addresses)
            for number, addresses in inside.items()
        ]
        whole = self._sum(kept)
        return replace(found, checkpointed=whole, recomputed=max(0, max(peaks) - whole), moved=self._sum(moved))

    def _sum(self, addresses: Iterable[int]) -> int:
        return sum(self.sizes[address] for address in addresses)


class _Results(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the outputs of costly operators."""

    def __init__(self, saved: Saved) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved = saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if is_costly(func):
            self._saved.add_results(outputs)
        return outputs
