"""Where a transformer keeps its projections, by family: the same role names for all of them.

A role is ``query``, ``key``, ``value``, ``output`` (attention), ``up``, ``gate``, ``down`` (feed-forward).  Projections that a family
fuses into one matrix are slices of its output rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

BLOCK = "block"
ROLES = ("query", "key", "value", "output", "up", "gate", "down")


class FamilyError(ValueError):
    """A model whose projections are not known, or a role that it does not have."""


@dataclass(frozen=True)
class Family:
    """Path of the list of blocks below the base model, and of each role's module below a block.

    ``fused`` says how a shared module's rows belong to roles: "thirds" (all query, all key, all value), "grouped" (the same with
    fewer key and value heads), "per_head" (query, key and value of head 0, then of head 1, ...).
    """

    blocks: str
    roles: Mapping[str, str]
    fused: Mapping[str, str] = field(default_factory=dict)


def _bert(prefix: str = "encoder.layer") -> Family:
    attention = {r: f"attention.self.{r}" for r in ("query", "key", "value")}
    return Family(prefix, attention | {"output": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense"})


def _llama() -> Family:
    attention = {r: f"self_attn.{r[0]}_proj" for r in ("query", "key", "value", "output")}
    return Family("layers", attention | {r: f"mlp.{r}_proj" for r in ("up", "gate", "down")})


_QKV = ("query", "key", "value")
_FUSED_PER_HEAD = {"output": "attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "roformer"), _bert()),
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "olmo2", "granite", "stablelm"), _llama()
    ),
    "distilbert": Family(
        "transformer.layer",
        {"query": "attention.q_lin", "key": "attention.k_lin", "value": "attention.v_lin", "output": "attention.out_lin"}
        | {"up": "ffn.lin1", "down": "ffn.lin2"},
    ),
    "mpnet": Family(
        "encoder.layer",
        {"query": "attention.attn.q", "key": "attention.attn.k", "value": "attention.attn.v", "output": "attention.attn.o"}
        | {"up": "intermediate.dense", "down": "output.dense"},
    ),
    "deberta-v2": Family(
        "encoder.layer",
        {r: f"attention.self.{r}_proj" for r in _QKV}
        | {"output": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense"},
    ),
    "modernbert": Family(
        "layers", dict.fromkeys(_QKV, "attn.Wqkv") | {"output": "attn.Wo", "down": "mlp.Wo"}, dict.fromkeys(_QKV, "thirds")
    ),
    "gpt2": Family(
        "h",
        dict.fromkeys(_QKV, "attn.c_attn") | {"output": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
        dict.fromkeys(_QKV, "thirds"),
    ),
    "phi3": Family(
        "layers",
        dict.fromkeys(_QKV, "self_attn.qkv_proj") | {"output": "self_attn.o_proj", "down": "mlp.down_proj"},
        dict.fromkeys(_QKV, "grouped"),
    ),
    "gpt_neox": Family("layers", dict.fromkeys(_QKV, "attention.query_key_value") | _FUSED_PER_HEAD, dict.fromkeys(_QKV, "per_head")),
    "bloom": Family(
        "h",
        dict.fromkeys(_QKV, "self_attention.query_key_value")
        | {"output": "self_attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"},
        dict.fromkeys(_QKV, "per_head"),
    ),
    "clip_vision_model": Family(
        "encoder.layers", {r: f"self_attn.{r[0]}_proj" for r in _QKV} | {"output": "self_attn.out_proj", "up": "mlp.fc1", "down": "mlp.fc2"}
    ),
    "vit": Family(
        "encoder.layer",
        {r: f"attention.attention.{r}" for r in _QKV}
        | {"output": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense"},
    ),
}


@dataclass(frozen=True)
class Site:
    """A linear map of a model, or a block: ``name`` is ``layers.<number>.<role>``; ``rows`` are its output rows in a fused module, else None.

    ``transposed``: the module keeps its weight as (in, out).  ``bias``: it has one.
    """

    name: str
    layer: int
    path: str  # of the module, below the base model
    in_features: int
    out_features: int
    rows: Tensor | None = None
    transposed: bool = False
    bias: bool = True


def features(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear map; GPT-2's ``Conv1D`` keeps its weight transposed."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":
        rows, columns = module.weight.shape  # type: ignore[union-attr, misc]
        return int(rows), int(columns)
    raise FamilyError(f"{type(module).__name__} is not a linear map; adapters work on nn.Linear and Conv1D")


def family_of(model_type: str, given: Mapping[str, object] | None = None) -> Family:
    """The family of a ``transformers`` model type, or the one ``given`` in a recipe: ``{blocks = "...", query = "...", ...}``.

    Raises:
        FamilyError: for an unknown type, with those known and how to describe one's own.
    """
    if given:
        roles = {r: str(p) for r, p in given.items() if r in ROLES}
        if unknown := set(given) - set(ROLES) - {"blocks"}:
            raise FamilyError(f"adapter.family: unknown role {sorted(unknown)[0]!r}; accepted are blocks and {', '.join(ROLES)}")
        if "blocks" not in given or not roles:
            raise FamilyError('adapter.family needs blocks = "path of the list of blocks" and at least one role, e.g. query = "attn.q"')
        return Family(str(given["blocks"]), roles)
    if model_type not in FAMILIES:
        raise FamilyError(
            f"model family {model_type!r} is not known; known are {', '.join(sorted(FAMILIES))}. Describe it in the recipe: "
            f'[adapter.family] blocks = "encoder.layer", query = "attention.self.query", value = "attention.self.value"'
        )
    return FAMILIES[model_type]


def _fused_rows(kind: str, role: str, out: int, config: object) -> Tensor:
    which = _QKV.index(role)
    if kind == "thirds":
        return torch.arange(out // 3) + which * (out // 3)
    heads = int(getattr(config, "num_attention_heads", 0) or getattr(config, "n_head", 0))
    if kind == "per_head":
        width = out // (3 * heads)
        return (torch.arange(heads)[:, None] * 3 * width + which * width + torch.arange(width)).flatten()
    groups = int(getattr(config, "num_key_value_heads", heads))
    width = out // (heads + 2 * groups)
    start, stop = [(0, heads), (heads, heads + groups), (heads + groups, heads + 2 * groups)][which]
    return torch.arange(start * width, stop * width)


def sites(base: nn.Module, family: Family, roles: tuple[str, ...], layers: range | list[int]) -> list[Site]:
    """The sites of ``roles`` in ``layers`` of a base model; the role "block" is the block itself.

    Raises:
        FamilyError: when a role or a path does not exist.
    """
    found = []
    if roles == (BLOCK,):
        width = int(base.config.hidden_size)  # type: ignore[union-attr, arg-type]
        return [Site(f"layers.{i}.{BLOCK}", i, f"{family.blocks}.{i}", width, width) for i in layers]
    for role in roles:
        if role not in family.roles:
            raise FamilyError(f"adapter.targets: this model has no {role!r}; it has {', '.join(family.roles)}")
    for i in layers:
        for role in roles:
            path = f"{family.blocks}.{i}.{family.roles[role]}"
            try:
                module = base.get_submodule(path)
            except AttributeError:
                raise FamilyError(f"the model has no module {path!r} for the role {role!r}; correct [adapter.family]") from None
            width_in, width_out = features(module)
            rows = _fused_rows(family.fused[role], role, width_out, getattr(base, "config", None)) if role in family.fused else None
            width = width_out if rows is None else len(rows)
            transposed, bias = type(module).__name__ == "Conv1D", getattr(module, "bias", None) is not None
            found.append(Site(f"layers.{i}.{role}", i, path, width_in, width, rows, transposed, bias))
    return found
