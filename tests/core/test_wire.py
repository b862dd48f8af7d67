from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.wire import HEADER_BYTES, WireError, pack, pad, schema, schema_size, size, trim, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.uint8, torch.float16]


@st.composite
def payloads(draw):
    out = {}
    for i in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        out[f"t{i}.{draw(st.sampled_from('abc'))}"] = torch.randint(0, 100, shape).to(dtype)
    return out


@given(payloads())
@settings(max_examples=60, deadline=None)
def test_what_is_packed_comes_back(payload):
    data = pack(payload)
    back = unpack(data, schema(payload))
    assert set(back) == set(payload)
    assert all(torch.equal(back[n], payload[n]) and back[n].dtype == payload[n].dtype for n in payload)
    assert len(data) == size(payload)[1] == schema_size(schema(payload))[1] == size(payload)[0] + HEADER_BYTES


@given(payloads(), st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_bytes_are_refused_and_nothing_else_happens(payload, data):
    good = pack(payload)
    at = data.draw(st.integers(0, len(good) - 1))
    if at in (5, 6, 7):
        return  # padding of the header
    bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    with pytest.raises(WireError):
        unpack(bad, schema(payload))


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(WireError):
        unpack(data, {"a": (torch.float32, (3,))})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d[:-1], "truncated"),
        (lambda d: d[:10], "truncated"),
        (lambda d: d + b"x", "oversized"),
        (lambda d: b"NOPE" + d[4:], "not an Isthmus payload"),
        (lambda d: d[:4] + b"\x09" + d[5:], "version 9"),
        (lambda d: d[:-1] + bytes([d[-1] ^ 1]), "corrupted"),
    ],
)
def test_the_error_names_what_is_wrong(change, says):
    payload = {"a": torch.arange(3.0)}
    with pytest.raises(WireError, match=says):
        unpack(change(pack(payload)), schema(payload))


def test_another_schema_is_refused_even_where_the_length_fits():
    with pytest.raises(WireError, match="another schema"):
        unpack(pack({"a": torch.zeros(2, 3)}), {"a": (torch.float32, (3, 2))})


def test_trimming_and_padding_are_inverse_on_the_corner():
    full = {"a": torch.zeros(4, 3)}
    full["a"][:2] = torch.arange(6.0).view(2, 3)
    small = {"a": (torch.float32, (2, 3))}
    assert trim(full, small)["a"].shape == (2, 3)
    assert torch.equal(pad(trim(full, small), schema(full))["a"], full["a"])


def test_an_empty_payload_is_no_message():
    assert size({}) == (0, 0)
    assert schema_size({}) == (0, 0)
