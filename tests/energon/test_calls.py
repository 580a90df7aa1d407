"""The same calls give the same results as in Energon 7.4.1, where nothing says otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import energon_lite

from .energon_calls import results

THEIRS = json.loads(Path(__file__).with_name("energon_results.json").read_text())

# Case → what is otherwise here, and why.
_ONE_EACH = "service fields of a batch are lists with one entry per sample"
_STACKED = "tensors are padded and stacked, as Energon's documentation says"
EXCEPTIONS = {
    "pad_dtype": "types are promoted: no value is cut to an integer",
    "gb_text": _ONE_EACH,
    "generic_concat_dc": _ONE_EACH,
    "from_samples_sub": _ONE_EACH,
    "from_samples_subhalf": _ONE_EACH,
    "from_samples_img": _STACKED,
    "from_samples_img_nodef": "a field with a default may be missing in the samples",
    "from_samples_empty": "a batch of nothing is refused",
    "from_samples_unknown": "a field that there is not is refused",
    "enc_batch_dict": "restore keys are tuples",
}


def test_calls_return_the_results_of_energon():
    ours = json.loads(json.dumps(results(energon_lite)))
    assert ours.keys() == THEIRS.keys()
    different = {name for name in THEIRS if ours[name] != THEIRS[name]}
    assert different - EXCEPTIONS.keys() == set()
    assert EXCEPTIONS.keys() - different == set()
