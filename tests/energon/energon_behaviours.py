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

import functools
import operator

import torch
from megatron.energon import (
    AugmentTaskEncoder,
    Batch,
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    DefaultTaskEncoder,
    EpochizeDataset,
    FilterDataset,
    GroupBatchDataset,
    IterMapDataset,
    LimitDataset,
    MapDataset,
    MixBatchDataset,
    PackingDataset,
    RepeatDataset,
    ShuffleBufferDataset,
    SkipSample,
    TextSample,
    WorkerConfig,
    edataclass,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    homogeneous_concat_mix,
    stateless,
)

from .energon_data import class_of, metadataset, prepared, write_shards

TEXT = {"sample_type": class_of("TextSample"), "field_map": {"text": "txt"}}


def texts(folder, num=30, start=0, ratio=None):
    """A dataset of the texts "0", "1" and so on."""
    write_shards(folder, num, lambda n: {"txt": str(n + start)})
    splits = {"train": "parts/data-[01].tar", "val": "parts/data-2.tar"} if ratio else {}
    return prepared(folder, TEXT, **splits)


def mds(path, **splits):
    return metadataset(path, **splits)


def wc(nw=0, rank=0, world=1, **settings):
    return WorkerConfig(rank=rank, world_size=world, num_workers=nw, **settings)


def train(path, bs=None, nw=0, rank=0, world=1, **settings):
    settings = {"shuffle_buffer_size": None, "max_samples_per_sequence": None, **settings}
    config = wc(nw, rank, world, **settings.pop("wkw", {}))
    return get_train_dataset(path, worker_config=config, batch_size=bs, **settings)


def val(path, bs=None, nw=0, rank=0, world=1, **settings):
    config = wc(nw, rank, world, **settings.pop("wkw", {}))
    settings = {"split_part": "train", **settings}
    return get_val_dataset(path, worker_config=config, batch_size=bs, **settings)


def base(folder, num=12, **settings):
    return val(
        texts(folder / "d", num) if not (folder / "d").exists() else folder / "d", **settings
    )


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


class Triples(DefaultTaskEncoder):
    """Packs by threes."""

    @stateless
    def encode_sample(self, sample):
        return TextSample.derive_from(sample, text=sample.text + "e")

    def select_samples_to_pack(self, samples):
        return [samples[i : i + 3] for i in range(0, len(samples), 3)]

    @stateless
    def pack_selected_samples(self, samples):
        return TextSample.derive_from(samples[0], text="+".join(tx(samples)))


def case_map(tmp):
    w = wc()
    ds = MapDataset(base(tmp), lambda s: s.text + "!", worker_config=w)
    return (run(ds), len(ds))


def case_map_gen(tmp):

    def g(s):
        for i in range(int(s.text) % 3):
            yield TextSample.derive_from(s, text=f"{s.text}.{i}")

    ds = MapDataset(base(tmp), g, worker_config=wc())
    return (run(ds), len(ds))


def case_map_skip(tmp):

    def g(s):
        if int(s.text) % 2:
            raise SkipSample()
        return s

    ds = MapDataset(base(tmp), g, worker_config=wc())
    return (run(ds), len(ds))


def case_map_stateless_restore(tmp):
    ds = MapDataset(base(tmp), lambda s: s, worker_config=wc(), stateless_map_fn=True)
    loader = get_savable_loader(ds)
    x = take(loader, 3)
    return (loader.can_restore_sample(), [loader.restore_sample(s.__restore_key__).text for s in x])


def case_map_not_stateless_restore(tmp):
    ds = MapDataset(base(tmp), lambda s: s, worker_config=wc())
    loader = get_savable_loader(ds)
    take(loader, 3)
    return loader.can_restore_sample()


def case_itermap(tmp):

    def f(it):
        for s in it:
            if int(s.text) % 2:
                yield TextSample.derive_from(s, text=s.text + "a")
            yield s

    ds = IterMapDataset(base(tmp), f, worker_config=wc(), len_map_fn=lambda n: 2 * n)
    return (run(ds), len(ds))


def case_itermap_restore(tmp):

    def f(it):
        yield from it

    ds = IterMapDataset(base(tmp), f, worker_config=wc(), stateless_iter_fn=True)
    loader = get_savable_loader(ds)
    x = take(loader, 3)
    return (loader.can_restore_sample(), [loader.restore_sample(s.__restore_key__).text for s in x])


