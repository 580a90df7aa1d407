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


def test_class_in_place_of_an_instance_is_an_error(texts) -> None:
    wrong: list[tuple[Any, str]] = [
        (DefaultTaskEncoder, r"is a class; pass an instance: DefaultTaskEncoder\(\)"),
        (method, "is no task encoder"),
        ("DefaultTaskEncoder", "is no task encoder"),
    ]
    for encoder, text in wrong:
        with pytest.raises(TypeError, match=text):
            get_train_dataset(
                texts, batch_size=2, shuffle_buffer_size=None, worker_config=CONFIG,
                task_encoder=encoder,
            )  # fmt: skip


@pytest.mark.parametrize("name", ["_load_dataset", "cache"])
def test_override_that_nothing_would_call_is_refused(name) -> None:
    with pytest.raises(TypeError, match=f"Mine has {name}, which is not called"):
        checked_encoder(encoder_with(**{name: method}))


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"batch_size": "4"}, TypeError, "batch_size='4' must be a whole number.*quotes"),
        ({"batch_size": 2.0}, TypeError, r"batch_size=2\.0 must be a whole number"),
        ({"batch_size": True}, TypeError, "batch_size=True must be a whole number"),
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
    ],
)
def test_sizes_that_cannot_be_are_named(texts, settings, error, text) -> None:
    settings = {"batch_size": 2, "shuffle_buffer_size": 5, **settings}
    with pytest.raises(error, match=text):
        get_train_dataset(texts, worker_config=CONFIG, **settings)


@pytest.mark.parametrize("config", [4, WorkerConfig, WorkerConfig.default_worker_config])
def test_object_that_is_no_worker_config_is_an_error(texts, config) -> None:
    with pytest.raises(TypeError, match=r"is no WorkerConfig; pass WorkerConfig\(rank="):
        get_train_dataset(texts, worker_config=config, batch_size=2, shuffle_buffer_size=None)


@pytest.mark.parametrize(("limit", "error"), [("3", TypeError), (-1, ValueError)])
def test_limit_of_validation_is_checked_too(texts, limit, error) -> None:
    with pytest.raises(error, match="limit="):
        get_val_dataset(texts, split_part="train", batch_size=2, limit=limit, worker_config=CONFIG)
