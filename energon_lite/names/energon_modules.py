"""The modules of Megatron-Energon 7.4 and their names: one table, from which modules are made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from energon_lite.names.lazy import ROOT, lazy_names, public_homes

# The modules of Energon's command line, and the names of commands in them.
_TOOLS = {
    "analyze_debug": "command",
    "checkpoint": "command command_info command_redist",
    "info": "command",
    "lint": "command",
    "mount": "command",
    "prepare": "command",
    "prepare_media": "command",
    "preview": "command",
}
_COMMANDS = {
    f"tools.{tool}.{name}": f"{ROOT}.cli.commands:{tool}"
    for tool, names in _TOOLS.items()
    for name in names.split()
} | {
    "cli.main.main": f"{ROOT}.cli.commands:main",
    **{f"cli.main.{tool}_command": f"{ROOT}.cli.commands:{tool}" for tool in _TOOLS},
}

# Module of Energon → what code imports from it.
ENERGON_MODULES: dict[str, str] = {
    **{f"tools.{tool}": names for tool, names in _TOOLS.items()},
    "tools": "",
    "cli": "",
    "cli.main": " ".join(["main", *(f"{tool}_command" for tool in _TOOLS)]),
    "av": "AVData AVDecoder AVWebdatasetDecoder get_clips_uniform get_single_frames_uniform",
    "av.av_data": "AVData",
    "av.av_decoder": "AVDecoder AVIndexMode AVWebdatasetDecoder",
    "av.utils": "get_clips_uniform get_single_frames_uniform",
    "cache": "CachePool DecodeFileStore DirectLazy FileCacheLazy FileStore FileStoreCachePool "
    "FileStoreDecoder Lazy MockLazy NoCachePool PrimaryFileStore SystemFileStore",
    "cache.base": "CachePool FileStore FileStoreDecoder FileStoreWrapper Lazy MockLazy "
    "PrimaryFileStore",
    "cache.file_cache_pool": "FileCacheLazy FileStoreCachePool",
    "cache.file_store": "DecodeFileStore JsonlFileStore SystemFileStore WebdatasetFileStore",
    "cache.no_cache": "DirectLazy NoCachePool",
    "bracecollapse": "collapse",
    "dataset_config": "get_dataset_from_config load_config",
    "deprecation": "deprecated warn_deprecated",
    "edataclass": "edataclass",
    "epathlib": "EPath",
    "epathlib.epath": "EPath",
    "errors": "ErrorContext FatalSampleError SYSTEM_EXCEPTIONS SampleException SkipSample "
    "handle_restore_errors log_exception reraise_exception",
    "eyaml": "load_yaml",
    "flavors": "AVData AVDecoder AVDecoderType BaseCoreDatasetFactory BaseWebdatasetFactory "
    "CaptioningSample CaptioningWebdataset CrudeJsonlDatasetFactory CrudeSample CrudeWebdataset "
    "DefaultCrudeJsonlDatasetFactory DefaultDecoderWebdatasetFactory "
    "DefaultGenericWebdatasetFactory EmptyDatasetError ImageClassificationSample "
    "ImageClassificationWebdataset ImageDecoderType ImageSample ImageWebdataset "
    "InterleavedSample InterleavedWebdataset JoinedWebdatasetFactory MultiChoiceVQASample "
    "MultiChoiceVQAWebdataset OCRSample OCRWebdataset PinMemoryMixin Sample SampleDecoder "
    "SavableDataset SimilarityInterleavedSample SimilarityInterleavedWebdataset "
    "StandardWebdatasetFactory TextSample TextWebdataset VQAOCRWebdataset VQASample "
    "VQAWebdataset VidQASample VidQAWebdataset VideoData WebdatasetMeta",
    "flavors.base_dataset": "BaseCoreDatasetFactory EPath ExtendableDataclassMixin FileStore "
    "FlexState PinMemoryMixin Sample Savable SavableDataset SourceInfo State WorkerConfig "
    "add_sample_restore_key edataclass legacy_handler set_sample_restore_key",
    "flavors.captioning": "CaptioningSample CaptioningWebdataset",
    "flavors.crude": "CrudeSample CrudeWebdataset",
    "flavors.image": "ImageSample ImageWebdataset",
    "flavors.image_classification": "ImageClassificationSample ImageClassificationWebdataset",
    "flavors.interleaved": "InterleavedSample InterleavedWebdataset",
    "flavors.jsonl": "CrudeJsonlDatasetFactory DefaultCrudeJsonlDatasetFactory",
    "flavors.jsonl.crude_jsonl_dataset": "CrudeJsonlDatasetFactory DefaultCrudeJsonlDatasetFactory",
    "flavors.jsonl.ijsonl": "IJsonlFile IJsonlIndexReader IJsonlIndexWriter",
    "flavors.jsonl.ijsonl_reader": "IJsonlReader",
    "flavors.jsonl.jsonl_prepare": "JsonlPreparator",
    "flavors.multichoice_vqa": "MultiChoiceVQASample MultiChoiceVQAWebdataset",
    "flavors.ocr": "OCRSample OCRWebdataset",
    "flavors.similarity_interleaved": "SimilarityInterleavedSample SimilarityInterleavedWebdataset",
    "flavors.text": "TextSample TextWebdataset",
    "flavors.vid_qa": "VidQASample VidQAWebdataset",
    "flavors.vqa": "VQASample VQAWebdataset",
    "flavors.vqa_and_ocr": "VQAOCRSample VQAOCRWebdataset",
    "flavors.webdataset": "AVData AVDecoder AVDecoderType BaseWebdatasetFactory "
    "DefaultDecoderWebdatasetFactory DefaultGenericWebdatasetFactory EmptyDatasetError "
    "ImageDecoderType JoinedWebdatasetFactory SampleDecoder StandardWebdatasetFactory VideoData "
    "WebdatasetMeta",
    "flavors.webdataset.base_webdataset": "BaseWebdatasetFactory DatasetSubset",
    "flavors.webdataset.config": "INDEX_SQLITE_FILENAME INDEX_UUID_FILENAME INFO_JSON_FILENAME "
    "INFO_YAML_FILENAME MAIN_FOLDER_NAME SPLIT_YAML_FILENAME",
    "flavors.webdataset.default_decoder_webdataset": "DefaultDecoderWebdatasetFactory",
    "flavors.webdataset.default_generic_webdataset": "DefaultGenericWebdatasetFactory",
    "flavors.webdataset.empty_dataset_error": "EmptyDatasetError",
    "flavors.webdataset.field_access": "FieldAccessError field_access split_field_access",
    "flavors.webdataset.indexing": "DuplicateSampleKeyError JoinIndexReader JoinIndexWriter "
    "SqliteIndexReader SqliteIndexWriter",
    "flavors.webdataset.itar": "ITarFile ITarRawSamplePartPointer ITarSamplePointer "
    "TarIndexReader TarIndexWriter open_itar",
    "flavors.webdataset.itar_reader": "ITarReader JoinIndexFileITarReader ShardInfosITarReader "
    "SqliteITarEntryReader",
    "flavors.webdataset.joined_webdataset": "JoinedWebdatasetFactory",
    "flavors.webdataset.metadata": "EnergonDatasetType WebdatasetMeta "
    "check_dataset_info_present get_dataset_info get_dataset_type get_info_shard_files",
    "flavors.webdataset.prepare": "WebdatasetPreparator",
    "flavors.webdataset.sample_decoder": "AVDecoderType DEFAULT_DECODER ImageDecoderType "
    "SampleDecoder",
    "flavors.webdataset.sample_loader": "RawSampleData WebdatasetSampleLoaderDataset",
    "flavors.webdataset.sharder": "Sharder",
    "flavors.webdataset.standard_webdataset": "StandardWebdatasetFactory",
    "flavors.webdataset.structs": "DatasetSubset FilteredSample ShardInfo WebdatasetInfo "
    "WebdatasetSplits",
    "fork_hook": "DataclassForkMixin ForkMixin",
    "loader": "get_loader get_savable_loader",
    "local_copy": "ensure_local_copy",
    "media": "AVMetadata ImageMetadata MediaMetadataBase MediaMetadataType "
    "deserialize_media_metadata serialize_media_metadata",
    "media.metadata": "AVMetadata ImageMetadata MediaMetadataBase MediaMetadataType "
    "deserialize_media_metadata serialize_media_metadata",
    "metadataset": "DatasetLoader DatasetLoaderInterface Metadataset MetadatasetV2 load_dataset "
    "prepare_metadataset traverse_metadataset",
    "metadataset.dataset_loader": "DatasetLoader",
    "metadataset.join_dataset_loader": "JoinDatasetLoader JoinedDatasetInfo",
    "metadataset.loader": "load_dataset prepare_metadataset traverse_metadataset",
    "metadataset.loader_interface": "DatasetBlendMode DatasetLoaderInterface LoadedDataset "
    "LoadedDatasetList TraversedDatasetReference",
    "metadataset.metadataset": "DatasetReference Metadataset MetadatasetBlender",
    "metadataset.metadataset_v2": "AuxDatasetReference AuxFilesystemReference DatasetReference "
    "MetadatasetBlend MetadatasetBlendEpochized MetadatasetJoin MetadatasetV2 Subset",
    "module_loader": "ModuleLoader",
    "rng": "SystemRng SystemRngState WorkerRng",
    "sample_utils": "default_get_batch_keys",
    "savable": "Savable",
    "savable_loader": "BasicDataLoader SavableCheckpoint SavableDataLoader "
    "SavableDataLoaderState SavableDatasetCheckpoint SavableDatasetState SavableDatasetWrapper "
    "SimpleSavableDatasetWrapper",
    "source_info": "SourceInfo add_source_info get_source_info",
    "state": "FlexState",
    "task_encoder": "AugmentTaskEncoder Batch Cooker DefaultTaskEncoder TaskEncoder "
    "basic_sample_keys batch_list batch_pad_stack batch_stack cooker generic_batch "
    "get_train_dataset get_val_dataset get_val_datasets stateless concat_pad generic_concat "
    "homogeneous_concat_mix",
    "task_encoder.base": "AugmentTaskEncoder Batch Cooker CrudeSample DefaultTaskEncoder Sample "
    "SavableDataset TaskEncoder T_batch T_encoded_sample T_raw_batch T_sample WorkerConfig "
    "batch_list batch_pad_stack batch_stack generic_batch get_failure_tolerance get_stateless "
    "stateless",
    "task_encoder.cooking": "Cooker T_sample basic_sample_keys cooker get_cooker_need_cache "
    "get_cooker_need_primary",
    "task_encoder.loader": "get_train_dataset get_val_dataset get_val_datasets",
    "transforms": "CustomTransform MergeTransform",
    "typed_converter": "JsonParser JsonValueError to_json_object",
    "watchdog": "Watchdog",
    "worker": "WorkerConfig",
    "wrappers": "BatchDataset BlendDataset ConcatDataset EpochizeDataset FilterDataset GcDataset "
    "GroupBatchDataset IterMapDataset LimitDataset LogSampleDataset MapDataset MixBatchDataset "
    "PackingDataset RepeatDataset ShuffleBufferDataset SkipSample concat_pad generic_concat "
    "homogeneous_concat_mix",
    "wrappers.base": "BaseWrapperDataset SampleIndex get_sample_restore_key",
    "wrappers.batch_dataset": "BatchDataset",
    "wrappers.blend_dataset": "BlendDataset",
    "wrappers.buffer": "SavableSampleBuffer",
    "wrappers.concat_dataset": "ConcatDataset",
    "wrappers.epochize_dataset": "EpochizeDataset",
    "wrappers.filter_dataset": "FilterDataset",
    "wrappers.gc_dataset": "GcDataset",
    "wrappers.group_batch_dataset": "GroupBatchDataset",
    "wrappers.iter_map_dataset": "IterMapDataset",
    "wrappers.limit_dataset": "LimitDataset",
    "wrappers.log_sample_dataset": "LogSampleDataset",
    "wrappers.map_dataset": "MapDataset",
    "wrappers.mix_batch_dataset": "MixBatchDataset concat_pad generic_concat "
    "homogeneous_concat_mix",
    "wrappers.packing_dataset": "PackingDataset",
    "wrappers.repeat_dataset": "RepeatDataset",
    "wrappers.shuffle_buffer_dataset": "ShuffleBufferDataset",
    "wrappers.skip": "SkipSample",
    "wrappers.watchdog_dataset": "WatchdogDataset",
}

# Those that are files of ours; `__getattr__ = energon_names(__name__)` in them has the rest.
REAL_MODULES = frozenset(
    {"cli", "loader", "metadataset", "task_encoder", "task_encoder.base", "task_encoder.cooking"}
    | {"transforms"}
)

# Where names are that are not public in ours, and those that are called otherwise.
_HOMES = {
    name: f"{ROOT}.{module}"
    for module, names in {
        "core.edataclass": "ExtendableDataclassMixin PinMemoryMixin",
        "core.service_fields": "add_sample_restore_key add_source_info get_sample_restore_key "
        "get_source_info set_sample_restore_key",
        "core.system_rng": "SystemRng SystemRngState",
        "metadataset.energon_api": "DatasetBlendMode LoadedDataset LoadedDatasetList "
        "TraversedDatasetReference",
        "storage.local_paths": "EPath",
        "transforms": "CustomTransform MergeTransform",
        "task_encoder.base": "T_batch T_encoded_sample T_raw_batch T_sample",
    }.items()
    for name in names.split()
} | {
    "FlexState": "builtins:dict",
    "INDEX_SQLITE_FILENAME": f"{ROOT}.storage.sqlite:INDEX_SQLITE",
    "INDEX_UUID_FILENAME": f"{ROOT}.storage.nvmeta:INDEX_UUID",
    "INFO_JSON_FILENAME": f"{ROOT}.storage.nvmeta:INFO_JSON",
    "INFO_YAML_FILENAME": f"{ROOT}.storage.nvmeta:INFO_YAML",
    "SPLIT_YAML_FILENAME": f"{ROOT}.storage.nvmeta:DEFAULT_SPLIT",
    "MAIN_FOLDER_NAME": f"{ROOT}.storage.nvmeta:META",
    "SYSTEM_EXCEPTIONS": f"{ROOT}.core.errors:FATAL_EXCEPTIONS",
    "SavableDataLoaderState": "builtins:dict",
    "State": f"{ROOT}.core.edataclass:ExtendableDataclassMixin",
    "default_get_batch_keys": f"{ROOT}.stages.observers:default_get_keys",
}


def home_of(name: str) -> str:
    """Returns the module of ours that has a name of Energon's, or that says why it is not there."""
    return public_homes().get(name) or _HOMES.get(name) or f"{ROOT}.names.later"


