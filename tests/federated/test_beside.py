from __future__ import annotations

import pytest
import torch

from isthmus.core.types import CompositionError
from isthmus.engines.simulator import ClientError
from isthmus.runner import make_method

from ..conftest import digits_recipe, tiny_text_task
from ..contracts.contracts import play


def method(kind: str = "beside", **options):
    return make_method(digits_recipe(**{"method.kind": kind, **{f"method.{n}": v for n, v in options.items()}}))


def test_only_the_shared_ranks_travel_and_the_own_part_stays_with_its_client():
    t = tiny_text_task()  # rank 4
    engine, server, records = play(method(ranks=1), t)
    _, _, plain = play(make_method(digits_recipe()), t)
    factors = 2 * 2 * (32 + 32) * 4  # layers, sites, in and out, bytes a rank
    assert plain[0].up[0][0] - records[0].up[0][0] == factors
    own = {n: x for n, x in engine.state().items() if n.startswith("beside/own.") and n.endswith("lora_b")}
    assert all(x.abs().sum() > 0 for x in own.values())
    for n, x in server.shared.items():
        if n.endswith("lora_b"):
            assert torch.equal(x[:, -1], torch.zeros(x.shape[0]))  # the server's own last rank never moved
            assert x[:, :-1].abs().sum() > 0
    each = [engine.personal_params(server, c) for c in range(2)]
    name = next(n for n in server.shared if n.endswith("lora_b"))
    assert torch.equal(each[0][name][:, :-1], each[1][name][:, :-1])
    assert not torch.equal(each[0][name][:, -1], each[1][name][:, -1])


def test_ranks_must_be_equal():
    with pytest.raises(ClientError, match="equal ranks"):
        play(method(ranks=1), tiny_text_task(ranks=(1, 2, 4, 3)))


def test_what_cannot_be_is_refused():
    for kind in ("flexlora+beside", "flora+beside", "hetlora+beside"):
        with pytest.raises(CompositionError, match="beside"):
            method(kind)
    with pytest.raises(CompositionError, match="some of it must be shared"):
        play(method(ranks=4), tiny_text_task())
    with pytest.raises(Exception, match="at least 1"):
        method(ranks=0)
