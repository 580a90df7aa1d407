"""What Energon's documentation shows under "advanced": each as a user types it."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from megatron.energon import (
    CaptioningSample,
    Cooker,
    DefaultTaskEncoder,
    TextSample,
    VQASample,
    WorkerConfig,
    basic_sample_keys,
    log_exception,
    reraise_exception,
    stateless,
)

from .energon_data import (
    before_and_after,
    caption,
    class_of,
    config,
    crude,
    encoder,
    keys_of,
    metadataset,
    numbered,
    png,
    prepared,
    shuffled,
    texts,
    val_set,
    validated,
    write_shards,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Datasets of 30 texts, `a`, and of 40, `b`; read only."""
    root = tmp_path_factory.mktemp("docs")
    shards = json.dumps([f"parts/data-{i}.tar" for i in range(3)])
    split = f"split_parts:\n  train: {shards}\n  first: ['parts/data-{{0..1}}.tar']\n"
    (texts(root / "a", 30) / ".nv-meta/split.yaml").write_text(split)
    texts(root / "b", 40)
    return root


@pytest.fixture
def meta(root, tmp_path):
    """Writes a metadataset of `a` and `b`."""
    (tmp_path / "a").symlink_to(root / "a")
    (tmp_path / "b").symlink_to(root / "b")
    return lambda **splits: metadataset(tmp_path / "m.yaml", **splits)


def test_crude_data_is_cooked_by_subflavor(tmp_path):
    crude(tmp_path / "a", 10, soup_drink="soup")
    crude(tmp_path / "b", 10, soup_drink="drink")
    blend = [{"weight": 1, "path": "a"}, {"weight": 1, "path": "b"}]
    path = metadataset(tmp_path / "m.yaml", train={"blend": blend})

    @stateless
    def cook_captioning(sample: dict) -> CaptioningSample:
        return CaptioningSample(
            **basic_sample_keys(sample), image=sample["jpg"], caption=sample["json"]["caption"]
        )

    @stateless
    def cook_vqa(sample: dict) -> VQASample:
        return VQASample(
            **basic_sample_keys(sample), image=sample["jpg"], context=sample["txt"], answers=["a"]
        )

    class MyTaskEncoder(DefaultTaskEncoder):
        cookers = [  # noqa: RUF012 as users type it
            Cooker(cook_captioning, has_subflavors={"soup_drink": "soup"}),
            Cooker(cook_vqa, has_subflavors={"soup_drink": "drink"}),
        ]

        def batch(self, samples):
            return [type(s) for s in samples]

    loader = shuffled(path, task_encoder=MyTaskEncoder())
    kinds = [kind for batch in itertools.islice(loader, 10) for kind in batch]
    assert set(kinds) == {CaptioningSample, VQASample}
    assert abs(kinds.count(VQASample) - 10) <= 5


@dataclass
class Packed:
    """A pack, as Energon's packing page has it."""

    __key__: str
    __restore_key__: tuple
    __subflavors__: dict
    texts: list
    lengths: torch.Tensor


class PackingEncoder(DefaultTaskEncoder):
    """The page's encoder: its selection sorts and pops the list that it is given."""

    def __init__(self, max_length):
        super().__init__()
        self.max_length = max_length

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"{sample.text}{random.random():.3f}")

    def select_samples_to_pack(self, samples):
        samples.sort(key=lambda sample: len(sample.text))
        groups = []
        while len(samples) > 0:
            batch = []
            length = 0
            while len(samples) > 0 and length + len(samples[0].text) < self.max_length:
                sample = samples.pop(0)
                batch.append(sample)
                length += len(sample.text)
            groups.append(batch)
        return groups

    @stateless
    def pack_selected_samples(self, samples):
        return Packed(
            __key__=",".join(sample.__key__ for sample in samples),
            __restore_key__=(),
            __subflavors__={},
            texts=[sample.text for sample in samples],
            lengths=torch.tensor([len(sample.text) for sample in samples]),
        )

    def batch(self, samples):
        return {"__key__": [s.__key__ for s in samples], "texts": [s.texts for s in samples]}


def test_packing_with_a_selection_that_pops_is_resumed_exactly(root):
    def make(**settings):
        packing = {"packing_buffer_size": 10, "task_encoder": PackingEncoder(60)}
        return shuffled(root / "b", 1, **packing, **settings)

    first, expected, found = before_and_after(make, 7, 12)
    assert all(len(pack) >= 2 for batch in first for pack in batch["texts"])
    assert found == expected
    whole = [key for pack in keys_of(make(repeat=False)) for key in pack.split(",")]
    assert sorted(whole) == numbered(range(40))


def test_batches_are_grouped_also_with_a_batch_size_for_each_group(tmp_path):
    sizes = [(8, 12), (12, 8), (12, 8)]
    write_shards(tmp_path / "ds", 30, lambda n: {**caption(n), "jpg": png(n, sizes[n % 3])})
    field_map = {"image": "jpg", "caption": "txt"}
    settings = {"sample_type": class_of("CaptioningSample"), "field_map": field_map}
    path = prepared(tmp_path / "ds", settings)

    def by_ratio(self, sample):
        aspect_ratio = sample.image.shape[1] / sample.image.shape[2]
        return "large" if aspect_ratio > 1 else "small", None

    def own_size(self, sample):
        return ("tall", 2) if sample.image.shape[1] > sample.image.shape[2] else ("wide", 5)

    for group, size, expected in (
        (by_ratio, 4, {(12, 4), (12, 2), (8, 4)}), (stateless(own_size), None, {(12, 2), (8, 5)}),
    ):  # fmt: skip
        hooks = encoder(batch_group_criterion=group)
        batches = list(shuffled(path, size, task_encoder=hooks, repeat=False))
        assert {(batch.image.shape[2], len(batch.image)) for batch in batches} == expected
        assert len(keys_of(batches)) == 30


