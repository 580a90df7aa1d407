"""A training run on tars, with a blend, a cooker, packs and workers, needs no module of extras/."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import text_set

from .source_tree import PACKAGE

RUN = """
import json, sys

import torch
from energon_lite import (
    Cooker, DefaultTaskEncoder, Packing, TextSample, WorkerConfig, basic_sample_keys, cooker,
    get_savable_loader, get_train_dataset, stateless,
)

def modules():
    return sorted(name for name in sys.modules if name.split(".")[0] == "energon_lite")

@cooker
def cook(sample: dict) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])

class Encoder(DefaultTaskEncoder):
    cookers = [Cooker(cook)]
    packing = Packing(capacity=64)

    @stateless
    def encode_sample(self, sample):
        return {"__key__": sample.__key__, "input_ids": torch.tensor(list(sample.text.encode()))}

    def sample_length(self, sample):
        return len(sample["input_ids"])

    def encode_batch(self, batch):
        return batch.input_ids, modules()

def loader():
    config = WorkerConfig(rank=0, world_size=1, num_workers=1, start_method=sys.argv[2])
    dataset = get_train_dataset(
        sys.argv[1], batch_size=2, task_encoder=Encoder(), worker_config=config,
        shuffle_buffer_size=10, max_samples_per_sequence=10,
    )
    return get_savable_loader(dataset)

if __name__ == "__main__":
    first = loader()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = json.loads(json.dumps(first.save_state_rank()))
    second = loader()
    second.restore_state_rank(state)
    resumed = [next(batch) for batch in [iter(second)] * 3]
    found = {*modules(), *(name for _, names in resumed for name in names)}
    print(json.dumps(sorted(found)))
"""


@pytest.fixture(scope="module")
def metadataset_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("core")
    text_set(root / "typed", 60)
    crude = text_set(root / "crude", 60)
    (crude / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )
    (root / "blend.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        "    - {weight: 2, path: typed}\n    - {weight: 1, path: crude}\n"
    )
    return root / "blend.yaml"


@pytest.mark.processes
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_training_run_on_tars_imports_core_modules_only(
    metadataset_file: Path, start_method: str, tmp_path: Path
) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    done = subprocess.run(
        [sys.executable, str(script), str(metadataset_file), start_method],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = set(json.loads(done.stdout.splitlines()[-1]))
    assert "energon_lite.loader.loader" in found
    assert [name for name in sorted(found) if name.startswith(f"{PACKAGE}.extras.")] == []
