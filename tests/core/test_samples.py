"""Sample and batch classes, and `edataclass`; the loss weight travels with samples unseen."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from energon_lite import generic_batch
from energon_lite.core.edataclass import edataclass
from energon_lite.core.samples import (
    SAMPLE_TYPES,
    Batch,
    CaptioningSample,
    CrudeSample,
    Sample,
    SourceInfo,
    TextSample,
    VQAOCRSample,
    VQASample,
)
from energon_lite.core.stacking import constructor_names
from energon_lite.task_encoder.base import as_type

SOURCE = SourceInfo(dataset_path="set", index=3, shard_name="a.tar", file_names=("k.txt",))

# Fields of each type after the service fields; from the format reference, section 4.5.
FIELDS = {
    "TextSample": "text",
    "ImageSample": "image",
    "CaptioningSample": "image caption",
    "ImageClassificationSample": "image label label_name",
    "InterleavedSample": "sequence",
    "SimilarityInterleavedSample": (
        "images texts audio video similarity_matrix matched_text_indices"
    ),
    "VQASample": "image context answers answer_weights",
    "MultiChoiceVQASample": "image context choices correct_choice_idx",
    "VidQASample": "video context answers answer_weights",
    "OCRSample": (
        "image text block_boxes block_classes block_text lines_boxes lines_text words_boxes "
        "words_text chars_boxes chars_text"
    ),
    "VQAOCRSample": "image context text answers answer_weights words_boxes words_text",
}


def text_sample(text: str = "abc", **kwargs: Any) -> TextSample:
    service: dict[str, Any] = {
        "__key__": "k",
        "__restore_key__": ("MapDataset", 1, ("Webdataset", 3)),
        "__subflavors__": {"a": 1},
        "__sources__": (SOURCE,),
        "__loss_weight__": 0.5,
    }
    return TextSample(**{**service, "text": text, **kwargs})


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Tensors that were pinned; stands in for an accelerator."""
    tensors: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor + 100

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return tensors


def test_all_sample_types_have_the_fields_of_the_format() -> None:
    assert SAMPLE_TYPES.keys() == FIELDS.keys()
    for name, kind in SAMPLE_TYPES.items():
        own = [field.name for field in dataclasses.fields(kind)][4:]
        assert own == FIELDS[name].split(), name
        assert issubclass(kind, Sample)


def test_samples_are_keyword_only_take_attributes_and_are_unhashable() -> None:
    with pytest.raises(TypeError):
        TextSample("k", ())  # type: ignore[call-arg]
    sample = text_sample()
    sample.other = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="unhashable"):
        hash(sample)


def test_source_info_is_hashable_and_immutable() -> None:
    assert len({SOURCE, SourceInfo("set", 3, "a.tar", ("k.txt",))}) == 1
    assert SOURCE.index == 3
    with pytest.raises(AttributeError):
        SOURCE.index = 4  # type: ignore[misc]


