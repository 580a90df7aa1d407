"""What only real processes show: dead parents, errors that travel, ranks that talk."""

from __future__ import annotations

import builtins
import ctypes
import dataclasses
import gc
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import (
    DefaultTaskEncoder,
    FatalSampleError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from ..helpers import Ranks, assert_same, through_json, train

pytestmark = pytest.mark.processes


class Fatal(DefaultTaskEncoder):
    @stateless(failure_tolerance=2)
    def encode_sample(self, sample: Any) -> Any:
        if int(sample.__key__) >= 20:
            raise ValueError("too large")
        return sample


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fatal_error_has_its_type_and_text_and_leaves_an_exact_state(texts, num_workers) -> None:
    def make(encoder: Any, workers: int) -> Any:
        config = WorkerConfig(rank=0, world_size=1, num_workers=workers, num_streams=2)
        settings = {"shuffle_over_epochs_multiplier": None, "worker_config": config}
        dataset = get_train_dataset(texts, batch_size=2, task_encoder=encoder, **settings)
        return get_savable_loader(dataset)

    loader = make(Fatal(), num_workers)
    found: list[Any] = []
    with pytest.raises(FatalSampleError, match=r"failed 2 times in a row .*too large"):
        found.extend(loader)
    assert [key for batch in found for key in batch.__key__] == [f"{i:05d}" for i in range(20)]
    # The state stands after the last batch that was given, and asking again fails again.
    state = through_json(loader.save_state_rank())
    assert state["count"] == 10
    with pytest.raises(FatalSampleError, match="too large"):
        next(iter(loader))
    assert through_json(loader.save_state_rank())["count"] == 10
    mended = make(Mended(), 0)
    mended.restore_state_rank(state)
    assert next(iter(mended)).__key__ == ["00020", "00021"]


class Mended(Fatal):
    @stateless
    def encode_sample(self, sample: Any) -> Any:
        return sample


def test_workers_end_at_once_after_an_error_though_its_traceback_is_kept(texts) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=2)
    dataset = get_train_dataset(texts, worker_config=config, batch_size=2, task_encoder=Fatal())
    before = set(multiprocessing.active_children())
    with pytest.raises(FatalSampleError) as caught:
        list(get_savable_loader(dataset))
    assert set(multiprocessing.active_children()) <= before
    assert caught.value.__traceback__ is not None


def test_workers_of_a_loader_in_a_circle_of_references_end_with_it(texts) -> None:
    before = set(multiprocessing.active_children())
    run: Any = Ranks(train(texts), 1, 2)
    run.slots(2)
    run.circle = run
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    del run
    gc.collect()
    # Sent away, not killed after a time-out.
    assert {worker.exitcode for worker in workers} == {0}


def test_global_seeds_of_the_user_are_left_alone_by_worker_processes(texts) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run = Ranks(train(texts, "skipping"), 1, 2)
    run.slots(4)
    assert torch.equal(torch.rand(3), expected)


def test_loader_of_which_no_batch_is_read_starts_no_process(texts) -> None:
    before = set(multiprocessing.active_children())
    run = Ranks(train(texts), 2, 3)
    run.save()
    assert set(multiprocessing.active_children()) == before


def test_prefetch_factor_changes_nothing(texts) -> None:
    make = train(texts, "skipping")
    expected = Ranks(make, 1, num_streams=3).slots(20)
    for prefetch_factor in (1, 5):
        run = Ranks(make, 1, 3, prefetch_factor=prefetch_factor)
        assert_same(run.slots(20), expected)
        state = run.save()
        resumed = Ranks(make, 1, 0, states=state)
        whole = Ranks(make, 1, num_streams=3).slots(30)
        assert_same(resumed.slots(10), {m: whole[m] for m in range(20, 30)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefetch_factor": 0}, "prefetch_factor=0 must be a whole number of at least 1"),
        ({"prefetch_factor": 1.5}, "prefetch_factor=1.5 must be"),
        ({"prefetch_factor": None}, "prefetch_factor=None must be"),
        ({"restart_workers": "3"}, "restart_workers='3' must be"),
        ({"stall_timeout_sec": "1"}, "stall_timeout_sec='1' must be above 0, or None"),
        ({"max_skip_rate": "all"}, "max_skip_rate='all' must lie in 0..1"),
    ],
)
def test_settings_of_other_types_are_refused_by_name(texts, settings, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Ranks(train(texts), 1, 2, **settings)


def test_braces_in_the_path_of_a_skip_log_stay(texts, tmp_path) -> None:
    Ranks(train(texts, "skipping"), 1, skip_log=tmp_path / "{a}-{rank}").slots(8)
    assert (tmp_path / "{a}-0").exists()


SCRIPT = """
from energon_lite import WorkerConfig, get_loader, get_train_dataset
config = WorkerConfig(rank=0, world_size=1, num_workers=1, start_method="spawn")
dataset = get_train_dataset({path!r}, batch_size=2, worker_config=config)
print(next(iter(get_loader(dataset))))
"""


def test_script_that_spawns_while_it_is_imported_gets_a_remedy(texts, tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(path=str(texts)))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "died" in line]
    assert "before the first batch" in line
    assert "`if __name__ == '__main__':`" in line


