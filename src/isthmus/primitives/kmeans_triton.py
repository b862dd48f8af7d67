"""k-means on a GPU, in Triton: the two kernels of Flash-KMeans (arXiv 2603.09229), for batches of problems and for data that do not fit.

*FlashAssign*: a block of rows passes over blocks of centres and keeps each row's smallest score; no N x K matrix.  *Sort-Inverse Update*:
rows are sorted by label and cut into pieces that have one label and at most `PIECE` rows; a program sums a piece, so nothing is added to
the same place by two, however unequal the clusters are.

Products are taken in full float32 unless ``precision`` says otherwise: labels are then exact up to float32's rounding, of centred data.
Tested in Triton's interpreter; on a GPU it has not been timed by us.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

PIECE = 4096
_WIDE = 64 * 2**20  # bytes of a piece of data that is copied to the device at a time


def tiles(d: int, itemsize: int, shared: int) -> dict[str, int]:
    """Sizes of the blocks for rows of d numbers of so many bytes, on a device with ``shared`` bytes of shared memory a block.

    The largest of a list whose operands, one block of rows and as many blocks of centres as there are stages, fit into it.
    """
    deep = min(max(16, triton.next_power_of_2(d)), 128)
    for rows, centres, stages, warps in (
        (128, 128, 3, 8), (128, 128, 2, 8), (128, 64, 3, 4), (128, 64, 2, 4), (64, 64, 2, 4), (64, 32, 2, 4), (32, 32, 2, 4), (16, 16, 1, 2),
    ):  # fmt: skip
        if itemsize * deep * (rows + centres) * stages <= shared:
            return {"ROWS": rows, "CENTRES": centres, "DEEP": deep, "num_stages": stages, "num_warps": warps}
    return {"ROWS": 16, "CENTRES": 16, "DEEP": 16, "num_stages": 1, "num_warps": 1}


@triton.jit
def _assign(
    x, shift, c, half, labels, n, k, d,
    ROWS: tl.constexpr, CENTRES: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Nearest centre of ROWS rows of one problem.  x (problems, n, d), shift (problems, d), c (problems, k, d) shifted, half its norms."""
    problem = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x += (problem * n + row[:, None]) * d
    c += problem * k * d
    best = tl.full((ROWS,), float("inf"), tl.float32)
    who = tl.zeros((ROWS,), tl.int32)
    for first in range(0, k, CENTRES):
        centre = first + tl.arange(0, CENTRES)
        product = tl.zeros((ROWS, CENTRES), tl.float32)
        for start in range(0, d, DEEP):
            depth = start + tl.arange(0, DEEP)
            mean = tl.load(shift + problem * d + depth, mask=depth < d, other=0.0)
            rows = tl.load(x + depth[None, :], mask=(row[:, None] < n) & (depth[None, :] < d), other=0.0) - mean[None, :]
            some = tl.load(
                c + centre[:, None].to(tl.int64) * d + depth[None, :], mask=(centre[:, None] < k) & (depth[None, :] < d), other=0.0
            )
            product += tl.dot(rows, tl.trans(some), input_precision=PRECISION)
        score = tl.load(half + problem * k + centre, mask=centre < k, other=float("inf"))[None, :] - product
        lowest, at = tl.min(score, 1), tl.argmin(score, 1, tie_break_left=True)
        less = lowest < best
        best = tl.where(less, lowest, best)
        who = tl.where(less, first + at.to(tl.int32), who)
    tl.store(labels + problem * n + row, who, mask=row < n)


@triton.jit
def _sum(x, order, start, stop, out, d, ROWS: tl.constexpr, DEEP: tl.constexpr):
    """Sum of the rows order[start:stop] of a piece, DEEP numbers of them.  x (rows, d), out (pieces, d) float64."""
    piece = tl.program_id(0).to(tl.int64)
    depth = tl.program_id(1) * DEEP + tl.arange(0, DEEP)
    first, last = tl.load(start + piece), tl.load(stop + piece)
    total = tl.zeros((DEEP,), tl.float64)
    for at in range(first, last, ROWS):
        place = at + tl.arange(0, ROWS)
        row = tl.load(order + place, mask=place < last, other=0).to(tl.int64)
        block = tl.load(x + row[:, None] * d + depth[None, :], mask=(place[:, None] < last) & (depth[None, :] < d), other=0.0)
        total += tl.sum(block.to(tl.float32), 0).to(tl.float64)
    tl.store(out + piece * d + depth, total, mask=depth < d)


