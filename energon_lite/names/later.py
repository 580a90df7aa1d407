"""Placeholders for names of Energon that do not exist yet: importable, with an error on use."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any, NoReturn

_AV = "audio and video are not in this version: such parts stay bytes, decode them in a hook"
_FILES = (
    "auxiliary data, file stores and caches are not in this version: put what a sample needs into "
    "its shards, or open files in a hook"
)
_JOINS = "joins are not in this version: write what belongs together into one sample"
_JSONL = "JSONL datasets are not in this version: pack the lines into shards"
_STATE = "states are plain JSON here: `loader.save_state_rank()` returns a dict"
_STAGE = "your own stage is a `SavableDataset` with a `Cursor` here (docs/architecture.md)"
_INSIDE = "this is an inner part of Megatron-Energon, without a counterpart here"
_FOLDER = f"{_INSIDE}; `load_dataset(path)` and `energon-lite info` read prepared folders"

REASONS: dict[str, str] = {
    name: reason
    for reason, names in {
        _AV: "AVData AVDecoder AVDecoderType AVIndexMode AVMetadata AVWebdatasetDecoder "
        "ImageMetadata MediaMetadataBase MediaMetadataType VideoData deserialize_media_metadata "
        "get_clips_uniform get_single_frames_uniform serialize_media_metadata",
        _FILES: "AuxDatasetReference AuxFilesystemReference CachePool DecodeFileStore DirectLazy "
        "FileCacheLazy FileStore FileStoreCachePool FileStoreDecoder FileStoreWrapper "
        "JsonlFileStore Lazy MockLazy NoCachePool PrimaryFileStore SystemFileStore "
        "WebdatasetFileStore get_cooker_need_cache get_cooker_need_primary",
        _JOINS: "JoinDatasetLoader JoinIndexFileITarReader JoinIndexReader JoinIndexWriter "
        "JoinedDatasetInfo JoinedWebdatasetFactory MetadatasetJoin",
        _JSONL: "CrudeJsonlDatasetFactory DefaultCrudeJsonlDatasetFactory IJsonlFile "
        "IJsonlIndexReader IJsonlIndexWriter IJsonlReader JsonlPreparator",
        _STATE: "Savable SavableCheckpoint SavableDatasetCheckpoint SavableDatasetState",
        _STAGE: "BaseWrapperDataset SampleIndex SavableSampleBuffer",
        _FOLDER: "DatasetReference EnergonDatasetType FilteredSample MetadatasetBlend "
        "MetadatasetBlendEpochized MetadatasetBlender ShardInfo Subset WebdatasetInfo "
        "WebdatasetMeta WebdatasetSplits check_dataset_info_present get_dataset_info "
        "get_dataset_type get_info_shard_files load_config",
        _INSIDE: "ErrorContext ITarFile ITarRawSamplePartPointer ITarReader ITarSamplePointer "
        "RawSampleData SavableDatasetWrapper ShardInfosITarReader Sharder "
        "SimpleSavableDatasetWrapper SqliteITarEntryReader SqliteIndexReader TarIndexReader "
        "WebdatasetSampleLoaderDataset field_access get_failure_tolerance get_stateless "
        "handle_restore_errors legacy_handler open_itar split_field_access DataclassForkMixin "
        "ForkMixin JsonParser JsonValueError ModuleLoader collapse deprecated ensure_local_copy "
        "load_yaml to_json_object warn_deprecated",
        "use `load_dataset(path).get_datasets(...)`": "get_dataset_from_config",
        "`image_decode` is a text here": "ImageDecoderType",
        "use `SampleDecoder()`": "DEFAULT_DECODER",
        "use `subset=(first, last + 1)`, or `subset:` in a metadataset": "DatasetSubset",
        "use `prepare_dataset(path, ...)` or `energon-lite prepare`": "DuplicateSampleKeyError "
        "SqliteIndexWriter TarIndexWriter WebdatasetPreparator",
        "use `sample_rng()` for randomness that is the same after a resume": "WorkerRng",
        "the loaders have it: `watchdog_timeout_seconds`": "Watchdog WatchdogDataset",
    }.items()
    for name in names.split()
}


class Later(ABCMeta):
    """The type of placeholders, which have no instances and explain themselves on use."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses to create an instance.

        Raises:
            NotImplementedError: Always; names what to use instead.
        """
        del args, kwargs
        raise NotImplementedError(_explain(cls))

    def __getattr__(cls, name: str) -> Any:
        """Refuses class attributes; those that Python itself looks up do not exist."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(_explain(cls))

    def __getitem__(cls, item: Any) -> Any:
        """Returns the placeholder itself: `Lazy[bytes]` in annotations."""
        del item
        return cls


def _explain(cls: type) -> str:
    name = next((base.__name__ for base in cls.__mro__ if base.__name__ in REASONS), cls.__name__)
    return f"{name}: {REASONS.get(name, _INSIDE)}. See docs/migrating.md."


def __getattr__(name: str) -> Any:
    """Creates the placeholder of a name, once."""
    if name.startswith("_"):
        raise AttributeError(name)
    placeholder = Later(name, (), {"__doc__": REASONS.get(name, _INSIDE), "__module__": __name__})
    return globals().setdefault(name, placeholder)