def energon_names(module: str) -> Callable[[str], Any]:
    """Returns a `__getattr__` for a module of ours with the name of one of Energon's.

    Args:
        module: `__name__` of the module.
    """
    return lazy_names(module, _homes(module.removeprefix(f"{ROOT}.")))


def make_module(name: str, of: str = ROOT) -> ModuleType:
    """Makes the module `of.name`, whose names are imported on first use."""
    module = ModuleType(f"{of}.{name}", f"Names of `megatron.energon.{name}`.")
    module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
    module.__path__ = []
    homes = _homes(name)
    module.__dict__["__all__"] = sorted(homes)
    module.__dict__["__getattr__"] = lazy_names(module.__name__, homes)
    return module


def add_modules() -> None:
    """Puts the modules that are no files into `sys.modules`.

    Not through a finder: what an import finds there is not written over a name of the package
    (`energon_lite.edataclass` is the decorator, also after `import energon_lite.edataclass`).
    """
    for name in ENERGON_MODULES.keys() - REAL_MODULES:
        sys.modules.setdefault(f"{ROOT}.{name}", make_module(name))


def _homes(module: str) -> dict[str, str]:
    names = ENERGON_MODULES[module].split()
    return {name: _COMMANDS.get(f"{module}.{name}") or home_of(name) for name in names}
