"""The metadatasets of Energon's page on blending: weights, nested files, tags, whole epochs.

    python examples/energon_blending.py         # needs nothing else

Megatron-Energon reads the same YAML files. Three prepared sets are blended by weights, two of them
in a second file; by tags (`subflavors`) the task encoder knows where a sample is from. The script
checks that the shares are those of the weights, that an epoch of `blend_epochized` has each sample
as often as asked, and that validation reads each sample once.
"""

from collections import Counter
from itertools import islice
from pathlib import Path

from draw_data import prepare_texts, random_texts

from energon_lite import (
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)

FOLDER = Path("demo_data/energon")
SETS = {
    "wiki": "the river rises in the hills",
    "chat": "hello how are you",
    "code": "def ( ) : = +",
}
HEAD = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
FILES = {
    # Of ten samples six are from wiki, and four from the other file: three of chat, one of code.
    "blend.yaml": """
  train:
    blend:
      - {weight: 6, path: ./wiki, subflavors: {kind: prose}}
      - {weight: 4, path: ./dialogue.yaml, subflavors: {kind: dialogue}}
  val: {path: ./dialogue.yaml}
""",
    # Tags of the outer file win over those of the inner one; other tags are kept.
    "dialogue.yaml": """
  train:
    blend:
      - {weight: 3, path: ./chat, subflavors: {kind: speech, source: web}}
      - {weight: 1, path: ./code, subflavors: {source: repositories}}
  val:
    blend: [{path: ./chat}, {path: ./code}]
""",
    # Not weights but repetitions: an epoch has wiki once, chat twice, and half of code.
    "epochs.yaml": """
  train:
    blend_epochized:
      - {repetitions: 1, path: ./wiki}
      - {repetitions: 2, path: ./chat}
      - {repetitions: 0.5, path: ./code}
""",
}


class TaggingEncoder(DefaultTaskEncoder):
    """Tags decide how a sample is encoded: here, what is put before its text."""

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        tags = sample.__subflavors__
        prefix = f"<{tags['kind']}> " if "kind" in tags else ""
        return TextSample.derive_from(sample, text=prefix + sample.text)


SETTINGS = {
    "batch_size": 10,
    "task_encoder": TaggingEncoder(),
    "worker_config": WorkerConfig.default_worker_config(num_workers=0, num_streams=2),
}


def main() -> None:
    for name, words in SETS.items():
        prepare_texts(FOLDER / name, random_texts(words, 80))  # 70 for train, 10 for val
    for name, text in FILES.items():
        (FOLDER / name).write_text(HEAD + text)

    loader = get_savable_loader(get_train_dataset(FOLDER / "blend.yaml", **SETTINGS))
    batches = list(islice(loader, 50))
    tags = [tuple(tag.values()) for batch in batches for tag in batch.__subflavors__]
    print(loader.stats())
    print("tags of 500 samples:", dict(Counter(tags)))
    print("a text:", batches[0].text[0][:40])
    asked = {"wiki/train": 0.6, "chat/train": 0.3, "code/train": 0.1}
    for name, figures in loader.stats().items():
        assert abs(figures.actual_share - asked[name]) < 0.02

    loader = get_loader(get_train_dataset(FOLDER / "epochs.yaml", repeat=False, **SETTINGS))
    for _ in range(2):
        assert sum(len(batch.__key__) for batch in loader) == 70 + 2 * 70 + 35
    epochs = {name: figures.epochs for name, figures in loader.stats().items()}
    assert list(epochs.values()) == [2, 4, 1]
    print("epochs of the sources in two epochs of 245 samples:", epochs)

    val_loader = get_loader(get_val_dataset(FOLDER / "blend.yaml", **SETTINGS))
    assert sum(len(batch.__key__) for batch in val_loader) == 20
    print("validation: 10 samples of chat and 10 of code, once each; weights do not count there")


if __name__ == "__main__":
    main()
