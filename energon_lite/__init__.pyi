# What is public, and where it is: read by type checkers, and by `__init__.py` when it runs.

from energon_lite.batching.rules import Buckets, ModalitySplit, Packing
from energon_lite.core.cache_pool import CachePool, DirectLazy, Lazy, MockLazy, NoCachePool
from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.edataclass import edataclass
from energon_lite.core.errors import (
    DatasetFormatError,
    DecodingError,
    EmptyDatasetError,
    FatalSampleError,
    FieldAccessError,
    SampleException,
    SkipSample,
    StateError,
    log_exception,
    reraise_exception,
)
from energon_lite.core.file_store import (
    DecodeFileStore,
    FileStore,
    FileStoreDecoder,
    PrimaryFileStore,
)
from energon_lite.core.samples import (
    Batch,
    CaptioningSample,
    CrudeSample,
    ImageClassificationSample,
    ImageSample,
    InterleavedSample,
    MultiChoiceVQASample,
    OCRSample,
    Sample,
    SimilarityInterleavedSample,
    SourceInfo,
    TextSample,
    VidQASample,
    VQAOCRSample,
    VQASample,
)
from energon_lite.core.stacking import (
    batch_list,
    batch_pad_stack,
    batch_stack,
    concat_pad,
    generic_batch,
    generic_concat,
    homogeneous_concat_mix,
)
from energon_lite.core.stream_context import sample_rng
from energon_lite.core.topology import WorkerConfig
from energon_lite.core.user_function import stateless
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.extras.cluster.ray_workers import RayWorkers
from energon_lite.extras.energon.alias import as_energon
from energon_lite.extras.energon.energon_api import (
    DatasetLoader,
    DatasetLoaderInterface,
    Metadataset,
    MetadatasetV2,
    load_dataset,
    prepare_metadataset,
    traverse_metadataset,
)
from energon_lite.extras.energon.iter_map import IterMapDataset
from energon_lite.extras.energon.legacy import (
    CaptioningWebdataset,
    ImageClassificationWebdataset,
    ImageWebdataset,
    InterleavedWebdataset,
    MultiChoiceVQAWebdataset,
    OCRWebdataset,
    SimilarityInterleavedWebdataset,
    TextWebdataset,
    VidQAWebdataset,
    VQAOCRWebdataset,
    VQAWebdataset,
)
from energon_lite.extras.energon.observers import GcDataset, LogSampleDataset
from energon_lite.extras.joins.joined import JoinedWebdatasetFactory
from energon_lite.extras.jsonl.crude_jsonl import (
    CrudeJsonlDatasetFactory,
    DefaultCrudeJsonlDatasetFactory,
)
from energon_lite.extras.media.av_decoder import (
    AVData,
    AVDecoder,
    AVWebdatasetDecoder,
    get_clips_uniform,
    get_single_frames_uniform,
)
from energon_lite.extras.prepare.run import prepare_dataset
from energon_lite.extras.report.dry_run import dry_run
from energon_lite.extras.report.run_report import run_report
from energon_lite.extras.samplers.multipack import MultipackBatchSampler
from energon_lite.extras.samplers.packed_rows import PackedCollator, PackedRows
from energon_lite.extras.samplers.split_modality import (
    SplitModalityBatchSampler,
    SplitModalitySampler,
)
from energon_lite.extras.samplers.token_budget import TokenBudgetBatchSampler
from energon_lite.extras.stores.file_cache_pool import FileCacheLazy, FileStoreCachePool
from energon_lite.extras.stores.file_stores import SystemFileStore
from energon_lite.extras.trainers.loader_callback import LoaderCallback
from energon_lite.loader.loader import (
    BasicDataLoader,
    SavableDataLoader,
    get_loader,
    get_savable_loader,
)
from energon_lite.loss.source_losses import loss_by_source
from energon_lite.order.schedules import Schedule
from energon_lite.pipeline import get_train_dataset, get_val_dataset, get_val_datasets
from energon_lite.sources.dataset_classes import (
    CrudeWebdataset,
    DefaultDecoderWebdatasetFactory,
    DefaultGenericWebdatasetFactory,
    StandardWebdatasetFactory,
)
from energon_lite.sources.source_factory import BaseCoreDatasetFactory
from energon_lite.sources.webdataset import BaseWebdatasetFactory
from energon_lite.stages.batching import BatchDataset, BucketBatchDataset, GroupBatchDataset
from energon_lite.stages.blend import BlendDataset
from energon_lite.stages.concat import ConcatDataset, RepeatDataset
from energon_lite.stages.epochs import EpochizeDataset, LimitDataset
from energon_lite.stages.map import FilterDataset, MapDataset
from energon_lite.stages.mix_batches import MixBatchDataset
from energon_lite.stages.modality_batches import SplitModalityBatchDataset
from energon_lite.stages.pack_lists import PackedSamplesOutput
from energon_lite.stages.packed_sample import PackedBatch, PackedSample, pack_samples
from energon_lite.stages.packing_stage import PackingDataset
from energon_lite.stages.shuffle_buffer import ShuffleBufferDataset
from energon_lite.task_encoder.base import AugmentTaskEncoder, DefaultTaskEncoder, TaskEncoder
from energon_lite.task_encoder.cooking import Cooker, basic_sample_keys, cooker

