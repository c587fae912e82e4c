"""torch's private names: in three modules alone, and each as dsjob expects it on the torch that is installed."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import run_ranks
from test_layers import MODULES
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dsjob import torch_private
from dsjob.ranks.mesh import World
from dsjob.torch_private import fsdp

HERE = ("torch_private", "torch_private.compile_cache", "torch_private.fsdp")
STANDALONE = "checkpoint.format.zero_to_fp32"
# Private names of other libraries, by the module that uses them: not torch's, whatever they are called.
OTHERS = {
    "data.lanes": "datasets",
    "document.interpolation": "OmegaConf",
    "engine.driven": "DeepSpeed",
    "engine.driven_state": "DeepSpeed",
    "ranks.watchdog": "sys._current_frames",
    "trust.exits": "os._exit",
    "training.metrics": "torchmetrics",
    "checkpoint.other.deepspeed.named_pickle": "pickle._Pickler",
}
# Of named tuples; transformers' own attributes of models and configs.
NOT_TORCH = {"_asdict", "_fields", "_replace", "_is_fsdp_managed_module", "_tp_plan", "_attn_implementation"}
NOT_TORCH |= {"_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"}


class Names(ast.NodeVisitor):
    """Private names in a module: those that it defines, and those that it takes from torch or asks others for."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self.module, self.defined, self.imported = module, set[str](), list[str]()
        self.used: list[tuple[int, str]] = []
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        self.imported += [f"{self.module}:{node.lineno} {n.name}" for n in node.names if is_private_of_torch(n.name)]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        self.imported += [f"{self.module}:{node.lineno} {name}" for name in names if is_private_of_torch(name)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.defined.add(node.name)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.defined.add(node.name)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.defined.add(node.target.id)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
            self.defined.add(node.attr)
        if is_private(node.attr):
            self.used.append((node.lineno, node.attr))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                self.used.append((node.lineno, str(name.value)))
        self.generic_visit(node)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not name.startswith("_foreach_")


def is_private_of_torch(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "torch" and any(is_private(part) for part in rest)


def list_torch_names() -> set[str]:
    """Private attributes of what dsjob gets from torch: they are torch's, even where dsjob defines the same name."""
    parameter = nn.Parameter(torch.zeros(1))
    made: list[Any] = [nn.Linear(1, 1), torch.optim.Adam([parameter]), parameter, parameter.untyped_storage()]
    classes = (DistributedDataParallel, FSDPModule, dist.ProcessGroup, torch.distributed.device_mesh.DeviceMesh)
    names = {name for each in (*made, *classes) for name in dir(each)}
    return {name for name in names if is_private(name)}


def find_private_names(modules: dict[str, ast.Module]) -> list[str]:
    """Each use of a private name of torch, as `module:line name`."""
    all_names = [Names(module, tree) for module, tree in modules.items()]
    own = set().union(*(names.defined for names in all_names))
    torchs = list_torch_names()
    found = []
    for names in all_names:
        if names.module in (*HERE, STANDALONE):
            continue
        found += names.imported
        for line, name in names.used:
            unknown = name not in own and names.module not in OTHERS
            if (unknown or name in torchs) and name not in names.defined | NOT_TORCH:
                found.append(f"{names.module}:{line} {name}")
    return found


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    trees = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}
    assert find_private_names(trees) == []


def test_private_names_are_found() -> None:
    source = """
import torch._dynamo
from torch.utils._pytree import tree_map
from torch.distributed.distributed_c10d import _world
class Own:
    def _mine(self): self._kept = other._mine + other._kept
def use(module):
    module._parameters
    getattr(module, "_anything", None)
    torch._dynamo.config, torch._foreach_add_, module.__dict__
"""
    found = find_private_names({"a": ast.parse(source), HERE[0]: ast.parse(source)})
    assert found == [
        "a:2 torch._dynamo",
        "a:3 torch.utils._pytree.tree_map",
        "a:4 torch.distributed.distributed_c10d._world",
        "a:8 _parameters",
        "a:9 _anything",
        "a:10 _dynamo",
    ]


def test_it_does_not_import_fsdp2() -> None:
    """That takes a good part of a second, which plans and checks of documents need not wait for."""
    code = "import sys, dsjob.torch_private; print('torch.distributed.fsdp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_foreach_operation_exists() -> None:
    used = {
        node.attr
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_foreach_")
    }
    assert len(used) > 10
    assert [name for name in used if not hasattr(torch, name)] == []


def test_trees_are_walked() -> None:
    tree = {"a": [1, (2.5, None)]}
    leaves, shape = torch_private.tree_flatten(tree)
    assert leaves == torch_private.tree_leaves(tree)
    assert torch_private.tree_unflatten(leaves, shape) == tree
    assert torch_private.tree_map(str, {"a": [1]}) == {"a": ["1"]}
    assert torch_private.tree_map_only(int, str, {"a": [1, 2.5]}) == {"a": ["1", 2.5]}


def test_an_assertion_fails() -> None:
    torch_private.assert_on_device(torch.tensor(True))
    with pytest.raises(RuntimeError):
        torch_private.assert_on_device(torch.tensor(False))


def test_tensors_without_memory_and_their_operators_are_seen() -> None:
    seen = []

    class Watch(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with torch_private.FakeTensorMode(), Watch():
        one, other = torch.zeros(1 << 40), torch.zeros(2)
        assert torch_private.address_of(one) == torch_private.address_of(one[1:])
        assert torch_private.address_of(one) != torch_private.address_of(other)
        assert one.untyped_storage().nbytes() == 4 << 40
        torch.mm(torch.zeros(2, 3), torch.zeros(3, 4))
    assert "mm" in seen


def test_ranks_can_be_imagined() -> None:
    seen = []

    class Watch(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func.overloadpacket.__name__, torch_private.find_group_name((args, kwargs))))
            return func(*args, **(kwargs or {}))

    with torch_private.imagining_ranks(4), torch_private.FakeTensorMode(), Watch():
        pair = dist.new_group([0, 1])
        name = pair.group_name
        x = torch.zeros(4)
        assert isinstance(x, torch_private.FakeTensor)
        dist.all_reduce(x, group=pair)
        dist.all_gather([torch.zeros(4), torch.zeros(4)], x, group=pair)
        dist.all_to_all_single(torch.zeros(4), x, group=pair)
        funcol.all_reduce(x, "sum", pair)
    assert not dist.is_initialized()
    kinds = {"allreduce_", "allgather_", "alltoall_base_", "all_reduce"}
    assert {kind for kind, group in seen if group == name} == kinds
    assert ("zeros", None) in seen


def test_tensors_of_torch_func_are_told() -> None:
    found = []

    def function(x: Tensor) -> Tensor:
        found.append(torch_private.is_functorch_wrapped_tensor(x))
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    function(torch.ones(2))
    assert found == [True, False]


def test_storages_know_where_they_lie_in_a_file(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4)}, tmp_path / "file")
    content = torch.load(tmp_path / "file", map_location="meta", weights_only=True)
    position = torch_private.position_in_file(content["a"])
    assert position is not None
    assert (tmp_path / "file").read_bytes()[position:][:32] == torch.arange(4).numpy().tobytes()
    assert torch_private.position_in_file(torch.ones(1)) is None


