"""Small pipelines whose results `energon_behaviours.json` has, as Energon 7.4.1 returns them.

Each function gets an empty folder. None depends on the random order.

PYTHONPATH=. ENERGON_REAL=1 ENERGON_PYTHON -m tests.energon.energon_behaviours > FILE
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

if not os.environ.get("ENERGON_REAL"):
    import energon_lite

    energon_lite.as_energon()

import megatron.energon as E
import torch
from megatron.energon import (
    DefaultTaskEncoder,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)

from .energon_data import class_of, metadataset, prepared, write_shards

TEXT = {"sample_type": class_of("TextSample"), "field_map": {"text": "txt"}}
WC = WorkerConfig(rank=0, world_size=1, num_workers=0)


def texts(folder, num=30, start=0, ratio=None):
    """A dataset of the texts "0", "1" and so on."""
    write_shards(folder, num, lambda n: {"txt": str(n + start)})
    splits = {"train": "parts/data-[01].tar", "val": "parts/data-2.tar"} if ratio else {}
    return prepared(folder, TEXT, **splits)


def two(tmp, num_a, num_b):
    """Datasets `a` and `b`; the numbers of the latter start at 100."""
    return texts(tmp / "a", num_a), texts(tmp / "b", num_b, start=100)


def config(settings):
    place = {"rank": 0, "world_size": 1, "num_workers": 0}
    own = {name: settings.pop(name) for name in ("handler", *place) if name in settings}
    handler = {"global_error_handler": own.pop("handler")} if "handler" in own else {}
    return WorkerConfig(**{**place, **own}, **handler)


def train(path, bs=None, **settings):
    settings = {"shuffle_buffer_size": None, "max_samples_per_sequence": None, **settings}
    return get_train_dataset(path, worker_config=config(settings), batch_size=bs, **settings)


def val(path, bs=None, **settings):
    settings = {"split_part": "train", **settings}
    return get_val_dataset(path, worker_config=config(settings), batch_size=bs, **settings)


def base(tmp, num=12):
    return val(tmp / "d" if (tmp / "d").exists() else texts(tmp / "d", num))


def encoded(tmp, num, bs=None, kind=DefaultTaskEncoder, settings=None, **hooks):
    """The validation dataset of some texts under a task encoder of a few hooks."""
    folder = tmp / "d" if (tmp / "d").exists() else texts(tmp / "d", num)
    encoder = type("T", (kind,), hooks)()
    return val(folder, bs, task_encoder=encoder, **(settings or {}))


def packed(tmp, num, bs=None, buffer=6, settings=None, **hooks):
    settings = {"packing_buffer_size": buffer, **(settings or {})}
    return encoded(tmp, num, bs, settings=settings, **hooks)


def said(sample, text):
    """A sample with another text."""
    return TextSample.derive_from(sample, text=text)


def plus(text):
    """A hook that appends a text."""
    return lambda self, sample: said(sample, sample.text + text)


def skip_if(is_so, value):
    if is_so:
        raise SkipSample
    return value


def by(num):
    """Packs by so many."""
    return lambda self, xs: [xs[i : i + num] for i in range(0, len(xs), num)]


def joined(xs):
    return said(xs[0], "+".join(tx(xs)))


JOIN = stateless(lambda self, xs: joined(xs))
TRIPLES = {
    "encode_sample": stateless(plus("e")), "select_samples_to_pack": by(3),
    "pack_selected_samples": JOIN,
}  # fmt: skip


def take(items, num):
    return list(itertools.islice(items, num))


def tx(samples):
    return [sample.text for sample in samples]


def nums(items):
    """The texts of samples and batches."""
    found = [item.text if hasattr(item, "text") else item for item in items]
    return [text for texts in found for text in (texts if isinstance(texts, list) else [texts])]


def run(dataset, num=None):
    return nums(itertools.islice(get_savable_loader(dataset), num))


def batches(dataset):
    return tx(get_loader(dataset))


def counted(dataset, num=None):
    return run(dataset, num), len(dataset)


def two_passes(dataset):
    loader = get_savable_loader(dataset)
    return nums(loader), nums(loader), len(dataset)


def restored(dataset, num=None):
    """Items, and what their keys restore."""
    loader = get_savable_loader(dataset)
    found = take(loader, num)
    again = [loader.restore_sample(item.__restore_key__) for item in found]
    return loader.can_restore_sample(), found, again


def resumed(make, before):
    """What a loader returns that goes on after some items, and the state's own loader."""
    loader, other = get_savable_loader(make()), get_savable_loader(make())
    take(loader, before)
    other.restore_state_rank(loader.save_state_rank())
    return other, loader


