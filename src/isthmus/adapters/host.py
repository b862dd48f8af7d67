"""A frozen pretrained model with adapters in it, run on the rows of many clients at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.tensors import Tensors
from .attention import use_short_rows
from .families import BLOCK, Family, FamilyError, Site, family_of, sites
from .frozen import fast_product, replace_linears
from .rows import Rows

Precision = Literal["fp32", "bf16"]


class Adapter(Protocol):
    """Which tensors of a model train, how they start and what they add to a site's output."""

    targets: tuple[str, ...]
    layers: str

    def init(self, site: Site, seed: int) -> Tensors:
        """Start values of one site, by local name."""
        ...

    def output(self, site: Site, x: Tensor, params: Tensors, rows: Rows) -> Tensor | None:
        """What is added to the site's output for x (R, L, in)."""
        ...


class _State:
    """What the adapted modules need to know about the call that is running."""

    def __init__(self) -> None:
        self.params: Tensors = {}
        self.rows = Rows()
        self.start: Tensor | None = None
        self.capture = False


class _Stop(Exception):
    """Carries the hidden states out of a forward pass that need not go on."""


class _Adapted(nn.Module):
    """A frozen module and what the adapters add at its sites (several when it is fused)."""

    def __init__(self, base: nn.Module, here: list[tuple[Site, Adapter]], state: _State) -> None:
        super().__init__()
        self.base, self.here, self.state = base, here, state

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        for site, adapter in self.here:
            prefix = site.name + "."
            params = {n[len(prefix) :]: t for n, t in self.state.params.items() if n.startswith(prefix)}
            more = adapter.output(site, x, params, self.state.rows) if params else None
            if more is not None:
                y = y + more if site.rows is None else y.index_add(-1, site.rows, more.expand(*y.shape[:-1], -1))
        return y


class _Around(nn.Module):
    """A block in other hands; attributes that some models read from their blocks are still there."""

    def __init__(self, block: nn.Module, state: _State) -> None:
        super().__init__()
        self.block, self.state = block, state

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


class _Longer(_Around):
    """A block whose rows get further tokens in front, which it loses again behind it."""

    def __init__(self, block: nn.Module, site: Site, adapter: Adapter, state: _State) -> None:
        super().__init__(block, state)
        self.site, self.adapter = site, adapter

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> object:
        prefix = self.site.name + "."
        params = {n[len(prefix) :]: t for n, t in self.state.params.items() if n.startswith(prefix)}
        more = self.adapter.output(self.site, hidden, params, self.state.rows) if params else None
        if more is None:
            return self.block(hidden, *args, **kwargs)
        if kwargs.get("position_embeddings") is not None:
            raise FamilyError("adapter.kind = 'prompt': this model turns its tokens by their positions (rotary); choose another adapter")
        count, length = more.shape[1], hidden.shape[1]
        masks = lambda value: _wider(value, count, length)  # noqa: E731
        out = self.block(torch.cat([more, hidden], 1), *map(masks, args), **{n: masks(v) for n, v in kwargs.items()})
        return (out[0][:, count:], *out[1:]) if isinstance(out, tuple) else out[:, count:]


def _wider(value: object, count: int, length: int) -> object:
    """An attention mask with room for ``count`` tokens in front, which all may see; anything else as it is."""
    if not isinstance(value, Tensor) or value.dim() not in (2, 4) or value.shape[-1] != length:
        return value
    seen = 1.0 if value.dim() == 2 else 0.0  # of a mask of ones and zeros, and of one that is added
    fill = True if value.dtype == torch.bool else seen
    value = F.pad(value, (count, 0), value=fill)
    return F.pad(value, (0, 0, count, 0), value=fill) if value.dim() == 4 and value.shape[-2] == length else value


class _Below(_Around):
    """A block below the lowest adapter: passes kept hidden states on instead of computing them again."""

    def __init__(self, block: nn.Module, state: _State, last: bool) -> None:
        super().__init__(block, state)
        self.last = last
        self.tuple = False

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> object:
        if self.state.start is not None:
            return (self.state.start,) if self.tuple else self.state.start
        out = self.block(hidden, *args, **kwargs)
        self.tuple = isinstance(out, tuple)
        if self.last and self.state.capture:
            raise _Stop(out[0] if self.tuple else out)
        return out


