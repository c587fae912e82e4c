"""Rules between the keys of a document: a table with one short function per rule, each with a stable id and a reason.

A rule receives a document in the job's vocabulary whose shape is right: unset keys are left out, and a value is None
if a problem with its shape has already been reported. It yields the places that break it. `check` runs the table.
Rules know nothing about files, lines or the world size.
"""

from dsjob.contract.rules import course, engines, methods, metrics, pipelines, spreading, tensors
from dsjob.contract.rules.table import RULES as RULES

__all__ = ["EXPLANATIONS", "RULES", "course", "engines", "methods", "metrics", "pipelines", "spreading", "tensors"]

_SHAPE = {
    "unknown-key": "A key that the contract does not have is a typo, or it is at the wrong level. Other tools ignore "
    "such a key and train with the default that it was meant to change.",
    "type": "The value has the wrong type. For example, a number in quotes is a string.",
    "enum": "The key only accepts the listed values.",
    "range": "The number is outside the range in which the key makes sense.",
    "length": "The text or list is empty, or has too many or too few items.",
    "pattern": "The text does not have the form that the key requires.",
    "required": "The section does not work without this key.",
    "type-and-target": "An optimizer or schedule is named either by its type or by a _target_, not by both.",
    "unsupported": "DeepSpeed has this key, but dsjob does not support what it asks for, and ignoring it would change "
    "results.",
    "no-effect": "The key is known, and leaving it out gives the same results.",
    "deprecated": "This is an old spelling. It still works; the message names the current one.",
    "given-twice": "A key and another spelling of it are both given, but only one of them can count.",
    "conflict": "The job file and the DeepSpeed config give different values for the same setting.",
    "batch": "train_batch must equal micro_batch x grad_accum x data-parallel world size, all of them at least 1.",
    "model-ranks": "Several ranks hold one model together (pipeline.stages, tensor_parallel.size, "
    "trainer.model_parallel_size), so the number of ranks must be a multiple of theirs.",
    "syntax": "The text is not valid JSON or YAML.",
    "duplicate-key": "A key occurs twice in one object. JSON and YAML readers silently keep the last one.",
    "number": "The number does not fit into a 64-bit float.",
    "too-deep": "Nesting beyond what any document needs is refused, so that reading takes bounded time and memory.",
    "more": "The document has more problems than are useful to list at once.",
    "too-large": "A text larger than any document needs is refused, so that reading takes bounded time and memory.",
    "alias": "YAML aliases that expand to more than any document needs are refused.",
    "key": "Keys must be text. YAML also allows empty keys, and lists or mappings as keys.",
    "merge": "YAML's << can only merge mappings into the mapping that contains it.",
    "tag": "A document is plain data. YAML tags ask the reader to create other kinds of objects.",
    "untrusted-target": "A _target_ is imported and called. One that is neither on dsjob's list nor in the user's own "
    "modules needs --trust.",
    "not-found": "A run on this machine could not import the _target_. Nothing was imported to find that out; another "
    "machine may have the module.",
    "contradiction": "The program's arguments and its DeepSpeed config give one setting two values, and only one can "
    "hold.",
    "replaced": "An optimizer or schedule that a program passes to initialize is used instead of the config's section, "
    "as in DeepSpeed, so changes of the section would change nothing.",
    "environment": "A document could send any environment variable anywhere, and its value would be saved and shown. "
    "Therefore only arguments of targets may read variables, except for a few harmless ones that may be used anywhere.",
    "one-batch": "`validate --deep` calls the model, the losses and the metrics with one batch of each set. A key that "
    "the batch lacks, or a model, loss or metric that fails, would stop the run.",
    "target": "The _target_ cannot be imported, or does not accept the arguments that the document gives it.",
    "remote-code": "Loading this model from a hub would download code and run it on this machine.",
    "unpinned": "Without a revision, a name on a hub can refer to different files tomorrow.",
    "untrusted-protocol": "Opening a URL runs the code for its protocol. A protocol that is not on dsjob's list needs "
    "--trust protocol:NAME.",
    "chained-url": "A URL that chains file systems (a::b) can run code, or reach what its parts alone may not.",
    "outside-folder": "A document can come from anyone. A library that a document gives a folder for its files writes "
    "only below the current one. A document from elsewhere (a URL, a checkpoint, another user) reads only below its "
    "own folder and the current one, and writes only below the current one.",
    "private-file": "A document can come from anyone, and could send away what it reads. So it names no hidden files "
    "and folders, no keys, and no folders of the system, unless the user does.",
    "credentials": "A library sends the credentials of the environment to the server that it is given. So the user, "
    "and not only the document, must have chosen this server.",
    "metadata-server": "Machines of a cloud get their credentials from a server with a fixed address. A document could "
    "send them away.",
    "nested-target": "What a target reads from a file could be sent away, or could be a path that no rule has checked.",
    "bound-reader": "A constructor that reads files would read any file that a sample names.",
    "request-option": "These options send headers, cookies and credentials, or redirect a request to another server.",
    "kernel-file": "Files in /proc, /dev and /sys hold the environment and the state of processes and devices.",
    "read-only-url": "Web servers are only read from. A run writes to a folder or an object store.",
    "hydra-section": "A job document may not configure Hydra itself.",
    "not-an-object": "A document is one object (a mapping) of keys and values.",
    "not-a-config": "A file without any key of a DeepSpeed config is not one. Its contents are not shown.",
    "another-tool": "The file belongs to another tool; dsjob import reads it.",
    "interpolation": "The ${...} names something that does not exist, cannot be resolved, or expands to more than any "
    "document needs.",
    "recipe-package": "Hydra puts the keys of a config below the name of its folder, unless the first line of the "
    "file says where they belong.",
    "cores": "Ranks that share a core take turns on it, and each collective waits for the slowest rank.",
    "not-there": "The override names a key that the composed document does not have.",
    "data-card": "The card in a dataset's folder determines what is loaded, so it must be readable and is checked "
    "first.",
    "not-json": "A dict passed by a program may only hold what JSON has: strings, finite numbers, booleans, lists and "
    "dicts.",
    "not-read": "The document names a DeepSpeed config at a URL. Checking a document fetches nothing, so that config "
    "is not checked.",
    "unreadable": "The file cannot be read.",
    "override": "The override on the command line cannot be parsed.",
    "job-document": "dsjob.initialize takes a DeepSpeed config; a job document can only be run by dsjob run.",
    "another-job": "The output folder holds the run of another model or dataset, which this run would resume.",
    "missing-package": "The monitor needs a package that is not part of dsjob's own dependencies.",
    "foreign-tokenizer": "A pretrained model knows the ids of its own tokenizer. With those of another one it trains "
    "without an error, and forgets what it has learnt.",
    "two-tokenizers": "An evaluation on other ids than those of the training says nothing about the model.",
    "auto": '"auto" stands for a value that is derived from others, but those are missing.',
}
EXPLANATIONS: dict[str, str] = {**_SHAPE, **{name: rule.reason for name, rule in RULES.items()}}
