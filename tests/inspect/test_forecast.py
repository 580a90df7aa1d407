from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from energon_lite import DefaultTaskEncoder, Packing, TextSample, get_train_dataset
from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.keys import leaves
from energon_lite.extras.inspect import forecast as module
from energon_lite.extras.inspect.forecast import Plan, interval_edges, plan
from energon_lite.extras.inspect.text import plan_text
from energon_lite.formats.length_files import write_lengths
from energon_lite.sources.dataset_config import load_factory

from ..conftest import examples
from ..helpers import Ranks, metadataset, text_set

SIZES = {"a": 23, "b": 40, "c": 7, "d": 61}
FADING = {"schedule": "linear", "points": {0: 3, 60: 0}}
COSINE = {"schedule": "cosine", "points": {10: 0.5, 90: 4}}


def entry(name: str, **keys: Any) -> dict[str, Any]:
    return {"path": f"./{name}", **keys}


A, B, C, D = map(entry, "abcd")
ENDLESS: dict[str, dict[str, Any]] = {
    "a folder": A,
    "a blend": {"blend": [entry("a", weight=5), B, entry("c", weight=0.7)]},
    "a blend at random": {"blend": [A, entry("b", weight=2)], "blend_mode": "random"},
    "nested blends": {"blend": [
        entry("a", weight=2), {"blend": [entry("b", weight=3), C], "weight": 3},
        {"blend": [D, entry("a", weight=FADING)], "blend_mode": "random"},
    ]},
    "schedules": {"blend": [entry("a", weight=FADING), entry("b", weight=COSINE), C]},
    "one folder three times": {"blend": [A, entry("a", weight=2), A]},
    "epochized": {"blend_epochized": [
        entry("a", repetitions=1.5), entry("c", repetitions=0.3), entry("b", repetitions=2),
        {"blend_epochized": [entry("d", repetitions=0.1)], "repetitions": 3},
    ]},
    "a concat": {"concat": [C, A, {"blend_epochized": [B]}]},
    "a concat in a blend": {"blend": [{"concat": [C, A]}, entry("b", weight=3)]},
    "subsets": {"blend": [entry("a", subset={"range": [3, 9]}),
                          entry("b", subset={"range": ["50%", "100%"]}, weight=2)]},
    "file order": {"blend": [entry("a", shuffle_over_epochs_multiplier=None), B]},
    "with replacement": {"blend": [entry("a", shuffle_over_epochs_multiplier=-1), B]},
    "until forever": {"blend": [A, C], "until": "forever"},
    "tokens": {"blend": [A, entry("b", weight=3), entry("a", weight=2)], "unit": "tokens",
               "lengths": "words"},
}  # fmt: skip
FINITE: dict[str, dict[str, Any]] = {
    "a folder": A,
    "epochized": ENDLESS["epochized"],
    "a concat": ENDLESS["a concat"],
    "file order": entry("b", shuffle_over_epochs_multiplier=None),
    "two epochs in one": entry("b", shuffle_over_epochs_multiplier=2),
    "until first": {"blend": [A, entry("b", weight=3), C], "until": "first"},
    "until all once": {"blend": [A, entry("b", weight=3)], "until": "all_once"},
    "until inside a concat": {"concat": [{"blend": [A, C], "until": "all_once"}, D]},
    "tokens until first": {"blend": [A, entry("b", weight=2)], "unit": "tokens",
                           "lengths": "words", "until": "first"},
}  # fmt: skip
TOPOLOGIES = [(1, 1), (1, 3), (2, 2), (2, 4), (3, 3), (3, 4), (2, 5)]


