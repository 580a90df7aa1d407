"""Pictures and texts on packs for the Trainer of transformers, by a processor of transformers.

    python examples/vlm_hf.py      # needs transformers, accelerate

The processor makes `input_ids`, `attention_mask` and `pixel_values`, and with
`Packing(output="huggingface")` packs become a dict that the model takes. It prints how the loss
falls.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from draw_data import prepare_captions_and_texts
from tiny_models import make_llava, make_llava_processor, train_tokenizer
from transformers import LlavaProcessor, Trainer, TrainingArguments

from energon_lite import (
    CaptioningSample,
    DefaultTaskEncoder,
    LoaderCallback,
    Packing,
    SampleDecoder,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

FOLDER = Path("demo_data/vlm_hf")
BLEND = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {weight: 3, path: ./captions}
      - {weight: 1, path: ./texts}
"""


class ProcessorEncoder(DefaultTaskEncoder):
    decoder = SampleDecoder(image_decode="pilrgb")
    packing = Packing(capacity=256, output="huggingface", overlong="drop")

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor = processor

    @stateless
    def encode_sample(self, sample: CaptioningSample | TextSample) -> dict[str, Any]:
        if isinstance(sample, CaptioningSample):
            text, images = f"<|image|>{sample.caption}<|end|>", [sample.image]
        else:
            text, images = f"{sample.text}<|end|>", None
        encoded = self.processor(text=text, images=images, return_tensors="pt")
        ids = encoded.pop("input_ids")[0]
        labels = ids.masked_fill(ids == self.processor.image_token_id, -100)
        mask = encoded.pop("attention_mask")[0]
        service = {"__key__": sample.__key__, "__sources__": sample.__sources__}
        # What is left, `pixel_values`, has a row per picture.
        return {**service, "input_ids": ids, "labels": labels, "attention_mask": mask, **encoded}

    def sample_length(self, sample: dict[str, Any]) -> int:
        return len(sample["input_ids"])


class PackTrainer(Trainer):
    """A Trainer whose batches are those of our loader."""

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(get_savable_loader(self.train_dataset))


def train(processor: Any, steps: int, num_workers: int) -> PackTrainer:
    arguments = TrainingArguments(
        str(FOLDER / "run"), max_steps=steps, logging_steps=steps // 4, save_strategy="no",
        learning_rate=3e-3, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    dataset = get_train_dataset(
        FOLDER / "blend.yaml",
        batch_size=2,  # packs
        virtual_epoch_length=30,  # what the Trainer calls an epoch; the data have no end
        task_encoder=ProcessorEncoder(processor),
        worker_config=WorkerConfig.default_worker_config(num_workers, num_streams=4),
    )
    model = make_llava(processor.tokenizer)  # or .from_pretrained(...)
    trainer = PackTrainer(model, arguments, train_dataset=dataset, callbacks=[LoaderCallback()])
    trainer.train()
    return trainer


def load_processor(num_samples: int = 400) -> Any:
    """Writes the data and a processor for them; loads the processor from its files."""
    tokenizer = train_tokenizer(prepare_captions_and_texts(FOLDER, num_samples))
    (FOLDER / "blend.yaml").write_text(BLEND)
    make_llava_processor(tokenizer).save_pretrained(FOLDER / "processor")
    return LlavaProcessor.from_pretrained(FOLDER / "processor")  # or of a name on the Hub


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="8 or more")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # the model is too small to gain from more
    processor = load_processor()

    trainer = train(processor, steps, num_workers=2)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[-1] < losses[0]
    print("loss:", *(f"{loss:.2f}" for loss in losses))


if __name__ == "__main__":
    main()
