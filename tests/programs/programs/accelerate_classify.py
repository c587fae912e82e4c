"""Fine-tunes a tiny BERT to classify sequences: accelerate with a `DeepSpeedPlugin`, checkpoints and metrics."""

import argparse
import json
import resource
import time

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import DataLoaderConfiguration, set_seed
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def make_samples(count: int, seed: int) -> list[dict]:
    """Sequences of tokens of different lengths; the label says whether the first token is greater than the last."""
    draw = torch.Generator().manual_seed(seed)
    rows = [
        torch.randint(4, 64, (int(torch.randint(6, 13, (), generator=draw)),), generator=draw) for _ in range(count)
    ]
    return [{"tokens": row, "label": int(row[0] > row[-1])} for row in rows]


def collate(samples: list[dict]) -> dict:
    tokens = pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> dict:
    model.eval()
    right, logits = [], []
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        predicted, labels, scores = accelerator.gather_for_metrics(
            (outputs.logits.argmax(dim=-1), batch["labels"], outputs.logits)
        )
        right += (predicted == labels).tolist()
        logits.append(scores.float())
    return {"samples": len(right), "accuracy": sum(right) / len(right), "logits": torch.cat(logits).sum(0).tolist()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clipping", type=float, default=1.0)
    parser.add_argument("--offload", default="none", help="device of the optimizer's state")
    parser.add_argument("--offload_params", default="none", help="device of the parameters")
    parser.add_argument("--precision", default="no")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save_at", type=int, default=0, help="micro step after which to save to the folder `saved`")
    parser.add_argument("--resume", default="", help="a folder to load, saved in the first epoch")
    parser.add_argument("--hidden", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    args = parse()
    plugin = DeepSpeedPlugin(
        zero_stage=args.stage,
        gradient_accumulation_steps=args.accumulation,
        gradient_clipping=args.clipping,
        offload_optimizer_device=args.offload,
        offload_param_device=args.offload_params,
        zero3_save_16bit_model=True,
    )
    # accelerate chooses a backend for GPUs only.
    groups = InitProcessGroupKwargs(backend=None if torch.cuda.is_available() else "gloo")
    accelerator = Accelerator(
        mixed_precision=args.precision,
        deepspeed_plugin=plugin,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # so that a resumed epoch has its order
        kwargs_handlers=[groups],
    )
    set_seed(42)
    train = DataLoader(make_samples(70, seed=1), shuffle=True, batch_size=4, collate_fn=collate)
    held_out = DataLoader(make_samples(27, seed=2), batch_size=8, collate_fn=collate)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=args.hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * args.hidden,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=40)
    model, optimizer, train, held_out, schedule = accelerator.prepare(model, optimizer, train, held_out, schedule)
    done = 0
    if args.resume:
        accelerator.load_state(args.resume)
        done = args.save_at
    records: list[dict] = []
    seconds = []
    for epoch in range(args.epochs):
        model.train()
        train.set_epoch(epoch)
        skips = done if epoch == 0 else 0
        for step, batch in enumerate(accelerator.skip_first_batches(train, skips) if skips else train, skips + 1):
            began = time.perf_counter()
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), args.clipping)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
            record = {"epoch": epoch, "step": step, "losses": accelerator.gather(loss.detach().float()).tolist()}
            record |= {"lr": schedule.get_last_lr()[0]}
            if accelerator.sync_gradients:
                record |= {"norm": norm, "skipped": accelerator.optimizer_step_was_skipped}
            records.append(record)
            if epoch == 0 and step == args.save_at and not args.resume:
                accelerator.save_state("saved")
        records.append({"epoch": epoch, **evaluate(accelerator, model, held_out)})
    records += save(accelerator, model)
    if accelerator.is_main_process:
        with open("records.json", "w") as file:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024  # MiB
            json.dump({"records": records, "seconds": sorted(seconds)[len(seconds) // 2], "peak": peak}, file)
    accelerator.end_training()


def save(accelerator: Accelerator, model: torch.nn.Module) -> list[dict]:
    """Saves the model in all of accelerate's ways; the norm of each weight, and whether the files have all weights."""
    weights = accelerator.get_state_dict(model)
    accelerator.save_model(model, "model")
    # A copy of the dict, since save_pretrained takes its tensors out.
    accelerator.unwrap_model(model).save_pretrained(
        "pretrained",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=dict(weights or {}),
    )
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return []
    files = [load_file(f"{folder}/model.safetensors") for folder in ("model", "pretrained")]
    same = [
        file.keys() == weights.keys() and all(torch.equal(file[key], weights[key]) for key in file) for file in files
    ]
    norms = {name: [str(weight.dtype), weight.float().norm().item()] for name, weight in sorted(weights.items())}
    return [{"weights": norms, "saved": same}]


if __name__ == "__main__":
    main()