BELOW = """
import sys
from energon_lite import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
if __name__ == "__main__":
    class Local(DefaultTaskEncoder):
        pass
    config = WorkerConfig(rank=0, world_size=1, num_workers=2, start_method=sys.argv[1])
    dataset = get_train_dataset(
        sys.argv[2], batch_size=2, worker_config=config, task_encoder=Local()
    )
    next(iter(get_loader(dataset)))
"""


@pytest.mark.parametrize(("method", "is_file"), [("spawn", True), ("forkserver", False)])
def test_class_that_worker_processes_cannot_import_is_one_error(
    texts, tmp_path, method, is_file
) -> None:
    """In a script below the guard, and where the program is no file, as in a notebook."""
    script = tmp_path / "script.py"
    script.write_text(BELOW)
    start = [script] if is_file else ["-c", BELOW]
    done = subprocess.run(
        [sys.executable, *start, method, str(texts)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    *_, line = done.stderr.splitlines()
    assert line.startswith("RuntimeError: Worker process ")
    assert "Can't get attribute 'Local'" in line
    for remedy in ("top level of a module", 'start_method="fork"', 'worker_type="thread"'):
        assert remedy in line
    assert done.stderr.count("Traceback") == 1
    for wrong in ("lack of memory", "Another one", "signal"):
        assert wrong not in done.stderr


class WithFunction(DefaultTaskEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.functions = {"a": [print, lambda text: text]}

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        return sample


def local_encoder() -> DefaultTaskEncoder:
    class Local(WithFunction):
        def __init__(self) -> None:
            DefaultTaskEncoder.__init__(self)

    return Local()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (WithFunction, r"WithFunction\.functions\['a'\]\[1\] is a function .*<lambda>, which"),
        (local_encoder, r"is a local_encoder.<locals>.Local, which cannot be sent to a worker"),
    ],
)
def test_encoder_that_cannot_be_sent_is_an_error_that_names_the_part(
    texts, method, make, words
) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=1, start_method=method)
    dataset = get_train_dataset(texts, batch_size=2, worker_config=config, task_encoder=make())
    before = set(multiprocessing.active_children())
    with pytest.raises(TypeError, match=words) as caught:
        next(iter(get_savable_loader(dataset)))
    for remedy in ("task encoder", "module", 'start_method="fork"', 'worker_type="thread"'):
        assert remedy in str(caught.value)
    assert set(multiprocessing.active_children()) == before


class Closing(DefaultTaskEncoder):
    """Closes all that its process has, and stays."""

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        sys.setswitchinterval(600)
        libc = ctypes.PyDLL(None)  # which keeps Python's lock, so that no thread notices
        for file in range(3, 1_000):
            libc.close(file)
        libc.sleep(600)


def test_worker_that_the_loader_ended_is_not_reported_as_killed_by_the_system(
    texts, caplog
) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=1)
    dataset = get_train_dataset(texts, batch_size=2, worker_config=config, task_encoder=Closing())
    with pytest.raises(RuntimeError, match="closed its socket, and was ended") as caught:
        next(iter(get_savable_loader(dataset)))
    assert "It had sent nothing, so no other was started" in str(caught.value)
    assert "signal 9" not in str(caught.value)
    assert "memory" not in str(caught.value)
    assert not caplog.records


LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
from energon_lite import *
class Large(DefaultTaskEncoder):
    @stateless
    def encode_batch(self, batch):
        return {"x": np.ones(300_000)}
