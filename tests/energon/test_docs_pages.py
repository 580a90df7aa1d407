"""All examples of Energon's documentation, by page, and what runs each here."""

from __future__ import annotations

import ast
import itertools
import json
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch
from megatron.energon import (
    Batch,
    CaptioningSample,
    DefaultTaskEncoder,
    SampleDecoder,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    log_exception,
    reraise_exception,
    stateless,
)

from .energon_data import (
    caption,
    captions,
    class_of,
    keys_of,
    metadataset,
    prepared,
    texts,
    train_set,
    val_set,
    write_shards,
)  # fmt: skip
from .test_docs_sources import command, keyed, picture_side, read_all, text_side

# Page -> (example, the test that runs it). Where an example cannot run here, "" instead of a test.
EXAMPLES: dict[str, list[tuple[str, str]]] = {
    "basic/quickstart": [
        ("load a dataset", "test_quickstart_trains_on_captions"),
        ("prepare, answering questions",
         "test_data_prep_writes_with_shard_writer_and_prepares_from_the_command_line"),
        ("print a sample", "test_task_encoder_without_batching"),
        ("batch size", "test_quickstart_trains_on_captions"),
        ("metadataset of coyo and coco", "test_metadataset_blends_by_weight"),
        ("WorkerConfig by hand", "test_parallel_ranks_share_an_epoch"),
        ("save and restore",
         "test_quickstart_with_default_worker_config_and_savable_loader"),
    ],
    "basic/data_prep": [
        ("ShardWriter",
         "test_data_prep_writes_with_shard_writer_and_prepares_from_the_command_line"),
        ("split by ratio",
         "test_data_prep_writes_with_shard_writer_and_prepares_from_the_command_line"),
        ("split by prefix", "test_parts_are_split_by_prefix_and_by_folder"),
        ("split by folder", "test_parts_are_split_by_prefix_and_by_folder"),
        ("sample loader of OCR data", "test_ocr_data_with_a_sample_loader"),
        ("dataset.yaml with a field map", "test_data_prep_field_map_reads_nested_json"),
        ("split.yaml, with excludes", "test_shards_and_samples_are_excluded"),
        (".info.yaml", "test_shards_and_samples_are_excluded"),
        ("polylithic dataset", "test_auxiliary_dataset_is_read_by_a_cooker"),
        ("JSONL dataset", "test_jsonl_is_prepared_and_read_alone"),
        ("JSONL in a metadataset", "test_jsonl_in_a_metadataset_with_subflavors"),
        ("media metadata of a WebDataset", "test_media_metadata_of_the_primary_dataset"),
        ("media metadata of a folder", "test_media_metadata_of_a_folder"),
    ],
    "basic/data_decoding": [
        ("decoder of the task encoder", "test_decoding_pictures_as_pil"),
        ("arguments of old versions", "test_decoding_switched_off"),
        ("get_clips", "test_clips_of_a_video"),
        ("get_clips_uniform", "test_clips_of_a_video_at_equal_distances"),
        ("whole videos and sounds", "test_sound_is_decoded"),
    ],
    "basic/task_encoder": [
        ("task encoder of captions", "test_captions_as_batches_of_plain_dataclasses"),
        ("with torchvision's transforms", "test_captions_with_transforms_of_torchvision"),
        ("pre- and postencoding", "test_task_encoder_pre_and_postencodes"),
    ],
    "basic/metadataset": [
        ("blend", "test_metadataset_blends_by_weight"),
        ("train and val part in one blend",
         "test_splits_of_a_metadataset_may_name_others_of_its_parts"),
        ("subflavors", "test_task_encoder_sees_subflavors"),
    ],
    "basic/save_restore": [
        ("per rank: save", "test_save_restore_per_rank_by_torch_save"),
        ("per rank: restore", "test_save_restore_per_rank_by_torch_save"),
        ("on the primary rank: save", "test_save_restore_global"),
        ("on the primary rank: restore", "test_save_restore_global"),
        ("saved together, restored by each", "test_save_restore_global"),
    ],
    "advanced/remote_dataset": [
        ("extras and configuration", ""),
        ("msc:// in get_train_dataset", ""),
        ("dss:// in a metadataset", ""),
    ],
    "advanced/crude_datasets": [
        ("dataset.yaml", "test_data_prep_crude_dataset"),
        ("cooker by subflavor", "test_crude_data_is_cooked_by_subflavor"),
        ("media metadata of the primary dataset", "test_media_metadata_of_the_primary_dataset"),
        ("aux: datasets and folders", "test_auxiliary_folder_of_the_file_system"),
        ("cooker with a source", "test_auxiliary_dataset_is_read_by_a_cooker"),
        ("several sources", "test_several_auxiliary_sources"),
        ("get(name, sample)", "test_auxiliary_dataset_is_read_by_a_cooker"),
        ("need_primary", "test_the_primary_dataset_by_name"),
        ("media metadata of a source", "test_media_metadata_of_an_auxiliary_dataset"),
        ("cache pool of the loader", "test_lazies_are_read_when_a_pack_is_made"),
        ("lazy of a cooker", "test_lazies_are_read_when_a_pack_is_made"),
        ("lazies in pack_selected_samples", "test_lazies_are_read_when_a_pack_is_made"),
        ("to_cache", "test_loaded_data_moves_to_the_cache"),
    ],
    "advanced/custom_sample_loader": [
        ("sample loader and part filter", "test_data_prep_sample_loader_next_to_the_yaml"),
        ("interleaved samples", "test_data_prep_interleaved_sample_of_several_pictures"),
    ],
    "advanced/repro_scaling": [
        ("four ranks, then one", "test_reproducible_scaling_yields_equal_global_batches"),
    ],
    "advanced/packing": [
        ("selecting and packing",
         "test_packing_with_a_selection_that_pops_is_resumed_exactly"),
    ],
    "advanced/grouping": [
        ("by aspect ratio", "test_grouping_by_aspect_ratio"),
        ("a batch size for each group", "test_grouping_with_a_batch_size_for_each_group"),
    ],
    "advanced/joining_datasets": [
        ("two datasets", "test_a_join_makes_samples_of_a_type_of_energon"),
        ("nonmatch", "test_join_where_a_side_may_be_none"),
        ("join inside a blend, with files and subflavors",
         "test_a_join_in_a_blend_names_files_and_subflavors"),
        ("joined type of the user's", "test_a_join_in_a_blend_names_files_and_subflavors"),
    ],
    "advanced/subsets": [
        ("train and val of one split part", "test_subsets_split_one_part_in_two"),
        ("absolute ranges inside percentages", "test_subsets"),
    ],
    "advanced/epochized_blending": [
        ("blend_epochized", "test_epochized_blend_repeats_each_dataset"),
        ("repeat=False", "test_epochized_blend_repeats_each_dataset"),
    ],
    "advanced/custom_blending": [
        ("build_train_datasets", "test_custom_blending_overrides_build_train_datasets"),
    ],
    "advanced/parallelism": [
        ("data, pipeline and tensor parallel ranks", "test_ranks_of_two_dimensions_share_states"),
    ],
    "advanced/error_handling": [
        ("both handlers in WorkerConfig", "test_handlers_of_energon_in_the_worker_config"),
        ("log_exception", "test_handlers_of_energon_in_the_worker_config"),
        ("reraise_exception", "test_handlers_of_energon_in_the_worker_config"),
        ("handler of the user's", "test_error_handlers_get_sample_and_sources"),
        ("failure_tolerance", "test_failures_in_a_row_are_fatal"),
        ("SkipSample", "test_samples_are_skipped"),
    ],
    "advanced/data_prep_api": [
        ("prepare_dataset from Python",
         "test_data_prep_prepares_from_python_with_a_brace_pattern"),
    ],
    "api/cli": [
        ("prepare", "test_commands_that_look_at_datasets"),
        ("info, lint, preview", "test_commands_that_look_at_datasets"),
    ],
}  # fmt: skip


