"""What `import deepspeed` finds under `dsjob exec`: it puts `dsjob.deepspeed` in its own place."""

from dsjob.programs.alias import alias_imports

alias_imports()