def layer_range(which: str, count: int) -> list[int]:
    """ "all", "upper:3", "lower:2" or "0,2,4" to layer numbers.

    Raises:
        ValueError: for anything else, or numbers that the model does not have.
    """
    kind, _, number = which.partition(":")
    if which == "all":
        return list(range(count))
    if kind in ("upper", "lower") and number.isdigit() and 1 <= int(number) <= count:
        return list(range(count - int(number), count)) if kind == "upper" else list(range(int(number)))
    listed = which.split(",")
    if all(x.strip().isdigit() and int(x) < count for x in listed):
        return sorted({int(x) for x in listed})
    raise ValueError(f'adapter.layers = {which!r}: accepted are "all", "upper:N", "lower:N" or "0,2,4"; the model has {count} layers')


class Host:
    """A frozen ``transformers`` model with adapters at its sites.

    Args:
        net: the model; it is changed in place and must not be used elsewhere.
        adapters: what trains.
        precision: "fp32", exact, or "bf16": products and activations of the frozen model in bfloat16, adapters kept in fp32.
        family: paths of a model family that is not known.
        product: "auto", "onednn" or "default", see `frozen`.
    """

    def __init__(
        self,
        net: nn.Module,
        adapters: Sequence[Adapter],
        precision: Precision = "fp32",
        family: Mapping[str, object] | None = None,
        product: str = "auto",
    ) -> None:
        self.net = net.eval().requires_grad_(False)
        base = getattr(net, "base_model", net)
        self.config = cast(Any, net.config)
        self.family: Family = family_of(self.config.model_type, family)
        self.state, self.adapters, self.precision = _State(), tuple(adapters), precision
        try:
            blocks = base.get_submodule(self.family.blocks)
        except AttributeError:
            raise FamilyError(f"the model has no module {self.family.blocks!r}; correct [adapter.family] blocks") from None
        self.sites: list[tuple[Site, Adapter]] = []
        for adapter in adapters:
            chosen = layer_range(adapter.layers, len(blocks))  # type: ignore[arg-type]
            self.sites += [(s, adapter) for s in sites(base, self.family, adapter.targets, chosen)]
        if precision == "bf16":
            net.to(torch.bfloat16)
            use_short_rows(net)
        replace_linears(net, precision == "fp32" and fast_product(product))
        at: dict[str, list[tuple[Site, Adapter]]] = {}
        for site, adapter in self.sites:
            at.setdefault(site.path, []).append((site, adapter))
        for path, here in at.items():
            parent, _, name = path.rpartition(".")
            module = base.get_submodule(path)
            blockwise = here[0][0].name.endswith(f".{BLOCK}")
            setattr(
                base.get_submodule(parent), name, _Longer(module, *here[0], self.state) if blockwise else _Adapted(module, here, self.state)
            )
        self.lowest = min((s.layer for s, _ in self.sites), default=0)
        for i in range(self.lowest):
            blocks[i] = _Below(blocks[i], self.state, i == self.lowest - 1)  # type: ignore[operator, index]
        self.base = base

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def width(self) -> int:
        """Size of a hidden state."""
        return int(self.config.hidden_size)

    def init(self, seed: int) -> Tensors:
        """Start values of everything that trains: ``<site>.<local name>``."""
        return {f"{s.name}.{n}": t for s, adapter in self.sites for n, t in adapter.init(s, seed).items()}

    def hidden(self, params: Tensors, rows: Rows, ids: Tensor, mask: Tensor, start: Tensor | None = None) -> Tensor:
        """Last hidden states (R, L, d).

        Args:
            params: by name, each (K, *shape), or (*shape) where it is the same for all rows.
            rows: whose row is whose.
            ids: token numbers (R, L), or pixels (R, channels, height, width) of an image model.
            mask: 1 for tokens and patches, 0 for padding, (R, L).
            start: hidden states (R, L, d) that enter the lowest adapted block, from `below`.
        """
        self.state.params, self.state.rows, self.state.start = params, rows, start
        try:
            if ids.is_floating_point():
                return self.base(pixel_values=ids.to(self.dtype)).last_hidden_state
            full = bool(mask.all())
            return self.base(input_ids=ids, attention_mask=None if full else mask).last_hidden_state
        finally:
            self.state.params, self.state.start = {}, None

    @torch.no_grad()
    def below(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states (R, L, d) that enter the lowest adapted block; only when there is a block below."""
        self.state.capture = True
        try:
            self.hidden({}, Rows(), ids, mask)
        except _Stop as stop:
            return stop.args[0]
        finally:
            self.state.capture = False
        raise AssertionError("no block below the lowest adapter")
