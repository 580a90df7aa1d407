"""All examples of Energon's documentation, by page, and what runs each here."""

from __future__ import annotations

import ast
from pathlib import Path

# Page, example, the test that runs it. Where an example cannot run here, "-" instead of a test.
EXAMPLES = """
basic/quickstart: load a dataset: test_quickstart_trains_on_captions
basic/quickstart: prepare, answering questions: {CLI}
basic/quickstart: print a sample: test_quickstart_validates
basic/quickstart: batch size: test_quickstart_trains_on_captions
basic/quickstart: metadataset of coyo and coco: test_metadataset_blends_by_weight
basic/quickstart: WorkerConfig by hand: test_ranks_of_two_dimensions_share_states
basic/quickstart: save and restore: test_save_restore_per_rank_by_torch_save
basic/data_prep: ShardWriter: {CLI}
basic/data_prep: split by ratio: {CLI}
basic/data_prep: split by prefix: test_parts_are_split_by_prefix_and_by_folder
basic/data_prep: split by folder: test_parts_are_split_by_prefix_and_by_folder
basic/data_prep: sample loader of OCR data: test_data_prep_sample_loader_next_to_the_yaml
basic/data_prep: dataset.yaml with a field map: test_data_prep_field_map_reads_nested_json
basic/data_prep: split.yaml, with excludes: test_shards_and_samples_are_excluded
basic/data_prep: .info.yaml: test_shards_and_samples_are_excluded
basic/data_prep: polylithic dataset: {AUX}
basic/data_prep: JSONL dataset: test_jsonl_is_prepared_and_read_alone
basic/data_prep: JSONL in a metadataset: test_jsonl_in_a_metadataset_with_subflavors
basic/data_prep: media metadata of a WebDataset: test_media_metadata_is_read_by_a_cooker
basic/data_prep: media metadata of a folder: test_media_metadata_is_read_by_a_cooker
basic/data_decoding: decoder of the task encoder: test_decoding_pictures
basic/data_decoding: arguments of old versions: test_megatron_lm_multimodal
basic/data_decoding: get_clips: test_clips_of_a_video
basic/data_decoding: get_clips_uniform: test_clips_of_a_video
basic/data_decoding: whole videos and sounds: test_sound_is_decoded
basic/task_encoder: task encoder of captions: test_task_encoder_with_types_for_each_step
basic/task_encoder: with torchvision's transforms: test_task_encoder_with_types_for_each_step
basic/task_encoder: pre- and postencoding: test_results_are_those_of_energon
basic/metadataset: blend: test_metadataset_blends_by_weight
basic/metadataset: train and val part in one blend: {SPLITS}
basic/metadataset: subflavors: test_metadataset_blends_by_weight
basic/save_restore: per rank, save: test_save_restore_per_rank_by_torch_save
basic/save_restore: per rank, restore: test_save_restore_per_rank_by_torch_save
basic/save_restore: on the primary rank, save: test_save_restore_global
basic/save_restore: on the primary rank, restore: test_save_restore_global
basic/save_restore: saved together, restored by each: test_save_restore_global
advanced/remote_dataset: extras and configuration: test_profiles_of_rclone_are_read
advanced/remote_dataset: msc in get_train_dataset: {MSC}
advanced/remote_dataset: dss in a metadataset: -
advanced/crude_datasets: dataset.yaml: test_crude_data_is_cooked_by_subflavor
advanced/crude_datasets: cooker by subflavor: test_crude_data_is_cooked_by_subflavor
advanced/crude_datasets: media metadata of the primary: test_media_metadata_is_read_by_a_cooker
advanced/crude_datasets: aux, datasets and folders: {AUX}
advanced/crude_datasets: cooker with a source: {AUX}
advanced/crude_datasets: several sources: {AUX}
advanced/crude_datasets: get(name, sample): {AUX}
advanced/crude_datasets: need_primary: test_the_primary_dataset_by_name
advanced/crude_datasets: media metadata of a source: test_media_metadata_is_read_by_a_cooker
advanced/crude_datasets: cache pool of the loader: test_lazies_are_read_when_a_pack_is_made
advanced/crude_datasets: lazy of a cooker: test_lazies_are_read_when_a_pack_is_made
advanced/crude_datasets: lazies in pack_selected_samples: test_lazies_are_read_when_a_pack_is_made
advanced/crude_datasets: to_cache: test_lazies_are_read_when_a_pack_is_made
advanced/custom_sample_loader: with a part filter: test_data_prep_sample_loader_next_to_the_yaml
advanced/custom_sample_loader: interleaved: test_data_prep_sample_loader_next_to_the_yaml
advanced/repro_scaling: four ranks, then one: {SCALING}
advanced/packing: selecting and packing: {PACKING}
advanced/grouping: by aspect ratio: {GROUPING}
advanced/grouping: a batch size for each group: {GROUPING}
advanced/joining_datasets: two datasets: test_joins_of_the_table
advanced/joining_datasets: nonmatch: test_joins_of_the_table
advanced/joining_datasets: inside a blend: test_a_join_in_a_blend_names_files_and_subflavors
advanced/joining_datasets: joined type of the user's: test_joins_of_the_table
advanced/subsets: train and val of one split part: {SPLITS}
advanced/subsets: absolute ranges inside percentages: test_subsets
advanced/epochized_blending: blend_epochized: test_epochized_blend_repeats_each_dataset
advanced/epochized_blending: repeat=False: test_epochized_blend_repeats_each_dataset
advanced/custom_blending: build_train_datasets: {BLENDING}
advanced/parallelism: ranks of three kinds: test_ranks_of_two_dimensions_share_states
advanced/error_handling: both handlers: test_handlers_of_energon_in_the_worker_config
advanced/error_handling: log_exception: test_handlers_of_energon_in_the_worker_config
advanced/error_handling: reraise_exception: test_handlers_of_energon_in_the_worker_config
advanced/error_handling: handler of the user's: {HANDLER}
advanced/error_handling: failure_tolerance: {TOLERANCE}
advanced/error_handling: SkipSample: test_many_skips_on_purpose_are_no_failures
advanced/data_prep_api: prepare_dataset: {PYTHON}
api/cli: prepare: {CLI}
api/cli: info, lint, preview: {CLI}
"""
LONG_NAMES = {
    "MSC": "test_profiles_with_different_credentials_work_side_by_side",
    "CLI": "test_data_prep_writes_with_shard_writer_and_prepares_from_the_command_line",
    "PYTHON": "test_data_prep_prepares_from_python_with_a_brace_pattern",
    "AUX": "test_cookers_get_decoded_files_and_append_their_sources",
    "SPLITS": "test_splits_of_a_metadataset_name_parts_and_subsets_of_others",
    "SCALING": "test_reproducible_scaling_yields_equal_global_batches",
    "PACKING": "test_packing_with_a_selection_that_pops_is_resumed_exactly",
    "GROUPING": "test_batches_are_grouped_also_with_a_batch_size_for_each_group",
    "BLENDING": "test_batches_of_one_dataset_are_blended_by_weight_and_resume",
    "HANDLER": "test_error_handler_gets_error_sample_and_sources_and_may_raise",
    "TOLERANCE": "test_failure_tolerance_is_honoured_with_and_without_restore_seeds",
}


def test_every_example_has_a_test_but_that_of_a_storage_of_nvidia():
    tests = {
        node.name
        for folder in ("energon", "task_encoder", "remote")
        for path in (Path(__file__).parents[1] / folder).glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    rows = [line.rsplit(": ", 1) for line in EXAMPLES.format(**LONG_NAMES).strip().splitlines()]
    assert [test for _, test in rows if test != "-" and test not in tests] == []
    pages = {example.partition(":")[0] for example, test in rows if test == "-"}
    assert pages == {"advanced/remote_dataset"}
    assert (len(rows), sum(test != "-" for _, test in rows)) == (77, 76)
