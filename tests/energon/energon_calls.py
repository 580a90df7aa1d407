"""Calls whose results `energon_results.json` has, as Energon 7.4.1 returns them.

ENERGON_PYTHON tests/energon/energon_calls.py > tests/energon/energon_results.json
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch

# The name of a case, and an expression with the names of `names_of`.
CASES = """
batch_stack: E.batch_stack([t([1, 2]), t([3, 4])])
batch_stack_diff: E.batch_stack([t([1, 2]), t([3])])
pad: E.batch_pad_stack([t([1, 2, 3]), t([4])])
pad2: E.batch_pad_stack([ones(1, 2), ones(2, 1)])
pad_ndim: E.batch_pad_stack([ones(1, 2), ones(2)])
pad_dtype: E.batch_pad_stack([t([1]), t([0.5, 1])])
pad_scalar: E.batch_pad_stack([t(1), t(2)])
pad_bool: E.batch_pad_stack([t([True]), t([False, True])])
batch_list: E.batch_list([1, 2])
gb_tensor: E.generic_batch([t([1]), t([1, 2])])
gb_num: E.generic_batch([1, 2])
gb_str: E.generic_batch(["a", "b"])
gb_none: E.generic_batch([None, None])
gb_np: E.generic_batch([np.ones(1), np.ones(2)])
gb_dict: E.generic_batch([{"a": t([1]), "b": "x"}, {"a": t([1, 2]), "b": "y"}])
gb_dict_keys: E.generic_batch([own("k", ("a", 1), a=1), own("l", ("a", 2), a=2)])
gb_list: E.generic_batch([[1], [2, 3]])
gb_tuple: E.generic_batch([(1, t(1)), (2, t(2))])
gb_nt: E.generic_batch([NT(t([1]), "x"), NT(t([1, 2]), "y")])
gb_text: E.generic_batch([TS(0), TS(1)])
gb_text_none: E.generic_batch([bare(0), bare(1)])
gb_nested: E.generic_batch([{"a": {"b": t([1])}}, {"a": {"b": t([2, 3])}}])
gb_crude: E.generic_batch([E.CrudeSample(__key__=k, x=t(i)) for k, i in (("a", 1), ("b", 2))])
concat_pad: E.concat_pad([ones(1, 2), ones(1, 3)])
generic_concat: E.generic_concat([{"a": t([1]), "b": ["x"]}, {"a": t([2, 3]), "b": ["y"]}])
generic_concat_list: E.generic_concat([["x"], ["y", "z"]])
generic_concat_str: E.generic_concat(["x", "y"])
generic_concat_dc: E.generic_concat([E.generic_batch([TS(0)]), E.generic_batch([TS(1), TS(2)])])
hcm: E.homogeneous_concat_mix([{"a": t([1])}, {"a": t([2])}])
hcm_diff: E.homogeneous_concat_mix([{"a": t([1])}, t([2])])
from_samples: B.from_samples([TS(0), TS(1)])
from_samples_img: B2.from_samples([IS(0), IS(1)], n=3)
from_samples_img_nodef: B2.from_samples([IS(0), IS(1)])
from_samples_sub: B.from_samples([TS(0, sub={}), TS(1, sub={})])
from_samples_subnone: B.from_samples([bare(0), bare(1)])
from_samples_subhalf: B.from_samples([bare(0), TS(1)])
from_samples_override: B.from_samples([TS(0), TS(1)], text=["z"])
from_samples_key: B.from_samples([TS(0)], __key__=["q"])
from_samples_empty: B.from_samples([])
from_samples_missing: B.from_samples([IS(0)])
from_samples_unknown: B.from_samples([TS(0)], zzz=1)
derive_batch: B3.derive_from(b(), tok=t([1]))
derive_batch_again: B3.derive_from(b(), tok=t([1]), __key__=["x"])
derive_batch_missing: B3.derive_from(b())
derive_sample: E.ImageSample.derive_from(TS(0), image=t([1]))
derive_sample_key: E.ImageSample.derive_from(TS(0), image=t([1]), __key__="z")
derive_sample_unknown: E.ImageSample.derive_from(TS(0), image=t([1]), q=1)
extend: More.extend(TS(0), n=3)
extend_override: More.extend(TS(0), n=3, text="q")
extend_bad: More.extend(IS(0), n=3)
extend_missing: More.extend(TS(0))
extend_same: E.TextSample.extend(TS(0))
extend_batch: MoreB.extend(b(), n=3)
joined: E.CaptioningSample.from_joined(image(), None)
joined2: IT.from_joined(image(), TS(3))
asdict: list(dataclasses.asdict(TS(0)))
asdict_batch: list(dataclasses.asdict(b()))
hash: hash(TS(0))
eq: TS(0) == TS(0)
pos: E.TextSample("a", ("b",))
edataclass_opts: [params.eq, params.frozen, More.__slots__ == ("n",)]
basic: E.basic_sample_keys(own("a", (1,), x=1, __shard__="s"))
basic2: E.basic_sample_keys(own("a", (1,), __subflavors__={}, __sources__=(1,)), (2,))
cooker_match: [E.Cooker(len, **has).is_match(given) for has, given in MATCHES]
sce: [issubclass(*pair) for pair in errors]
from_sample_key: type(Fatal.from_sample_key("k")).__name__
wc_eq: WC(**PLACE) == WC(**PLACE, seed_offset=4)
wc_pos: WC(0, 1, 2)
sd: [E.SampleDecoder().decode(f"a.{part}", data) for part, data in PARTS]
sd_call: E.SampleDecoder()({"__key__": "k", "txt": b"x", "json": b"[1]", "q": b"z"})
enc_batch: TE().batch([TS(0), TS(1)])
enc_batch_type: TE(raw_batch_type=B).batch([TS(0), TS(1)])
enc_encode_type: TE(encoded_sample_type=E.Sample).encode_sample(TS(0))
enc_encode_dict: TE(encoded_sample_type=dict).encode_sample(TS(0))
enc_batch_dict: TE(batch_type=dict).encode_batch(b())
te_base_encode: E.TaskEncoder.encode_sample(TE(), TS(0)).text
te_group: TE().batch_group_criterion(TS(0))
te_select: TE().select_samples_to_pack([])
te_pack: TE().pack_selected_samples([])
"""


class NT(NamedTuple):
    a: object
    b: str


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


def classes_of(E: Any) -> dict[str, Any]:
    """Types of the user's: samples and batches."""

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

    @E.edataclass
    class B3(E.Batch):
        tok: torch.Tensor

    @E.edataclass
    class More(E.TextSample):
        n: int

    @E.edataclass
    class MoreB(MyBatch):
        n: int

    @E.edataclass
    class IT(E.Sample):
        image: torch.Tensor
        text: str

    return {"B": MyBatch, "B2": MyBatch2, "Img": Img, "B3": B3, "More": More, "MoreB": MoreB,
            "IT": IT}  # fmt: skip


