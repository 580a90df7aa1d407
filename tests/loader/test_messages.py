"""Messages of worker processes: what arrives, where it lies, and what becomes of the memory."""

from __future__ import annotations

import builtins
import dataclasses
import gc
import os
import random
import re
import resource
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    Batch,
    SourceInfo,
    TextSample,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    get_train_dataset,
)
from energon_lite.core.sample_columns import Origin, SampleColumns, SampleForm
from energon_lite.loader.workers.arena import LentRange
from energon_lite.loader.workers.channel import REPORT, Channel, Closed, Inlet, Message, Outlet
from energon_lite.loader.workers.codec import WorkerError, packed, packed_delivery
from energon_lite.loader.workers.executor import executor_kind
from energon_lite.loader.workers.rank_feed import Delivery

from ..conftest import examples
from ..helpers import assert_same


class Line:
    """Both ends of a socket between a worker process and the training loop, in one process."""

    def __init__(self, num_deliveries: int = 3) -> None:
        self.here, self.there = socket.socketpair()
        self.inlet = Inlet(Channel(self.here))
        self.outlet = Outlet(Channel(self.there), num_deliveries)
        self.take_back()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.here.close()
        self.there.close()

    def send(self, value: Any) -> Any:
        """A value after its way through the arena, and after what the training loop answered."""
        is_from_worker = isinstance(value, (Delivery, WorkerError))
        self.outlet.send(7, packed_delivery(value, "here") if is_from_worker else packed(value))
        return self.received()

    def received(self) -> Any:
        found = self.inlet.take(7)
        self.take_back()
        return found

    def take_back(self) -> None:
        """Lets the worker process see what was returned."""
        assert self.outlet.is_wanted()

    @property
    def used_bytes(self) -> int:
        """What is out of the arena, as the worker process has it."""
        arena: Any = self.outlet._arena
        return int(arena._space.used_bytes)

    @property
    def memory(self) -> int:
        """What the arena has of the memory of the system."""
        arena: Any = self.outlet._arena
        return os.fstat(arena.file).st_blocks * 512


def is_in_arena(array: Any) -> bool:
    """Whether an array is a view of an arena."""
    while isinstance(array, np.ndarray) and not isinstance(array, LentRange):
        array = array.base
    return isinstance(array, LentRange)


def test_arrays_and_tensors_of_all_sizes_and_layouts_arrive_and_are_writable() -> None:
    large = torch.arange(30_000)
    read_only = np.frombuffer(b"x" * 50_000, np.uint8)
    value = {
        "small": torch.arange(3),
        "large": large,
        "view": large[5:7],
        "turned": large.view(100, 300).t(),
        "bf16": torch.ones(40_000, dtype=torch.bfloat16),
        "bool": torch.ones(40_000, dtype=torch.bool),
        "complex": torch.ones(9_000, dtype=torch.complex64).conj(),
        "empty": torch.empty(0),
        "no rows": torch.empty(0, 5),
        "scalar": torch.tensor(2.5),
        "expanded": torch.ones(1).expand(50_000),
        "shared": torch.ones(9).share_memory_(),
        "parameter": torch.nn.Parameter(torch.ones(20_000)),
        "array": np.arange(20_000.0).reshape(100, 200),
        "fortran": np.asfortranarray(np.arange(20_000.0).reshape(100, 200)),
        "strided": np.arange(40_000)[::2],
        "times": np.arange(9_000).astype("datetime64[s]"),
        "objects": np.array(["a", None], dtype=object),
        "records": np.zeros(9_000, dtype=[("a", "i4"), ("b", "f8")]),
        "read_only": read_only,
        "small read only": read_only[:9],
        "no size": np.zeros((0, 5)),
        "bytes": b"y" * 200_000,
        "bytearray": bytearray(b"z" * 200_000),
    }
    with Line() as line:
        found = line.send(value)
        assert_same(found, value)
    assert found["view"].untyped_storage().data_ptr() == found["large"].untyped_storage().data_ptr()
    assert found["fortran"].flags.f_contiguous
    assert found["turned"].stride() == value["turned"].stride()
    names = ("read_only", "small read only", "array", "strided", "times", "fortran")
    for array in (*(found[name] for name in names), found["large"].numpy()):
        array[0] = 1
    assert not found["shared"].is_shared()  # or it would end with its process
    value["shared"][0] = 5
    assert found["shared"][0] == 1
    assert type(found["array"]) is np.ndarray
    assert all(is_in_arena(found[name]) for name in ("read_only", "array", "times", "fortran"))
    assert not is_in_arena(found["small read only"])


