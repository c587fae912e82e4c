"""`dsjob ops`: lists the native ops and the compilers, and builds ops ahead."""

from __future__ import annotations

import json
from typing import Any

from dsjob.cli.ckpt_text import align
from dsjob.cli.flags import make_parser
from dsjob.errors import BuildError, UsageError
from dsjob.terminal import print_block, print_text


def main(arguments: list[str], debug: bool) -> int:
    """Lists ops, or with `build` as the first word, builds them."""
    if arguments[:1] == ["build"]:
        return _build(arguments[1:])
    parser = make_parser(
        "ops",
        "List the native ops: whether each is built, why it cannot be, and which keys of a job use it. "
        "`dsjob ops build` builds ahead of the first job that needs one.",
        ("dsjob ops", "dsjob ops --json", "dsjob ops build cpu_optimizers"),
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    found = _look()
    print_block(json.dumps(found, indent=2) if args.json else _show(found))
    return 0


def _look() -> dict[str, Any]:
    """The ops and the tools to build them."""
    from dataclasses import asdict

    from dsjob.ops.build import find_built, open_cache
    from dsjob.ops.registry import OPS, PLAIN
    from dsjob.ops.toolchain import find_problem, find_toolchain

    ops: list[dict[str, Any]] = []
    for op in OPS.values():
        built, problem = find_built(op), find_problem(op)
        state = "built" if built else f"cannot be built: {problem}" if problem else "not built yet"
        ops.append({"name": op.name, "device": op.device, "state": state, "library": built and str(built)})
        ops[-1] |= {"users": op.users, "instead": op.instead}
    plain = {"device": "any", "state": "plain torch, nothing to build", "library": None, "instead": ""}
    ops += [{"name": name, "users": users, **plain} for name, users in PLAIN.items()]
    try:
        folder = str(open_cache())
    except BuildError as error:
        folder = error.message
    return {"ops": ops, "tools": asdict(find_toolchain()), "folder": folder}


def _show(found: dict[str, Any]) -> str:
    blocks = []
    for op in found["ops"]:
        otherwise = f"\n  otherwise: {op['instead']}" if op["instead"] else ""
        blocks.append(f"{op['name']} ({op['device']}): {op['state']}\n  used by: {op['users']}{otherwise}")
    tools = found["tools"]
    cuda = f"CUDA {tools['torch_cuda']}" if tools["torch_cuda"] else "without CUDA"
    lines = [
        ("C++ compiler", tools["compiler"] or "none"),
        ("nvcc", tools["nvcc"] or "none"),
        ("torch", f"{tools['torch']}, {cuda}"),
        ("GPU architectures", tools["architectures"] or "none"),
        ("folder", found["folder"]),
    ]
    return "\n".join([*blocks, "", align(lines)])


def _build(arguments: list[str]) -> int:
    parser = make_parser(
        "ops build",
        "Build native ops for this machine, so that no job has to wait for it. Without a name: all that can be built.",
        ("dsjob ops build", "dsjob ops build cpu_optimizers"),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="ops to build (default: all)")
    args = parser.parse_args(arguments)
    from dsjob.ops.build import build, find_built
    from dsjob.ops.registry import OPS, PLAIN
    from dsjob.ops.toolchain import find_problem

    for name in args.names:
        if name in PLAIN:
            raise UsageError(f"{name} is plain torch: there is nothing to build", hint=f"available: {', '.join(OPS)}")
        if name not in OPS:
            raise UsageError(f"unknown op {name!r}", hint=f"available: {', '.join(OPS)}")
    chosen = [OPS[name] for name in args.names] or list(OPS.values())
    problems: list[str] = []
    for op in chosen:
        problem = "" if args.names or find_built(op) else find_problem(op)
        problems += [problem] if problem else []
        print_text(f"{op.name} is left out: {problem}" if problem else f"{op.name}: {build(op)}")
    if len(problems) == len(chosen):
        raise BuildError("no op can be built on this machine", hint=problems[0])
    return 0