def names_of(E: Any) -> dict[str, Any]:
    """The names of the expressions; `E` is the module megatron.energon, or ours."""
    kinds = classes_of(E)
    errors = importlib.import_module(E.SkipSample.__module__)
    fatal, broken = errors.FatalSampleError, errors.SampleException

    def TS(i: int, **own: Any) -> Any:
        source = E.SourceInfo(dataset_path="/d", index=i, shard_name="s", file_names=("f",))
        return E.TextSample(
            __key__=f"k{i}", __restore_key__=("a", i), __subflavors__=own.get("sub", {"x": i}),
            __sources__=own.get("src", (source,)), text=f"t{i}",
        )  # fmt: skip

    def IS(i: int) -> Any:
        image = torch.full((2,), float(i))
        return kinds["Img"](__key__=f"k{i}", __restore_key__=("a", i), image=image)

    def own(key: str, restore_key: tuple[Any, ...], **more: Any) -> dict[str, Any]:
        return {"__key__": key, "__restore_key__": restore_key, **more}

    return {
        **kinds, "E": E, "np": np, "t": torch.tensor, "ones": torch.ones, "NT": NT, "TS": TS,
        "IS": IS, "own": own, "bare": lambda i: TS(i, sub=None, src=None), "TE":
        E.DefaultTaskEncoder, "WC": E.WorkerConfig, "Fatal": fatal, "dataclasses": dataclasses,
        "b": lambda: kinds["B"].from_samples([TS(0), TS(1)]), "params":
        kinds["More"].__dataclass_params__, "PLACE": {"rank": 0, "world_size": 1, "num_workers": 0},
        "image": lambda: E.ImageSample(**own("a", ("r",)), image=torch.tensor([1])),
        "errors": [(fatal, broken), (broken, ValueError), (E.SkipSample, Exception),
                   (fatal, ValueError)],
        "PARTS": [("txt", b"x"), ("json", b'{"a":1}'), ("zzz", b"x"), ("cls", b"3")],
        "MATCHES": [({}, {}), ({"has_subflavors": {"a": 1}}, {"a": 1, "b": 2}),
                    ({"has_subflavors": {"a": 1}}, {}), ({"has_subflavors": {}}, {"a": 1})],
    }  # fmt: skip


def results(E: Any) -> dict[str, Any]:
    """Result of each case under its name; `E` is the module megatron.energon, or ours."""
    names, found = names_of(E), {}
    for line in CASES.strip().splitlines():
        case, _, expression = line.partition(": ")
        try:
            found[case] = show(eval(expression, names))
        except NameError:
            raise
        except Exception:
            found[case] = "error"
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rows = results(importlib.import_module("megatron.energon"))
    print("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items()) + "\n}")