def test_modules_give_out_their_own_tensors() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    norm = net[0]
    assert isinstance(norm, torch_private.NormBase)
    assert isinstance(nn.InstanceNorm2d(2), torch_private.NormBase)
    assert not isinstance(nn.LayerNorm(2), torch_private.NormBase)
    norm.register_buffer("passing", torch.ones(1), persistent=False)
    assert torch_private.list_saved_buffers(norm) == ["running_mean", "running_var", "num_batches_tracked"]
    assert torch_private.own_parameters(net[1]) == {"weight": net[1].weight, "bias": None}
    made = nn.Parameter(torch.ones(2, 2))
    torch_private.own_parameters(net[1])["weight"] = made
    assert net[1].weight is made
    wide = torch_private.copy_with_parameters(norm, Tensor.double)
    assert (wide.weight.dtype, norm.weight.dtype) == (torch.float64, torch.float32)
    assert wide.running_mean is norm.running_mean
    torch_private.change_tensors(net, Tensor.half)
    assert (net[1].weight.dtype, norm.running_mean.dtype) == (torch.float16, torch.float16)


def test_changes_in_place_are_counted() -> None:
    tensor = torch.zeros(2)
    before = torch_private.count_changes(tensor)
    _ = tensor + 1
    assert torch_private.count_changes(tensor) == before
    tensor.add_(1)
    assert torch_private.count_changes(tensor) == before + 1


