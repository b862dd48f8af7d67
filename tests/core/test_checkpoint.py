from __future__ import annotations

import errno
import json
import os
import pickle

import pytest
import torch

from isthmus.core import checkpoint
from isthmus.core.checkpoint import CheckpointError
from isthmus.core.ledger import Ledger, total
from isthmus.core.rounds import RoundRecord

TENSORS = {"shared/a": torch.arange(6.0).view(2, 3), "memory/n": torch.tensor([1, 2]), "empty": torch.zeros(0, 3)}


def test_a_checkpoint_comes_back_and_old_ones_go(tmp_path):
    for i in range(1, 5):
        checkpoint.save(tmp_path, i, TENSORS, {"round": i})
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["round-00003", "round-00004"]
    round, tensors, meta = checkpoint.load(tmp_path / "round-00004")
    assert (round, meta) == (4, {"round": 4})
    assert all(torch.equal(tensors[n], TENSORS[n]) for n in TENSORS)


@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: b"", lambda d: d[:-1] + bytes([d[-1] ^ 1]), pickle.dumps])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_serves(tmp_path, damage):
    checkpoint.save(tmp_path, 1, TENSORS, {})
    newest = checkpoint.save(tmp_path, 2, TENSORS, {}) / "state.safetensors"
    newest.write_bytes(damage(newest.read_bytes()))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(tmp_path / "round-00002")
    found, problems = checkpoint.latest(tmp_path)
    assert found[0] == 1
    assert "round-00002" in problems[0]


def test_a_checkpoint_that_lies_about_its_checksum_is_still_no_pickle(tmp_path):
    import hashlib

    folder = checkpoint.save(tmp_path, 1, TENSORS, {})
    evil = pickle.dumps({"a": 1})
    (folder / "state.safetensors").write_bytes(evil)
    document = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(document | {"sha256": hashlib.sha256(evil).hexdigest()}))
    with pytest.raises(CheckpointError, match="safetensors"):
        checkpoint.load(folder)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_loses_nothing_that_was_saved(tmp_path, monkeypatch, call):
    checkpoint.save(tmp_path, 1, TENSORS, {})
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(tmp_path, 2, TENSORS, {})
    monkeypatch.undo()
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before
    assert checkpoint.latest(tmp_path)[0][0] == 1


def test_a_really_full_device_is_a_clear_error(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.path.symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left"):
        ledger.append(record(0), {}, 0.0)


def record(round):
    return RoundRecord(round, [0, 1], {1: "late"}, {0: (10, 34)}, {0: (20, 44), 1: (20, 44)}, {"loss": 0.5}, 1.0)


def test_the_ledger_appends_and_forgets_a_line_cut_off_by_a_crash(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for i in range(3):
        ledger.append(record(i), {}, 0.1)
    with ledger.path.open("a") as file:
        file.write('{"round": 3, "coh')
    rows = ledger.rows()
    assert [r["round"] for r in rows] == [0, 1, 2]
    assert (total(rows, "up"), total(rows, "down"), total(rows, "up", wire=False)) == (3 * 34, 3 * 88, 30)
    ledger.cut(2)
    assert [r["round"] for r in ledger.rows()] == [0, 1]