def case_itermap_state(tmp):

    def f(it):
        yield from it

    def mk():
        return get_savable_loader(IterMapDataset(base(tmp), f, worker_config=wc()))

    loader = mk()
    take(loader, 4)
    st = loader.save_state_rank()
    resumed = mk()
    resumed.restore_state_rank(st)
    return nums(resumed)


def case_filter(tmp):
    ds = FilterDataset(base(tmp), filter_fn=lambda s: int(s.text) > 5, worker_config=wc())
    return (run(ds), len(ds))


def case_limit(tmp):
    ds = LimitDataset(base(tmp), 5, worker_config=wc())
    loader = get_savable_loader(ds)
    return (nums(loader), nums(loader), len(ds))


def case_limit_reset(tmp):
    ds = LimitDataset(base(tmp), 5, worker_config=wc(), reset_after_epoch=True)
    loader = get_savable_loader(ds)
    return (nums(loader), nums(loader), len(ds))


def case_repeat(tmp):
    ds = RepeatDataset(base(tmp, 3), repeats=2, worker_config=wc())
    loader = get_savable_loader(ds)
    return (nums(loader), nums(loader), len(ds))


def case_repeat_frac(tmp):
    ds = RepeatDataset(base(tmp, 5), repeats=1.5, worker_config=wc())
    loader = get_savable_loader(ds)
    return (nums(loader), len(ds))


def case_repeat_inf(tmp):
    ds = RepeatDataset(base(tmp, 3), worker_config=wc())
    return (run(ds, 10), len(ds))


def case_repeat_limit(tmp):
    ds = LimitDataset(
        RepeatDataset(base(tmp, 3), worker_config=wc()),
        8,
        worker_config=wc(),
        reset_after_epoch=True,
    )
    loader = get_savable_loader(ds)
    return (nums(loader), nums(loader), len(ds))


def case_concat(tmp):
    texts(tmp / "b", 4, start=100)
    ds = ConcatDataset(base(tmp, 5), val(tmp / "b"), worker_config=wc())
    loader = get_savable_loader(ds)
    return (nums(loader), nums(loader), len(ds))


def case_blend(tmp):
    texts(tmp / "b", 4, start=100)
    ds = BlendDataset((base(tmp, 5), 1), (val(tmp / "b"), 1), worker_config=wc())
    loader = get_savable_loader(ds)
    return (sorted(nums(loader)), len(ds))


def case_blend_inf(tmp):
    texts(tmp / "b", 4, start=100)
    texts(tmp / "a", 5)
    ds = BlendDataset((train(tmp / "a"), 3), (train(tmp / "b"), 1.0), worker_config=wc())
    x = run(ds, 400)
    return (270 <= len([i for i in x if int(i) < 100]) <= 330, len(ds))


def case_epochize(tmp):
    texts(tmp / "d", 10)
    ds = EpochizeDataset(train(tmp / "d"), length=4, worker_config=wc())
    loader = get_savable_loader(ds)
    x = [nums(loader) for _ in range(5)]
    return ([len(i) for i in x], sorted(functools.reduce(operator.iadd, x, [])), len(ds))


def case_shuffle_buffer(tmp):
    ds = ShuffleBufferDataset(base(tmp), size=4, worker_config=wc())
    x = run(ds)
    return (sorted(x), x != sorted(x, key=int), len(ds))


def case_batch(tmp):
    ds = BatchDataset(
        base(tmp, 10), batch_size=4, batcher=lambda x: [s.text for s in x], worker_config=wc()
    )
    return (list(get_savable_loader(ds)), len(ds))


def case_batch_drop(tmp):
    ds = BatchDataset(
        base(tmp, 10),
        batch_size=4,
        batcher=lambda x: [s.text for s in x],
        drop_last=True,
        worker_config=wc(),
    )
    return (list(get_savable_loader(ds)), len(ds))


def case_batch_gen(tmp):

    def b(x):
        yield TextSample.derive_from(x[0], text=[s.text for s in x[:1]])
        yield TextSample.derive_from(x[0], text=[s.text for s in x[1:]])

    ds = BatchDataset(base(tmp, 6), batch_size=3, batcher=b, worker_config=wc())
    return [s.text for s in get_savable_loader(ds)]


