"""Builds a model of which this rank keeps only some parameters, without memory for the others.

A constructor draws the initial values of all parameters from one stream of random numbers, often more than once. So it
runs as always, and what is kept gets the values that it has in the whole model. But of the other parameters, only the
last ones that it touched have memory, no more than the largest of them. A parameter is recognized before it has values
by when its module got its first parameter, which a first run on the meta device has told.

Values that are gone must not be read. If an operator does, or if the second run builds something else than the first,
`NotInPartsError` is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from dsjob.ranks.agreement import all_gather
from dsjob.ranks.heap import returning_memory
from dsjob.ranks.mesh import World
from dsjob.torch_private import TorchDispatchMode, address_of, own_parameters, tree_leaves

_Key = tuple[int, str]  # the number of a module, and the name that it has for a parameter


class NotInPartsError(Exception):
    """A model cannot be built in parts. Its text is the reason."""


class Sketch:
    """A model on the meta device, and how to build parts of it. build: builds it there."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        with _Numbers() as numbers:
            self.model = build()
        self._names = numbers.name(self.model)

    def build(self, make: Callable[[], nn.Module], kept: Collection[str]) -> nn.Module:
        """The model that `make` returns, of which only the parameters that are named in `kept` have values. They are
        those that the first of their names in the model names. Raises NotInPartsError."""
        keys = {key for key, name in self._names.items() if name not in kept}
        limit = max(
            (p.numel() * p.itemsize for name, p in self.model.named_parameters() if name not in kept), default=0
        )
        with _Numbers() as numbers, _Others(keys, numbers, limit) as watched, _PastOperators(watched):
            model = make()
        if shared := watched.find_shared(model, kept):
            raise NotInPartsError(f"{shared} has the memory of a parameter of another rank")
        watched.release()
        if watched.reader:
            raise NotInPartsError(f"{watched.reader} reads parameters of other ranks while the model is built")
        if numbers.name(model) != self._names:
            raise NotInPartsError("its constructor builds something else on the meta device")
        if missing := sorted(list_without_values(model) & set(kept)):
            raise NotInPartsError(f"{missing[0]} would have no values")
        return model


def build_together(
    sketch: Sketch | None, make: Callable[[], nn.Module], kept: Collection[str], world: World
) -> tuple[nn.Module | None, str]:
    """What `sketch.build(make, kept)` returns, if it succeeds on all ranks. Otherwise None, and the reason of the first
    rank that has failed; it is empty if ranks only lack a sketch.

    A collective: a constructor may call collectives, so no rank may run it again alone.
    """
    model, problem = None, None if sketch is not None else ""
    if sketch is not None:
        try:
            with returning_memory(keeps=world.device.type == "cpu"):
                model = sketch.build(make, kept)
        except NotInPartsError as error:
            problem = str(error)
    problems = [each for each in all_gather(world.everyone, problem) if each is not None]
    return (None, next(filter(None, problems), "")) if problems else (model, "")


def list_without_values(model: nn.Module) -> set[str]:
    """The names of the parameters of a model from `Sketch.build` that it was built without; they are zeros."""
    return {name for name, parameter in model.named_parameters() if hasattr(parameter, _MARK)}


_MARK = "_dsjob_without_values"


class _Numbers:
    """Numbers modules in the order in which they get their first parameter. on_parameter: is called with each."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self.on_parameter: Callable[[_Key, nn.Parameter], None] | None = None
        self._count = 0

    def __enter__(self) -> _Numbers:
        self._handle = register_module_parameter_registration_hook(self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._handle.remove()

    def _note(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if module not in self.of:
            self.of[module] = self._count
            self._count += 1
        if parameter is not None and self.on_parameter is not None:
            self.on_parameter((self.of[module], name), parameter)

    def name(self, model: nn.Module) -> dict[_Key, str]:
        """The names of the parameters of a model. Those of modules that were copied are not among them."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return {
            (self.of[module], key): names[id(parameter)]
            for module in model.modules()
            if module in self.of
            for key, parameter in own_parameters(module).items()
            if parameter is not None
        }


@dataclass(eq=False)
class _Other:
    """A parameter that is not kept. valid: whether its storage has the values that it would have."""

    parameter: nn.Parameter
    storage: torch.UntypedStorage
    size: int  # bytes of the storage while it has memory
    valid: bool = True


