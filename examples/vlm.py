"""Pictures and texts on packs: a LLaVA of transformers, in a training loop of one's own.

    python examples/vlm.py         # needs transformers

A picture becomes 16 patches of a vision tower, which take the places of the 16 `<|image|>` tokens
before its caption. Captions and texts without pictures share packs, and attention stays inside each
sample. It prints how the loss falls, resumes from the middle with other workers, and checks that
all losses are bit-equal.
"""

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from draw_data import prepare_captions_and_texts
from tiny_models import make_llava, train_tokenizer

from energon_lite import (
    CaptioningSample,
    DefaultTaskEncoder,
    Packing,
    SampleDecoder,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.loss import weighted_causal_lm_loss

FOLDER = Path("demo_data/vlm")
BLEND = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {weight: 3, path: ./captions}
      - {weight: 1, path: ./texts, loss_weight: 0.5}
  val: {path: ./captions}
"""
IMAGE, PATCHES = "<|image|>", 16  # a token for each patch of a picture, 8 x 8 of 32 x 32 pixels


class VisionEncoder(DefaultTaskEncoder):
    decoder = SampleDecoder(image_decode="bytes")  # until the samples of a pack are chosen
    pictures = SampleDecoder(image_decode="torchrgb", image_size=32)
    packing = Packing(capacity={"tokens": 256, "pictures": 8}, overlong="drop")

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    @stateless
    def preencode_sample(self, sample: CaptioningSample | TextSample) -> dict[str, Any]:
        """Only the tokens: packs are chosen by them, and a buffered picture stays a JPEG."""
        is_picture = isinstance(sample, CaptioningSample)
        text = IMAGE * PATCHES + sample.caption if is_picture else sample.text
        tokens = torch.tensor(self.tokenizer.encode(text + self.tokenizer.eos_token))
        mask = tokens != self.tokenizer.convert_tokens_to_ids(IMAGE)
        images = [sample.image] if is_picture else []
        return {"__key__": sample.__key__, "input_ids": tokens, "loss_mask": mask, "images": images}

    def sample_length(self, sample: dict[str, Any]) -> dict[str, int]:
        return {"tokens": len(sample["input_ids"]), "pictures": len(sample["images"])}

    @stateless
    def postencode_sample(self, sample: dict[str, Any]) -> dict[str, Any]:
        images = [2 * self.pictures.decode("jpg", jpeg) - 1 for jpeg in sample["images"]]
        return {**sample, "images": images}


def make_loader(tokenizer: Any, num_workers: int) -> Any:
    dataset = get_train_dataset(
        FOLDER / "blend.yaml",
        batch_size=4,  # packs
        task_encoder=VisionEncoder(tokenizer),
        worker_config=WorkerConfig.default_worker_config(num_workers, num_streams=4),
    )
    return get_savable_loader(dataset)


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Without a mask and a cache, the model keeps samples apart by their `position_ids`."""
    outputs = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        pixel_values=torch.stack(batch.images) if batch.images else None,
        use_cache=False,
    )
    return weighted_causal_lm_loss(outputs, batch.labels, weights=batch.loss_weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # the model is too small to gain from more
    tokenizer = train_tokenizer(prepare_captions_and_texts(FOLDER, 400))
    (FOLDER / "blend.yaml").write_text(BLEND)
    model = make_llava(tokenizer)  # or .from_pretrained(...)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = make_loader(tokenizer, num_workers=2)

    def train(num_steps: int) -> list[float]:
        losses = []
        for batch in islice(loader, num_steps):
            loss = loss_of(model, batch)  # on a GPU: batch.to("cuda", non_blocking=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first = train(steps // 2)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    torch.save({name: part.state_dict() for name, part in parts.items()}, FOLDER / "half.pt")
    second = train(steps // 2)
    print(f"loss {first[0]:.2f} ... {first[-1]:.2f} ... {second[-1]:.2f}")
    print(loader.stats())

    loader = parts["loader"] = make_loader(tokenizer, num_workers=0)
    for name, state in torch.load(FOLDER / "half.pt").items():
        parts[name].load_state_dict(state)
    assert train(steps // 2) == second
    print(f"resumed at step {steps // 2} without workers: all losses are bit-equal")


if __name__ == "__main__":
    main()
