"""Names to parts: built-ins by import path, third parties through entry points.

A package adds a method with

    [project.entry-points."isthmus.methods"]
    mine = "my_package.mine:mine"

and tasks, adapters and channels the same way.  A name that exists already is an error, never an overwrite.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass

KINDS = ("methods", "tasks", "adapters", "channels")

_FEDERATED, _CHANNELS = "isthmus.federated.", "isthmus.parts.channels."
BUILT_IN: dict[str, dict[str, str]] = {
    "methods": {
        "local": _FEDERATED + "references:local",
        "pooled": _FEDERATED + "references:pooled",
        "fedavg": _FEDERATED + "fedavg:fedavg",
        "fedprox": _FEDERATED + "fedprox:fedprox",
        "scaffold": _FEDERATED + "scaffold:scaffold",
        "fedadam": _FEDERATED + "fedopt:fedadam",
        "fedyogi": _FEDERATED + "fedopt:fedyogi",
        "fedper": _FEDERATED + "fedper:fedper",
        "ffa_lora": _FEDERATED + "ffa_lora:ffa_lora",
        "fedsa_lora": _FEDERATED + "fedsa_lora:fedsa_lora",
        "rolora": _FEDERATED + "rolora:rolora",
        "flora": _FEDERATED + "flora:flora",
        "flexlora": _FEDERATED + "flexlora:flexlora",
        "hetlora": _FEDERATED + "hetlora:hetlora",
        "fedex_lora": _FEDERATED + "fedex_lora:fedex_lora",
        "fedlova": _FEDERATED + "fedlova:fedlova",
        "frank_lora": _FEDERATED + "frank_lora:frank_lora",
        "rank_rate": _FEDERATED + "frank_lora:rank_rate",
        "flora_chef": _FEDERATED + "flora_chef:flora_chef",
        "flfire": _FEDERATED + "flora_chef:flfire",
        "flsauce": _FEDERATED + "flora_chef:flsauce",
        "fedibs": _FEDERATED + "fedibs:fedibs",
        "fedrecall": _FEDERATED + "fedrecall:fedrecall",
        "beside": _FEDERATED + "beside:beside",
        "rational": _FEDERATED + "rational:rational",
        "feduca": _FEDERATED + "feduca:feduca",
        "norm_bound": _FEDERATED + "robust:norm_bound",
        "krum": _FEDERATED + "robust:krum",
        "multi_krum": _FEDERATED + "robust:multi_krum",
        "bulyan": _FEDERATED + "robust:bulyan",
        "median": _FEDERATED + "robust:median",
        "trimmed_mean": _FEDERATED + "robust:trimmed_mean",
        "geometric_median": _FEDERATED + "robust:geometric_median",
        "fbfs": _FEDERATED + "fbfs:fbfs",
        "gate_majority": _FEDERATED + "fbfs:gate_majority",
        "router_kmeans": _FEDERATED + "router:router_kmeans",
        "router_mlp": _FEDERATED + "router:router_mlp",
        "qffl": _FEDERATED + "fair:qffl",
        "afl": _FEDERATED + "fair:afl",
        "fcm": _FEDERATED + "fcm:fcm",
        "fedsem": _FEDERATED + "fedsem:fedsem",
        "dp": _FEDERATED + "dp:dp",
    },
    "tasks": {
        "classification": "isthmus.tasks.build:classification",
        "language": "isthmus.tasks.build:language",
        "digits": "isthmus.tasks.build:digits",
        "logic": "isthmus.tasks.logic:logic",
        "routing": "isthmus.tasks.queries:routing",
        "concepts": "isthmus.tasks.concepts:concepts",
        "bags": "isthmus.tasks.mil:bags",
        "forecast": "isthmus.tasks.forecast:forecast",
        "pairs": "isthmus.tasks.pairs:pairs",
    },
    "adapters": {
        "lora": "isthmus.adapters.lora:Lora",
        "bias": "isthmus.adapters.bias:Biases",
        "prompt": "isthmus.adapters.prompt:Prompts",
    },
    "channels": {
        "cast": _CHANNELS + "quantise:Cast",
        "int8": _CHANNELS + "quantise:Int8",
        "topk": _CHANNELS + "sparse:TopK",
        "gaussian": _CHANNELS + "privacy:GaussianNoise",
        "attack": _CHANNELS + "attack:Attack",
        "secure_sum": _CHANNELS + "secure:SecureSum",
    },
}


class RegistryError(LookupError):
    """A name that is not registered, twice registered, or does not import."""


@dataclass(frozen=True)
class Entry:
    """One registered name."""

    kind: str
    name: str
    target: str
    package: str

    def load(self) -> Callable[..., object]:
        """Import it.

        Raises:
            RegistryError: when the import fails, naming the package.
        """
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:
            raise RegistryError(
                f"{self.kind[:-1]} {self.name!r} of the package {self.package} does not import ({self.target}): {type(error).__name__}: {error}"
            ) from error

    def summary(self) -> str:
        """The first line of its docstring; "broken: ..." if it does not import."""
        try:
            return (inspect.getdoc(self.load()) or "").partition("\n")[0]
        except RegistryError as error:
            return f"broken: {error}"


def entries(kind: str) -> dict[str, Entry]:
    """Everything registered under a kind.

    Raises:
        RegistryError: when two packages claim the same name.
    """
    found = {name: Entry(kind, name, target, "isthmus") for name, target in BUILT_IN[kind].items()}
    for point in importlib.metadata.entry_points(group=f"isthmus.{kind}"):
        package = point.dist.name if point.dist else "?"
        if point.name in found:
            raise RegistryError(f"{kind[:-1]} {point.name!r} is registered by {found[point.name].package} and by {package}; rename one")
        found[point.name] = Entry(kind, point.name, point.value, package)
    return found


def get(kind: str, name: str) -> Callable[..., object]:
    """The part of that name.

    Raises:
        RegistryError: with the nearest names.
    """
    known = entries(kind)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RegistryError(f"{kind[:-1]} {name!r} is not known; {hint}accepted are {', '.join(sorted(known))}")
    return known[name].load()
