"""Composes a recipe when it is imported, so that processes forked later find Hydra ready."""

from dsjob.document.compose import compose

compose(["+recipe=quickstart"])