# -------------------------------------------------------------- epochs, splits, subsets, scaling


def test_epochized_blend_repeats_each_dataset(meta):
    a = {"repetitions": 3, "path": "a", "subflavors": {"from": "a"}}
    path = meta(train={"blend_epochized": [a, {"path": "b", "subflavors": {"from": "b"}}]})
    loader = shuffled(path, 5, repeat=False)
    for _ in range(2):
        flavors = [flavor["from"] for batch in loader for flavor in batch.__subflavors__]
        assert (flavors.count("a"), flavors.count("b")) == (90, 40)


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (["0%", "50%"], None, range(10)),
        ([5, 15], None, range(5, 15)),
        ([15, "end"], None, range(15, 20)),
        (["25%", "75%"], ["0%", "50%"], range(5, 10)),
        ([4, 14], ["50%", "100%"], range(9, 14)),
    ],
)
def test_subsets(meta, inner, outer, expected):
    leaf = {"path": "a", "split_part": "first", "subset": {"range": inner}}
    path = meta(val={"blend": [leaf], "subset": {"range": outer}} if outer else leaf)
    assert keys_of(validated(path, 4)) == numbered(expected)


def test_splits_of_a_metadataset_name_parts_and_subsets_of_others(meta):
    part = {"path": "a", "split_part": "train"}
    path = meta(
        train={"path": "a", "subset": {"range": ["0%", "80%"]}},
        val={**part, "subset": {"range": ["80%", "100%"]}},
        test={"path": "a", "split_part": "first"},
    )
    assert len(list(shuffled(path, None, repeat=False))) == 24
    assert keys_of(validated(path)) == numbered(range(24, 30))
    assert len(validated(path, split_part="test")) == 20


def test_reproducible_scaling_yields_equal_global_batches(root):
    def global_batches(world_size, workers):
        places = [
            config(rank=rank, world_size=world_size, num_workers=workers)
            for rank in range(world_size)
        ]
        loaders = [shuffled(root / "b", worker_config=place) for place in places]
        num = 2 // world_size
        return [
            sorted(key for loader in loaders for key in keys_of(itertools.islice(loader, num)))
            for _ in range(6)
        ]

    assert global_batches(2, 1) == global_batches(1, 2)


@pytest.mark.parametrize("handler", [log_exception, reraise_exception])
def test_handlers_of_energon_in_the_worker_config(root, handler):
    def encode_sample(self, sample):
        if sample.__key__ == "000001":
            raise ValueError("broken")
        return sample

    place = WorkerConfig(
        rank=0, world_size=1, num_workers=0,
        global_error_handler=handler, restore_error_handler=reraise_exception,
    )  # fmt: skip
    settings = {"worker_config": place, "split_part": "first"}
    settings["task_encoder"] = encoder(encode_sample=encode_sample)
    if handler is reraise_exception:
        with pytest.raises(ValueError, match="broken"):
            validated(root / "a", **settings)
    else:
        assert keys_of(validated(root / "a", **settings)) == numbered([0, *range(2, 20)])
    assert len(val_set(root / "a", **settings)) == 20


def _run_rank(global_rank, data, folder):
    """Two data parallel ranks of two tensor parallel ones each; global ranks 0 and 2 save."""
    distributed = torch.distributed
    meet = f"file://{folder}/meet"
    distributed.init_process_group("gloo", init_method=meet, rank=global_rank, world_size=4)
    data_rank, tensor_rank = divmod(global_rank, 2)
    group = [distributed.new_group(ranks=[0, 2]), distributed.new_group(ranks=[1, 3])][tensor_rank]
    world = distributed.get_world_size(group)
    place = config(rank=data_rank, world_size=world, data_parallel_group=group)
    first, resumed = (shuffled(data, worker_config=place) for _ in range(2))
    keys_of(itertools.islice(first, 3))
    if tensor_rank == 0:
        torch.save(first.save_state_rank(), f"{folder}/dataloader_rank{data_rank}.pt")
    distributed.barrier()
    state = torch.load(f"{folder}/dataloader_rank{data_rank}.pt", weights_only=False)
    resumed.restore_state_rank(state)
    both = [keys_of(itertools.islice(each, 3)) for each in (first, resumed)]
    Path(f"{folder}/{global_rank}.json").write_text(json.dumps(both))
    distributed.destroy_process_group()


@pytest.mark.processes
def test_ranks_of_two_dimensions_share_states(root, tmp_path):
    start = torch.multiprocessing.start_processes
    start(_run_rank, args=(str(root / "b"), str(tmp_path)), nprocs=4, start_method="fork")
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert all(before == after for before, after in found)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert not {*found[0][0]} & {*found[2][0]}