__version__: str

__all__ = [
    "AVData",
    "AVDecoder",
    "AVWebdatasetDecoder",
    "AugmentTaskEncoder",
    "BaseCoreDatasetFactory",
    "BaseWebdatasetFactory",
    "BasicDataLoader",
    "Batch",
    "BatchDataset",
    "BlendDataset",
    "BucketBatchDataset",
    "Buckets",
    "CachePool",
    "CaptioningSample",
    "CaptioningWebdataset",
    "ConcatDataset",
    "Cooker",
    "CrudeJsonlDatasetFactory",
    "CrudeSample",
    "CrudeWebdataset",
    "Cursor",
    "DatasetFormatError",
    "DatasetLoader",
    "DatasetLoaderInterface",
    "DecodeFileStore",
    "DecodingError",
    "DefaultCrudeJsonlDatasetFactory",
    "DefaultDecoderWebdatasetFactory",
    "DefaultGenericWebdatasetFactory",
    "DefaultTaskEncoder",
    "DirectLazy",
    "EmptyDatasetError",
    "EpochizeDataset",
    "FatalSampleError",
    "FieldAccessError",
    "FileCacheLazy",
    "FileStore",
    "FileStoreCachePool",
    "FileStoreDecoder",
    "FilterDataset",
    "GcDataset",
    "GroupBatchDataset",
    "ImageClassificationSample",
    "ImageClassificationWebdataset",
    "ImageSample",
    "ImageWebdataset",
    "InterleavedSample",
    "InterleavedWebdataset",
    "IterMapDataset",
    "JoinedWebdatasetFactory",
    "Lazy",
    "LimitDataset",
    "LoaderCallback",
    "LogSampleDataset",
    "MapDataset",
    "Metadataset",
    "MetadatasetV2",
    "MixBatchDataset",
    "MockLazy",
    "ModalitySplit",
    "MultiChoiceVQASample",
    "MultiChoiceVQAWebdataset",
    "MultipackBatchSampler",
    "NoCachePool",
    "OCRSample",
    "OCRWebdataset",
    "PackedBatch",
    "PackedCollator",
    "PackedRows",
    "PackedSample",
    "PackedSamplesOutput",
    "Packing",
    "PackingDataset",
    "PrimaryFileStore",
    "RayWorkers",
    "RepeatDataset",
    "Sample",
    "SampleDecoder",
    "SampleException",
    "SavableDataLoader",
    "SavableDataset",
    "Schedule",
    "ShuffleBufferDataset",
    "SimilarityInterleavedSample",
    "SimilarityInterleavedWebdataset",
    "SkipSample",
    "SourceInfo",
    "SplitModalityBatchDataset",
    "SplitModalityBatchSampler",
    "SplitModalitySampler",
    "StandardWebdatasetFactory",
    "StateError",
    "SystemFileStore",
    "TaskEncoder",
    "TextSample",
    "TextWebdataset",
    "TokenBudgetBatchSampler",
    "VQAOCRSample",
    "VQAOCRWebdataset",
    "VQASample",
    "VQAWebdataset",
    "VidQASample",
    "VidQAWebdataset",
    "WorkerConfig",
    "__version__",
    "as_energon",
    "basic_sample_keys",
    "batch_list",
    "batch_pad_stack",
    "batch_stack",
    "concat_pad",
    "cooker",
    "dry_run",
    "edataclass",
    "generic_batch",
    "generic_concat",
    "get_clips_uniform",
    "get_loader",
    "get_savable_loader",
    "get_single_frames_uniform",
    "get_train_dataset",
    "get_val_dataset",
    "get_val_datasets",
    "homogeneous_concat_mix",
    "load_dataset",
    "log_exception",
    "loss_by_source",
    "pack_samples",
    "prepare_dataset",
    "prepare_metadataset",
    "reraise_exception",
    "run_report",
    "sample_rng",
    "stateless",
    "traverse_metadataset",
]
