"""The callables that any document may name: constructors that are harmless with any arguments.

None of them unpickles, compiles or downloads.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Listed(NamedTuple):
    """Callables of one module: their names, and where they must be defined (regular expressions, matched in full)."""

    module: str
    names: str
    home: str


LISTED: tuple[Listed, ...] = (
    Listed("dsjob", r"linear_cross_entropy", r"dsjob\.ops\.linear_cross_entropy"),
    Listed("dsjob", r"Layers", r"dsjob\.parallel\.pipeline\.layers"),
    Listed("dsjob.recipes", r"[a-z]\w*\.[A-Za-z]\w*", r"dsjob\.recipes\.\w+"),
    Listed("dsjob.pipelines", r"(schedules|orders)\.[A-Z]\w*", r"dsjob\.pipelines\.(schedules|orders)"),
    Listed("dsjob.text", r"Text|Pad|Mixture|Prompts|Rouge|exact_match", r"dsjob\.text\.\w+"),
    Listed("dsjob.callbacks", r"[A-Z]\w*", r"dsjob\.callbacks\.(?!callback$)\w+"),
    Listed("dsjob.optim.schedules", r"[A-Z]\w*", r"dsjob\.optim\.schedules"),
    Listed("torch", r"tensor|zeros|ones|full|arange|rand|randn|randint|Generator|device", r"torch(\._C)?"),
    Listed("torch.nn", r"[A-Z]\w*", r"torch\.nn\..+"),
    Listed("torch.optim", r"[A-Z]\w*", r"torch\.optim\..+"),
    Listed("torch.optim.lr_scheduler", r"[A-Z]\w*", r"torch\.optim\.lr_scheduler"),
    Listed(
        "torch.utils.data",
        r"(Tensor|Concat|Chain|Stack)Dataset|Subset|random_split|[A-Z]\w*Sampler|DataLoader|default_collate",
        r"torch\.utils\.data\..+",
    ),
    # Metrics of text and image are excluded: several of them download weights and unpickle them.
    Listed("torchmetrics", r"[A-Z]\w*", r"torchmetrics\.(aggregation|classification|collections|regression)(\..+)?"),
    Listed("torchmetrics.classification", r"[A-Z]\w*", r"torchmetrics\.classification\..+"),
    Listed("torchmetrics.regression", r"[A-Z]\w*", r"torchmetrics\.regression\..+"),
    Listed("torchmetrics.text", r"(BLEU|CHRF)Score|(Char|Word)ErrorRate|EditDistance", r"torchmetrics\.text\..+"),
    Listed(
        "transformers",
        # Rag's retrievers read pickled indexes, and Timm's models come from another hub.
        r"(?!Rag|Timm)[A-Z]\w*(Config|Model|For[A-Z]\w*)(\.from_pretrained|\.from_config)?"
        r"|Auto(Tokenizer|Processor|ImageProcessor|FeatureExtractor)\.from_pretrained",
        r"transformers\.(models|data)\..+",
    ),
    Listed("transformers", r"(Default)?DataCollator\w*|default_data_collator", r"transformers\.data\.data_collator"),
    Listed("transformers", r"get_\w+_schedule\w*|Adafactor", r"transformers\.optimization"),
    # With random weights: see `vision`. Models of detection and others below load a backbone unless told not to.
    Listed("torchvision.models", r"(?!get_|list_)[A-Za-z]\w*", r"torchvision\.models\.(?!_)\w+"),
    Listed("timm", r"create_model", r"timm\.models\.\w+"),
    Listed("datasets", r"load_dataset|load_from_disk", r"datasets\.load"),
    Listed("datasets", r"Dataset\.from_(dict|list|csv|json|parquet|text)", r"datasets\.arrow_dataset"),
)


def is_listed(path: str) -> bool:
    """Whether a dotted path matches `LISTED`, as a string."""
    return any(matches(row, path) for row in LISTED)


def matches(row: Listed, path: str) -> bool:
    """Whether a dotted path is one of the callables of `row`."""
    return path.startswith(row.module + ".") and bool(re.fullmatch(row.names, path[len(row.module) + 1 :]))