def test_a_method_is_replaced_for_a_while() -> None:
    seen = []
    before = nn.Module.apply

    def apply(self: nn.Module, fn: Any) -> nn.Module:
        seen.append(self)
        return self

    net = nn.Linear(1, 1)
    with torch_private.replacing_method(nn.Module, "apply", apply):
        net.apply(print)
    assert seen == [net]
    assert nn.Module.apply is before
    with torch_private.replacing_method(nn.Module, "no_method_of_torch", apply):
        assert hasattr(net, "no_method_of_torch")
    assert not hasattr(net, "no_method_of_torch")


def test_a_compiled_module_is_known() -> None:
    net = nn.Linear(1, 1)
    assert not torch_private.is_compiled(net)
    net.compile(backend="eager")
    assert torch_private.is_compiled(net)


def test_the_limit_of_compilations_is_raised_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = torch._dynamo.config
    before = config.recompile_limit, config.accumulated_recompile_limit
    try:
        torch_private.raise_recompile_limit(1000)
        assert (config.recompile_limit, config.accumulated_recompile_limit) == (1000, 1000)
        config.recompile_limit = 1
        told = []
        note = logging.Filter()
        note.filter = lambda record: told.append(str(record.msg)) or True  # type: ignore[assignment,func-returns-value]
        monkeypatch.setattr(torch_private.COMPILER_LOG, "filters", [note])  # those of dsjob may drop the message
        function = torch.compile(lambda x, number: x * number, backend="eager", dynamic=False)
        for number in range(4):
            function(torch.ones(1), number)
        assert any(torch_private.LIMIT_REACHED in message for message in told)
    finally:
        config.recompile_limit, config.accumulated_recompile_limit = before
        torch._dynamo.reset()


def test_hooks_of_optimizers_are_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert not torch_private.has_step_hooks(optimizer)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    assert torch_private.has_step_hooks(optimizer)
    handle.remove()
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert torch_private.has_step_hooks(optimizer)
    handle.remove()
    assert not torch_private.has_step_hooks(optimizer)


def test_optimizers_that_read_a_flag_on_the_device_are_known() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    assert torch_private.can_skip_on_device(torch.optim.Adam(parameters, fused=True))
    assert not torch_private.can_skip_on_device(torch.optim.Adam(parameters, foreach=True))


def test_adam_lists_what_its_step_moves() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.Adam([parameter], capturable=False)
    lists: list[list[Any]] = [[] for _ in range(6)]
    assert torch_private.init_group(optimizer, optimizer.param_groups[0], *lists) is False  # no complex numbers
    assert lists[0] == [parameter]
    assert lists[1] == [parameter.grad]
    assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}


def use_groups(world: World) -> dict[str, Any]:
    alone = torch_private.make_group_of_one()
    x = torch.full((2,), float(world.data_rank))
    dist.all_reduce(x, group=alone)
    gathered = [torch.zeros(2)]
    dist.all_gather(gathered, x, group=alone)
    pair = dist.new_group([0, 1])
    before = torch_private.count_collectives(pair)
    hosts = torch_private.make_group_of_hosts(pair, timedelta(seconds=60))
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, world.data_rank, group=hosts)
    dist.all_reduce(x.clone(), group=pair)
    torch_private.get_store().set(f"here/{world.data_rank}", "yes")
    groups = torch_private.list_process_groups()
    with pytest.raises(RuntimeError):
        torch_private.count_collectives(alone)
    return {
        "alone": (alone.size(), x.tolist(), gathered[0].tolist()),
        "hosts": (dist.get_process_group_ranks(hosts), objects),
        "counted": torch_private.count_collectives(pair) - before,
        "listed": all(group in groups for group in (dist.group.WORLD, alone, pair)),
        "met": torch_private.get_store().get(f"here/{1 - world.data_rank}").decode(),
    }


def test_process_groups() -> None:
    for rank, found in enumerate(run_ranks(use_groups, 2)):
        assert found["alone"] == (1, [rank, rank], [rank, rank])
        assert found["hosts"] == ([0, 1], [0, 1])
        assert found["counted"] == 1
        assert found["listed"]
        assert found["met"] == "yes"


