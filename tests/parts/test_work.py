from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isthmus.core.types import Inbox
from isthmus.parts.share import ByName
from isthmus.parts.work import LocalTraining

INBOX = Inbox({}, 0, torch.tensor(0))


def quadratic(params, batch):
    return ((params["w"] - batch["x"]).square().sum(-1) * batch["valid"]).sum() / batch["valid"].sum().clamp_min(1) + params[
        "b"
    ].square().sum()


def batches(steps, seed=0):
    x = torch.randn(steps, 4, 3, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "valid": torch.ones(steps, 4, dtype=torch.bool)}


START = {"w": torch.zeros(3), "b": torch.ones(2)}


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({"optimiser": "sgd"}, lambda p: torch.optim.SGD(p, lr=0.05)),
        ({"optimiser": "sgd", "momentum": 0.9, "weight_decay": 0.1}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1)),
        ({"optimiser": "adamw"}, lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.0)),
        ({"optimiser": "adamw", "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1)),
    ],
)
def test_steps_are_those_of_torchs_optimisers(settings, reference):
    data = batches(6)
    got = LocalTraining(lr=0.05, **settings)(START, quadratic, data, INBOX, {}).params
    leaves = {n: t.clone().requires_grad_() for n, t in START.items()}
    optimiser = reference(list(leaves.values()))
    for i in range(6):
        optimiser.zero_grad()
        quadratic(leaves, {n: t[i] for n, t in data.items()}).backward()
        optimiser.step()
    for n in START:
        torch.testing.assert_close(got[n], leaves[n].detach(), rtol=1e-5, atol=1e-6)


def test_padded_steps_change_nothing():
    data, more = batches(3), batches(5)
    more["x"][:3], more["valid"][3:] = data["x"], False
    work = LocalTraining("adamw", 0.05)
    a, b = work(START, quadratic, data, INBOX, {}), work(START, quadratic, more, INBOX, {})
    assert all(torch.equal(a.params[n], b.params[n]) for n in START)
    assert float(b.report["steps"]) == 3
    torch.testing.assert_close(a.report["loss"], b.report["loss"])


def test_names_that_do_not_train_stay():
    got = replace(LocalTraining("sgd", 0.05), trains=ByName(("w",)))(START, quadratic, batches(3), INBOX, {})
    assert torch.equal(got.params["b"], START["b"])
    assert not torch.equal(got.params["w"], START["w"])
    assert set(got.gradient) == {"w"}


def test_rates_multiply_and_the_clip_bounds():
    half = {"w": torch.tensor(0.5)}
    for optimiser in ("sgd", "adamw"):
        one = LocalTraining(optimiser, 0.1)(START, quadratic, batches(1), INBOX, half).params
        other = LocalTraining(optimiser, 0.05)(START, quadratic, batches(1), INBOX, {}).params
        whole = LocalTraining(optimiser, 0.1)(START, quadratic, batches(1), INBOX, {}).params
        torch.testing.assert_close(one["w"], other["w"])
        torch.testing.assert_close(one["b"], whole["b"])
    clipped = LocalTraining("sgd", 1.0, clip=0.01)(START, quadratic, batches(1), INBOX, {}).params
    moved = torch.cat([(clipped[n] - START[n]).flatten() for n in START]).norm()
    assert float(moved) == pytest.approx(0.01, rel=1e-3)


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"train\.lr = 0"):
        LocalTraining(lr=0)
    with pytest.raises(ValueError, match="'adamw' and 'sgd'"):
        LocalTraining("lion")(START, quadratic, batches(1), INBOX, {})  # type: ignore[arg-type]