# new_zeros, zeros_like and others take only the shape of what they are given.
_SHAPES = ("new_", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_OVERWRITING = {
    "normal_",
    "uniform_",
    "zero_",
    "fill_",
    "copy_",
    "random_",
    "bernoulli_",
    "exponential_",
    "log_normal_",
}
_PAST_OPERATORS = {"numpy", "__array__", "tolist", "data_ptr"}


class _Others(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes memory away from parameters that are not kept. `reader`: what read values that were gone.

    limit: bytes that all of them together may have at a time, besides those of one operator.
    """

    def __init__(self, keys: Collection[_Key], numbers: _Numbers, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys, self._limit, self.reader = keys, limit, ""
        self._others: dict[int, _Other] = {}  # by address_of
        self._live: dict[_Other, None] = {}  # those that were touched last are last
        numbers.on_parameter = self._place

    @torch.no_grad()
    def _place(self, key: _Key, parameter: nn.Parameter) -> None:
        # Parameters of other classes, such as quantized or lazy ones, keep their values.
        plain = type(parameter) is nn.Parameter and parameter.device.type == "cpu"
        if key not in self._keys or not plain or self.find(parameter) is not None:
            return
        storage, size = parameter.untyped_storage(), parameter.numel() * parameter.itemsize
        valid = storage.resizable() and storage.nbytes() == size
        if not valid:  # a part of a file, or of another tensor
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
            storage = parameter.untyped_storage()
        other = self._others[address_of(parameter)] = _Other(parameter, storage, size, valid)
        self._touch([other])

    def find(self, tensor: Tensor) -> _Other | None:
        """The parameter that a tensor is, or is a view of; None if that is kept, or no parameter."""
        plain = tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter)
        return self._others.get(address_of(tensor)) if plain else None

    def find_shared(self, model: nn.Module, kept: Collection[str]) -> str:
        """The name of a parameter that is kept, or of a buffer, whose memory was taken away with that of another
        parameter; empty if there is none. Tensors share memory if one was made from the `data` of another."""
        own = {name: parameter for name, parameter in model.named_parameters() if name in kept}
        return next((n for n, each in {**own, **dict(model.named_buffers())}.items() if self.find(each)), "")

    def _touch(self, others: Sequence[_Other]) -> None:
        for other in others:
            if not other.storage.nbytes() and other.size:
                other.storage.resize_(other.size)
                other.valid = False
            self._live.pop(other, None)
            self._live[other] = None
        while len(self._live) > len(others) and sum(other.size for other in self._live) > self._limit:
            oldest = next(iter(self._live))
            del self._live[oldest]
            oldest.storage.resize_(0)

    def release(self) -> None:
        """Gives all parameters that are not kept one zero for all of their elements."""
        for other in self._others.values():
            shape, dtype = other.parameter.shape, other.parameter.dtype
            if self.find(other.parameter) is other:
                other.parameter.data = torch.zeros((), dtype=dtype).expand(shape)
                setattr(other.parameter, _MARK, True)

    def read(self, reader: str, given: Any) -> None:
        """Notes that Python code reads the values of tensors."""
        others = [other for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and (other := self.find(leaf))]
        self._touch(others)
        if not all(other.valid for other in others):
            self.reader = self.reader or reader

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        found = [self.find(tensor) for tensor in given]
        others = list(dict.fromkeys(other for other in found if other is not None))
        self._touch(others)
        outputs = func(*args, **(kwargs or {}))
        if not others or name.startswith(_SHAPES):
            return outputs
        overwritten = None
        if name in _OVERWRITING and found[0] is not None and given[0].numel() == found[0].parameter.numel():
            overwritten = found[0]
        read_invalid = any(not other.valid for other in found[overwritten is not None :] if other is not None)
        made = [self.find(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if overwritten is not None:
            overwritten.valid = not read_invalid
        elif read_invalid:
            changed = made or (found if outputs is None else [None])
            if all(changed):
                for other in others:
                    other.valid = False
            else:
                self.reader = self.reader or str(func.overloadpacket)
        return outputs


class _PastOperators(TorchFunctionMode):
    """Tells of functions that read values without an operator."""

    def __init__(self, others: _Others) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _PAST_OPERATORS:
            self._others.read(func.__name__, args)
        return func(*args, **(kwargs or {}))
