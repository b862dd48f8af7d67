from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.tasks import sources
from isthmus.tasks.partition import Partition, by_value, split
from isthmus.tasks.sources import DataError

TEXT = ["good film", "bad film", 'a "quoted", text', "line\nbreak"]
LABEL = ["pos", "neg", "pos", "neg"]
CLIENT = ["a", "b", "a", "b"]


def write(path, columns):
    table = pa.table(columns)
    kind = path.suffix
    if kind == ".csv":
        import csv

        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(columns)
            rows.writerows(zip(*columns.values(), strict=True))
    elif kind == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in zip(*columns.values(), strict=True)))
    elif kind == ".parquet":
        pa.parquet.write_table(table, path)
    else:
        pa.feather.write_feather(table, path)


@pytest.mark.parametrize("kind", [".csv", ".jsonl", ".parquet", ".arrow"])
def test_a_users_table_of_every_kind_is_read(tmp_path, kind):
    path = tmp_path / f"mine{kind}"
    write(path, {"words": TEXT, "kind": LABEL, "office": CLIENT})
    corpus = sources.load(str(path), "words", "kind", "office")
    assert (corpus.text, corpus.label, corpus.client, corpus.notes) == (TEXT, LABEL, CLIENT, [])


def test_a_folder_per_client_is_read(tmp_path):
    for name in ("paris", "rome"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "part.csv", {"text": TEXT, "label": LABEL})
    corpus = sources.load(str(tmp_path), client="folder")
    assert corpus.client == ["paris"] * 4 + ["rome"] * 4
    assert corpus.label == LABEL * 2


def test_folders_of_labels_are_read_with_and_without_clients(tmp_path):
    for client in ("x", "y"):
        for label in ("sport", "tech"):
            folder = tmp_path / client / label
            folder.mkdir(parents=True)
            (folder / "1.txt").write_text(f"{client} {label}")
    assert sources.load(str(tmp_path), client="folder").client == ["x", "x", "y", "y"]
    assert sources.load(str(tmp_path / "x")).label == ["sport", "tech"]


@pytest.mark.parametrize(
    ("columns", "ask", "says"),
    [
        ({"text": TEXT, "label": LABEL}, {"text": "body"}, r"data\.text = 'body'.*no such column; it has 'text', 'label'"),
        ({"text": TEXT, "label": [""] * 4}, {}, r"data\.label = 'label': this column of mine\.csv is empty"),
        ({"text": TEXT, "label": LABEL}, {"client": "office"}, r"data\.client = 'office'"),
    ],
)
def test_missing_and_empty_columns_are_named(tmp_path, columns, ask, says):
    write(tmp_path / "mine.csv", columns)
    with pytest.raises(DataError, match=says):
        sources.load(str(tmp_path / "mine.csv"), **ask)


def test_rows_with_gaps_are_left_out_and_counted(tmp_path):
    write(tmp_path / "mine.csv", {"text": ["a", " ", "c"], "label": ["x", "y", ""]})
    corpus = sources.load(str(tmp_path / "mine.csv"))
    assert corpus.text == ["a"]
    assert corpus.notes == ["mine.csv: 2 of 3 rows have an empty text or label and were left out"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.csv", b'a,b\n1,2,3\n"', "does not parse"),
        ("x.jsonl", b"{not json", "does not parse"),
        ("x.parquet", b"PAR1 nothing", "does not parse"),
        ("x.arrow", b"\x80\x04K\x01.", "does not parse"),
        ("x.pkl", b"\x80\x04K\x01.", "accepted are .csv"),
    ],
)
def test_files_that_do_not_parse_are_named_and_nothing_unpickles(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        sources.load(str(tmp_path / name))


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(DataError, match="neither a file or folder, nor one of bbc"):
        sources.load("nothing-here")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no texts found"):
        sources.load(str(tmp_path / "empty"))
    with pytest.raises(DataError, match="expected one for each client"):
        sources.load(str(tmp_path / "empty"), client="folder")


@given(st.sampled_from(["dirichlet", "classes", "quantity", "iid"]), st.integers(1, 6), st.floats(0.2, 10), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_every_row_is_dealt_once(kind, clients, alpha, seed):
    label = torch.arange(600) % 5
    test = torch.arange(600) % 4 == 0
    part = Partition(kind, clients, alpha, classes=2, smallest=1)
    try:
        client = part.deal(label, test, seed)
    except DataError:
        return
    assert torch.equal(client, part.deal(label, test, seed))
    train, tests = split(client, clients, test, 0.2, seed, label)
    together = torch.cat([*train, *tests]).sort().values
    assert torch.equal(together, torch.arange(600))
    assert all(test[t].all() for t in tests)
    train, tests = split(client, clients, None, 0.2, seed, label)
    assert torch.equal(torch.cat([*train, *tests]).sort().values, torch.arange(600))


def test_partitions_are_as_skewed_as_they_say():
    label, none = torch.arange(4000) % 10, torch.zeros(4000, dtype=torch.bool)

    def table(**more):
        client = Partition(clients=5, **more).deal(label, none, 0)
        return torch.stack([torch.bincount(label[client == c], minlength=10) for c in range(5)])

    even, skewed = table(kind="dirichlet", alpha=100.0).double(), table(kind="dirichlet", alpha=0.1).double()
    spread = lambda t: float((t / t.sum(0)).std(0).mean())
    assert spread(even) < 0.05 < 0.25 < spread(skewed)
    assert ((table(kind="classes", classes=2) > 0).sum(1) == 2).all()
    sizes = table(kind="quantity", alpha=0.5)
    assert float((sizes / sizes.sum(1, keepdim=True)).std(0).max()) < 0.02
    assert int(sizes.sum(1).max()) > 2 * int(sizes.sum(1).min())
    assert by_value(["b", "a", "b"])[1] == ["a", "b"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Partition(clients=50).deal(torch.zeros(20, dtype=torch.long), torch.zeros(20, dtype=torch.bool), 0),
            "more rows than clients",
        ),
        (lambda: Partition(clients=8, alpha=0.01).deal(torch.arange(200) % 2, torch.zeros(200, dtype=torch.bool), 0), "raise alpha"),
        (lambda: Partition("classes", classes=9).deal(torch.arange(200) % 3, torch.zeros(200, dtype=torch.bool), 0), "there are 3 labels"),
        (lambda: Partition(clients=0), "partition.clients = 0"),
        (lambda: Partition(alpha=0), "partition.alpha = 0"),
        (
            lambda: split(torch.tensor([0, 0, 0, 1]), 2, None, 0.2, 0, torch.zeros(4, dtype=torch.long)),
            "client 0 has 3 training and 0 test rows",
        ),
    ],
)
def test_shares_that_cannot_be_are_refused_with_what_to_do(make, says):
    with pytest.raises(DataError, match=says):
        make()