def test_of_rows_of_a_large_table_the_table_is_not_sent() -> None:
    table = torch.arange(6 << 20).view(-1, 64)
    value = {
        "row": table[7],
        "column": table[90:95, 3],
        "turned": table[5:9].t(),
        "expanded": table[4, 5].expand(3, 2),
        "empty": table[3:3],
        "shared": table.int().share_memory_()[7],
        "half of shared": table.int().share_memory_()[: len(table) // 2],
    }
    with Line() as line:
        found = line.send(value)
    assert_same(found, value)
    sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in found.items()}
    assert sizes["row"] == 64 * 8
    assert sizes["column"] == (4 * 64 + 1) * 8
    assert sizes["empty"] == 0
    assert sizes["half of shared"] == table.numel() * 2
    assert sizes["shared"] == 64 * 4
    assert found["turned"].stride() == value["turned"].stride()


def test_what_was_kept_in_great_numbers_is_right_and_goes_back_to_the_system() -> None:
    with Line() as line:
        kept = [line.send(torch.full((50_000,), float(value))) for value in range(100)]
        assert all(bool((tensor == value).all()) for value, tensor in enumerate(kept))
        assert line.memory >= 100 * 200_000
        last = kept[-1]
        kept.clear()
        line.send(0)
        assert line.memory < 3_000_000
        assert bool((last == 99).all())
        assert bool((line.send(torch.ones(10**6)) == 1).all())  # again beyond what is usual
        found = line.send([torch.ones(3_000_000), b"x" * 5_000_000])  # which has no limit
        assert (found[0].sum(), found[1]) == (3_000_000, b"x" * 5_000_000)


@given(st.integers(0, 2**32))
@examples(5)
def test_batches_kept_at_random_stay_what_they_were(seed: int) -> None:
    numbers = random.Random(seed)
    kept: dict[int, Any] = {}
    with Line() as line:
        for value in range(30):
            sizes = [int(10 ** numbers.uniform(0, 5.3)) for _ in range(numbers.randint(1, 4))]
            batch = [torch.full((size,), value % 251, dtype=torch.uint8) for size in sizes]
            arrays = [np.full(size, value % 251, np.uint8) for size in sizes]
            body = bytes([value % 251]) * sizes[0]
            kept[value] = line.send((batch, arrays, body))
            for other in list(kept):
                if numbers.random() < 0.3:
                    del kept[other]
            for other, (tensors, arrays, body) in kept.items():
                parts = [*(tensor.numpy() for tensor in tensors), *arrays]
                assert all((part == other % 251).all() for part in parts)
                assert body == bytes([other % 251]) * len(body)
        kept.clear()
        del tensors, arrays, body, parts, batch
        gc.collect()
        line.send(0)
        assert line.used_bytes < 1_000


@dataclasses.dataclass
class Plain:
    """A batch without slots."""

    __key__: list[str]
    __sources__: Any


@edataclass
class Slotted(Batch):
    """A batch with slots."""

    image: torch.Tensor


class Reduced(Plain):
    """A batch that says how it is pickled."""

    def __reduce__(self) -> Any:
        return type(self), (self.__key__, self.__sources__)


