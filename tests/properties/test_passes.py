"""Finite passes, however a consumer takes them, leaves them, and resumes them."""

from __future__ import annotations

from itertools import islice
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ..conftest import examples
from ..helpers import Ranks, keys_of, through_json, train, validation

NUM_TEXTS = 20


@given(data=st.data())
@examples(5)
def test_no_for_loop_is_empty_and_training_passes_follow_each_other(texts, data) -> None:
    """Whether a `for` takes fewer batches than there are, as many or all, and where it resumes."""
    is_training = data.draw(st.booleans())
    settings = {"batch_size": data.draw(st.integers(1, 6))}
    encoder = data.draw(st.sampled_from(["plain", "skipping", "expanding"]))
    make = (
        train(texts, encoder, repeat=False, **settings)
        if is_training
        else validation(texts, encoder, **settings)
    )
    num_streams = data.draw(st.integers(1, 4))
    whole = Ranks(make, 1, num_streams=num_streams).loaders[0]
    passes = [[keys_of(batch) for batch in whole] for _ in range(6)]
    (loader,) = Ranks(make, 1, num_streams=num_streams).loaders
    at, number, is_resumed = 0, 0, False
    for _ in range(data.draw(st.integers(1, 6))):
        if at == len(passes[number]) or (at and not is_training and not is_resumed):
            at, number = 0, number + 1
        is_resumed = False
        if number == len(passes):
            break
        take = data.draw(st.one_of(st.integers(1, 25), st.just(len(passes[number]) - at)))
        found = [keys_of(batch) for batch in islice(iter(loader), take)]
        assert found
        assert found == passes[number][at : at + take]
        at += len(found)
        if data.draw(st.booleans()):
            state: Any = through_json(loader.state_dict())
            (loader,) = Ranks(make, 1).loaders
            loader.load_state_dict(state)
            is_resumed = True