def show(value):
    """A value as JSON; without restore keys, which are of each library."""
    if isinstance(value, torch.Tensor):
        return ["tensor", value.tolist()]
    if type(value).__name__ == "SourceInfo":
        return [Path(str(value.dataset_path)).name, value.index, list(value.file_names)]
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if f.name != "__restore_key__"]
        return [type(value).__name__, {name: show(getattr(value, name)) for name in names}]
    if isinstance(value, dict):
        return {str(k): show(v) for k, v in value.items() if k != "__restore_key__"}
    if isinstance(value, list | tuple):
        return [show(item) for item in value]
    if isinstance(value, set):
        return sorted(map(str, value))
    return value if value is None or isinstance(value, int | float | str) else type(value).__name__


def doubled_odd(samples):
    for s in samples:
        if int(s.text) % 2:
            yield said(s, s.text + "a")
        yield s


def batch_by(kind, below, **settings):
    batcher = settings.pop("batcher", tx)
    return kind(below, batcher=batcher, worker_config=WC, **settings)


def grouped(tmp, size, group, **settings):
    below, kind = base(tmp, 11), E.GroupBatchDataset
    group = {"fixed_batch_size": size, "sample_group_key": group}
    return list(get_savable_loader(batch_by(kind, below, **group, **settings)))


def packs(tmp, num, buffer, pre, fin, **settings):
    return E.PackingDataset(
        base(tmp, num), buffer_size=buffer, pre_packer=pre, final_packer=fin, worker_config=WC,
        **settings,
    )  # fmt: skip


def mixed(tmp, bs, mix, num):
    pairs = [(train(path, bs), 1) for path in two(tmp, 50, 40)]
    ds = E.MixBatchDataset(*pairs, batch_size=4, batch_mix_fn=mix, worker_config=WC)
    return take(get_savable_loader(ds), num)


def mix_of_samples(tmp):
    found = mixed(tmp, None, tx, 50)
    from_a = [i for x in found for i in x if int(i) < 100]
    return {len(x) for x in found}, 60 <= len(from_a) <= 140


def mix_of_batches(tmp):
    found = mixed(tmp, 1, E.homogeneous_concat_mix, 3)
    return [type(x).__name__ for x in found], *[[len(x) for x in y] for y in (
        tx(found), [x.__key__ for x in found])]  # fmt: skip


def epochized(tmp):
    ds = E.EpochizeDataset(train(texts(tmp / "d", 10)), length=4, worker_config=WC)
    loader = get_savable_loader(ds)
    passes = [nums(loader) for _ in range(5)]
    return [len(i) for i in passes], sorted(itertools.chain(*passes)), len(ds)


def endless_blend(tmp):
    a, b = two(tmp, 5, 4)
    ds = E.BlendDataset((train(a), 3), (train(b), 1.0), worker_config=WC)
    return 270 <= sum(int(i) < 100 for i in run(ds, 400)) <= 330, len(ds)


def restored_packs(tmp):
    can, found, again = restored(packed(tmp, 9, **TRIPLES))
    same = [s.__restore_key__[0] == found[0].__restore_key__[0] for s in found]
    return can, [tx(again)[i] == text for i, text in enumerate(tx(found))], same


def resumed_groups(tmp):
    def make():
        group = stateless(lambda self, s: (int(s.text) % 2, None))
        encode = stateless(lambda self, s: s)
        return encoded(tmp, 11, 2, batch_group_criterion=group, encode_sample=encode)

    return batches(make()), tx(resumed(make, 3)[0])


