"""Attention for short rows in bfloat16 on a CPU, where torch's fused kernel is several times slower in its backward pass.

Registered with ``transformers`` under the name `NAME`; longer rows, fp32 and other devices go to torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "isthmus_short_rows"
_LONGEST = 256


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (R, H, L, D), key and value (R, H', L, D), mask additive or boolean (R or 1, 1, L, L), to (R, L, H, D)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    r, h, length, d = query.shape
    if query.dtype != torch.bfloat16 or query.device.type != "cpu" or max(length, key.shape[2]) > _LONGEST or kwargs.get("dropout"):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs)
    if key.shape[1] != h:
        key, value = (t.repeat_interleave(h // t.shape[1], 1) for t in (key, value))
    flat = [t.reshape(r * h, -1, d) for t in (query * (scaling or d**-0.5), key, value)]
    scores = torch.bmm(flat[0], flat[1].mT)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if attention_mask is not None:
        grid = scores.view(r, h, length, -1)
        if attention_mask.dtype == torch.bool:
            grid = grid.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            grid = grid + attention_mask
        scores = grid.reshape(r * h, length, -1)
    elif causal and length > 1:
        upper = torch.ones(length, key.shape[2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(upper, torch.finfo(scores.dtype).min)
    out = torch.bmm(torch.softmax(scores, -1), flat[2])
    return out.view(r, h, length, d).transpose(1, 2), None


def use_short_rows(net: nn.Module) -> None:
    """Make a ``transformers`` model use it, where the model lets its attention be chosen."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if getattr(net, "_supports_sdpa", False) and hasattr(net, "set_attn_implementation"):
        net.set_attn_implementation(NAME)  # type: ignore[operator]