def _shared(device: torch.device) -> int:
    if device.type != "cuda":
        return 48 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 48 * 1024))


def assign(x: Tensor, centres: Tensor, shift: Tensor, precision: str = "ieee") -> Tensor:
    """Nearest centre of each row: (problems, n) int32.

    Args:
        x: (problems, n, d), contiguous, float32, float16 or bfloat16.
        centres: (problems, k, d) float32.
        shift: (problems, d) float32, taken from both before they are multiplied.
        precision: of the products: "ieee", "tf32x3" or "tf32" (no longer exact).
    """
    problems, n, d = x.shape
    k = centres.shape[1]
    moved = (centres - shift[:, None]).contiguous()
    half = moved.double().square().sum(-1).div(2).float()
    labels = torch.empty(problems, n, dtype=torch.int32, device=x.device)
    size = tiles(d, 4, _shared(x.device))
    for first in range(0, problems, 65535):  # of a grid's second side
        some = slice(first, first + 65535)
        grid = (triton.cdiv(n, size["ROWS"]), len(x[some]))
        _assign[grid](x[some], shift[some], moved[some], half[some], labels[some], n, k, d, PRECISION=precision, **size)
    return labels


def sums(x: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sums (problems, k, d), float64, and numbers (problems, k) of the rows of each label."""
    problems, _, d = x.shape
    flat = (labels.long() + k * torch.arange(problems, device=x.device)[:, None]).reshape(-1)
    order = flat.argsort(stable=True)
    count = torch.bincount(flat, minlength=problems * k)
    start = count.cumsum(0) - count
    pieces = (count + PIECE - 1) // PIECE
    owner = torch.repeat_interleave(torch.arange(problems * k, device=x.device), pieces)
    within = torch.arange(len(owner), device=x.device) - (pieces.cumsum(0) - pieces)[owner]
    first = start[owner] + within * PIECE
    last = torch.minimum(first + PIECE, (start + count)[owner])
    part = torch.empty(len(owner), d, dtype=torch.float64, device=x.device)
    deep = min(max(16, triton.next_power_of_2(d)), 128)
    _sum[(len(owner), triton.cdiv(d, deep))](x.reshape(-1, d), order, first, last, part, d, ROWS=32, DEEP=deep, num_warps=4)
    out = torch.zeros(problems * k, d, dtype=torch.float64, device=x.device).index_add_(0, owner, part)
    return out.reshape(problems, k, d), count.reshape(problems, k)


def squares(x: Tensor, centres: Tensor, labels: Tensor) -> Tensor:
    """Squared distance of each row to its own centre, (problems, n)."""
    own = torch.gather(centres, 1, labels.long()[..., None].expand(*labels.shape, x.shape[-1]))
    return (x.float() - own).square().sum(-1)


def average(x: Tensor, centres: Tensor, labels: Tensor) -> Tensor:
    """New centres; an empty cluster takes the row that is furthest from its own."""
    total, count = sums(x, labels, centres.shape[1])
    if (count == 0).any():
        far = squares(x, centres, labels)
        for p, cluster in (count == 0).nonzero().tolist():
            row = int(far[p].argmax())
            old = int(labels[p, row])
            if count[p, old] < 2:
                continue
            value = x[p, row].double()
            total[p, old] -= value
            count[p, old] -= 1
            total[p, cluster], count[p, cluster], far[p, row] = value, 1, 0
    return torch.where(count[..., None] > 0, total / count.clamp_min(1)[..., None], centres.double()).float()


def plus_plus(x: Tensor, k: int, random: torch.Generator) -> Tensor:
    """k-means++ of each problem, (problems, k, d) float32."""
    problems, n, d = x.shape
    every = torch.arange(problems, device=x.device)
    centres = torch.empty(problems, k, d, device=x.device)
    near = torch.full((problems, n), 1.0, device=x.device)
    for i in range(k):
        mass = near.double().cumsum(1)
        point = torch.rand(problems, 1, generator=random, dtype=torch.float64).to(x.device) * mass[:, -1:]
        centres[:, i] = x[every, torch.searchsorted(mass, point, right=True)[:, 0].clamp_max(n - 1)].float()
        square = torch.cat(
            [(part.float() - centres[:, i : i + 1]).square().sum(-1) for part in x.split(max(1, _WIDE // (4 * problems * d)), 1)], 1
        )
        near = square if i == 0 else torch.minimum(near, square)
    return centres


def fit(
    x: Tensor, n_clusters: int, init: Any = None, max_iter: int = 100, tol: float = 1e-4, random_state: Any = None, precision: str = "ieee"
) -> tuple[Tensor, Tensor, Tensor]:
    """k-means of a batch of problems (problems, n, d) on their device: labels, centres and inertia, as `kmeans_batched`.

    Raises:
        ValueError: wrong shapes, NaN or infinity.
    """
    if x.dim() != 3 or 0 in x.shape:
        raise ValueError(f"x has shape {tuple(x.shape)}; must be (problems, n, d), none of them 0")
    if not 1 <= n_clusters <= x.shape[1]:
        raise ValueError(f"n_clusters = {n_clusters!r}: must be between 1 and the {x.shape[1]} rows of a problem")
    if not torch.isfinite(x).all():
        raise ValueError("x contains NaN or infinity")
    x = (x if x.dtype in (torch.float32, torch.float16, torch.bfloat16) else x.float()).contiguous()
    shift = x.float().mean(1)
    if init is None:
        centres = plus_plus(x, n_clusters, torch.Generator().manual_seed(int(random_state or 0)))
    else:
        centres = torch.as_tensor(init, dtype=torch.float32, device=x.device)
        if centres.shape != (x.shape[0], n_clusters, x.shape[2]):
            raise ValueError(f"init has shape {tuple(centres.shape)}; must be {(x.shape[0], n_clusters, x.shape[2])}")
    limit = tol * x.float().var(1, correction=0).mean(1)
    for _ in range(max_iter):
        after = average(x, centres, assign(x, centres, shift, precision))
        moved = (after - centres).square().sum((1, 2))
        centres = after
        if (moved <= limit).all():
            break
    labels = assign(x, centres, shift, precision)
    return labels, centres, squares(x, centres, labels).double().sum(1)


def step_streamed(x: NDArray[Any] | Tensor, centres: Tensor, shift: Tensor, labels: NDArray[Any]) -> tuple[Tensor, Tensor]:
    """One step over rows (n, d) that stay outside the device: the next piece is copied while this one is worked on.

    Args:
        x: in ordinary memory, or mapped from a file.
        centres, shift: (k, d), (d,) float32 on the device.
        labels: (n,) int32, written.

    Returns:
        Sums (k, d), float64, and numbers (k,) of the rows of each label, on the device.
    """
    device, (n, d), k = centres.device, x.shape, len(centres)
    rows = max(1, _WIDE // (4 * d))
    total = torch.zeros(k, d, dtype=torch.float64, device=device)
    count = torch.zeros(k, dtype=torch.int64, device=device)
    cuda = device.type == "cuda"
    copies = torch.cuda.Stream(device) if cuda else None

    def send(first: int) -> tuple[Tensor, Any]:
        piece = torch.as_tensor(
            np.ascontiguousarray(x[first : first + rows], dtype=np.float32)
            if isinstance(x, np.ndarray)
            else x[first : first + rows].float()
        )
        if copies is None:
            return piece.to(device), None
        with torch.cuda.stream(copies):
            there = piece.pin_memory().to(device, non_blocking=True)
        return there, copies.record_event()

    coming = send(0)
    for first in range(0, n, rows):
        piece, arrived = coming
        if first + rows < n:
            coming = send(first + rows)
        if arrived is not None:
            torch.cuda.current_stream(device).wait_event(arrived)
            piece.record_stream(torch.cuda.current_stream(device))
        found = assign(piece[None], centres[None], shift[None])
        part, some = sums(piece[None], found, k)
        total, count = total + part[0], count + some[0]
        labels[first : first + rows] = found[0].cpu().numpy()
    return total, count
