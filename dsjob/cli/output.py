"""YAML output of commands, in a form that `document` reads back unchanged."""

from __future__ import annotations

import re
from typing import Any

import yaml

from dsjob.terminal import make_printable


class _Dumper(yaml.SafeDumper):
    """PyYAML writes YAML 1.1, where 1e-3 is a string. dsjob reads YAML 1.2, where it is a number."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """A string, quoted if it could be read as a number, or if it needs escapes."""
        quotes = '"' if not text.isprintable() else "'" if re.match(r"[-+]?\.?\d", text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=quotes)


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(value: Any) -> str:
    """A document, or a part of one, as YAML text. Its lines are printable: YAML has the escapes of Python."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return "\n".join(map(make_printable, text.split("\n")))
