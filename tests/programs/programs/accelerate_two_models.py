"""Two models with a plugin each: a student learns from a sharded teacher, or both models train."""

import argparse
import json

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import set_seed
from accelerate.utils.deepspeed import get_active_deepspeed_plugin
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup


def make_loader() -> DataLoader:
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 64, (48, 10), generator=draw)
    return DataLoader([{"input_ids": row, "labels": row} for row in tokens], shuffle=True, batch_size=4)


def make_model(seed: int) -> LlamaForCausalLM:
    set_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
        )
    )


def make_config(stage: int) -> dict:
    return {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                              "stage3_param_persistence_threshold": "auto"},
        "gradient_accumulation_steps": 1,
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": 4,
    }  # fmt: skip


def distill(accelerator: Accelerator) -> list[dict]:
    """The student's plugin is active first; the teacher's is selected before the teacher is built."""
    assert get_active_deepspeed_plugin(accelerator.state) is accelerator.state.get_deepspeed_plugin("first")
    train, student = make_loader(), make_model(0)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=40)
    student, optimizer, schedule, train = accelerator.prepare(student, optimizer, schedule, train)
    wrapped = accelerator.deepspeed_engine_wrapped
    accelerator.state.select_deepspeed_plugin("second")
    teacher = accelerator.prepare(make_model(1))
    accelerator.deepspeed_engine_wrapped = wrapped
    student.train()
    teacher.eval()
    records = []
    for batch in [*train, *train]:
        with torch.no_grad():
            wanted = teacher(**batch).logits.softmax(-1)
        outputs = student(**batch)
        loss = outputs.loss + nn.functional.cross_entropy(outputs.logits.flatten(0, 1), wanted.flatten(0, 1))
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        records.append({"loss": accelerator.gather(loss.detach().float()).tolist(), "lr": schedule.get_last_lr()})
    return records


def train_both(accelerator: Accelerator) -> list[dict]:
    """The second model has an accelerator of its own, which shares the state of the first."""
    other, train = Accelerator(), make_loader()
    first = make_model(0)
    first_optimizer = torch.optim.AdamW(first.parameters(), lr=2e-3)
    first, first_optimizer, train = accelerator.prepare(first, first_optimizer, train)
    other.state.select_deepspeed_plugin("second")
    second = make_model(1)
    second_optimizer = torch.optim.AdamW(second.parameters(), lr=1e-3)
    second, second_optimizer = other.prepare(second, second_optimizer)
    assert other.deepspeed_engine_wrapped.engine is second
    assert accelerator.deepspeed_engine_wrapped.engine is first
    records = []
    for batch in [*train, *train]:
        losses = []
        for each, model, optimizer in ((accelerator, first, first_optimizer), (other, second, second_optimizer)):
            with each.accumulate(model):
                loss = model(**batch).loss
                each.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses += each.gather(loss.detach().float()).tolist()
        records.append({"losses": losses})
    for each, folder in ((accelerator, "first"), (other, "second")):
        each.save_state(folder)
        each.load_state(folder)
    with torch.no_grad():
        records.append({"after": [model(**batch).loss.item() for model in (first, second)]})
    return records


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=["distill", "both"], required=True)
    parser.add_argument("--stages", type=int, nargs=2, default=[2, 3])
    parser.add_argument("--precision", default="no")
    args = parser.parse_args()
    plugins = {
        name: DeepSpeedPlugin(hf_ds_config=make_config(stage))
        for name, stage in zip(("first", "second"), args.stages, strict=True)
    }
    groups = InitProcessGroupKwargs(backend=None if torch.cuda.is_available() else "gloo")
    accelerator = Accelerator(mixed_precision=args.precision, deepspeed_plugins=plugins, kwargs_handlers=[groups])
    records = distill(accelerator) if args.what == "distill" else train_both(accelerator)
    if accelerator.is_main_process:
        with open("records.json", "w") as file:
            json.dump(records, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