def own_types(tmp):
    @E.edataclass
    class RB(E.Batch):
        text: list

    loader = get_loader(val(texts(tmp / "d", 5), 2, task_encoder=DefaultTaskEncoder(
        raw_batch_type=RB)))  # fmt: skip
    return [(type(b).__name__, b.text, b.__key__) for b in loader]


def augmented(tmp):
    class A(E.AugmentTaskEncoder):
        def encode_sample(self, s):
            return super().encode_sample(said(s, s.text + "a"))

    inner = type("T", (DefaultTaskEncoder,), {"encode_sample": plus("e")})()
    return batches(val(texts(tmp / "d", 5), 2, task_encoder=A(inner)))


def skips(tmp):
    def batch(self, xs):
        return skip_if(xs[0].text == "0", DefaultTaskEncoder.batch(self, xs))

    return batches(encoded(
        tmp, 9, 2, encode_sample=lambda self, s: skip_if(s.text == "1", s), batch=batch,
        encode_batch=lambda self, b: skip_if(b.text[0] == "3", b),
    ))  # fmt: skip


def restored_expansions(tmp, bs, num, **hooks):
    @stateless
    def encode(self, s):
        yield from [said(s, f"{s.text}.{i}") for i in range(num)]

    _, found, again = restored(encoded(tmp, 5, bs, encode_sample=encode, **hooks))
    return tx(found), tx(again)


def failing_post(tmp):
    @stateless
    def post(self, s):
        if s.text == "1":
            raise ValueError("x")
        return s

    hooks = {"select_samples_to_pack": lambda self, xs: [xs], "postencode_sample": post}
    quiet = {"handler": lambda *a: None}
    return batches(packed(tmp, 4, None, 4, quiet, pack_selected_samples=JOIN, **hooks))


def of_both(tmp, num_a, num_b, bs=None, **own):
    two(tmp, num_a, num_b)
    leaves = [{"path": n, "split_part": "train", **({k: {"n": n} for k in own})} for n in "ab"]
    path = metadataset(tmp / "m.yaml", val={"blend": leaves})
    return get_loader(val(path, bs, split_part="val"))


def nested_split(tmp):
    texts(tmp / "a", 30, ratio=True)
    metadataset(tmp / "i.yaml", foo={"path": "a", "split_part": "val"}, train={"path": "a"})
    path = metadataset(tmp / "m.yaml", train={"path": "i.yaml", "split_part": "foo"})
    return nums(get_loader(val(path)))


def indexed(self, s):
    return said(s, f"{self.current_batch_index}/{self.current_sample_index}")


def unpacked(self, xs):
    yield from [said(x, x.text + "g") for x in xs]


ALL = {"select_samples_to_pack": lambda self, xs: [xs]}
FIRST_TWO = {"select_samples_to_pack": lambda self, xs: [xs[:2], xs[2:]]}
SINGLE = {"select_samples_to_pack": by(1)}