def case_batch_skip(tmp):

    def b(x):
        if x[0].text == "0":
            raise SkipSample()
        return [s.text for s in x]

    return list(
        get_savable_loader(BatchDataset(base(tmp, 6), batch_size=3, batcher=b, worker_config=wc()))
    )


def case_group(tmp):
    ds = GroupBatchDataset(
        base(tmp, 11),
        fixed_batch_size=None,
        sample_group_key=lambda s: (int(s.text) % 3, 2),
        batcher=lambda x: [s.text for s in x],
        worker_config=wc(),
    )
    return list(get_savable_loader(ds))


def case_group_fixed(tmp):
    ds = GroupBatchDataset(
        base(tmp, 11),
        fixed_batch_size=3,
        sample_group_key=lambda s: (int(s.text) % 2, None),
        batcher=lambda x: [s.text for s in x],
        drop_last=True,
        worker_config=wc(),
    )
    return list(get_savable_loader(ds))


def case_mixbatch(tmp):
    texts(tmp / "b", 40, start=100)
    texts(tmp / "a", 50)
    ds = MixBatchDataset(
        (train(tmp / "a"), 1),
        (train(tmp / "b"), 1),
        batch_size=4,
        batch_mix_fn=lambda x: [s.text for s in x],
        worker_config=wc(),
    )
    b = take(get_savable_loader(ds), 50)
    return ({len(x) for x in b}, 60 <= len([i for x in b for i in x if int(i) < 100]) <= 140)


def case_mixbatch_batches(tmp):
    texts(tmp / "b", 40, start=100)
    texts(tmp / "a", 50)
    ds = MixBatchDataset(
        (train(tmp / "a", 1), 1),
        (train(tmp / "b", 1), 1),
        batch_size=4,
        batch_mix_fn=homogeneous_concat_mix,
        worker_config=wc(),
    )
    b = take(get_savable_loader(ds), 3)
    return ([type(x).__name__ for x in b], [len(x.text) for x in b], [len(x.__key__) for x in b])


def case_packing(tmp):

    def pre(xs):
        return [xs[i : i + 2] for i in range(0, len(xs), 2)]

    def fin(xs):
        return TextSample.derive_from(xs[0], text="+".join(x.text for x in xs))

    ds = PackingDataset(
        base(tmp, 11), buffer_size=6, pre_packer=pre, final_packer=fin, worker_config=wc()
    )
    return (run(ds), len(ds))


def case_packing_gen(tmp):

    def pre(xs):
        return [xs[:3], xs[3:]]

    def fin(xs):
        for x in xs:
            yield TextSample.derive_from(x, text=x.text + "p")

    ds = PackingDataset(
        base(tmp, 11), buffer_size=6, pre_packer=pre, final_packer=fin, worker_config=wc()
    )
    return sorted(run(ds))


def case_packing_encoder(tmp):

    def pre(xs):
        return [xs]

    def enc(s):
        if s.text == "3":
            raise SkipSample()
        return TextSample.derive_from(s, text=s.text + "e")

    def fin(xs):
        return TextSample.derive_from(xs[0], text="+".join(x.text for x in xs))

    ds = PackingDataset(
        base(tmp, 6),
        buffer_size=3,
        pre_packer=pre,
        final_packer=fin,
        sample_encoder=enc,
        worker_config=wc(),
    )
    return run(ds)


def case_te_encode(tmp):

    class T(DefaultTaskEncoder):
        def encode_sample(self, s):
            return TextSample.derive_from(s, text=s.text + "e")

        def encode_batch(self, b):
            return {"t": b.text, "k": b.__key__}

    return list(get_loader(val(texts(tmp / "d", 5), 2, task_encoder=T())))


def case_te_batch_override(tmp):

    class T(DefaultTaskEncoder):
        def batch(self, s):
            return [x.text for x in s]

    return list(get_loader(val(texts(tmp / "d", 5), 2, task_encoder=T())))


def case_te_batch_gen(tmp):

    class T(DefaultTaskEncoder):
        def batch(self, s):
            yield from s

    return nums(get_loader(val(texts(tmp / "d", 5), 2, task_encoder=T())))