def on_topologies(cases: Iterable[str]) -> list[tuple[str, int, int]]:
    """Each case on one of the topologies, in turns."""
    return [(name, *TOPOLOGIES[i % len(TOPOLOGIES)]) for i, name in enumerate(cases)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with the sets a..d, each with an index of lengths."""
    folder = tmp_path_factory.mktemp("plan")
    for number, (name, size) in enumerate(SIZES.items()):
        path = text_set(folder / name, size)
        lengths = 1 + np.arange(size, dtype=np.int64) * (7 + number) % 30
        write_lengths(path, "train", "words", lengths, load_factory(path).data)
    return folder


def written(root: Path, split: dict[str, Any], name: str = "meta.yaml") -> Path:
    """Writes a metadataset with one split; JSON is YAML."""
    (root / name).write_text(json.dumps(metadataset(split)))
    return root / name


def real_steps(path: Path, steps: int, world_size: int, num_streams: int, **arguments: Any):
    """The samples of each source at each step of a real run, up to its pass's end."""
    ranks = Ranks(
        lambda config: get_train_dataset(path, worker_config=config, **arguments),
        world_size,
        num_streams=num_streams,
    )
    found = []
    for _ in range(steps):
        counted: Counter[str] = Counter()
        for rank in range(world_size):
            try:
                batch = next(ranks.iterators[rank])
            except StopIteration:
                return found
            counted.update(key[0] for key in leaves(batch.__restore_key__))
        found.append(counted)
    return found


def shown(found: Plan) -> str:
    """What the command prints."""
    return "\n".join(plan_text(found))


def assert_predicted(found: Plan, real: list[Counter[str]]) -> None:
    """Compares a plan with the steps of a real run, in all and in each interval."""
    assert found.drawn_steps == found.steps == len(real)
    counted: Counter[str] = sum(real, Counter())
    assert {s.name: s.samples for s in found.sources if s.samples} == dict(counted)
    assert found.samples == counted.total()
    assert [interval.start for interval in found.intervals] == interval_edges(len(real))[:-1]
    for interval in found.intervals if found.unit == "samples" else ():
        here: Counter[str] = sum(real[interval.start : interval.stop], Counter())
        shares = {name: number / here.total() for name, number in here.items()}
        assert interval.actual is not None
        assert {k: v for k, v in interval.actual.items() if v} == pytest.approx(shares)


@pytest.mark.parametrize(("name", "world_size", "num_streams"), on_topologies(ENDLESS))
def test_a_plan_of_an_endless_run_is_what_the_run_has(root, name, world_size, num_streams):
    path = written(root, ENDLESS[name])
    run = {"batch_size": 3, "shuffle_buffer_size": 8, "max_samples_per_sequence": 5}
    real = real_steps(path, 37, world_size, num_streams, **run)
    assert len(real) == 37
    found = plan(path, steps=37, world_size=world_size, num_streams=num_streams, **run)
    assert_predicted(found, real)
    assert all("comes" in warning for warning in found.warnings)


@pytest.mark.parametrize(("name", "world_size", "num_streams"), on_topologies(FINITE))
def test_a_plan_stops_where_the_pass_of_the_first_rank_ends(root, name, world_size, num_streams):
    path = written(root, FINITE[name])
    run = {"batch_size": 3, "repeat": False}
    real = real_steps(path, 1000, world_size, num_streams, **run)
    assert 0 < len(real) < 200
    found = plan(path, steps=1000, world_size=world_size, num_streams=num_streams, **run)
    assert_predicted(found, real)
    assert f"the pass ends after {len(real)} of 1,000 steps" in found.warnings[0]
    assert f"{len(real)} of 1,000 steps" in shown(found)
    shorter = plan(path, steps=len(real), world_size=world_size, num_streams=num_streams, **run)
    assert_predicted(shorter, real)
    assert not any("the pass ends" in warning for warning in shorter.warnings)


def test_batches_that_only_some_ranks_have_are_reported(root):
    found = plan(root / "c", steps=10, world_size=2, num_streams=3, repeat=False)
    assert (found.steps, found.samples, found.more_batches) == (3, 6, 1)
    assert "; batches that only some ranks have then: 1" in found.warnings[0]


WEIGHTS = st.one_of(
    st.sampled_from([1, 0.01, 3]),
    st.builds(
        lambda kind, y, x, z: {"schedule": kind, "points": {0: y, x: z}},
        st.sampled_from(["linear", "step", "cosine"]),
        st.floats(0.1, 5), st.integers(1, 150), st.floats(0.1, 5),
    ),
)  # fmt: skip
LEAVES = st.sampled_from(list(SIZES)).map(entry)


def nodes(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def blend(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        return {"blend": [{**node, "weight": weight} for node, weight in pairs]}

    return st.lists(st.tuples(inner, WEIGHTS), min_size=1, max_size=3).map(blend)


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    split=st.recursive(LEAVES, nodes, max_leaves=5), steps=st.integers(1, 40),
    batch_size=st.integers(1, 4), topology=st.sampled_from(TOPOLOGIES), seed=st.integers(0, 3),
)  # fmt: skip
def test_any_blend_is_predicted(root, split, steps, batch_size, topology, seed):
    path = written(root, split, "any.yaml")
    world_size, num_streams = topology
    ranks = Ranks(
        lambda config: get_train_dataset(path, worker_config=config, batch_size=batch_size),
        world_size, num_streams=num_streams, seed=seed,
    )  # fmt: skip
    ranks.steps(steps)
    stats = ranks.loaders[0].stats().merged(loader.stats() for loader in ranks.loaders[1:])
    found = plan(
        path, steps=steps, batch_size=batch_size, world_size=world_size, num_streams=num_streams,
        seed_offset=seed,
    )  # fmt: skip
    assert {s.name: s.samples for s in found.sources} == {n: s.samples for n, s in stats.items()}
    for source in found.sources:
        assert source.epochs == pytest.approx(stats[source.name].epochs)
        assert source.target_share == pytest.approx(stats[source.name].target_share)
        assert source.actual_share == pytest.approx(stats[source.name].actual_share)


def test_nothing_of_a_shard_is_read_and_bytes_are_those_of_the_mean_sample(tmp_path):
    data = text_set(tmp_path / "data", 30)
    before = plan(data, steps=60)
    size = sum(shard.stat().st_size for shard in data.glob("*.tar"))
    assert before.read_bytes == 2 * size
    (source,) = before.sources
    assert (source.samples, source.epochs, source.actual_share) == (60, 2.0, 1.0)
    for shard in data.glob("*.tar"):
        shard.write_bytes(bytes(shard.stat().st_size))
    assert plan(data, steps=60) == before


def test_shares_over_time_follow_the_schedule(root):
    falling = {"schedule": "step", "points": {0: 3, 400: 1}}
    split = {"blend": [entry("a", weight=falling), entry("b")]}
    found = plan(written(root, split), steps=200, batch_size=4)
    assert [(s.start, s.stop) for s in found.intervals] == [(k * 25, k * 25 + 25) for k in range(8)]
    asked = [interval.target["a/train"] for interval in found.intervals]
    assert asked == pytest.approx([0.75] * 4 + [0.5] * 4)
    actual = [interval.actual["a/train"] for interval in found.intervals]
    assert actual == pytest.approx(asked, abs=0.06)


def test_sources_seen_often_or_never_are_warned_of(root):
    split = {"blend": [entry("c", weight=2), entry("b", weight=1e-9), entry("d", weight=1)]}
    found = plan(written(root, split), steps=60)
    often, never = found.warnings
    assert often.startswith("c/train: each of its 7 samples comes 5.7 times.")
    assert never.startswith("b/train: none of its 40 samples comes.")


def test_what_a_long_run_has_after_the_drawn_samples_is_extrapolated(root, monkeypatch):
    split = {"blend": [entry("a", weight=FADING), B, {"concat": [C, D], "weight": 0.5}]}
    path = written(root, split)
    run = {"steps": 400, "batch_size": 2, "world_size": 2}
    exact = plan(path, **run)
    assert "(exact)" in shown(exact)
    for most, close in ((1599, 4), (400, 15)):
        monkeypatch.setattr(module, "MAX_DRAWS", most)
        found = plan(path, **run)
        assert (exact.drawn_steps, found.drawn_steps, found.steps) == (400, most // 4, 400)
        assert f"(exact for {most // 4} steps, then extrapolated)" in shown(found)
        assert found.samples == exact.samples
        for one, other in zip(exact.sources, found.sources, strict=True):
            assert one.name == other.name
            assert abs(one.samples - other.samples) <= close
            assert one.target_share == pytest.approx(other.target_share)


def test_a_long_pass_is_extrapolated_up_to_its_end(root, monkeypatch):
    split = {"blend": [entry("a"), entry("b")], "until": "all_once"}
    path = written(root, split)
    run = {"steps": 100, "world_size": 2, "batch_size": 3, "repeat": False}
    exact = plan(path, **run)
    monkeypatch.setattr(module, "MAX_DRAWS", 30)
    found = plan(path, **run)
    assert (found.drawn_steps, exact.drawn_steps) == (5, exact.steps)
    assert abs(exact.steps - found.steps) <= 1
    assert "the pass ends after" in found.warnings[0]


# ------------------------------------------------------------------------------------------ tokens


class Words(DefaultTaskEncoder):
    def sample_length(self, sample: TextSample) -> int:
        return len(sample.text)


def test_tokens_are_counted_with_an_index(root):
    path = written(root, ENDLESS["tokens"])
    found = plan(path, steps=600)
    assert found.unit == "tokens"
    assert [source.name for source in found.sources] == ["a/train", "b/train", "a/train#2"]
    total = sum(source.tokens for source in found.sources)
    for source, share in zip(found.sources, (1 / 6, 3 / 6, 2 / 6), strict=True):
        assert source.target_share == pytest.approx(share)
        assert source.actual_share == pytest.approx(share, abs=0.02)
        assert source.actual_share == pytest.approx(source.tokens / total)
    assert "tokens" in shown(found).splitlines()[1]


def test_tokens_without_an_index_have_only_target_shares(root):
    split = {"blend": [entry("a", weight=1), entry("b", weight=3)], "unit": "tokens"}
    path = written(root, split)
    found = plan(path, steps=100)
    assert (found.drawn_steps, found.unit, found.samples) == (0, "tokens", None)
    assert found.read_bytes is None
    assert [source.target_share for source in found.sources] == [0.25, 0.75]
    assert all(source.samples is source.actual_share is None for source in found.sources)
    assert "Name a stored index with `lengths`" in found.warnings[0]
    text = shown(found)
    assert "only shares can be predicted" in text
    assert "target shares of tokens over time" in text
    assert json.loads(json.dumps(found.to_json()))["samples"] is None
    with pytest.raises(ValueError, match="name a stored index with `lengths` in the blend") as info:
        plan(path, steps=1, packing=Packing(capacity=100, lengths="tokens"))
    assert "Omit" not in str(info.value)
    # The run itself knows them, from the encoder.
    dataset = get_train_dataset(path, batch_size=2, task_encoder=Words())
    assert dataset.traits.unit == "tokens"


def test_a_long_blend_by_tokens_is_extrapolated_by_the_lengths_of_its_sources(root, monkeypatch):
    path = written(root, ENDLESS["tokens"])
    exact = plan(path, steps=600, batch_size=2)
    monkeypatch.setattr(module, "MAX_DRAWS", 400)
    found = plan(path, steps=600, batch_size=2)
    assert (found.drawn_steps, found.steps, found.samples) == (200, 600, exact.samples)
    for one, other in zip(exact.sources, found.sources, strict=True):
        assert other.samples == pytest.approx(one.samples, rel=0.05)
        assert other.tokens == pytest.approx(one.tokens, rel=0.05)
        assert other.actual_share == pytest.approx(one.actual_share, abs=0.02)


# ------------------------------------------------------------------------------- report and errors


def test_a_plan_is_json_and_a_table(root):
    found = plan(written(root, ENDLESS["a blend"]), steps=100, world_size=2, batch_size=4)
    report = found.to_json()
    plain = json.loads(json.dumps(report))
    assert plain["samples"] == 800
    for name, value in report.items():
        assert plain[name] == (list(value) if isinstance(value, tuple) else value)
    headline, header, *rows = shown(found).splitlines()
    assert "100 steps of 2 ranks x 4 samples, from 2 streams: 800 samples" in headline
    assert headline.endswith("of tars (exact)")
    assert header.split() == ["source", "size", "target", "actual", "samples", "epochs", "bytes"]
    assert [row.split()[0] for row in rows[:3]] == ["a/train", "b/train", "c/train"]
    assert rows[3] == "actual shares of samples over time:"
    assert shown(plan(root / "a", steps=1)).startswith(
        f"{root / 'a'}, train: 1 step of 1 rank x 1 sample, from 1 stream: 1 sample, "
    )


def test_a_dict_is_planned_too(root, monkeypatch):
    monkeypatch.chdir(root)
    content = json.loads(written(root, ENDLESS["a blend"]).read_text())
    found = plan(content, steps=20)
    assert found.path == "(a dict)"
    assert found.sources == plan(root / "meta.yaml", steps=20).sources


NO_END = r"a blend is endless by default, and must end here"
HOURS = r"a step has 1,000,000,000 samples.*at most 5,000,000"


@pytest.mark.parametrize(
    ("path", "settings", "error", "words"),
    [
        ("a", {"steps": 0}, ValueError, "steps=0 must be at least 1"),
        ("a", {"batch_size": 0}, ValueError, "batch_size=0 must be at least 1"),
        ("a", {"world_size": 0}, ValueError, "world_size=0"),
        ("a", {"stepps": 2}, TypeError, "'stepps'"),
        ("a", {"split_part": "tain"}, DatasetFormatError, "no split part 'tain'"),
        ("meta.yaml", {"split_part": "tain"}, DatasetFormatError, r"meta\.yaml: no split 'tain'"),
        ("meta.yaml", {"repeat": False}, ValueError, NO_END),
        ("none", {}, FileNotFoundError, "not a prepared dataset"),
        ("a", {"batch_size": 10**9}, ValueError, HOURS),
    ],
)
def test_what_cannot_be_planned_is_refused(root, path, settings, error, words):
    written(root, ENDLESS["a blend"])
    with pytest.raises(error, match=words):
        plan(root / path, **{"steps": 1, **settings})
