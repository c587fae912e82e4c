"""Trains a tiny Llama whose layers two ranks may divide: `trainer CONFIG` with HF's Trainer, or `accelerate CONFIG`."""

import json
import sys

import torch
from causal_lm import Sentences
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def make_model() -> LlamaForCausalLM:
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip


def train(config: str) -> list:
    """The log of a Trainer, and that of another one which resumes its checkpoint."""
    logs = []
    for resumed in (None, "out/checkpoint-2"):
        args = TrainingArguments(
            "out", use_cpu=True, deepspeed=config, max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2,
            gradient_accumulation_steps=2, logging_steps=1, save_steps=2, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        data, held_out = Sentences(96, seed=0), Sentences(8, seed=1)
        trainer = Trainer(make_model(), args, train_dataset=data, eval_dataset=held_out)
        trainer.train(resume_from_checkpoint=resumed)
        trainer.evaluate()
        trainer.save_model("saved")
        logs += trainer.state.log_history[-4:]  # steps 3 and 4, a summary and an evaluation
    return logs


def loop(config: str) -> list:
    """The losses of a loop with accelerate."""
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
    )
    model = make_model()
    loader = torch.utils.data.DataLoader(Sentences(48, seed=0), batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    logs = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        logs.append({"loss": loss.item()})
    accelerator.save_model(model, "saved")
    accelerator.wait_for_everyone()
    return logs


if __name__ == "__main__":
    records = {"trainer": train, "accelerate": loop}[sys.argv[1]](sys.argv[2])
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        saved = {name: weight.norm().item() for name, weight in sorted(load_file("saved/model.safetensors").items())}
        with open("records.json", "w") as file:
            json.dump([*records, saved], file)