class InWorker(IterableDataset[bool]):
    def __iter__(self) -> Iterator[bool]:
        with torch_private.hiding_worker():
            hidden = get_worker_info() is None
        yield hidden and get_worker_info() is not None


def test_a_worker_can_be_hidden() -> None:
    assert [bool(found) for found in DataLoader(InWorker(), num_workers=1)] == [True]


def shard(world: World) -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(net[0], mesh=world.data_mesh)
    fully_shard(net, mesh=world.data_mesh)
    before = [fsdp.find_gathered(p) for p in fsdp.list_sharded(net)]
    assert fsdp.list_owners(net) == [net[1]]
    assert not fsdp.is_gathered(net)
    assert not any(fsdp.is_shown_whole(p) for p in fsdp.list_sharded(net))
    fsdp.begin_calls(net)
    net[0](torch.ones(1, 2))  # else it would begin, and the model could not be called after it
    net.unshard()
    net.state_dict()
    assert not fsdp.is_gathered(net)  # what FSDP2 does by itself
    fsdp.keep_gathered_in_state_dict(net)
    net.unshard()
    net.state_dict()
    assert fsdp.is_gathered(net)
    assert all(fsdp.is_shown_whole(p) for p in fsdp.list_sharded(net))
    net.set_requires_gradient_sync(False)
    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()
    found: dict[str, Any] = {"before": before, "names": [], "whole": [], "own": []}
    for unit in (net, net[0]):
        fsdp.look_again_at_dtypes(unit)
        for parameter in fsdp.list_sharded(unit):
            gathered = fsdp.find_gathered(parameter)
            assert gathered is not None
            own = parameter.unsharded_accumulated_grad
            found["names"].append(fsdp.name_of(parameter))
            found["whole"].append((tuple(gathered.shape), tuple(parameter.sharded_param.shape)))
            found["own"].append(float((own if own is not None else gathered.grad).sum()))
            assert parameter.offload_to_cpu is False
            assert callable(parameter.to_sharded_dtensor)
    return found


def read_shards(world: World) -> list[Any]:
    """Shards in other memory, which is filled when FSDP2 needs it."""
    net = nn.Linear(2, 3, bias=False)
    fully_shard(net, mesh=world.data_mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    (parameter,) = fsdp.list_sharded(net)
    size = fsdp.shard_memory(parameter).numel()
    kept, read = torch.full((size,), 7.0), torch.full((size,), 3.0)
    master = parameter.sharded_param
    fsdp.show_shard_in(parameter, kept, whole=True)
    told: list[Any] = []

    def need(in_backward: bool) -> None:
        told.append(in_backward)
        fsdp.show_shard_in(parameter, read)

    def end(event: Any) -> None:
        told.append("end")
        fsdp.show_shard_in(parameter, kept)

    fsdp.read_before_gathers(net, need, end, alone=world.data_size == 1)
    total = float(net(torch.ones(1, 2)).detach().sum())
    net.reshard()
    same = net.weight is master and bool((torch_private.find_part(master) == 7).all())
    return [told, total, same]


@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_can_be_read_before_fsdp2_gathers_them(world_size: int) -> None:
    for told, total, same in run_ranks(read_shards, world_size):
        assert told == [False, "end"]
        assert total == 18
        assert same


def test_what_fsdp2_holds() -> None:
    for found in run_ranks(shard, 2):
        assert found["before"] == [None, None]
        assert found["names"] == ["1.weight", "1.bias", "0.weight", "0.bias"]
        assert found["whole"] == [((2, 2), (2, 2)), ((2,), (2,))] * 2
        assert found["own"][1] == 4.0  # two passes of a bias of two


class Partly(nn.Module):
    """A model that leaves one parameter out."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.output: Tensor = self.used(x)
        return self.output


def pass_through_ddp(world: World) -> list[bool]:
    """Whether DDP gives out the model's own output's memory: without and with `keep_outputs`."""
    same = []
    for keeps in (False, True):
        ddp = DistributedDataParallel(Partly(), find_unused_parameters=True)
        if keeps:
            torch_private.keep_outputs(ddp)
        outputs = ddp(torch.ones(1, 2))
        same.append(outputs.data_ptr() == ddp.module.output.data_ptr())
    return same


def test_ddp_keeps_outputs_where_they_are() -> None:
    assert run_ranks(pass_through_ddp, 2) == [[False, True]] * 2