INFO = SourceInfo("data/a", 5, "s0.tar", ("5.txt", "5.jpg"))
OTHER = SourceInfo(Path("data/b"), "name", "", ())


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A batch that pickle restores by a method."""

    __key__: list[str]
    __restore_key__: Any
    __sources__: Any


class WithState(Plain):
    """A batch that leaves something out, and makes it again."""

    def __getstate__(self) -> Any:
        return {"__key__": self.__key__, "__sources__": self.__sources__}


class Made(dict[str, Any]):
    """A dict of another type."""


@pytest.mark.parametrize(
    "key",
    [
        ("batch", 3, ("a/train", 0, 5, 7), ("a/train", 1, 2**70, 8)),
        ("batch", 3, ("a/train", 0, 5, 7), ("crop", 1, ("a/train", 1, 6, 8))),  # of two lengths
        ("batch", 3, "no tuple", ("a", 1)),
        ("batch", 3),
        (),
        None,
    ],
)
@pytest.mark.parametrize(
    "sources",
    [
        [(INFO, OTHER), (), (INFO,)],
        [],
        (INFO, OTHER),
        [(INFO,), None],
        [(INFO,), ("not", "a", "source", ())],
    ],
)
def test_restore_key_of_a_batch_of_any_type_arrives_as_it_was(key, sources) -> None:
    slotted = Slotted(__key__=["a"], __restore_key__=key, image=torch.ones(3), __sources__=sources)
    with_state = WithState(["a"], sources)
    with_state.__restore_key__ = key  # type: ignore[attr-defined]
    fields = {"x": 1, "__restore_key__": key, "__sources__": sources, "z": [key, sources]}
    slotted.more = (1, 2)  # beside its slots
    items = [slotted, Frozen(["a"], key, sources), with_state, fields, Made(fields), (1, key)]
    items += [Reduced(["a"], sources), [Plain(["a"], sources)], {"deep": slotted}]
    with Line() as line:
        for item in items:
            found = line.send(Delivery(item, 5, 1, None, [], [("a", 1)]))
            assert type(found) is Delivery
            assert found[1:] == (5, 1, None, [], [("a", 1)])
            assert type(found.item) is type(item)
            assert_same(found.item, item)
            if item is slotted:
                assert found.item.more == (1, 2)
            if isinstance(item, dict):
                assert [*found.item] == [*item]
                assert repr(found.item) == repr(item)
            else:
                names = ("__restore_key__", "__sources__")
                for name in names if item is not with_state else names[1:]:
                    if hasattr(item, name):
                        assert repr(getattr(found.item, name)) == repr(getattr(item, name))
            assert hasattr(found.item, "__restore_key__") == (item in items[:2])


KEY = ("batch", 3, ("a/train", 0, 5, 7), ("a/train", 1, 6, 8))
LATER = ("__restore_key__", "__subflavors__", "__sources__")
FIELDS = ("__key__", *LATER, "__loss_weight__", "text")


@given(
    names=st.lists(st.sampled_from("abc"), max_size=5),
    before=st.lists(st.sampled_from([*LATER, "look", "delete"]), max_size=3),
    after=st.lists(st.sampled_from(LATER), max_size=2),
)
def test_batch_of_columns_arrives_as_the_samples_of_its_columns_say(names, before, after) -> None:
    numbers = range(len(names))
    origins = {name: Origin(f"/{name}", {"of": name}, 2.0) for name in "abc"}
    keys = [(name, 0, 7 * n, n) for n, name in enumerate(names)]
    texts, files = [f"text {n}" for n in numbers], [f"{n}.txt" for n in numbers]
    columns = [[*map(str, numbers)], keys, texts, ["s.tar"] * len(names), files]
    made = SampleColumns(SampleForm(TextSample, "text", []), origins, columns)
    samples = made.samples()
    expected = {name: [getattr(sample, name) for sample in samples] for name in FIELDS}

    def change(batch: Any, step: str) -> None:
        if step == "look":
            assert batch.__sources__ == expected.get("__sources__")
        elif step == "delete":
            expected.pop("__subflavors__", None)
            with suppress(AttributeError):
                del batch.__subflavors__
        else:
            expected[step] = (step, len(names))
            setattr(batch, step, expected[step])

    batch = made.batch()
    for step in before:
        change(batch, step)
    with Line() as line:
        found = line.send(Delivery(batch, 0, 0, None, [], [])).item
    for step in after:
        change(found, step)
    assert type(found) is TextSample
    assert {name: getattr(found, name) for name in FIELDS if hasattr(found, name)} == expected


class Asking(Batch):
    """A batch that finds further attributes by itself."""

    def __getattr__(self, name: str) -> Any:
        if name == "more":
            return 5
        raise AttributeError(name)


def test_batch_that_finds_attributes_by_itself_arrives_whole() -> None:
    with Line() as line:
        batch = Asking(__key__=["a"], __restore_key__=KEY, __sources__=(INFO,))
        found = line.send(Delivery(batch, 0, 0, None, [], [])).item
        assert type(found) is Asking
        assert (found.__restore_key__, found.__sources__, found.more) == (KEY, (INFO,), 5)


def made_batch(line: Line, value: int, num_rows: int = 8) -> torch.Tensor:
    array = line.outlet.empty((8, 100, 100), np.dtype(np.float32))
    array[...] = value
    return torch.from_numpy(array[:num_rows])


def test_array_that_was_made_in_the_arena_and_is_kept_by_a_hook_may_be_changed_by_it() -> None:
    with Line() as line:
        kept = made_batch(line, 1)
        first = line.send({"x": kept})
        kept += 1
        second = line.send([kept, kept.numpy(), kept[2:]])
        kept += 1
        assert bool((first["x"] == 1).all())
        assert all(bool((part == 2).all()) for part in second)
        assert is_in_arena(second[1])
        del kept, second
        assert bool((first["x"] == 1).all())
        del first
        line.send(0)
        line.send(0)
        assert line.used_bytes < 1_000
        tensor = made_batch(line, 3)
        content = packed([tensor, tensor.numpy()])  # the same memory twice
        del tensor
        line.outlet.send(7, content)
        found = line.received()
        found[0] += 1
        assert bool((found[1] == 3).all())


def num_open_files() -> int:
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_fork_reads_what_was_in_use_when_it_began_whatever_comes_after() -> None:
    with Line() as line:
        line.send(0)
        batch = line.send(torch.ones(50_000))
        arena = line.inlet.arena
        assert arena is not None
        arena.leave()  # what the worker pool does before each fork
        here, there = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(here, 1)
            os._exit(0 if bool((batch == 1).all()) else 1)
        del batch
        for value in range(10):
            line.send(torch.full((50_000,), float(value)))
        os.write(there, b".")
        assert os.waitpid(pid, 0)[1] == 0
        for end in (here, there):
            os.close(end)
        assert line.inlet.arena is not arena  # the new one
        assert line.used_bytes < 500_000


def test_report_that_comes_in_parts_is_one_report_and_the_end_of_the_socket_is_the_end() -> None:
    here, there = socket.socketpair()
    inlet, outlet = Channel(here), Channel(there)
    assert inlet.receive() is None
    text = b"It sleeps. " * 50_000
    writer = threading.Thread(target=outlet.send, args=(REPORT, 5, text))
    writer.start()
    found = None
    while found is None:
        found = inlet.receive()
    writer.join()
    assert found == Message(REPORT, 5, text)
    outlet.send(REPORT, 6, b"a")
    outlet.send(REPORT, 7, b"b")
    there.sendall(b"half")
    assert inlet.receive() == (REPORT, 6, b"a")
    assert inlet.is_ready()
    assert inlet.receive() == (REPORT, 7, b"b")
    assert inlet.receive() is None
    assert not inlet.is_ready()
    there.close()
    with pytest.raises(Closed):
        inlet.receive()
    with pytest.raises(Closed):
        inlet.send(REPORT)
    here.close()


@pytest.mark.processes
def test_too_many_open_files_are_an_error_that_names_the_limit(texts: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    config = WorkerConfig(rank=0, world_size=1, num_workers=1)
    loader = get_savable_loader(get_train_dataset(texts, batch_size=2, worker_config=config))
    executor_kind(config)  # imports what it needs
    before = num_open_files()
    os.close(free := os.dup(0))
    for number in range(5):  # two sockets with two ends each, and the arena
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + number, hard))
        try:
            with pytest.raises(OSError, match="Too many open files") as caught:
                next(iter(loader))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert any("ulimit -n" in note for note in caught.value.__dict__["__notes__"])
        del caught
        assert num_open_files() == before


# ------------------------------------------------------- tensors of all kinds; what cannot be sent


def kinds_of_tensors() -> dict[str, torch.Tensor]:
    """Tensors that are more than their memory, dtype, shape and strides."""
    rows = torch.arange(12.0).reshape(3, 4)
    numbers = torch.complex(rows, rows + 1)
    named = rows.clone()
    named.origin = "a"  # type: ignore[attr-defined]
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1, 2, 3])
    made = {
        "conj": numbers.conj(),
        "large conj": torch.complex(torch.ones(20_000), torch.ones(20_000)).conj(),
        "neg": numbers.conj().imag,
        "attribute": named,
        "quantized": torch.quantize_per_tensor(rows, 0.1, 3, torch.quint8),
        "by channel": torch.quantize_per_channel(rows, scales, zeros, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([rows, rows[:2]]),
        "jagged": torch.nested.nested_tensor([rows, rows[:2]], layout=torch.jagged),
        "coo": rows.to_sparse(),
        "not coalesced": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2)),
        "csr": rows.to_sparse_csr(),
        "csc": rows.to_sparse_csc(),
        "bsr": torch.ones(4, 4).to_sparse_bsr((2, 2)),
        "bsc": torch.ones(4, 4).to_sparse_bsc((2, 2)),
        "meta": torch.empty(3, device="meta"),
        "float8": rows.to(torch.float8_e4m3fn),
        "shared": rows.clone().share_memory_(),
        "parameter": torch.nn.Parameter(rows.clone()),
        "shared parameter": torch.nn.Parameter(rows.clone()).share_memory_(),
        "conj parameter": torch.nn.Parameter(numbers.conj()),
    }
    for name in ("conj", "coo", "csr", "nested", "shared"):
        made[f"{name} with a gradient"] = made[name].clone().requires_grad_()
    return made


def described(tensor: torch.Tensor) -> Any:
    """What there is to know of a tensor, but for where its memory is."""
    whole = tensor.detach()
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    content = whole.resolve_conj().resolve_neg().tolist() if is_dense and not tensor.is_meta else ""
    flags = tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg()
    text = re.sub(r"size=\(\d+, j\d+", "", repr(whole))  # numbers that count what was made
    attributes = vars(tensor) if tensor.layout is not torch.jagged else ""
    return type(tensor), tensor.dtype, tensor.layout, flags, attributes, content, text


@pytest.mark.filterwarnings("ignore")  # of torch, on sparse and quantized tensors
def test_tensors_of_all_kinds_arrive_as_they_were() -> None:
    expected = kinds_of_tensors()
    with Line() as line:
        batch = line.send(expected)
    assert expected.keys() == batch.keys()
    for name, tensor in expected.items():
        assert described(batch[name]) == described(tensor), name
        shared = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
        assert not (shared and batch[name].is_shared()), name


class Local:
    """Made where it cannot be imported from."""

    __qualname__ = "somewhere.<locals>.Local"


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (lambda: 0, r"batch\['odd'\] is a function .*<lambda>"),
        (open(os.devnull), r"batch\['odd'\] is a TextIOWrapper"),  # noqa: SIM115, PTH123
        ([1, {"deep": Local()}], r"batch\['odd'\]\[1\]\['deep'\] is a .*Local"),
        (threading.Lock(), r"batch\['odd'\] is a lock"),
        (torch.ones(2, requires_grad=True) * 2, r"batch\['odd'\] is a Tensor.*call detach\(\)"),
        ([torch.ones(2, 2).to_mkldnn()], r"batch\['odd'\]\[0\] is a Tensor"),
        (Plain(["k"], threading.Lock()), r"batch\['odd'\]\.__sources__ is a lock"),
    ],
)
def test_part_of_a_batch_that_cannot_be_sent_is_named_by_an_error(odd, message) -> None:
    with Line() as line:
        error = line.send(Delivery({"__key__": ["key 7"], "odd": odd}, 0, 0, None, [], []))
        assert line.send("the next one") == "the next one"
    with pytest.raises(TypeError, match=message) as caught:
        error.reraise()
    assert "key 7" in str(caught.value)
    assert "WorkerConfig(num_workers=0)" in str(caught.value)


class SeveralError(Exception):
    """Is made of several arguments, and not of a text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text}, code {code}")
        self.code = code


