"""Checks the arguments of a call against the callable's signature, without calling it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

from dsjob.contract import schema as contract
from dsjob.contract.hints import suggest

# The names of what the loop passes, by position, to the callables at these places.
_PASSED = {
    "loss": ("outputs", "batch"),
    "trainer.step": ("engines", "batch"),
    "trainer.eval_step": ("engines", "batch"),
    "data.collate": ("samples",),
}
# Arguments of every configuration of transformers that its signature does not list.
_CONFIG_KEYS = (
    "num_labels", "attn_implementation", "experts_implementation", "output_attentions", "torch_dtype", "use_cache",
    "is_decoder", "add_cross_attention", "tie_word_embeddings", "rope_theta", "rope_scaling",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Misfit:
    """A problem with a call. `argument`: the wrong keyword; empty for missing and surplus arguments."""

    argument: str
    message: str
    hint: str = ""
    too_many: bool = False


def find_misfits(
    name: str,
    function: Callable[..., Any],
    positional: int,
    keywords: Iterable[str],
    *,
    partial: bool = False,
    unwrap: bool = True,
) -> list[Misfit]:
    """The problems with calling `function` with this number of positional arguments and these keywords.

    Empty if the function has no signature, as some built-ins. `partial`: missing arguments may be added later.
    `unwrap`: judge a decorated function by the function that it wraps, which may take other arguments.
    """
    try:
        parameters = list(inspect.signature(function, follow_wrapped=unwrap).parameters.values())
    except (TypeError, ValueError):
        return []
    keywords = list(keywords)
    by_place = [p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in parameters if p.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    kinds = {p.kind for p in parameters}
    if _configures_model(function):
        generation = contract.job_schema()["properties"]["generation"]["properties"]
        other_names = getattr(function, "attribute_map", {})  # of the same settings, in some models
        by_name += [key for key in (*_CONFIG_KEYS, *other_names, *generation) if key not in by_name]
    taken = [p.name for p in by_place[:positional]]
    found = []
    if positional > len(by_place) and Parameter.VAR_POSITIONAL not in kinds:
        found.append(Misfit("", f"{name} takes {_count(len(by_place))}, not {positional}", too_many=True))
    for key in keywords:
        if key in by_name and key in taken:
            found.append(Misfit(key, f'{name} is given "{key}" twice: by position and by name', "keep one of the two"))
        elif key not in by_name and Parameter.VAR_KEYWORD not in kinds:
            found.append(_explain(name, key, by_place, list(by_name), (*keywords, *taken)))
    if partial:
        return found
    needed = [p.name for p in (*by_place, *parameters) if p.default is Parameter.empty and not _is_open(p)]
    missing = [n for n in dict.fromkeys(needed) if n not in (*taken, *keywords)]
    hints = " ".join(misfit.hint for misfit in found)
    return found + [Misfit("", f'{name} needs the argument "{n}"') for n in missing if f'mean "{n}"' not in hints]


def _configures_model(function: Callable[..., Any]) -> bool:
    """Whether a callable is a configuration of transformers. It also takes arguments that its signature does not list,
    such as `num_labels`, and settings of generation, such as `decoder_start_token_id`, which T5 cannot train
    without."""
    kinds = inspect.getmro(function) if inspect.isclass(function) else ()
    names = ("PreTrainedConfig", "PretrainedConfig")  # since transformers 5, before it
    return any(kind.__name__ in names and kind.__module__.startswith("transformers.") for kind in kinds)


def name_loss_arguments(outputs: Any, targets: Any) -> tuple[Sequence[str], Sequence[str]]:
    """What a loss is called with, given `outputs` and `targets` of the document: the names of the positional arguments,
    and of the keyword arguments."""
    if targets is None:
        return _PASSED["loss"], ()
    parts = [["predictions"] if outputs is None else outputs, targets]
    positional = [str(key) for part in parts if not isinstance(part, Mapping) for key in part]
    return positional, [str(key) for part in parts if isinstance(part, Mapping) for key in part]


def find_role_misfits(
    name: str, role: str, made: Any, passed: tuple[Sequence[str], Sequence[str]] | None = None
) -> list[Misfit]:
    """The problems with how the loop calls `made`, the callable of the target `name` at `role`. Empty for other roles.

    If `made` is a class, its instances are called. passed: the names of positional and keyword arguments, if the role
    does not determine them.
    """
    if passed is None and role not in _PASSED:
        return []
    positional, keywords = passed or (_PASSED[role], ())
    if inspect.isclass(made):
        function = vars(made).get("forward" if _calls_forward(made) else "__call__")
        if not inspect.isfunction(function):  # inherited: the class may replace what calls it
            return []
        called: Any = functools.partial(function, None)  # `self`
    else:
        called = made.forward if _calls_forward(type(made)) and not _has_pre_hooks(made) else made
    hint = f"{role} is called with ({', '.join([*positional, *(f'{key}=' for key in keywords)])})"
    found = find_misfits(name, called, len(positional), keywords, unwrap=False)
    return [replace(misfit, hint=hint) for misfit in found]


def _calls_forward(kind: type) -> bool:
    """Whether instances of `kind` are called as torch.nn.Module calls its own: `__call__` takes anything, `forward`
    does not."""
    return getattr(kind.__call__, "__module__", "") == "torch.nn.modules.module"


def _has_pre_hooks(module: Any) -> bool:
    """Whether a torch module has hooks that run before it: they may replace its arguments."""
    return any(held for name, held in vars(module).items() if name.endswith("_pre_hooks"))


def _count(arguments: int) -> str:
    return f"{arguments} positional argument{'s' if arguments != 1 else ''}"


def takes_keyword(function: Callable[..., Any], name: str) -> bool:
    """Whether a callable's signature accepts a keyword argument of this name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == name or p.kind is Parameter.VAR_KEYWORD for p in parameters)


def _is_open(parameter: Parameter) -> bool:
    return parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _explain(name: str, key: str, by_place: list[Parameter], known: list[str], given: Sequence[str]) -> Misfit:
    if key in (p.name for p in by_place):
        return Misfit(key, f'{name} takes "{key}" only by position', "write its value in a list: _args_: [...]")
    free = [one for one in known if one not in given]
    shown = free or known
    takes = (
        f"it takes {', '.join(shown[:12])}{', ...' if len(shown) > 12 else ''}" if shown else "it takes none by name"
    )
    return Misfit(key, f'{name} has no argument "{key}"', suggest(key, free) or takes)
