"""Ten real classifiers of different cost answer real queries: who was right, and what it took.  src/isthmus/tables/newsdesk.json

python benchmarks/answers.py    # five minutes on two cores

Queries are 3,000 posts and stories of the test parts of 20 Newsgroups and R52; the classifiers learned on the train parts, some on one of the two sets only.  The cost of
an answer is the measured time for one query alone, from its text on, mean over 200 queries after a warm-up.  Only numbers are written: which row of which set, bits, milliseconds.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import MultinomialNB
from sklearn.neighbors import NearestCentroid
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC

from isthmus.tasks.queries import Encoder
from isthmus.tasks.sources import load

OUT = Path(__file__).resolve().parents[1] / "src" / "isthmus" / "tables" / "newsdesk.json"
LEARN, ASK, SEED = 4000, 1500, 0


class Embedded:
    """A classifier on sentence embeddings of MiniLM, of all its layers or the first ones."""

    def __init__(self, encoder: Encoder, classifier) -> None:
        self.encoder, self.classifier = encoder, classifier

    def fit(self, texts, labels):
        self.classifier.fit(self.encoder(texts).numpy(), labels)
        return self

    def predict(self, texts):
        return self.classifier.predict(self.encoder(texts).numpy())


class Committee:
    """The mean of several classifiers' votes, each by its probabilities: the most expensive one."""

    def __init__(self, members) -> None:
        self.members = members

    def fit(self, texts, labels):
        for m in self.members:
            m.fit(texts, labels)
        return self

    def predict(self, texts):
        found = [m.predict(texts) for m in self.members]
        # the majority, and of three different answers the last one's
        return np.asarray([a if a == b else c for a, b, c in zip(*found, strict=True)])


def pool() -> dict[str, tuple[object, str]]:
    """Name to (classifier, what it learned on)."""
    whole, short = Encoder(), Encoder(layers=2)
    words = lambda n: CountVectorizer(max_features=n, binary=True)
    svm = lambda: make_pipeline(TfidfVectorizer(ngram_range=(1, 2), max_features=120000, sublinear_tf=True), LinearSVC())
    logistic = lambda encoder: Embedded(encoder, LogisticRegression(C=10, max_iter=300))
    network = lambda: Embedded(whole, MLPClassifier((256,), max_iter=60, early_stopping=True, random_state=SEED))
    return {
        "bayes-500": (make_pipeline(words(500), MultinomialNB()), "both"),
        "centroid": (make_pipeline(HashingVectorizer(n_features=4096), NearestCentroid()), "both"),
        "bayes-groups": (make_pipeline(words(20000), MultinomialNB(alpha=0.1)), "20newsgroups"),
        "svm-machines": (svm(), "20newsgroups: comp. misc. rec."),
        "svm-people": (svm(), "20newsgroups: alt. sci. soc. talk."),
        "svm-reuters": (svm(), "r52"),
        "minilm2": (logistic(short), "both"),
        "minilm-logistic": (logistic(whole), "both"),
        "minilm-network": (network(), "both"),
        "committee": (Committee([logistic(whole), network(), svm()]), "both"),
    }


def main() -> None:
    torch.manual_seed(SEED)
    draw = np.random.default_rng(SEED)
    learn, ask = {}, []
    for name in ("20newsgroups", "r52"):
        corpus = load(name)
        parts = {p: np.flatnonzero(np.asarray(corpus.split) == p) for p in ("train", "test")}
        rows = draw.choice(parts["train"], LEARN, replace=False)
        learn[name] = ([corpus.text[i] for i in rows], [f"{name}: {corpus.label[i]}" for i in rows])
        rows = np.sort(draw.choice(parts["test"], ASK, replace=False))
        ask += [(name, int(i), corpus.text[i], f"{name}: {corpus.label[i]}") for i in rows]
    for part in ("comp. misc. rec.", "alt. sci. soc. talk."):
        mine = [i for i, y in enumerate(learn["20newsgroups"][1]) if y.split(": ")[1].startswith(tuple(part.split()))]
        learn[f"20newsgroups: {part}"] = tuple([column[i] for i in mine] for column in learn["20newsgroups"])
    learn["both"] = tuple(learn["20newsgroups"][i] + learn["r52"][i] for i in (0, 1))
    texts, truth = [a[2] for a in ask], np.asarray([a[3] for a in ask])
    columns, some = [], draw.choice(len(ask), 200, replace=False)
    for name, (classifier, on) in pool().items():
        started = time.perf_counter()
        classifier.fit(*learn[on])
        right = classifier.predict(texts) == truth
        for i in some[:20]:
            classifier.predict([texts[i]])
        each = []
        for i in some:
            began = time.perf_counter()
            classifier.predict([texts[i]])
            each.append(1000 * (time.perf_counter() - began))
        columns.append(
            {"model": name, "learned": on, "milliseconds": round(float(np.median(each)), 4), "right": "".join("01"[int(r)] for r in right)}
        )
        print(name, f"{right.mean():.3f}", f"{columns[-1]['milliseconds']:.2f} ms", f"{time.perf_counter() - started:.0f} s", flush=True)
    versions = {n: importlib.metadata.version(n) for n in ("scikit-learn", "torch", "transformers")} | {"python": platform.python_version()}
    document = {
        "queries": [{"set": n, "rows": [a[1] for a in ask if a[0] == n]} for n in ("20newsgroups", "r52")],
        "answers": columns,
        "versions": versions,
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