def case_te_encode_batch_gen(tmp):

    class T(DefaultTaskEncoder):
        def encode_batch(self, b):
            yield b
            yield TextSample.derive_from(b, text=[x + "2" for x in b.text])

    return [b.text for b in get_loader(val(texts(tmp / "d", 5), 2, task_encoder=T()))]


def case_te_encode_gen(tmp):

    class T(DefaultTaskEncoder):
        @stateless
        def encode_sample(self, s):
            for i in range(2):
                yield TextSample.derive_from(s, text=f"{s.text}.{i}")

    loader = get_savable_loader(val(texts(tmp / "d", 5), None, task_encoder=T()))
    x = list(loader)
    return (tx(x), [loader.restore_sample(s.__restore_key__).text for s in x])


def case_te_encode_gen_batch_restore(tmp):

    class T(DefaultTaskEncoder):
        @stateless
        def encode_sample(self, s):
            for i in range(3):
                yield TextSample.derive_from(s, text=f"{s.text}.{i}")

        @stateless
        def batch(self, xs):
            return TextSample.derive_from(xs[0], text=[x.text for x in xs])

        @stateless
        def encode_batch(self, b):
            return b

    loader = get_savable_loader(val(texts(tmp / "d", 5), 4, task_encoder=T()))
    x = list(loader)
    return (tx(x), [loader.restore_sample(s.__restore_key__).text for s in x])


def case_te_skip_everywhere(tmp):

    class T(DefaultTaskEncoder):
        def encode_sample(self, s):
            if s.text == "1":
                raise SkipSample
            return s

        def batch(self, xs):
            if xs[0].text == "0":
                raise SkipSample()
            return super().batch(xs)

        def encode_batch(self, b):
            if b.text[0] == "3":
                raise SkipSample()
            return b

    return [b.text for b in get_loader(val(texts(tmp / "d", 9), 2, task_encoder=T()))]


def case_te_preencode(tmp):

    class T(DefaultTaskEncoder):
        def preencode_sample(self, s):
            return TextSample.derive_from(s, text=s.text + "p")

        def postencode_sample(self, s):
            return TextSample.derive_from(s, text=s.text + "q")

    return [b.text for b in get_loader(val(texts(tmp / "d", 4), 2, task_encoder=T()))]


def case_te_post_only(tmp):

    class T(DefaultTaskEncoder):
        def postencode_sample(self, s):
            return TextSample.derive_from(s, text=s.text + "q")

    return [b.text for b in get_loader(val(texts(tmp / "d", 4), 2, task_encoder=T()))]


def case_te_pack(tmp):
    return [
        b.text
        for b in get_loader(
            val(texts(tmp / "d", 17), 2, packing_buffer_size=6, task_encoder=Triples())
        )
    ]


def case_te_pack_len(tmp):
    d = val(texts(tmp / "d", 17), 2, packing_buffer_size=6, task_encoder=Triples())
    return len(d)


def case_te_pack_state(tmp):
    d = texts(tmp / "d", 30)

    def mk():
        return get_savable_loader(
            train(
                d,
                2,
                packing_buffer_size=7,
                task_encoder=Triples(),
                shuffle_buffer_size=4,
                max_samples_per_sequence=3,
            )
        )

    out = []
    for n in (0, 1, 3, 5):
        loader = mk()
        take(loader, n)
        st = loader.save_state_rank()
        a = [b.text for b in take(loader, 6)]
        resumed = mk()
        resumed.restore_state_rank(st)
        out.append([b.text for b in take(resumed, 6)] == a)
    return out


def case_te_pack_restore_sample(tmp):
    loader = get_savable_loader(
        val(texts(tmp / "d", 9), None, packing_buffer_size=6, task_encoder=Triples())
    )
    x = list(loader)
    return (
        loader.can_restore_sample(),
        [loader.restore_sample(s.__restore_key__).text == s.text for s in x],
        [s.__restore_key__[0] == x[0].__restore_key__[0] for s in x],
    )


def case_te_pack_empty_selection(tmp):

    class T(Triples):
        def select_samples_to_pack(self, xs):
            return []

    return nums(get_loader(val(texts(tmp / "d", 9), None, packing_buffer_size=6, task_encoder=T())))


def case_te_group(tmp):

    class T(DefaultTaskEncoder):
        def batch_group_criterion(self, s):
            return (int(s.text) % 2, 3)

    return ([b.text for b in get_loader(val(texts(tmp / "d", 11), None, task_encoder=T()))],)