def test_edataclass_works_bare_and_with_options() -> None:
    @edataclass
    class Bare:
        a: int

    @edataclass(frozen=True)
    class Frozen:
        a: int

    assert Bare(a=1) == Bare(a=1)
    assert "__dict__" not in dir(Bare(a=1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Frozen(a=1).a = 2  # type: ignore[misc]


def test_super_without_arguments_works_in_edataclasses() -> None:
    def decorated(function: Any) -> Any:
        return functools.wraps(function)(lambda *args: function(*args))

    @edataclass
    class Base(Sample):
        a: int

        def value(self) -> int:
            return self.a

        @property
        def double(self) -> int:
            return 2 * self.a

    @edataclass
    class Derived(Base):
        b: int

        def value(self) -> int:
            return super().value() + self.b

        @property
        def double(self) -> int:
            return super().double + self.b

        @classmethod
        def derive_from(cls, base_sample: Sample, **kwargs: Any) -> Derived:
            return super().derive_from(base_sample, b=1, **kwargs)

        @decorated
        def wrapped(self) -> int:
            return super().value()

    sample = Derived.derive_from(text_sample(), a=5)
    assert (sample.value(), sample.double, sample.wrapped()) == (6, 11, 5)
    assert type(sample) is Derived


def test_derive_from_copies_service_fields_unless_they_are_passed() -> None:
    image = torch.zeros(3, 1, 1)
    base = text_sample()
    sample = CaptioningSample.derive_from(base, image=image, caption="c", __key__="new")
    assert sample.__key__ == "new"
    assert sample.__restore_key__ == base.__restore_key__
    assert sample.__subflavors__ == {"a": 1}
    assert sample.__sources__ == (SOURCE,)
    assert sample.__loss_weight__ == 0.5


def test_extend_copies_all_fields_into_a_subclass() -> None:
    @edataclass
    class Scored(TextSample):
        score: float

    sample = Scored.extend(text_sample("t"), score=0.25)
    assert (sample.text, sample.score, sample.__key__) == ("t", 0.25, "k")
    with pytest.raises(TypeError, match="TextSample cannot be extended to a CaptioningSample"):
        CaptioningSample.extend(text_sample(), image=None, caption="")


def test_joined_sample_keeps_the_key_of_the_primary_and_lists_all_sources() -> None:
    @edataclass
    class Joined(Sample):
        text: str
        context: str | None = None

    other_source = SOURCE._replace(index=9)
    other = text_sample("second", __key__="other", __sources__=(other_source,))
    joined = Joined.from_joined(text_sample("first"), None, other)
    assert (joined.text, joined.context, joined.__key__) == ("second", None, "k")
    assert joined.__sources__ == (SOURCE, other_source)
    with pytest.raises(TypeError, match="no field for caption, image"):
        Joined.from_joined(
            CaptioningSample.derive_from(text_sample(), image=torch.zeros(1), caption="")
        )
    with pytest.raises(TypeError, match="primary"):
        Joined.from_joined(None)


class OwnTo:
    """As the outputs of processors: moves itself."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def to(self, *args: Any, **settings: Any) -> OwnTo:
        moved = OwnTo()
        moved.calls = [*self.calls, (args, settings)]
        return moved


class Pair(NamedTuple):
    a: torch.Tensor
    b: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    t: torch.Tensor


@edataclass
class Everything(Batch):
    ids: torch.Tensor
    nested: dict[str, Any]
    own: Any = None


def everything() -> Everything:
    inner = CaptioningSample.derive_from(text_sample(), image=torch.ones(2), caption="c")
    rows = [(torch.ones(1), inner), Pair(torch.ones(1), "b"), Frozen(torch.ones(2)), None, 7]
    batch = Everything(
        __key__=["a", "b"], __restore_key__=("k",), ids=torch.arange(3), own=OwnTo(),
        nested=collections.defaultdict(list, {
            "rows": rows, "user": collections.UserDict(x=torch.ones(1)),
            "crude": CrudeSample(t=torch.ones(4)), "size": torch.Size([1]),
        }),
    )  # fmt: skip
    batch.extra = [torch.ones(1)]  # type: ignore[attr-defined]
    return batch


def tensors_in(batch: Any) -> list[torch.Tensor]:
    (plain, inner), pair, frozen, *_ = batch.nested["rows"]
    found = [batch.ids, plain, inner.image, pair.a, frozen.t, batch.nested["crude"]["t"]]
    return [*found, batch.extra[0], batch.nested["user"]["x"]]


def assert_kinds(batch: Any) -> None:
    (_, inner), pair, frozen, none, number = batch.nested["rows"]
    kinds = (Everything, collections.defaultdict, CrudeSample, CaptioningSample, Pair, Frozen)
    found = (batch, batch.nested, batch.nested["crude"], inner, pair, frozen)
    assert tuple(map(type, found)) == kinds
    assert (pair.b, none, number, batch.nested["size"]) == ("b", None, 7, torch.Size([1]))
    assert (batch.__key__, inner.__sources__) == (["a", "b"], (SOURCE,))


def test_pin_memory_reaches_every_tensor_and_changes_no_original(pinned: list[torch.Tensor]):
    batch = everything()
    found = batch.pin_memory()
    assert_kinds(found)
    olds, news = tensors_in(batch), tensors_in(found)
    assert all(new.equal(old + 100) for old, new in zip(olds[:-1], news[:-1], strict=True))
    assert len(pinned) >= len(olds) - 1
    assert all(old.equal(again) for old, again in zip(olds, tensors_in(everything()), strict=True))


def test_a_batch_moves_with_all_that_is_in_it_and_the_original_stays() -> None:
    batch = everything()
    moved = batch.to("meta", non_blocking=True)
    for own, kind in ((moved, "meta"), (batch, "cpu")):
        weights = [own.loss_weight, own.valid, own.nested["rows"][0][1].loss_weight]
        assert {tensor.device.type for tensor in [*tensors_in(own), *weights]} == {kind}
        assert_kinds(own)
    assert (moved.own.calls, batch.own.calls) == ([(("meta",), {})], [])
    assert batch.cpu().own.calls == [(("cpu",), {})]
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
            batch.cuda()


@pytest.mark.parametrize("where", [(torch.bfloat16,), ("cpu", torch.bfloat16)])
def test_dtype_converts_floating_point_only(where: tuple[Any, ...]) -> None:
    moved = everything().to(*where)
    assert (moved.ids.dtype, moved.extra[0].dtype) == (torch.int64, torch.bfloat16)
    assert moved.own.calls == [(where[:-1], {"dtype": torch.bfloat16})]
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match="floating point"):
            everything().to(dtype=dtype)


def test_own_fields_and_methods_with_these_names_win() -> None:
    @dataclasses.dataclass
    class Plain(Sample):
        cpu: float

    @edataclass
    class Translation(Sample):
        to: str
        cuda: int = 3

    @edataclass
    class Later(Translation):
        text: torch.Tensor

    @edataclass
    class Moves(Batch):
        ids: torch.Tensor

        def to(self, device: Any, **settings: Any) -> Any:
            moved = super().to(device, **settings)
            moved.note = "mine"  # type: ignore[attr-defined]
            return moved

    service: dict[str, Any] = {"__key__": "k", "__restore_key__": ()}
    for kind in (Plain, Translation):
        with pytest.raises(TypeError, match="missing 1 required"):
            kind(**service)
    assert Plain(**service, cpu=1.5).to("cpu").cpu == 1.5
    sample = Later(**service, to="fr", text=torch.ones(1))
    assert (sample.to, sample.cuda, sample.cpu().to) == ("fr", 3, "fr")
    moves = Moves(**{**service, "__key__": ["k"]}, ids=torch.ones(1))
    assert moves.to("meta").note == moves.cpu().note == "mine"
    outer = Everything(__key__=["k"], __restore_key__=(), ids=torch.ones(1), nested={"m": moves})
    moved = outer.to("meta").nested["m"]
    assert (moved.note, moved.ids.device.type) == ("mine", "meta")


@edataclass
class ImageBatch(Batch):
    image: torch.Tensor
    caption: list[str]
    note: str = "none"


def images(*sizes: int) -> list[CaptioningSample]:
    return [
        CaptioningSample(
            __key__=f"k{size}", __restore_key__=("Webdataset", size), __sources__=(SOURCE,),
            image=torch.ones(3, size, size), caption=str(size),
        )
        for size in sizes
    ]  # fmt: skip


def test_batch_from_samples_pads_and_stacks_tensors_of_typed_and_crude_samples() -> None:
    batch = ImageBatch.from_samples(images(1, 2))
    assert batch.image.shape == (2, 3, 2, 2)
    assert batch.image.sum() == 3 + 12
    assert (batch.caption, batch.__key__, batch.note) == (["1", "2"], ["k1", "k2"], "none")
    assert batch.__restore_key__ == (("Webdataset", 1), ("Webdataset", 2))
    assert batch.__sources__ == (SOURCE, SOURCE)
    given = ImageBatch.from_samples(images(1), caption=["x"], __key__=["y"], note="n")
    assert (given.caption, given.__key__, given.note) == (["x"], ["y"], "n")
    crude = CrudeSample(__key__="a", image=torch.zeros(3, 1, 1), caption="c")
    batch = ImageBatch.from_samples([crude, crude])
    assert (batch.__key__, batch.__loss_weight__) == (["a", "a"], [1.0, 1.0])
    assert batch.__sources__ is None


def test_batch_lists_stay_aligned_with_the_samples_when_subflavors_are_empty() -> None:
    samples = images(1, 1, 1)
    samples[0].__subflavors__ = {}
    samples[2].__subflavors__ = {"a": 1}
    samples[1].__loss_weight__ = 2.0
    batch = ImageBatch.from_samples(samples)
    assert batch.__subflavors__ == [{}, None, {"a": 1}]
    assert batch.__loss_weight__ == [1.0, 2.0, 1.0]


def test_batch_from_samples_names_a_field_that_samples_lack() -> None:
    with pytest.raises(TypeError, match="field 'image' is not in every TextSample"):
        ImageBatch.from_samples([text_sample()])
    with pytest.raises(ValueError, match="no sample"):
        ImageBatch.from_samples([])
    broken = images(1, 1)
    broken[1].image = torch.zeros(2)
    with pytest.raises(ValueError, match=r"ImageBatch, field 'image'.*\(2,\).*\(3, 1, 1\)"):
        ImageBatch.from_samples(broken)


def test_batch_derive_from_copies_service_fields_once() -> None:
    base = ImageBatch.from_samples(images(1))

    @edataclass
    class Encoded(Batch):
        tokens: torch.Tensor

    encoded = Encoded.derive_from(base, tokens=torch.zeros(1))
    assert encoded.__key__ == ["k1"]
    assert encoded.__sources__ == (SOURCE,)
    with pytest.raises(TypeError, match="multiple values"):
        Encoded.derive_from(base, tokens=torch.zeros(1), __key__=["again"])


def test_vqa_samples_have_defaults_for_all_but_image_and_text() -> None:
    image = torch.zeros(3, 1, 1)
    assert VQASample.derive_from(text_sample(), image=image, context="q").answers is None
    sample = VQAOCRSample.derive_from(text_sample(), image=image, context="q", text="t")
    assert sample.words_boxes is None


# ------------------------------------------------- the four fields of Energon, and the loss weight


FOUR = ["__key__", "__restore_key__", "__subflavors__", "__sources__"]


@edataclass
class Slotted(TextSample):
    number: int = 0


@edataclass
class Deeper(Slotted):
    more: str = ""


@dataclass
class Plain(TextSample):
    number: int = 0

    def __post_init__(self):
        self.text = self.text.strip() if isinstance(self.text, str) else self.text


class Undecorated(Slotted):
    pass


@edataclass
class TextBatch(Batch):
    text: list[str]


@dataclass
class PlainBatch(Batch):
    text: list[str] = dataclasses.field(default_factory=list)


SAMPLES = [TextSample, Slotted, Deeper, Plain, Undecorated]
BATCHES = [TextBatch, PlainBatch]


def sample_of(kind, **more):
    return kind(__key__="k", __restore_key__=("s", 0), text="t", **more)


def test_fields_and_asdict_see_the_fields_of_energon():
    assert [field.name for field in dataclasses.fields(Sample)] == FOUR
    assert [field.name for field in dataclasses.fields(Batch)] == FOUR
    for kind in SAMPLES:
        sample = sample_of(kind, __loss_weight__=0.5)
        assert [field.name for field in dataclasses.fields(kind)][:5] == [*FOUR, "text"]
        assert list(dataclasses.asdict(sample))[:5] == [*FOUR, "text"]
        assert "loss_weight" not in repr(sample)
        assert "__loss_weight__" in constructor_names(kind)
        for text in (dataclasses.fields(kind), dataclasses.asdict(sample)):
            assert "loss_weight" not in str(text)


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_weight_of_a_sample_is_kept(kind):
    sample = sample_of(kind, __loss_weight__=0.5)
    same = [
        copy.copy(sample),
        copy.deepcopy(sample),
        pickle.loads(pickle.dumps(sample)),
        dataclasses.replace(sample, text="other"),
        kind.derive_from(sample, text="other"),
        kind.extend(sample),
    ]
    assert [one.__loss_weight__ for one in same] == [0.5] * 6
    assert sample.loss_weight == torch.tensor(0.5)
    sample.__loss_weight__ = 0.25
    assert float(sample.loss_weight) == 0.25
    assert sample_of(kind).__loss_weight__ == 1.0
    assert sample_of(kind) == sample_of(kind)
    batch = generic_batch([sample, sample_of(kind)])
    assert type(batch) is kind
    assert batch.loss_weight.tolist() == [0.25, 1.0]


@pytest.mark.parametrize("kind", BATCHES)
def test_the_weights_of_a_batch_are_kept(kind):
    batch = kind.from_samples([sample_of(Slotted, __loss_weight__=w) for w in (0.5, 2.0)])
    others = [
        copy.copy(batch),
        pickle.loads(pickle.dumps(batch)),
        dataclasses.replace(batch, text=["x", "y"]),
        kind.derive_from(batch, text=["x", "y"]),
        kind.extend(batch),
    ]
    assert [other.loss_weight.tolist() for other in others] == [[0.5, 2.0]] * 5
    assert [field.name for field in dataclasses.fields(kind)] == [*FOUR, "text"]


def test_dicts_have_the_weight_only_where_it_is_not_1():
    plain, heavy = sample_of(Slotted), sample_of(Slotted, __loss_weight__=0.5)
    assert "__loss_weight__" not in as_type(plain, dict)
    dicts = [as_type(sample, dict) for sample in (plain, heavy)]
    batch = generic_batch(dicts)
    assert batch["__loss_weight__"] == [1.0, 0.5]
    assert as_type(generic_batch([plain, plain]), dict).keys() == {*FOUR, "text", "number"}
    assert as_type(generic_batch([plain, heavy]), dict)["__loss_weight__"] == [1.0, 0.5]


def test_a_sample_takes_further_attributes_and_keeps_its_post_init():
    sample = sample_of(Deeper)
    sample.seen = [1]
    assert pickle.loads(pickle.dumps(sample)).seen == copy.copy(sample).seen == [1]
    plain = Plain(__key__="k", __restore_key__=(), text=" t ", __loss_weight__=0.5)
    assert (plain.text, plain.__loss_weight__) == ("t", 0.5)