def test_every_example_has_a_test_but_those_of_remote_storage():
    tests = {
        node.name
        for path in Path(__file__).parent.glob("test_docs_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    named = [(page, test) for page, rows in EXAMPLES.items() for _, test in rows]
    assert [test for _, test in named if test and test not in tests] == []
    assert {page for page, test in named if not test} == {"advanced/remote_dataset"}
    assert (len(named), sum(bool(test) for _, test in named)) == (77, 74)


# ------------------------------------------------------------------------------ data preparation


@pytest.mark.parametrize(
    ("shards", "patterns"),
    [
        (["train_0", "train_1", "val_0"], ["train:shards/train_.*", "val:shards/val_.*"]),
        (["train/0", "train/1", "val/0"], ["train:shards/train/.*", "val:shards/val/.*"]),
    ],
)
def test_parts_are_split_by_prefix_and_by_folder(tmp_path, shards, patterns):
    for number, shard in enumerate(shards):
        keyed(
            tmp_path / str(number), lambda key: caption(int(key)), *f"{number}0 {number}1".split()
        )
        path = tmp_path / "ds" / "shards" / f"{shard}.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / str(number) / "parts" / "data-0.tar").rename(path)
    split = [part for pattern in patterns for part in ("--split-parts", pattern)]
    field_map = ("--field-map", '{"image": "jpg", "caption": "txt"}')
    command("prepare", tmp_path / "ds", *split, "--non-interactive", "--sample-type",
            "CaptioningSample", *field_map)  # fmt: skip
    found = [s.__key__ for s in get_loader(val_set(tmp_path / "ds"))]
    assert found == ["20", "21"]
    assert len(list(get_loader(val_set(tmp_path / "ds", split_part="train")))) == 4


LOADER = """
import torch

def sample_loader(raw: dict) -> dict:
    return dict(
        __key__=raw["__key__"],
        image=raw["jp2"],
        text="\\n".join(line["text"] for line in raw["json"]["lines"]),
        lines_boxes=torch.tensor(
            [
                (line["l"], line["t"], line["r"] - line["l"], line["b"] - line["t"])
                for line in raw["json"]["lines"]
            ],
            dtype=torch.int64,
        ),
        lines_text=[line["text"] for line in raw["json"]["lines"]],
    )

def part_filter(part: str) -> bool:
    return part in ("jp2", "json")
"""


def test_ocr_data_with_a_sample_loader(tmp_path, monkeypatch):
    monkeypatch.setenv("ENERGON_LITE_TRUST", "1")
    lines = [{"l": 1, "t": 2, "r": 9, "b": 7, "text": t} for t in ("CHAPTER", "4")]
    picture = caption(3)["jpg"]
    write_shards(tmp_path / "ds", 2, lambda n: {"jp2": picture, "json": {"lines": lines}})
    loader = "sample_loader.py:sample_loader"
    config = {"sample_type": class_of("OCRSample"), "sample_loader": loader}
    prepared(tmp_path / "ds", {**config, "part_filter": "sample_loader.py:part_filter"})
    (tmp_path / "ds/.nv-meta/sample_loader.py").write_text(LOADER)
    sample = next(iter(get_loader(val_set(tmp_path / "ds", split_part="train"))))
    assert sample.text == "CHAPTER\n4"
    assert sample.lines_boxes.tolist() == [[1, 2, 8, 5]] * 2
    assert sample.words_boxes is None


def test_shards_and_samples_are_excluded(tmp_path):
    ds = texts(tmp_path / "ds", 30)
    meta = ds / ".nv-meta"
    counts = json.loads((meta / ".info.json").read_text())["shard_counts"]
    (meta / ".info.json").unlink()
    (meta / ".info.yaml").write_text(json.dumps({"shard_counts": counts}))
    (meta / "split.yaml").write_text(
        "exclude:\n  - parts/data-2.tar\n  - parts/data-1.tar/000012\n"
        "split_parts:\n  train:\n  - parts/data-0.tar\n  - parts/data-1.tar\n  - parts/data-2.tar\n"
    )
    found = [int(s.__key__) for s in get_loader(val_set(ds, split_part="train"))]
    assert found == [n for n in range(20) if n != 12]


# --------------------------------------------------------------------------------- task encoders


@dataclass
class RawBatch(Batch):
    image: torch.Tensor
    caption: list[str]


@dataclass
class EncodedBatch(Batch):
    images: torch.Tensor
    text_tokens: torch.Tensor


class CaptioningTaskEncoder(
    DefaultTaskEncoder[CaptioningSample, CaptioningSample, RawBatch, EncodedBatch]
):
    decoder = SampleDecoder(image_decode="torchrgb")

    def __init__(self, image_transform):
        super().__init__(batch_type=RawBatch)
        self.image_transform = image_transform

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        sample.image = self.image_transform(sample.image)
        return sample

    def batch(self, samples: list[CaptioningSample]) -> RawBatch:
        return RawBatch.from_samples(samples)

    def encode_batch(self, batch_data: RawBatch) -> EncodedBatch:
        tokens = torch.tensor([len(text) for text in batch_data.caption])
        return EncodedBatch.derive_from(batch_data, images=batch_data.image, text_tokens=tokens)


def first_batch(path, image_transform):
    dataset = get_train_dataset(
        path, batch_size=4, shuffle_buffer_size=100, max_samples_per_sequence=100,
        task_encoder=CaptioningTaskEncoder(image_transform),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )  # fmt: skip
    return next(iter(get_loader(dataset)))


def test_captions_as_batches_of_plain_dataclasses(tmp_path):
    batch = first_batch(captions(tmp_path / "ds"), lambda image: image)
    assert batch.text_tokens.shape == (4,)
    assert len(batch.images) == len(batch.__key__) == 4


def test_captions_with_transforms_of_torchvision(tmp_path):
    transforms = pytest.importorskip("torchvision.transforms", reason="needs torchvision")
    augment = transforms.Compose(
        [transforms.RandomResizedCrop((16, 16)), transforms.RandomHorizontalFlip()]
    )
    batch = first_batch(captions(tmp_path / "ds"), augment)
    assert [image.shape for image in batch.images] == [(3, 16, 16)] * 4


# ------------------------------------------------------------------------- joins and subsets


JOINS = """
from dataclasses import dataclass

from megatron.energon import Sample, TextSample, edataclass

@edataclass
class CaptionOnly(Sample):
    caption: str

@dataclass
class JoinedSample(Sample):
    text1: str
    text2: str

    @staticmethod
    def from_joined(ds1: TextSample, ds2: TextSample) -> "JoinedSample":
        return JoinedSample.derive_from(ds1, text1=ds1.text, text2=ds2.text)
"""


@pytest.fixture
def my_joins(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/my_joins.py").write_text(JOINS)
    monkeypatch.syspath_prepend(tmp_path / "code")
    import_module("my_joins")
    yield
    sys.modules.pop("my_joins")


@pytest.mark.usefixtures("my_joins")
def test_a_join_makes_samples_of_a_type_of_energon(tmp_path):
    keys = ["s1", "s2", "s3"]
    picture_side(tmp_path / "ds1", *keys)
    keyed(tmp_path / "ds2", lambda key: {"txt": f"caption {key}"}, *keys)
    config = {"sample_type": class_of("CaptionOnly", "my_joins"), "field_map": {"caption": "txt"}}
    prepared(tmp_path / "ds2", config)
    path = metadataset(
        tmp_path / "m.yaml",
        train={"join": [{"path": "ds1"}, {"path": "ds2"}], "joiner": class_of("CaptioningSample")},
    )
    command("prepare", path)
    found = read_all(path)
    assert {type(sample) for sample in found.values()} == {CaptioningSample}
    assert {key: sample.caption for key, sample in found.items()} == {
        key: f"caption {key}" for key in keys
    }


@pytest.mark.usefixtures("my_joins")
def test_a_join_in_a_blend_names_files_and_subflavors(tmp_path):
    text_side(tmp_path / "ds1", "s1", "s2")
    text_side(tmp_path / "ds2", "s1", "s2")
    join = {
        "weight": 1,
        "join": [
            {"path": "ds1", "dataset_config": "dataset.yaml"},
            {
                "path": "ds2", "dataset_config": "dataset.yaml", "split_config": "split.yaml",
                "subflavors": {"ds2_extra": 2},
            },
        ],
        "joiner": class_of("JoinedSample", "my_joins"),
        "split_part": "train",
        "subflavors": {"source": "metadataset.yaml"},
    }  # fmt: skip
    path = metadataset(tmp_path / "m.yaml", train={"blend": [join]})
    command("prepare", path)
    for sample in itertools.islice(get_savable_loader(train_set(path)), 4):
        assert (sample.text1, sample.text2) == (f"ds1 {sample.__key__}", f"ds2 {sample.__key__}")
        assert sample.__subflavors__["source"] == "metadataset.yaml"


def test_subsets_split_one_part_in_two(tmp_path):
    texts(tmp_path / "ds", 30)
    path = metadataset(
        tmp_path / "m.yaml",
        train={"path": "ds", "subset": {"range": ["0%", "80%"]}},
        val={"path": "ds", "split_part": "train", "subset": {"range": ["80%", "100%"]}},
    )
    assert len(list(get_loader(train_set(path, repeat=False)))) == 24
    assert keys_of(get_loader(val_set(path))) == [f"{n:06d}" for n in range(24, 30)]


# ------------------------------------------------------------------------ errors, ranks, commands


class BrokenTaskEncoder(DefaultTaskEncoder):
    def encode_sample(self, sample):
        if sample.__key__ == "000001":
            raise ValueError("broken")
        return sample


@pytest.mark.parametrize("handler", [log_exception, reraise_exception])
def test_handlers_of_energon_in_the_worker_config(tmp_path, handler):
    config = WorkerConfig(
        rank=0, world_size=1, num_workers=0,
        global_error_handler=handler, restore_error_handler=reraise_exception,
    )  # fmt: skip
    dataset = get_val_dataset(
        texts(tmp_path / "ds", 5), split_part="train", worker_config=config, batch_size=None,
        task_encoder=BrokenTaskEncoder(),
    )  # fmt: skip
    if handler is reraise_exception:
        with pytest.raises(ValueError, match="broken"):
            list(get_loader(dataset))
    else:
        assert keys_of(get_loader(dataset)) == ["000000", "000002", "000003", "000004"]


def _run_rank(global_rank, folder):
    """Two data parallel ranks of two tensor parallel ones each; global ranks 0 and 2 save."""
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=global_rank, world_size=4
    )
    data_rank, tensor_rank = divmod(global_rank, 2)
    groups = [distributed.new_group(ranks=[0, 2]), distributed.new_group(ranks=[1, 3])]
    config = WorkerConfig(
        rank=data_rank, world_size=distributed.get_world_size(groups[tensor_rank]), num_workers=0,
        data_parallel_group=groups[tensor_rank],
    )  # fmt: skip

    def loader():
        return get_savable_loader(
            get_train_dataset(
                f"{folder}/ds",
                batch_size=2,
                shuffle_buffer_size=10,
                max_samples_per_sequence=10,
                worker_config=config,
            )
        )

    first = loader()
    keys_of(itertools.islice(first, 3))
    if tensor_rank == 0:
        torch.save(first.save_state_rank(), f"{folder}/dataloader_rank{data_rank}.pt")
    distributed.barrier()
    resumed = loader()
    state = torch.load(f"{folder}/dataloader_rank{data_rank}.pt", weights_only=False)
    resumed.restore_state_rank(state)
    both = [keys_of(itertools.islice(each, 3)) for each in (first, resumed)]
    Path(f"{folder}/{global_rank}.json").write_text(json.dumps(both))
    distributed.destroy_process_group()


@pytest.mark.processes
def test_ranks_of_two_dimensions_share_states(tmp_path):
    texts(tmp_path / "ds", 40)
    torch.multiprocessing.start_processes(
        _run_rank, args=(str(tmp_path),), nprocs=4, start_method="fork"
    )
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert all(before == after for before, after in found)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert not {*found[0][0]} & {*found[2][0]}


def test_commands_that_look_at_datasets(tmp_path):
    captions(tmp_path / "ds")
    for name in ("info", "lint"):
        command(name, tmp_path / "ds", "--split-parts=train" if name == "lint" else "--")
    if not os.environ.get("ENERGON_REAL"):  # it divides by zero for pictures of one colour
        command("preview", tmp_path / "ds", "--split-parts", "train", answers="y\nn\n")
