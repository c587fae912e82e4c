"""What the server of forks (`forks`) does once: each fork then starts with it done, and costs as little as possible."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import re
import weakref
from pathlib import Path

# None of these starts a thread of torch's, which a fork would lose. FSDP2 imports torch._dynamo at its first use, and
# DeepSpeed the compiler.
PRELOADED = [
    "dsjob.engine.build", "dsjob.training.job", "dsjob.cli.run", "dsjob.cli.eval", "dsjob.cli.exec",
    "dsjob.cli.sweep", "dsjob.front.run", "dsjob.front.smoke", "dsjob.front.generate", "dsjob.launch.comparison",
    "dsjob.programs.launch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.run",
    "torch.utils.serialization.config", "torch.profiler._cupti_monitor",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch._dynamo", "torch._inductor.compile_fx",
    "torch._dynamo.repro.after_dynamo", "s3fs", "pytest", "rich._emoji_codes", "programs", "transformers.trainer",
    "transformers.models.t5.modeling_t5", "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.bert.modeling_bert", "torchmetrics.text",
]  # fmt: skip
HUGE = 2 << 20  # bytes of a huge page on x86 and on most ARM machines
COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1; older kernels refuse it


def use_huge_pages() -> None:
    """Puts this process's memory into huge pages where the system can: copying and ending the table of small ones
    would take most of the time of a fork."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in re.findall(r"^(\w+)-(\w+) rw-p 0+ 00:00 0 ", Path("/proc/self/maps").read_text(), re.MULTILINE):
        first = -(-int(start, 16) // HUGE) * HUGE
        for page in range(first, int(end, 16) - HUGE + 1, HUGE):
            advise(page, HUGE, COLLAPSE)


gc.disable()  # nothing of this becomes garbage
for name in PRELOADED:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

from dsjob.document.compose import compose  # noqa: E402  # as late as the modules before it

compose(["+recipe=quickstart"])  # Hydra reads its own configs at the first composition
# torch's libraries of operators would be taken apart at the exit of each fork, which copies 40 MB.
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False
gc.enable()
gc.freeze()  # DeepSpeed and transformers often collect garbage: nothing of what was imported here
use_huge_pages()