def case_te_group_fixed(tmp):

    class T(DefaultTaskEncoder):
        @stateless
        def batch_group_criterion(self, s):
            return (int(s.text) % 2, None)

        @stateless
        def encode_sample(self, s):
            return s

    d = texts(tmp / "d", 11)

    def mk():
        return get_savable_loader(val(d, 2, task_encoder=T()))

    loader = mk()
    take(loader, 3)
    st = loader.save_state_rank()
    resumed = mk()
    resumed.restore_state_rank(st)
    return ([b.text for b in mk()], [b.text for b in resumed])


def case_te_indices_nw(tmp):

    class T(DefaultTaskEncoder):
        def encode_sample(self, s):
            return TextSample.derive_from(
                s, text=f"{self.current_batch_index}/{self.current_sample_index}"
            )

    return sorted(nums(get_loader(val(texts(tmp / "d", 8), 2, nw=2, task_encoder=T()))))


def case_te_types(tmp):

    @edataclass
    class RB(Batch):
        text: list

    class T(DefaultTaskEncoder):
        def __init__(self):
            super().__init__(raw_batch_type=RB)

    return [
        (type(b).__name__, b.text, b.__key__)
        for b in get_loader(val(texts(tmp / "d", 5), 2, task_encoder=T()))
    ]


def case_augment_te(tmp):

    class T(DefaultTaskEncoder):
        def encode_sample(self, s):
            return TextSample.derive_from(s, text=s.text + "e")

    class A(AugmentTaskEncoder):
        def encode_sample(self, s):
            return super().encode_sample(TextSample.derive_from(s, text=s.text + "a"))

    return [b.text for b in get_loader(val(texts(tmp / "d", 5), 2, task_encoder=A(T())))]


def case_pack_workers(tmp):

    class T(DefaultTaskEncoder):
        @stateless
        def encode_sample(self, s):
            return s

        def select_samples_to_pack(self, xs):
            return [xs[i : i + 2] for i in range(0, len(xs), 2)]

        @stateless
        def pack_selected_samples(self, xs):
            return TextSample.derive_from(xs[0], text="+".join(x.text for x in xs))

    return sorted(
        functools.reduce(
            operator.iadd,
            [
                t.split("+")
                for t in tx(
                    get_loader(
                        val(
                            texts(tmp / "d", 20),
                            None,
                            nw=2,
                            packing_buffer_size=4,
                            task_encoder=T(),
                        )
                    )
                )
            ],
            [],
        ),
        key=int,
    )


def case_pack_post_fail(tmp):

    class T(DefaultTaskEncoder):
        def select_samples_to_pack(self, xs):
            return [xs]

        @stateless
        def postencode_sample(self, s):
            if s.text == "1":
                raise ValueError("x")
            return s

        @stateless
        def pack_selected_samples(self, xs):
            return TextSample.derive_from(xs[0], text="+".join(x.text for x in xs))

    return tx(
        get_loader(
            val(
                texts(tmp / "d", 4),
                None,
                packing_buffer_size=4,
                task_encoder=T(),
                wkw={"global_error_handler": lambda *a: None},
            )
        )
    )


def case_pack_skip_pack(tmp):

    class T(DefaultTaskEncoder):
        def select_samples_to_pack(self, xs):
            return [[x] for x in xs]

        @stateless
        def pack_selected_samples(self, xs):
            if xs[0].text == "2":
                raise SkipSample()
            return TextSample.derive_from(xs[0], text=xs[0].text)

    return tx(get_loader(val(texts(tmp / "d", 5), None, packing_buffer_size=3, task_encoder=T())))


def case_pack_gen(tmp):

    class T(DefaultTaskEncoder):
        def select_samples_to_pack(self, xs):
            return [xs]

        @stateless
        def pack_selected_samples(self, xs):
            for x in xs:
                yield TextSample.derive_from(x, text=x.text + "g")

    return tx(get_loader(val(texts(tmp / "d", 5), None, packing_buffer_size=3, task_encoder=T())))


