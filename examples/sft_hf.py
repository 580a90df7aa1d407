"""Chats: loss on the answers only, packs, the Trainer of transformers, resume in mid-epoch.

    python examples/sft_hf.py      # needs transformers, accelerate, jinja2

The data are lines of a JSONL file, each with `messages` as OpenAI and Hugging Face have them. It
prints how the loss of the answers falls, resumes from the middle with other workers, checks that
all weights end bit-equal, and asks the model. docs/chat_data.md explains the steps.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from draw_data import write_chats
from tiny_models import make_llama, train_tokenizer
from transformers import Trainer, TrainingArguments

from energon_lite import (
    Cooker,
    DefaultTaskEncoder,
    LoaderCallback,
    Packing,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
    stateless,
)

FOLDER = Path("demo_data/sft")
CHATS = FOLDER / "chats.jsonl"


class ChatEncoder(DefaultTaskEncoder):
    """From a line of the file to tokens, and to packs that a model takes as they are."""

    packing = Packing(capacity=256, output="huggingface", overlong="truncate")

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.cookers = [Cooker(self.cook)]

    @stateless
    def cook(self, line: dict[str, Any]) -> dict[str, Any]:
        chat = self.tokenizer.apply_chat_template(
            line["json"]["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        tokens, is_answer = torch.tensor(chat["input_ids"]), torch.tensor(chat["assistant_masks"])
        return {**basic_sample_keys(line), "input_ids": tokens, "loss_mask": is_answer}

    def sample_length(self, sample: dict[str, Any]) -> int:
        return len(sample["input_ids"])


class PackTrainer(Trainer):
    """A Trainer whose batches are those of our loader."""

    def get_train_dataloader(self) -> Any:
        # `train_dataset` is what the Trainer was given; `prepare` lets the loader move its batches.
        return self.accelerator.prepare(get_savable_loader(self.train_dataset))


def train(tokenizer: Any, steps: int, num_workers: int, resume: str | None = None) -> PackTrainer:
    arguments = TrainingArguments(
        str(FOLDER / "run"), max_steps=steps, save_steps=steps // 2, logging_steps=steps // 4,
        learning_rate=3e-3, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    dataset = get_train_dataset(
        CHATS,
        batch_size=4,  # packs
        virtual_epoch_length=30,  # what the Trainer calls an epoch; the data have no end
        task_encoder=ChatEncoder(tokenizer),
        worker_config=WorkerConfig.default_worker_config(num_workers, num_streams=4),
    )
    model = make_llama(tokenizer)  # or AutoModelForCausalLM.from_pretrained(...)
    trainer = PackTrainer(model, arguments, train_dataset=dataset, callbacks=[LoaderCallback()])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160, help="8 or more")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # the model is too small to gain from more
    write_chats(CHATS, 600)
    prepare_dataset(CHATS)  # or: energon-lite prepare chats.jsonl
    tokenizer = train_tokenizer(CHATS.read_text().splitlines())

    whole = train(tokenizer, steps, num_workers=2)
    losses = [log["loss"] for log in whole.state.log_history if "loss" in log]
    assert losses[-1] < losses[0]
    print("loss of the answers:", *(f"{loss:.2f}" for loss in losses))

    resumed = train(tokenizer, steps, 0, resume=f"{FOLDER}/run/checkpoint-{steps // 2}")
    for name, weights in whole.model.state_dict().items():
        assert torch.equal(weights, resumed.model.state_dict()[name]), name
    print(f"resumed at step {steps // 2} without workers: all weights are bit-equal at the end")

    question = [{"role": "user", "content": "What is two and three?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    answer = whole.model.generate(**prompt, max_new_tokens=10, do_sample=False)
    print(tokenizer.decode(answer[0]))


if __name__ == "__main__":
    main()