name, more, texts = sys.argv[1:]
config = WorkerConfig(rank=0, world_size=1, num_workers=2, start_method="fork")
dataset = get_train_dataset(texts, batch_size=2, worker_config=config, task_encoder=Large())
loader = get_savable_loader(dataset)
pages = Path("/proc/self/statm").read_text().split()[0]
used = {"RLIMIT_AS": int(pages) * resource.getpagesize()}.get(name, 0)
kind = getattr(resource, name)
resource.setrlimit(kind, (used + int(more), resource.getrlimit(kind)[1]))
print(len([batch for batch, _ in zip(loader, range(9))]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("RLIMIT_FSIZE", 1_000, ("File too large", "ulimit -f")),
        ("RLIMIT_FSIZE", 1 << 20, ("File too large", "ulimit -f")),
        ("RLIMIT_AS", 16 << 20, ("emory", "fewer workers", "ulimit -v")),
        ("RLIMIT_NOFILE", 12, ("Too many open files", "ulimit -n")),
        ("RLIMIT_NOFILE", 15, ("Too many open files", "ulimit -n")),
    ],
)
def test_limits_of_the_system_are_errors_that_name_the_limit(texts, limit, value, words) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, limit, str(value), str(texts)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    end = "\n".join(done.stderr.splitlines()[-2:])
    for word in words:
        assert word in end
    names = {"ulimit -f", "ulimit -v", "ulimit -n"}
    assert [name for name in names if name in end] == [word for word in words if word in names]
    assert "signal 9" not in end


# ----------------------------------------------------------------------- what cannot be sent


@dataclasses.dataclass
class Parts:
    """A batch of parts of which one may not be sent."""

    __key__: list[str]
    meta: dict[str, Any]


class OddEncoder(DefaultTaskEncoder):
    """Puts something into the third batch that no queue takes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    @stateless
    def encode_batch(self, batch: Any) -> Parts:
        class Local:
            pass

        class LocalError(MemoryError):
            pass

        meta: dict[str, Any] = {"x": torch.ones(2)}
        if self.current_batch_index == 2:
            if self.kind == "error":
                raise LocalError("no room")
            odd: dict[str, Callable[[], Any]] = {
                "lambda": lambda: lambda: 0,
                "file": Path(os.devnull).open,
                "local": lambda: [1, {"deep": Local()}],
                "lock": threading.Lock,
                "graph": lambda: torch.ones(2, requires_grad=True) * 2,
                "opaque": lambda: [torch.ones(2, 2).to_mkldnn()],
            }
            meta["odd"] = odd[self.kind]()
        return Parts(batch.__key__, meta)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("lambda", r"batch\.meta\['odd'\] is a function .*<lambda>"),
        ("file", r"batch\.meta\['odd'\] is a TextIOWrapper"),
        ("local", r"batch\.meta\['odd'\]\[1\]\['deep'\] is a .*Local"),
        ("lock", r"batch\.meta\['odd'\] is a lock"),
        ("graph", r"batch\.meta\['odd'\] is a Tensor.*call detach\(\)"),
        ("opaque", r"batch\.meta\['odd'\]\[0\] is a Tensor"),
    ],
)
def test_batch_that_cannot_be_sent_is_an_error_that_names_the_part(texts, kind, message) -> None:
    def make(num_workers: int) -> Any:
        config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, num_streams=2)
        dataset = get_train_dataset(
            texts, batch_size=4, worker_config=config, task_encoder=OddEncoder(kind)
        )
        return get_savable_loader(dataset)

    keys = [batch.__key__ for batch in islice(iter(make(0)), 4)]
    loader = make(2)
    iterator = iter(loader)
    assert [next(iterator).__key__ for _ in range(2)] == keys[:2]
    for batches in (iterator, iter(loader)):  # and again, however often it is tried
        with pytest.raises(TypeError, match=message) as caught:
            next(batches)
        assert str(keys[2][0]) in str(caught.value)
    assert "WorkerConfig(num_workers=0)" in str(caught.value)
    alone = make(0)
    alone.load_state_dict(loader.state_dict())
    assert [batch.__key__ for batch in islice(iter(alone), 2)] == keys[2:]


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


class Unmaking:
    """Can be pickled, and not unpickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return {"function": (not_made, (1,)), "state": (Unmade, (), {"x": 1})}[self.name]