class MessageError(Exception):
    """Has the text as an attribute of its own."""

    message = "something"

    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"failed with {self.code}"


class LocalError(MemoryError):
    """Cannot be pickled."""

    __qualname__ = "somewhere.<locals>.LocalError"


ERRORS: dict[str, Exception] = {
    "several": SeveralError(5, "it broke"),
    "message": MessageError(7),
    "local": LocalError("it broke"),
}
Group: Any = getattr(builtins, "ExceptionGroup", None)
if Group is not None:
    ERRORS["group"] = Group("it broke", [ValueError("a"), OSError(5, "b")])
    ERRORS["unsendable group"] = Group("it broke", [ValueError(threading.Lock())])


@pytest.mark.parametrize("is_sent", [True, False])  # or handed over, by a thread
@pytest.mark.parametrize("name", sorted(ERRORS))
def test_error_of_several_arguments_has_its_type_text_and_traceback(name, is_sent) -> None:
    expected: Any = ERRORS[name]
    try:
        raise expected
    except Exception:
        error = WorkerError("in a worker")
    if is_sent:
        with Line() as line:
            error = line.send(error)
    with pytest.raises(Exception, match=r"it broke|failed with 7") as caught:
        error.reraise()
    found: Any = caught.value
    if "unsendable" in name or (name == "local" and is_sent):
        assert type(found) is RuntimeError
        assert f"{type(expected).__name__}: it broke" in str(found)
        return
    assert type(found) is type(expected)
    if name == "local":
        return
    assert str(found) == str(expected)
    assert getattr(found, "code", 0) == getattr(expected, "code", 0)
    if name == "group":
        assert [repr(error) for error in found.exceptions] == ["ValueError('a')", "OSError(5, 'b')"]
    assert any("in test_error_of_several" in note for note in found.__notes__)


class Unmaking:
    """Can be pickled, and not unpickled."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


class Unmade:
    def __setstate__(self, state: Any) -> None:
        raise KeyError("it cannot be made here")


def not_made(number: int) -> Any:
    raise KeyError(f"it cannot be made here {number}")


@pytest.mark.parametrize("reduced", [(not_made, (1,)), (Unmade, (), {"x": 1})])
def test_value_that_cannot_be_unpickled_is_an_error_that_names_the_remedy(reduced) -> None:
    with Line() as line, pytest.raises(KeyError, match="cannot be made here") as caught:
        line.send({"a": torch.ones(20_000), "odd": [1, Unmaking(*reduced)]})
    (note,) = caught.value.__dict__["__notes__"]
    assert 'Send another type, or use worker_type="thread"' in note
    assert caught.traceback[-1].name in ("not_made", "__setstate__")
