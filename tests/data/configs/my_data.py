"""Any name may be defined here: the configs of this folder are examples without code."""


def __getattr__(name: str) -> object:
    raise AttributeError(name)
