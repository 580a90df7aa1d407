"""Calls whose results `energon_results.json` has, as Energon 7.4.1 returns them.

ENERGON_PYTHON tests/energon/energon_calls.py > tests/energon/energon_results.json
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import warnings
from typing import NamedTuple

import numpy as np
import torch


def show(v):
    """A value as JSON: types, shapes and contents."""
    if isinstance(v, torch.Tensor):
        return ["tensor", str(v.dtype), v.tolist()]
    if isinstance(v, np.ndarray):
        return ["array", v.tolist()]
    if dataclasses.is_dataclass(v):
        fields = {f.name: show(getattr(v, f.name)) for f in dataclasses.fields(v)}
        # Energon's batches list restore keys, ours have a tuple of them.
        if isinstance(fields.get("__key__"), list):
            fields["__restore_key__"] = list(map(show, v.__restore_key__))
        return [type(v).__name__, fields]
    if isinstance(v, tuple) and hasattr(v, "_fields"):
        return [type(v).__name__, {k: show(x) for k, x in v._asdict().items()}]
    if isinstance(v, tuple):
        return ["tuple", [show(x) for x in v]]
    if isinstance(v, list):
        return [show(x) for x in v]
    if isinstance(v, dict):
        return {str(k): show(x) for k, x in v.items()}
    return v if v is None or isinstance(v, int | float | str) else type(v).__name__


def results(E):
    """Result of each case under its name; `E` is the module megatron.energon, or ours."""
    R = {}

    def case(name, fn):
        try:
            R[name] = show(fn())
        except Exception:
            R[name] = "error"

    errors = importlib.import_module(E.SkipSample.__module__)
    t = torch.tensor

    def TS(i, **k):
        return E.TextSample(
            __key__=f"k{i}",
            __restore_key__=("a", i),
            __subflavors__=k.pop("sub", {"x": i}),
            __sources__=k.pop(
                "src",
                (E.SourceInfo(dataset_path="/d", index=i, shard_name="s", file_names=("f",)),),
            ),
            text=f"t{i}",
        )

    case("batch_stack", lambda: E.batch_stack([t([1, 2]), t([3, 4])]))
    case("batch_stack_diff", lambda: E.batch_stack([t([1, 2]), t([3])]))
    case("pad", lambda: E.batch_pad_stack([t([1, 2, 3]), t([4])]))
    case("pad2", lambda: E.batch_pad_stack([torch.ones(1, 2), torch.ones(2, 1)]))
    case("pad_ndim", lambda: E.batch_pad_stack([torch.ones(1, 2), torch.ones(2)]))
    case("pad_dtype", lambda: E.batch_pad_stack([t([1]), t([0.5, 1])]))
    case("pad_scalar", lambda: E.batch_pad_stack([t(1), t(2)]))
    case("pad_bool", lambda: E.batch_pad_stack([t([True]), t([False, True])]))
    case("batch_list", lambda: E.batch_list([1, 2]))
    case("gb_tensor", lambda: E.generic_batch([t([1]), t([1, 2])]))
    case("gb_num", lambda: E.generic_batch([1, 2]))
    case("gb_str", lambda: E.generic_batch(["a", "b"]))
    case("gb_none", lambda: E.generic_batch([None, None]))
    case("gb_np", lambda: E.generic_batch([np.ones(1), np.ones(2)]))
    case("gb_dict", lambda: E.generic_batch([{"a": t([1]), "b": "x"}, {"a": t([1, 2]), "b": "y"}]))
    case(
        "gb_dict_keys",
        lambda: E.generic_batch(
            [
                {"__key__": "k", "__restore_key__": ("a", 1), "a": 1},
                {"__key__": "l", "__restore_key__": ("a", 2), "a": 2},
            ]
        ),
    )
    case("gb_list", lambda: E.generic_batch([[1], [2, 3]]))
    case("gb_tuple", lambda: E.generic_batch([(1, t(1)), (2, t(2))]))

    class NT(NamedTuple):
        a: object
        b: str

    case("gb_nt", lambda: E.generic_batch([NT(t([1]), "x"), NT(t([1, 2]), "y")]))
    case("gb_text", lambda: E.generic_batch([TS(0), TS(1)]))
    case(
        "gb_text_none",
        lambda: E.generic_batch([TS(0, sub=None, src=None), TS(1, sub=None, src=None)]),
    )
    case("gb_nested", lambda: E.generic_batch([{"a": {"b": t([1])}}, {"a": {"b": t([2, 3])}}]))
    case(
        "gb_crude",
        lambda: E.generic_batch(
            [E.CrudeSample(__key__="a", x=t(1)), E.CrudeSample(__key__="b", x=t(2))]
        ),
    )
    case("concat_pad", lambda: E.concat_pad([torch.ones(1, 2), torch.ones(1, 3)]))
    case(
        "generic_concat",
        lambda: E.generic_concat([{"a": t([1]), "b": ["x"]}, {"a": t([2, 3]), "b": ["y"]}]),
    )
    case("generic_concat_list", lambda: E.generic_concat([["x"], ["y", "z"]]))
    case("generic_concat_str", lambda: E.generic_concat(["x", "y"]))
    case(
        "generic_concat_dc",
        lambda: E.generic_concat([E.generic_batch([TS(0)]), E.generic_batch([TS(1), TS(2)])]),
    )
    case("hcm", lambda: E.homogeneous_concat_mix([{"a": t([1])}, {"a": t([2])}]))
    case("hcm_diff", lambda: E.homogeneous_concat_mix([{"a": t([1])}, t([2])]))

    @E.edataclass
    class MyBatch(E.Batch):
        text: list

    @E.edataclass
    class MyBatch2(E.Batch):
        image: torch.Tensor
        n: int = 5

    @E.edataclass
    class Img(E.Sample):
        image: torch.Tensor

    def IS(i, shape=(2,)):
        return Img(__key__=f"k{i}", __restore_key__=("a", i), image=torch.full(shape, float(i)))

    case("from_samples", lambda: MyBatch.from_samples([TS(0), TS(1)]))
    case("from_samples_img", lambda: MyBatch2.from_samples([IS(0), IS(1)], n=3))
    case("from_samples_img_nodef", lambda: MyBatch2.from_samples([IS(0), IS(1)]))
    case("from_samples_sub", lambda: MyBatch.from_samples([TS(0, sub={}), TS(1, sub={})]))
    case(
        "from_samples_subnone",
        lambda: MyBatch.from_samples([TS(0, sub=None, src=None), TS(1, sub=None, src=None)]),
    )
    case("from_samples_subhalf", lambda: MyBatch.from_samples([TS(0, sub=None, src=None), TS(1)]))
    case("from_samples_override", lambda: MyBatch.from_samples([TS(0), TS(1)], text=["z"]))
    case("from_samples_key", lambda: MyBatch.from_samples([TS(0)], __key__=["q"]))
    case("from_samples_empty", lambda: MyBatch.from_samples([]))
    case("from_samples_missing", lambda: MyBatch.from_samples([IS(0)]))
    case("from_samples_unknown", lambda: MyBatch.from_samples([TS(0)], zzz=1))

    def b():
        return MyBatch.from_samples([TS(0), TS(1)])

    @E.edataclass
    class B3(E.Batch):
        tok: torch.Tensor

    case("derive_batch", lambda: B3.derive_from(b(), tok=t([1])))
    case("derive_batch_again", lambda: B3.derive_from(b(), tok=t([1]), __key__=["x"]))
    case("derive_batch_missing", lambda: B3.derive_from(b()))
    case("derive_sample", lambda: E.ImageSample.derive_from(TS(0), image=t([1])))
    case("derive_sample_key", lambda: E.ImageSample.derive_from(TS(0), image=t([1]), __key__="z"))
    case("derive_sample_unknown", lambda: E.ImageSample.derive_from(TS(0), image=t([1]), q=1))

    @E.edataclass
    class More(E.TextSample):
        n: int

    case("extend", lambda: More.extend(TS(0), n=3))
    case("extend_override", lambda: More.extend(TS(0), n=3, text="q"))
    case("extend_bad", lambda: More.extend(IS(0), n=3))
    case("extend_missing", lambda: More.extend(TS(0)))
    case("extend_same", lambda: E.TextSample.extend(TS(0)))

    @E.edataclass
    class MoreB(MyBatch):
        n: int

    case("extend_batch", lambda: MoreB.extend(b(), n=3))
    case(
        "joined",
        lambda: E.CaptioningSample.from_joined(
            E.ImageSample(__key__="a", __restore_key__=("r",), image=t([1])), None
        ),
    )

    @E.edataclass
    class IT(E.Sample):
        image: torch.Tensor
        text: str

    case(
        "joined2",
        lambda: IT.from_joined(
            E.ImageSample(__key__="a", __restore_key__=("r",), image=t([1])), TS(3)
        ),
    )
    case("asdict", lambda: list(dataclasses.asdict(TS(0))))
    case("asdict_batch", lambda: list(dataclasses.asdict(b())))
    case("hash", lambda: hash(TS(0)))
    case("eq", lambda: TS(0) == TS(0))
    case("pos", lambda: E.TextSample("a", ("b",)))
    case(
        "edataclass_opts",
        lambda: [
            More.__dataclass_params__.eq,
            More.__dataclass_params__.frozen,
            More.__slots__ == ("n",),
        ],
    )
    case(
        "basic",
        lambda: E.basic_sample_keys(
            {"__key__": "a", "__restore_key__": (1,), "x": 1, "__shard__": "s"}
        ),
    )
    case(
        "basic2",
        lambda: E.basic_sample_keys(
            {"__key__": "a", "__restore_key__": (1,), "__subflavors__": {}, "__sources__": (1,)},
            (2,),
        ),
    )
    case(
        "cooker_match",
        lambda: [
            E.Cooker(len).is_match({}),
            E.Cooker(len, has_subflavors={"a": 1}).is_match({"a": 1, "b": 2}),
            E.Cooker(len, has_subflavors={"a": 1}).is_match({}),
            E.Cooker(len, has_subflavors={}).is_match({"a": 1}),
        ],
    )
    case(
        "sce",
        lambda: [
            issubclass(errors.FatalSampleError, errors.SampleException),
            issubclass(errors.SampleException, ValueError),
            issubclass(E.SkipSample, Exception),
            issubclass(errors.FatalSampleError, ValueError),
        ],
    )
    case("from_sample_key", lambda: type(errors.FatalSampleError.from_sample_key("k")).__name__)
    case(
        "wc_eq",
        lambda: (
            E.WorkerConfig(rank=0, world_size=1, num_workers=0)
            == E.WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=4)
        ),
    )
    case("wc_pos", lambda: E.WorkerConfig(0, 1, 2))
    case(
        "sd",
        lambda: show(
            [
                E.SampleDecoder().decode("a.txt", b"x"),
                E.SampleDecoder().decode("a.json", b'{"a":1}'),
                E.SampleDecoder().decode("a.zzz", b"x"),
                E.SampleDecoder().decode("a.cls", b"3"),
            ]
        ),
    )
    case(
        "sd_call",
        lambda: E.SampleDecoder()({"__key__": "k", "txt": b"x", "json": b"[1]", "q": b"z"}),
    )
    case("enc_batch", lambda: E.DefaultTaskEncoder().batch([TS(0), TS(1)]))
    case(
        "enc_batch_type", lambda: E.DefaultTaskEncoder(raw_batch_type=MyBatch).batch([TS(0), TS(1)])
    )
    case(
        "enc_encode_type",
        lambda: E.DefaultTaskEncoder(encoded_sample_type=E.Sample).encode_sample(TS(0)),
    )
    case(
        "enc_encode_dict",
        lambda: E.DefaultTaskEncoder(encoded_sample_type=dict).encode_sample(TS(0)),
    )
    case("enc_batch_dict", lambda: E.DefaultTaskEncoder(batch_type=dict).encode_batch(b()))
    case("te_base_encode", lambda: E.TaskEncoder.encode_sample(E.DefaultTaskEncoder(), TS(0)).text)
    case("te_group", lambda: E.DefaultTaskEncoder().batch_group_criterion(TS(0)))
    case("te_select", lambda: E.DefaultTaskEncoder().select_samples_to_pack([]))
    case("te_pack", lambda: E.DefaultTaskEncoder().pack_selected_samples([]))
    return R


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rows = results(importlib.import_module("megatron.energon"))
    print("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items()) + "\n}")
