"""DeepSpeed configs as Python objects: structs with known keys and defaults that can be validated.

Keys and defaults come from the matching section of `schemas/`. `check` validates values, `batch` derives batch sizes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, ClassVar, TypeVar

from dsjob.contract import legacy
from dsjob.contract import schema as contract
from dsjob.contract.batch import BatchSizes
from dsjob.contract.bounds import check_values
from dsjob.contract.check import check_config
from dsjob.contract.deepspeed_keys import BATCH_KEYS
from dsjob.contract.hints import suggest
from dsjob.contract.shown import shorten
from dsjob.errors import ConfigError, DocumentError, Problem

C = TypeVar("C", bound="Config")


class Config(MutableMapping[str, Any]):
    """A struct in which `c.key` and `c["key"]` are the same. Made from keyword arguments, or by `from_dict` from a
    dict.

    A subclass can set the `section` of a DeepSpeed config that it represents. It then refuses other keys, and fills in
    defaults. Raises ConfigError.
    """

    section: ClassVar[str | None] = None
    parts: ClassVar[Mapping[str, type[Config]]] = {}  # configs inside this one
    _declared: ClassVar[Mapping[str, Any]] = {}  # a subclass's own keys with their defaults: `x = None`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = {key: value for key, value in vars(cls).items() if _is_key(key, value)}
        cls._declared = {**cls._declared, **own}
        for key, value in own.items():
            setattr(cls, key, _Declared(key, value))

    def __init__(self, *unnamed: Any, **values: Any) -> None:
        kind = type(self).__name__
        if unnamed:
            message = f"{kind} takes keyword arguments only, not {shorten(unnamed[0])}"
            raise ConfigError([Problem(message, (), "type", f"write {kind}(key=value), or {kind}.from_dict({{...}})")])
        allowed = self._keys()
        known = sorted({*allowed, *self.parts, *self._declared})
        closed = allowed or self.parts
        wrong = [key for key in values if closed and key not in known]
        if wrong:
            hints = {key: suggest(key, known) or f"available: {', '.join(known[:12])}" for key in wrong}
            raise ConfigError(
                [Problem(f"{kind} has no key {key}", (key,), "unknown-key", hint) for key, hint in hints.items()]
            )
        filled = {key: copy.deepcopy(below.get("default")) for key, below in allowed.items()}
        filled |= {key: copy.deepcopy(value) for key, value in self._declared.items()}
        made = {key: kind() for key, kind in self.parts.items() if key not in values}
        given = {key: self._build(key, value) for key, value in values.items()}
        object.__setattr__(self, "_values", {**filled, **made, **given})

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """The config with the values of a dict."""
        return cls(**_require_mapping(values, cls.__name__))

    @classmethod
    def _keys(cls) -> Mapping[str, contract.Schema]:
        if cls.section is None:
            return {}
        section = contract.deepspeed_schema()["properties"][cls.section]
        return {key: below for key, below in section["properties"].items() if "x-alias-of" not in below}

    def _build(self, key: str, value: Any) -> Any:
        kind = self.parts.get(key)
        if kind is None or isinstance(value, kind):
            return value
        return kind.from_dict(_require_mapping(value, key))

    def to_dict(self) -> dict[str, Any]:
        """The config as a dict without unset (None) values."""
        plain = {key: value.to_dict() if isinstance(value, Config) else value for key, value in self.items()}
        return {key: value for key, value in plain.items() if value is not None}

    def resolve(self, world_size: int = 1) -> None:
        """Derives missing values, if possible, for `world_size` data-parallel ranks. Raises DocumentError."""
        for value in self.values():
            if isinstance(value, Config):
                _resolve(value, world_size)

    def is_valid(self, world_size: int = 1) -> bool:
        """Derives missing values, and returns whether this config and those in it are valid."""
        try:
            _resolve(self, world_size)
        except DocumentError:
            return False
        return not any(problem.severity == "error" for problem in check_config(self.as_config()))

    def as_config(self) -> dict[str, Any]:
        """This section as a DeepSpeed config."""
        return {self.section: self._changed()} if self.section else {}

    def _changed(self) -> dict[str, Any]:
        """The keys whose values differ from the defaults, and always `enabled`."""
        defaults = {key: below.get("default") for key, below in self._keys().items() if key != "enabled"}
        return {key: value for key, value in self.to_dict().items() if key not in defaults or defaults[key] != value}

    def __getattr__(self, key: str) -> Any:
        try:
            return self.__dict__["_values"][key]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no key {key!r}") from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __getitem__(self, key: str) -> Any:
        return self.__dict__["_values"][key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.__dict__["_values"][key] = self._build(key, value)

    def __delitem__(self, key: str) -> None:
        del self.__dict__["_values"][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__["_values"])

    def __len__(self) -> int:
        return len(self.__dict__["_values"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.items())})"


class _Declared:
    """The descriptor of a key that a subclass declares: its value on an object, its default on the class."""

    def __init__(self, key: str, default: Any) -> None:
        self._key, self._default = key, default

    def __get__(self, config: Config | None, kind: type[Config]) -> Any:
        return self._default if config is None else config[self._key]


def _is_key(name: str, value: Any) -> bool:
    if name.startswith("_") or name in ("section", "parts"):
        return False
    return not (callable(value) or isinstance(value, (property, classmethod, staticmethod)))


def _resolve(config: Config, world_size: int) -> None:
    """Calls `config.resolve`, which a subclass may have overridden without the argument `world_size`."""
    if inspect.signature(config.resolve).parameters:
        config.resolve(world_size)
    else:
        config.resolve()


class FP16Config(Config):
    """The `fp16` section, including loss scaling."""

    section = "fp16"


class BF16Config(Config):
    """The `bf16` section."""

    section = "bf16"


class TorchAutocastConfig(Config):
    """The `torch_autocast` section."""

    section = "torch_autocast"


class BatchConfig(Config):
    """train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel world size."""

    @classmethod
    def _keys(cls) -> Mapping[str, contract.Schema]:
        properties = contract.deepspeed_schema()["properties"]
        return {key: properties[key] for key in BATCH_KEYS}

    def resolve(self, world_size: int = 1) -> None:
        """Derives missing batch sizes. Raises DocumentError if they do not multiply out."""
        full = BatchSizes.from_dict(self).resolve(world_size)
        self.update(zip(BATCH_KEYS, (full.train_batch, full.micro_batch, full.grad_accum), strict=True))

    def as_config(self) -> dict[str, Any]:
        return self.to_dict()


class TrainingConfig(Config):
    """Batch sizes and precision of a training. `from_dict` also accepts a whole DeepSpeed config."""

    parts: ClassVar[Mapping[str, type[Config]]] = {
        "batch": BatchConfig,
        "fp16": FP16Config,
        "bf16": BF16Config,
        "torch_autocast": TorchAutocastConfig,
    }

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """The config with the values of a dict, whose batch sizes are in `batch` or, as in DeepSpeed, at the top
        level."""
        if problems := check_values(values, cls.__name__):
            raise ConfigError(problems)
        values = _require_mapping(values, cls.__name__)
        if "bfloat16" in values:
            values = legacy.expand({**values, "bfloat16": _require_mapping(values["bfloat16"], "bfloat16")})
        top = {key: values[key] for key in BATCH_KEYS if key in values}
        parts = {key: values[key] for key in cls.parts if key in values}
        if top:
            parts["batch"] = {**_require_mapping(parts.get("batch", {}), "batch"), **top}
        others = {key: values[key] for key in values if key not in cls.parts and key not in BATCH_KEYS}
        known = [*contract.deepspeed_schema()["properties"], *cls.parts]
        wrong = [
            Problem("unknown key", (key,), "unknown-key", suggest(key, known)) for key in others if key not in known
        ]
        if wrong:
            raise ConfigError(wrong)
        made = cls(**parts)
        object.__setattr__(made, "_others", others)
        return made

    def as_config(self) -> dict[str, Any]:
        """The DeepSpeed config, including other sections that were passed to `from_dict`."""
        sections = {key: value._changed() for key, value in self.items() if key != "batch"}
        return {**self.__dict__.get("_others", {}), **self.batch.to_dict(), **sections}


def _require_mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        message = f"must be an object, but is {shorten(value)}"
        hint = f'write {{"enabled": {str(value).lower()}}}' if isinstance(value, bool) else 'write {"key": value, ...}'
        raise ConfigError([Problem(message, (name,), "type", hint)])
    wrong = [key for key in value if not isinstance(key, str)]
    if wrong:
        raise ConfigError([Problem(f"keys must be strings, but one is {shorten(wrong[0])}", (name,), "type")])
    return dict(value)
