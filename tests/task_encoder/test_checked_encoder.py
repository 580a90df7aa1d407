"""What is said about a task encoder and its settings before anything is read."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from energon_lite import DefaultTaskEncoder, WorkerConfig, get_train_dataset, get_val_dataset
from energon_lite.task_encoder.base import checked_encoder

NUM_TEXTS = 6
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


def encoder_with(**names: Any) -> Any:
    return type("Mine", (DefaultTaskEncoder,), names)()


def method(self: Any, *arguments: Any) -> Any:
    return arguments


MISSPELT = {
    "encode_samples": "encode_sample", "encodesample": "encode_sample",
    "encode_smaple": "encode_sample", "encodeSample": "encode_sample",
    "pre_encode_sample": "preencode_sample", "select_sample_to_pack": "select_samples_to_pack",
    "batch_group_criteria": "batch_group_criterion", "encode_batches": "encode_batch",
    "build_train_dataset": "build_train_datasets", "batchs": "batch",
}  # fmt: skip


@pytest.mark.parametrize(("name", "meant"), MISSPELT.items())
def test_misspelt_hook_warns_with_the_closest_name(name, meant) -> None:
    with pytest.warns(UserWarning, match=f"Mine has '{name}', .* did you mean '{meant}'"):
        checked_encoder(encoder_with(**{name: method}))


def test_misspelt_setting_warns_too() -> None:
    with pytest.warns(UserWarning, match="'cooker'.* did you mean 'cookers'"):
        checked_encoder(encoder_with(cooker=()))


# Helpers that real task encoders have beside their hooks.
HELPERS = """
    encode_image encode_text encode_captioning encode_vqa encode_interleaved encode_any encode
    encode_batch_vqa encode_sample_vqa encode_multi_choice decode tokenize tokenizer tokenizers
    image_transform process_images collate collate_fn pad_batch batch_size batches pack_samples
    select_packs greedy_knapsack apply_prompt_templates get_visual_transform get_num_tiles
    sample_weights build_tokenizer build_prompt build_transforms batched packer length lengths
    sample_tokens text_length state_dict load_state_dict reset setup num_tokens samples sample
"""


def test_no_helper_of_real_task_encoders_is_taken_for_a_misspelt_hook() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked_encoder(encoder_with(**dict.fromkeys(HELPERS.split(), method)))
        checked_encoder(encoder_with(_encode_samples=method))
        # Beside the hook itself such a name is a helper.
        checked_encoder(encoder_with(encode_sample=method, encode_samples=method))


INT = "must be an integer"
NO_CONFIG = r"is no WorkerConfig; pass WorkerConfig\(rank="
# Settings of `get_train_dataset`, the error and its words.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batch_size": "4"}, TypeError, f"batch_size='4' {INT}.*int\\("),
    ({"batch_size": 2.0}, TypeError, rf"batch_size=2\.0 {INT}"),
    ({"batch_size": True}, TypeError, f"batch_size=True {INT}"),
    ({"batch_drop_last": "false"}, TypeError, "batch_drop_last='false' must be True or False"),
    ({"repeat": 0}, ValueError, "repeat=0 must be at least 1, True for no end"),
    ({"repeat": "false"}, TypeError, f"repeat='false' {INT}"),
    ({"repeat": None}, TypeError, f"repeat=None {INT}"),
    ({"parallel_shard_iters": "2"}, TypeError, f"parallel_shard_iters='2' {INT}"),
    ({"shuffle": True}, TypeError, "'shuffle': use .*shuffle_buffer_size=n"),
    ({"drop_last": True}, TypeError, "'drop_last': use batch_drop_last=True"),
    ({"num_workers": 2}, TypeError, r"'num_workers': use .*default_worker_config\(num_workers=n\)"),
    ({"seed": 1}, TypeError, r"'seed': use WorkerConfig\(seed_offset=n\)"),
    ({"num_epochs": 2}, TypeError, r"'num_epochs': use get_train_dataset\(repeat=n\)"),
    ({"batch_size": 0}, ValueError, "batch_size=0 must be at least 1, or None"),
    ({"batch_size": -1}, ValueError, "batch_size=-1 must be at least 1"),
    ({"packing_buffer_size": 0}, ValueError, "packing_buffer_size=0 must be at least 1"),
    ({"packing_buffer_size": "8"}, TypeError, "packing_buffer_size='8'"),
    ({"shuffle_buffer_size": -2}, ValueError, "shuffle_buffer_size=-2 must be at least 0"),
    ({"shuffle_buffer_size": 1e3}, TypeError, r"shuffle_buffer_size=1000\.0"),
    ({"max_samples_per_sequence": 0}, ValueError, "max_samples_per_sequence=0"),
    ({"virtual_epoch_length": "10"}, TypeError, "virtual_epoch_length='10'"),
    ({"virtual_epoch_length": -1}, ValueError, "virtual_epoch_length=-1 must be at least 0"),
    ({"packing_buffer_size": 5}, ValueError, "packing_buffer_size=5, but"),
    ({"shuffle_over_epochs_multiplier": 0}, ValueError, "multiplier=0"),
    *(({"worker_config": config}, TypeError, NO_CONFIG) for config in (
        4, WorkerConfig, WorkerConfig.default_worker_config)),
    ({"task_encoder": DefaultTaskEncoder}, TypeError,
     r"is a class; pass an instance: DefaultTaskEncoder\(\)"),
    ({"task_encoder": method}, TypeError, "is no task encoder"),
    ({"task_encoder": "DefaultTaskEncoder"}, TypeError, "is no task encoder"),
    *(({"task_encoder": encoder_with(**{name: method})}, TypeError,
       f"Mine has {name}, which is not called") for name in ("_load_dataset", "cache")),
    ({"limit": "3"}, TypeError, "limit="),  # of validation
    ({"limit": -1}, ValueError, "limit="),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "error", "words"), REFUSED)
def test_settings_that_cannot_be_are_named(texts, settings, error, words) -> None:
    get, own = get_train_dataset, {"shuffle_buffer_size": 5}
    if "limit" in settings:
        get, own = get_val_dataset, {"split_part": "train"}
    with pytest.raises(error, match=words):
        get(texts, **{"batch_size": 2, "worker_config": CONFIG, **own, **settings})
