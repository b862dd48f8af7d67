from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from isthmus.core.rounds import server_start
from isthmus.core.types import Channel, CompositionError, Plugin
from isthmus.federated.fedavg import plain
from isthmus.federated.fedprox import Proximal, fedprox
from isthmus.federated.ffa_lora import ffa_lora
from isthmus.parts.aggregate import ProductSVD
from isthmus.parts.channels.privacy import GaussianNoise
from isthmus.parts.channels.quantise import Cast, Int8
from isthmus.parts.channels.sparse import TopK

from ..conftest import digits_task


@dataclass(frozen=True)
class Masked(Channel):
    """Stands for a secure sum: afterwards nobody sees one client's payload."""

    name = "masked"
    takes = frozenset({"individual"})


@pytest.mark.parametrize("before", [Int8(), Cast(), TopK()], ids=lambda c: c.name)
def test_noise_after_rounding_or_thinning_out_is_refused(before):
    with pytest.raises(CompositionError, match=r"GaussianNoise needs the payload 'exact', which .* took away"):
        replace(plain(), channels=(before, GaussianNoise(1.0, 1.0)))
    replace(plain(), channels=(GaussianNoise(1.0, 1.0), before))


def test_an_aggregate_that_looks_at_single_clients_is_refused_over_masked_sums():
    with pytest.raises(CompositionError, match="ProductSVD needs the payload 'individual', which Masked took away"):
        replace(plain(), channels=(Masked(),), aggregate=ProductSVD(), observers=())
    with pytest.raises(CompositionError, match="UpdateNorm"):
        replace(plain(), channels=(Masked(),))
    replace(plain(), channels=(Masked(),), observers=())


def test_a_plug_in_stands_once_since_its_memory_has_its_name():
    with pytest.raises(CompositionError, match="'fedprox' stands in its stacks twice"):
        fedprox(fedprox(plain()))
    assert isinstance(Proximal(), Plugin)


def test_a_method_says_which_tensors_it_misses():
    with pytest.raises(CompositionError, match=r"ProductSVD works on tensors named '\*.lora_a'; this task trains"):
        server_start(replace(plain(), aggregate=ProductSVD()), digits_task(), 0)


def test_methods_are_values():
    base = plain()
    assert ffa_lora(base) == ffa_lora(base)
    assert ffa_lora(base) != base
    with pytest.raises(AttributeError):
        base.name = "other"


def test_a_private_channel_suppresses_reports_and_example_counts():
    from isthmus.core.rounds import open_round
    from isthmus.engines.simulator import Simulator

    task = digits_task()
    method = replace(plain(), channels=(GaussianNoise(1.0, 0.1),))
    replies = Simulator(method, task).exchange(open_round(method, server_start(method, task, 0)))
    assert replies.update.report == {}
    assert torch.equal(replies.update.weight, torch.ones(task.clients))