def case_pack_batch(tmp):

    class T(DefaultTaskEncoder):
        def select_samples_to_pack(self, xs):
            return [xs[:2], xs[2:]]

        @stateless
        def pack_selected_samples(self, xs):
            return TextSample.derive_from(xs[0], text="+".join(x.text for x in xs))

        def encode_batch(self, b):
            return TextSample.derive_from(b, text=["<" + t + ">" for t in b.text])

    return [
        b.text
        for b in get_loader(val(texts(tmp / "d", 9), 2, packing_buffer_size=4, task_encoder=T()))
    ]


def case_group_drop_last(tmp):

    class T(DefaultTaskEncoder):
        def batch_group_criterion(self, s):
            return (int(s.text) % 2, 2)

    return [
        b.text
        for b in get_loader(val(texts(tmp / "d", 7), None, batch_drop_last=True, task_encoder=T()))
    ]


def case_preencode_gen(tmp):

    class T(DefaultTaskEncoder):
        def preencode_sample(self, s):
            yield s
            yield TextSample.derive_from(s, text=s.text + "b")

    return tx(get_loader(val(texts(tmp / "d", 3), None, task_encoder=T())))


def case_encode_dict_batch(tmp):

    class T(DefaultTaskEncoder):
        def encode_sample(self, s):
            return {"__key__": s.__key__, "t": s.text, "x": torch.ones(int(s.text) + 1)}

    return list(get_loader(val(texts(tmp / "d", 4), 2, task_encoder=T())))


def case_blend_in_val_subflavors(tmp):
    texts(tmp / "a", 2)
    texts(tmp / "b", 2, start=100)
    m = mds(
        tmp / "m.yaml",
        val={
            "blend": [
                {"path": "a", "split_part": "train", "subflavors": {"n": "a"}},
                {"path": "b", "split_part": "train", "subflavors": {"n": "b"}},
            ]
        },
    )
    return [(s.text, s.__subflavors__) for s in get_loader(val(m, split_part="val"))]


def case_val_batches_mixed(tmp):
    texts(tmp / "a", 3)
    texts(tmp / "b", 3, start=100)
    m = mds(
        tmp / "m.yaml",
        val={"blend": [{"path": "a", "split_part": "train"}, {"path": "b", "split_part": "train"}]},
    )
    return [b.text for b in get_loader(val(m, 2, split_part="val"))]


def case_repeat_false_workers(tmp):
    d = texts(tmp / "d", 23)
    return [
        sorted(
            nums(
                get_loader(
                    train(
                        d, 3, nw=n, repeat=False, shuffle_buffer_size=4, max_samples_per_sequence=3
                    )
                )
            ),
            key=int,
        )
        == [str(i) for i in range(23)]
        for n in (0, 1, 3)
    ]


def case_ranks_train_disjoint(tmp):
    d = texts(tmp / "d", 24)
    x = [nums(take(get_loader(train(d, rank=r, world=3)), 8)) for r in range(3)]
    return sorted(functools.reduce(operator.iadd, x, []), key=int) == [str(i) for i in range(24)]


def case_epochized_two_passes(tmp):
    texts(tmp / "a", 4)
    texts(tmp / "b", 3, start=100)
    m = mds(
        tmp / "m.yaml", train={"blend_epochized": [{"path": "a", "repetitions": 2}, {"path": "b"}]}
    )
    loader = get_loader(
        train(m, repeat=False, batch_size=None) if False else train(m, repeat=False)
    )
    return sorted(nums(loader)) == sorted(nums(loader))


def case_nested_split(tmp):
    texts(tmp / "a", 30, ratio=(("train", 2), ("val", 1)))
    mds(tmp / "i.yaml", foo={"path": "a", "split_part": "val"}, train={"path": "a"})
    m = mds(tmp / "m.yaml", train={"path": "i.yaml", "split_part": "foo"})
    return nums(get_loader(val(m)))


def case_sources_batch(tmp):
    b = next(iter(get_loader(val(texts(tmp / "d", 4), 2))))
    return list(b.__sources__)


CASES = {name[5:]: case for name, case in list(globals().items()) if name.startswith("case_")}


def result_of(name: str, folder: Path) -> Any:
    """What a case returns, as it is after JSON."""
    return json.loads(json.dumps(show(CASES[name](folder))))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    out, sys.stdout = sys.stdout, sys.stderr
    rows = {name: result_of(name, Path(tempfile.mkdtemp())) for name in CASES}
    text = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items())
    print(f"{{\n{text}\n}}", file=out)
