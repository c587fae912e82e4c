"""Sampled texts need a model that writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from dsjob.callbacks import SampledText
from dsjob.errors import ContractError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": "4"}, "max_new_tokens: must be an integer"),
        ({"max_new_token": 4}, "max_new_token: unknown key"),
    ],
)
def test_settings_are_checked_like_the_section_generation(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        SampledText(["once"], **settings)


def test_a_model_that_cannot_generate_is_an_error_before_the_first_step() -> None:
    spec = SimpleNamespace(data=SimpleNamespace(eval={"": None}))
    run: Any = SimpleNamespace(spec=spec, engine=SimpleNamespace(module=nn.Linear(1, 1)))
    with pytest.raises(ContractError, match="Linear has no method generate"):
        SampledText(["once"]).on_start(run)
