"""Rules between the keys of a document: a table, one short function a rule, each with a stable id and its reason.

A rule sees the document in a job's words, of the right shape, with what is not set left out and None where a mistake of
shape was told already, and finds places to complain about. `check` runs the table. Nothing here knows files, lines or
the world size.
"""

from dsjob.contract.rules import course, engines, methods, spreading
from dsjob.contract.rules.table import RULES as RULES

__all__ = ["EXPLANATIONS", "RULES", "course", "engines", "methods", "spreading"]

_SHAPE = {
    "unknown-key": "A key that the contract does not have is a typo or stands at the wrong level. Other tools ignore "
    "it, and train with the default that it was meant to change.",
    "type": "A value is of another kind than the key takes: a number in quotes, for example, is a string.",
    "enum": "The key takes one of a few values.",
    "range": "A number is outside what the key can mean.",
    "length": "A text or list is empty, or has more or fewer parts than the key takes.",
    "pattern": "A text has not the form that the key takes.",
    "required": "The section cannot do without this key.",
    "type-and-target": "An optimizer or schedule is named by its type or by a _target_, not by both.",
    "unsupported": "DeepSpeed knows the key, dsjob does not do what it asks for, and ignoring it would change results.",
    "no-effect": "The key is known, and leaving it out gives the same results.",
    "deprecated": "An old spelling: it works, and its present name is told.",
    "given-twice": "A key and its other spelling are both given, and only one of them could count.",
    "conflict": "A job file and a DeepSpeed config say different things of one setting.",
    "batch": "train_batch = micro_batch x grad_accum x data-parallel world size has to hold, all of them at least 1.",
    "model-parallel-size": "model_parallel_size ranks hold one model together: the number of ranks is a multiple.",
    "syntax": "The text is not JSON or YAML.",
    "duplicate-key": "A key is given twice in one object; JSON and YAML readers keep the last one without a word.",
    "number": "A number that no 64-bit float can hold.",
    "too-deep": "Nesting beyond what any document needs is refused, so that reading takes bounded time and memory.",
    "more": "A document has more problems than anybody reads at once.",
    "too-large": "A text beyond what any document needs is refused, so that reading takes bounded time and memory.",
    "alias": "YAML aliases that add up to more than any document needs are refused.",
    "key": "A key is text; YAML also has empty keys and keys that are lists or mappings.",
    "merge": "YAML's << merges mappings into the one that it stands in, and nothing else.",
    "tag": "A document is plain data; YAML's tags ask a reader to make objects of other kinds.",
    "untrusted-target": "A _target_ is imported and called; what is neither on dsjob's list nor the user's own needs a "
    "--trust.",
    "environment": "A document could send any variable of the environment anywhere, and its value would be saved and "
    "shown. Arguments of targets may read them; everything may read the few that anybody may see.",
    "target": "A _target_ cannot be imported, or does not take the arguments that the document gives it.",
    "remote-code": "The name of a model on a hub would bring code with it that runs here.",
    "unpinned": "A name on a hub without a revision can be other bytes tomorrow.",
    "untrusted-protocol": "Opening a URL runs the code of its protocol; what is not on dsjob's list needs a --trust "
    "protocol:NAME.",
    "chained-url": "A URL that chains file systems (a::b) can run code, or reach what its parts alone may not.",
    "outside-folder": "A library that is given a folder to keep files in writes there; a document may come from "
    "anybody, and chooses none beyond the current folder.",
    "nested-target": "What a target has read from a file could be sent away, or be a path that no rule has seen.",
    "bound-reader": "A constructor that reads files would read whatever names the samples hold.",
    "request-option": "Such options send headers, cookies and credentials, or send a request somewhere else.",
    "kernel-file": "Files of /proc, /dev and /sys hold the environment, and the state of processes and devices.",
    "read-only-url": "A web server is read from; what a run writes goes into a folder or an object store.",
    "hydra-section": "What Hydra itself does with a run is not for a job document to say.",
    "not-an-object": "A document is one object (a mapping) of keys and values.",
    "not-a-config": "A file without any key of a DeepSpeed config is none, and what it holds is not shown.",
    "another-tool": "The file is that of another tool, which dsjob import reads.",
    "interpolation": "A ${...} names something that is not there, cannot be resolved, or grows beyond what any "
    "document needs.",
    "recipe-package": "Hydra puts the keys of a config below the name of its folder, unless its first line says where.",
    "cores": "Ranks that share a core take turns on it, and each exchange waits for the slowest.",
    "not-there": "An override names a key that the composed document does not have.",
    "data-card": "The card of a dataset's folder says what is loaded, so it has to be readable and is checked first.",
    "not-json": "A dict that a program gives holds what JSON has: texts, finite numbers, booleans, lists and dicts.",
    "not-read": "A document names a DeepSpeed config at a URL, and nothing is fetched to check a document.",
    "unreadable": "The file cannot be read.",
    "override": "What the command line gives over the document cannot be read.",
    "job-document": "dsjob.initialize takes a DeepSpeed config; only dsjob run can make something of a job document.",
    "another-job": "The output folder holds the run of another model or data set, which would be continued.",
    "auto": '"auto" stands for a value that is derived from others, which are not there.',
}
EXPLANATIONS: dict[str, str] = {**_SHAPE, **{name: rule.reason for name, rule in RULES.items()}}
