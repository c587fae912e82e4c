"""Fine-tunes a tiny GPT-2 from a folder: accelerate with a DeepSpeed config file, in which values may be auto.

The config decides whether DeepSpeed's optimizer and schedule are used or those of torch and transformers.
"""

import argparse
import json
import math
import os

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import DataLoaderConfiguration, DummyOptim, DummyScheduler, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, get_scheduler
from transformers.integrations import is_deepspeed_zero3_enabled


def make_loader(count: int, seed: int, shuffle: bool) -> DataLoader:
    draw = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 4, (count, 12), generator=draw)
    tokens = (steps.cumsum(1) + torch.randint(0, 64, (count, 1), generator=draw)) % 64
    return DataLoader([{"input_ids": row, "labels": row} for row in tokens], shuffle=shuffle, batch_size=4)


def make_groups(model: torch.nn.Module) -> list[dict]:
    """Two groups of parameters: those with weight decay, and biases and norms without."""
    kept = [(any(part in name for part in ("bias", "ln_")), p) for name, p in model.named_parameters()]
    return [
        {"params": [p for plain, p in kept if not plain], "weight_decay": 0.1},
        {"params": [p for plain, p in kept if plain], "weight_decay": 0.0},
    ]


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(4)))
    model.train()
    return math.exp(torch.cat(losses).float().mean())


def make_schedule(kind: str, optimizer: object, total: int) -> object:
    if kind == "config":
        return DummyScheduler(optimizer, total_num_steps=total, warmup_num_steps=3)
    if kind == "callable":
        return DummyScheduler(optimizer, lr_scheduler_callable=lambda made: get_scheduler("cosine", made, 3, total))
    return get_scheduler("cosine", optimizer, num_warmup_steps=3, num_training_steps=total)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--schedule", choices=["config", "callable", "torch"], required=True)
    parser.add_argument("--precision", default="no")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", default="", help="the checkpoint of the first epoch")
    args = parser.parse_args()
    plugin = DeepSpeedPlugin(hf_ds_config=args.config)
    groups = InitProcessGroupKwargs(backend=None if torch.cuda.is_available() else "gloo")
    accelerator = Accelerator(
        mixed_precision=args.precision,
        gradient_accumulation_steps=2,
        deepspeed_plugin=plugin,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        kwargs_handlers=[groups],
    )
    set_seed(7)
    train, held_out = make_loader(64, seed=1, shuffle=True), make_loader(22, seed=2, shuffle=False)
    with plugin.zero3_init_context_manager(enable=False):
        assert not is_deepspeed_zero3_enabled() or plugin.zero_stage == 3
        whole = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    if accelerator.is_main_process and not os.path.exists("gpt2"):
        whole.save_pretrained("gpt2")
    accelerator.wait_for_everyone()
    model = AutoModelForCausalLM.from_pretrained("gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    own = "optimizer" not in plugin.deepspeed_config
    optimizer = (torch.optim.AdamW if own else DummyOptim)(make_groups(model), lr=3e-3)
    schedule = make_schedule(args.schedule, optimizer, 32)
    model, optimizer, train, held_out, schedule = accelerator.prepare(model, optimizer, train, held_out, schedule)
    records: list[dict] = [{"config": {key: plugin.deepspeed_config[key] for key in sorted(plugin.deepspeed_config)}}]
    records[0]["config"].pop("steps_per_print")
    if args.resume:
        accelerator.load_state(args.resume)
    best, start = math.inf, int(bool(args.resume))
    for epoch in range(start, args.epochs):
        train.set_epoch(epoch)
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                record = {"loss": accelerator.reduce(loss.detach().float(), "mean").item()}
                lr = [group["lr"] for group in optimizer.param_groups]
                records.append({**record, "lr": lr, "norm": accelerator.clip_grad_norm_(model.parameters(), 1.0)})
        perplexity = evaluate(accelerator, model, held_out)
        records.append({"epoch": epoch, "perplexity": perplexity})
        if epoch == 0:
            accelerator.save_state("epoch_0")
        if perplexity < best:
            best = perplexity
            accelerator.save_state("best")
    accelerator.load_state("best")
    records.append({"best": best, "loaded": evaluate(accelerator, model, held_out)})
    accelerator.unwrap_model(model).save_pretrained(
        "final",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        with open("records.json", "w") as file:
            json.dump(records, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
