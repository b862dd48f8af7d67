from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.types import Inbox
from isthmus.core.wire import schema
from isthmus.parts.channels.privacy import GaussianNoise
from isthmus.parts.channels.quantise import Cast, Int8
from isthmus.parts.channels.sparse import TopK

INBOX = Inbox({}, 0, torch.tensor(0))


def values(shape=(3, 5), seed=0):
    return {"w": torch.randn(shape, generator=torch.Generator().manual_seed(seed)), "n": torch.tensor([3, 4])}


def back(channel, payload):
    return channel.decode(channel.encode(payload, INBOX), schema(payload))


@given(st.integers(0, 10_000), st.floats(1e-6, 1e6))
@settings(max_examples=50, deadline=None)
def test_int8_is_right_to_half_a_step(seed, size):
    payload = {"w": values(seed=seed)["w"] * size}
    step = float(payload["w"].abs().max()) / 127
    assert float((back(Int8(), payload)["w"] - payload["w"]).abs().max()) <= 0.5001 * step


def test_int8_of_zeros_and_of_integers():
    payload = {"w": torch.zeros(3), "n": torch.tensor([3, 4])}
    got = back(Int8(), payload)
    assert torch.equal(got["w"], payload["w"])
    assert torch.equal(got["n"], payload["n"])


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_cast_counts_its_bytes_and_keeps_integers(dtype, size):
    payload = values()
    sent = Cast(dtype).encode(payload, INBOX)
    assert sent["w"].element_size() == size
    assert sent["n"].dtype == torch.int64
    torch.testing.assert_close(back(Cast(dtype), payload)["w"], payload["w"], rtol=1e-2, atol=1e-3)
    with pytest.raises(ValueError, match="'fp32', 'fp16', 'bf16'"):
        Cast("fp8")


@pytest.mark.parametrize("fraction", [0.01, 0.3, 1.0])
def test_top_k_keeps_the_largest(fraction):
    payload = values((40, 10))
    got = back(TopK(fraction), payload)["w"]
    k = math.ceil(fraction * 400)
    assert int((got != 0).sum()) == k
    kept = payload["w"].abs().flatten().sort(descending=True).values[:k]
    torch.testing.assert_close(got.abs().flatten().sort(descending=True).values[:k], kept)


def test_top_k_places_take_two_bytes_where_they_fit():
    assert TopK(0.1).encode({"w": torch.randn(2**15)}, INBOX)["w@places"].dtype == torch.int16
    assert TopK(0.1).encode({"w": torch.randn(2**15 + 1)}, INBOX)["w@places"].dtype == torch.int32


@pytest.mark.parametrize("channel", [Int8(), TopK(0.2)], ids=lambda c: c.name)
def test_error_feedback_loses_nothing_in_the_long_run(channel):
    """What is sent plus what waits is always the sum of what was meant."""
    waits, sent = torch.zeros(50), torch.zeros(50)
    meant = torch.zeros(50)
    for i in range(30):
        new = torch.randn(50, generator=torch.Generator().manual_seed(i))
        meant += new
        payload = {"w": new + waits}
        got = back(channel, payload)
        waits = payload["w"] - got["w"]
        sent += got["w"]
    torch.testing.assert_close(sent + waits, meant, rtol=1e-4, atol=1e-4)
    assert float(waits.norm()) < 0.5 * float(meant.norm())


def test_noise_is_clipped_keyed_and_as_large_as_said():
    payload = {"w": torch.full((20_000,), 1.0)}
    quiet = GaussianNoise(clip=2.0, sigma=0.0).encode(payload, INBOX)["w"]
    assert float(quiet.norm()) == pytest.approx(2.0, rel=1e-4)
    noisy = GaussianNoise(clip=2.0, sigma=0.5).encode(payload, INBOX)["w"]
    assert float((noisy - quiet).std()) == pytest.approx(1.0, rel=0.03)
    again = GaussianNoise(clip=2.0, sigma=0.5).encode(payload, INBOX)["w"]
    assert torch.equal(noisy, again)
    for other in (Inbox({}, 1, torch.tensor(0)), Inbox({}, 0, torch.tensor(1)), Inbox({}, 0, torch.tensor(0), seed=1)):
        assert not torch.equal(noisy, GaussianNoise(clip=2.0, sigma=0.5).encode(payload, other)["w"])


def test_noise_refuses_what_it_cannot_cover():
    with pytest.raises(ValueError, match="n is neither floating point nor a count"):
        GaussianNoise(1.0, 1.0).encode({"n": torch.ones(3, dtype=torch.uint8)}, INBOX)
    counts = {"n": torch.full((20_000,), 1000)}
    assert torch.equal(GaussianNoise(1e9, 0.0).encode(counts, INBOX)["n"], counts["n"])
    noisy = GaussianNoise(1e6, 1e-5).encode(counts, INBOX)["n"]
    assert noisy.dtype == torch.int64
    assert float((noisy - counts["n"]).double().std()) == pytest.approx(10.0, rel=0.03)
    for bad in ((0.0, 1.0), (1.0, -1.0)):
        with pytest.raises(ValueError, match="clip"):
            GaussianNoise(*bad)