CASES = {
    # Wrappers.
    "map": lambda t: counted(E.MapDataset(base(t), lambda s: s.text + "!", worker_config=WC)),
    "map_gen": lambda t: counted(E.MapDataset(
        base(t), lambda s: (yield from [said(s, f"{s.text}.{i}") for i in range(int(s.text) % 3)]),
        worker_config=WC,
    )),
    "map_skip": lambda t: counted(E.MapDataset(
        base(t), lambda s: skip_if(int(s.text) % 2, s), worker_config=WC
    )),
    "map_stateless_restore": lambda t: (lambda can, _, again: (can, tx(again)))(*restored(
        E.MapDataset(base(t), lambda s: s, worker_config=WC, stateless_map_fn=True), 3
    )),
    "map_not_stateless_restore": lambda t: get_savable_loader(
        E.MapDataset(base(t), lambda s: s, worker_config=WC)
    ).can_restore_sample(),
    "itermap": lambda t: counted(E.IterMapDataset(
        base(t), doubled_odd, worker_config=WC, len_map_fn=lambda n: 2 * n
    )),
    "itermap_restore": lambda t: (lambda can, _, again: (can, tx(again)))(*restored(
        E.IterMapDataset(base(t), iter, worker_config=WC, stateless_iter_fn=True), 3
    )),
    "itermap_state": lambda t: nums(resumed(
        lambda: E.IterMapDataset(base(t), iter, worker_config=WC), 4
    )[0]),
    "filter": lambda t: counted(E.FilterDataset(
        base(t), filter_fn=lambda s: int(s.text) > 5, worker_config=WC
    )),
    "limit": lambda t: two_passes(E.LimitDataset(base(t), 5, worker_config=WC)),
    "limit_reset": lambda t: two_passes(
        E.LimitDataset(base(t), 5, worker_config=WC, reset_after_epoch=True)
    ),
    "repeat": lambda t: two_passes(E.RepeatDataset(base(t, 3), repeats=2, worker_config=WC)),
    "repeat_frac": lambda t: counted(E.RepeatDataset(base(t, 5), repeats=1.5, worker_config=WC)),
    "repeat_inf": lambda t: counted(E.RepeatDataset(base(t, 3), worker_config=WC), 10),
    "repeat_limit": lambda t: two_passes(E.LimitDataset(
        E.RepeatDataset(base(t, 3), worker_config=WC), 8, worker_config=WC, reset_after_epoch=True
    )),
    "concat": lambda t: two_passes(E.ConcatDataset(*map(val, two(t, 5, 4)), worker_config=WC)),
    "blend": lambda t: (lambda found, num: (sorted(found), num))(*counted(
        E.BlendDataset(*((val(path), 1) for path in two(t, 5, 4)), worker_config=WC)
    )),
    "blend_inf": endless_blend,
    "epochize": epochized,
    "shuffle_buffer": lambda t: (lambda x, num: (sorted(x), x != sorted(x, key=int), num))(
        *counted(E.ShuffleBufferDataset(base(t), size=4, worker_config=WC))
    ),
    "batch": lambda t: (lambda ds: (list(get_savable_loader(ds)), len(ds)))(
        batch_by(E.BatchDataset, base(t, 10), batch_size=4)
    ),
    "batch_drop": lambda t: (lambda ds: (list(get_savable_loader(ds)), len(ds)))(
        batch_by(E.BatchDataset, base(t, 10), batch_size=4, drop_last=True)
    ),
    "batch_gen": lambda t: batches(batch_by(
        E.BatchDataset, base(t, 6), batch_size=3,
        batcher=lambda xs: (yield from [said(xs[0], tx(xs[:1])), said(xs[0], tx(xs[1:]))]),
    )),
    "batch_skip": lambda t: list(get_savable_loader(batch_by(
        E.BatchDataset, base(t, 6), batch_size=3,
        batcher=lambda xs: skip_if(xs[0].text == "0", tx(xs)),
    ))),
    "group": lambda t: grouped(t, None, lambda s: (int(s.text) % 3, 2)),
    "group_fixed": lambda t: grouped(t, 3, lambda s: (int(s.text) % 2, None), drop_last=True),
    "mixbatch": mix_of_samples,
    "mixbatch_batches": mix_of_batches,
    "packing": lambda t: counted(packs(t, 11, 6, lambda xs: by(2)(None, xs), joined)),
    "packing_gen": lambda t: sorted(run(packs(
        t, 11, 6, lambda xs: [xs[:3], xs[3:]],
        lambda xs: (yield from [said(x, x.text + "p") for x in xs]),
    ))),
    "packing_encoder": lambda t: run(packs(
        t, 6, 3, lambda xs: [xs], joined,
        sample_encoder=lambda s: skip_if(s.text == "3", said(s, s.text + "e")),
    )),
    # Task encoders.
    "te_encode": lambda t: list(get_loader(encoded(
        t, 5, 2, encode_sample=plus("e"),
        encode_batch=lambda self, b: {"t": b.text, "k": b.__key__},
    ))),
    "te_batch_override": lambda t: list(get_loader(encoded(t, 5, 2, batch=lambda self, s: tx(s)))),
    "te_batch_gen": lambda t: run(encoded(t, 5, 2, batch=lambda self, s: (yield from s))),
    "te_encode_batch_gen": lambda t: batches(encoded(t, 5, 2, encode_batch=lambda self, b: (
        yield from [b, said(b, [x + "2" for x in b.text])]
    ))),
    "te_encode_gen": lambda t: restored_expansions(t, None, 2),
    "te_encode_gen_batch_restore": lambda t: restored_expansions(
        t, 4, 3, batch=stateless(lambda self, xs: said(xs[0], tx(xs))),
        encode_batch=stateless(lambda self, b: b),
    ),
    "te_skip_everywhere": skips,
    "te_preencode": lambda t: batches(
        encoded(t, 4, 2, preencode_sample=plus("p"), postencode_sample=plus("q"))
    ),
    "te_post_only": lambda t: batches(encoded(t, 4, 2, postencode_sample=plus("q"))),
    "te_pack": lambda t: batches(packed(t, 17, 2, **TRIPLES)),
    "te_pack_len": lambda t: len(packed(t, 17, 2, **TRIPLES)),
    "te_pack_restore_sample": restored_packs,
    "te_pack_empty_selection": lambda t: run(packed(
        t, 9, **{**TRIPLES, "select_samples_to_pack": lambda self, xs: []}
    )),
    "te_group": lambda t: [batches(encoded(
        t, 11, batch_group_criterion=lambda self, s: (int(s.text) % 2, 3)
    ))],
    "te_group_fixed": resumed_groups,
    "te_indices_nw": lambda t: sorted(run(encoded(
        t, 8, 2, settings={"num_workers": 2}, encode_sample=indexed
    ))),
    "te_types": own_types,
    "augment_te": augmented,
    "pack_post_fail": failing_post,
    "pack_skip_pack": lambda t: batches(packed(t, 5, None, 3, **SINGLE, pack_selected_samples=(
        stateless(lambda self, xs: skip_if(xs[0].text == "2", said(xs[0], xs[0].text)))
    ))),
    "pack_gen": lambda t: batches(packed(
        t, 5, None, 3, **ALL, pack_selected_samples=stateless(unpacked)
    )),
    "pack_batch": lambda t: batches(packed(
        t, 9, 2, 4, **FIRST_TWO, pack_selected_samples=JOIN,
        encode_batch=lambda self, b: said(b, [f"<{text}>" for text in b.text]),
    )),
    "group_drop_last": lambda t: batches(encoded(
        t, 7, settings={"batch_drop_last": True},
        batch_group_criterion=lambda self, s: (int(s.text) % 2, 2),
    )),
    "preencode_gen": lambda t: batches(encoded(
        t, 3, preencode_sample=lambda self, s: (yield from [s, said(s, s.text + "b")])
    )),
    "encode_dict_batch": lambda t: list(get_loader(encoded(t, 4, 2, encode_sample=lambda self, s: {
        "__key__": s.__key__, "t": s.text, "x": torch.ones(int(s.text) + 1)
    }))),
    # Metadatasets, epochs and ranks.
    "blend_in_val_subflavors": lambda t: [
        (s.text, s.__subflavors__) for s in of_both(t, 2, 2, subflavors=True)
    ],
    "val_batches_mixed": lambda t: tx(of_both(t, 3, 3, 2)),
    "nested_split": nested_split,
    "sources_batch": lambda t: list(next(iter(get_loader(val(texts(t / "d", 4), 2)))).__sources__),
}  # fmt: skip


def result_of(name: str, folder: Path) -> Any:
    """What a case returns, as it is after JSON."""
    return json.loads(json.dumps(show(CASES[name](folder))))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    out, sys.stdout = sys.stdout, sys.stderr
    rows = {name: result_of(name, Path(tempfile.mkdtemp())) for name in CASES}
    text = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items())
    print(f"{{\n{text}\n}}", file=out)
