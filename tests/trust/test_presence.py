"""Targets that do not exist are found without importing anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dsjob.trust.grant import Trust
from dsjob.trust.presence import explain_absent, find_absent

FILES = {
    "shop/__init__.py": "from shop.goods import Apple\nfrom shop.cart import cart\n",
    "shop/goods.py": "raise SystemError('imported')\nclass Apple: ...\nPear = Apple\n",
    "shop/open.py": "def __getattr__(name): ...\n",
    "shop/cart.py": "def cart(): ...\n",
    "bare/inner.py": "def build(): ...\n",
    "bare/deep/inner.py": "def build(): ...\n",
    "wide/__init__.py": "import pkgutil\n__path__ = pkgutil.extend_path(__path__, __name__)\n",
    "swapped.py": "import sys\nsys.modules[__name__] = make()\n",
    "star.py": "from math import*\n",
}


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Trust(folders=(str(tmp_path),))


@pytest.mark.parametrize(
    "path",
    [
        "shop.Apple",
        "shop.goods.Apple",
        "shop.goods.Pear",
        "shop.goods.Apple.grown",  # only an import shows it
        "shop.open.anything",
        "shop.cart",  # a function and a module
        "bare.inner.build",
        "bare.deep.inner.build",
        "wide.elsewhere.Part",
        "swapped.anything",
        "star.sin",
        "dsjob.recipes.gpt.build",
        "torch.nn.NoSuchModule",  # an installed package may compute its names
    ],
)
def test_what_may_exist_is_not_absent(path: str, trust: Trust) -> None:
    assert explain_absent(path, trust) == ("", "")


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("shopp.Apple", "there is no module 'shopp'", 'did you mean "shop"?'),
        ("qqq.Apple", "there is no module 'qqq'", "an installed package with --trust"),
        ("shop.goodz.Apple", "shop has no 'goodz'", 'did you mean "goods"?'),
        ("shop.goods.Aple", "shop.goods has no 'Aple'", 'did you mean "Apple"?'),
        ("shop.goods", "shop.goods is a module", "name a class or function in it"),
        ("bare.build", "bare has no 'build'", ""),
        ("bare.deep.inner.built", "bare.deep.inner has no 'built'", 'did you mean "build"?'),
    ],
)
def test_what_is_absent_is_named_and_not_imported(path: str, message: str, hint: str, trust: Trust) -> None:
    found = explain_absent(path, trust)
    assert found[0] == message
    assert hint in found[1]
    assert not {"shop", "bare"} & sys.modules.keys()


def test_targets_at_any_depth_are_looked_up(trust: Trust) -> None:
    document = {"model": {"_target_": "shop.Apple", "parts": [{"_target_": "gone.Part"}]}}
    (found,) = find_absent(document, trust)
    assert (found.dotted, found.rule, found.severity) == ("model.parts[0]._target_", "not-found", "warning")