class Unmade:
    def __setstate__(self, state: Any) -> None:
        raise KeyError("it cannot be made here")


def not_made(number: int) -> Any:
    raise KeyError(f"it cannot be made here {number}")


ERRORS: dict[str, Callable[[], Exception]] = {
    "several": lambda: SeveralError(5, "it broke"),
    "message": lambda: MessageError(7),
}
Group: Any = getattr(builtins, "ExceptionGroup", None)
if Group is not None:
    ERRORS["group"] = lambda: Group("it broke", [ValueError("a"), OSError(5, "b")])
    ERRORS["unsendable group"] = lambda: Group("it broke", [ValueError(threading.Lock())])


class Raising(DefaultTaskEncoder):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        if self.name in ERRORS:
            raise ERRORS[self.name]()
        return Parts(batch.__key__, {"a": torch.ones(20_000), "odd": [1, Unmaking(self.name)]})


def raise_it(error: Exception, *_: object) -> None:
    raise error


@pytest.mark.parametrize("kind", ["process", "thread"])
@pytest.mark.parametrize("name", sorted(ERRORS))
def test_error_of_several_arguments_has_its_type_text_and_traceback(texts, name, kind) -> None:
    config = WorkerConfig(
        rank=0, world_size=1, num_workers=1, worker_type=kind, global_error_handler=raise_it
    )
    dataset = get_train_dataset(
        texts, batch_size=4, worker_config=config, task_encoder=Raising(name)
    )
    expected = ERRORS[name]()
    with pytest.raises(Exception, match=r"it broke|failed with 7") as caught:
        next(iter(get_savable_loader(dataset)))
    found: Any = caught.value
    if name == "unsendable group":
        assert type(found) is RuntimeError
        assert "ExceptionGroup: it broke" in str(found)
        return
    assert type(found) is type(expected)
    assert str(found) == str(expected)
    assert getattr(found, "code", 0) == getattr(expected, "code", 0)
    if name == "group":
        assert [repr(error) for error in found.exceptions] == ["ValueError('a')", "OSError(5, 'b')"]
    assert any("in encode_batch" in note for note in found.__notes__)


@pytest.mark.parametrize("name", ["function", "state"])
def test_value_that_cannot_be_unpickled_is_an_error_that_names_the_remedy(texts, name) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=1)
    dataset = get_train_dataset(
        texts, batch_size=2, worker_config=config, task_encoder=Raising(name)
    )
    with pytest.raises(KeyError, match="cannot be made here") as caught:
        next(iter(get_savable_loader(dataset)))
    (note,) = caught.value.__dict__["__notes__"]
    assert 'Send another type, or use worker_type="thread"' in note
    assert caught.traceback[-1].name in ("not_made", "__setstate__")


def kinds_of_tensors() -> dict[str, torch.Tensor]:
    """Tensors that are more than their memory, dtype, shape and strides."""
    rows = torch.arange(12.0).reshape(3, 4)
    numbers = torch.complex(rows, rows + 1)
    large = torch.complex(torch.ones(20_000), torch.ones(20_000))
    named = rows.clone()
    named.origin = "a"  # type: ignore[attr-defined]
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1, 2, 3])
    made = {
        "conj": numbers.conj(),
        "large conj": large.conj(),
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


class Kinds(DefaultTaskEncoder):
    """Makes batches of tensors of all kinds."""

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        return {"__key__": batch.__key__, **kinds_of_tensors()}


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
def test_tensors_of_all_kinds_arrive_as_without_workers(texts) -> None:
    found = []
    for num_workers in (0, 1):
        config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, num_streams=1)
        dataset = get_train_dataset(texts, batch_size=4, worker_config=config, task_encoder=Kinds())
        with get_savable_loader(dataset) as loader:
            found.append(next(iter(loader)))
    expected, batch = found
    assert expected.pop("__key__") == batch.pop("__key__")
    assert expected.keys() == batch.keys()
    for name, tensor in expected.items():
        assert described(batch[name]) == described(tensor), name
        shared = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
        assert not (shared and batch[name].is_shared()), name


def test_error_of_a_type_that_cannot_be_sent_arrives(texts) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=1)
    dataset = get_train_dataset(
        texts, batch_size=4, worker_config=config, task_encoder=OddEncoder("error")
    )
    with pytest.raises(Exception, match="no room"):
        list(islice(iter(get_savable_loader(dataset)), 9))
