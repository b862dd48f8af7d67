from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.func import vmap

from isthmus.core import seeds


def test_the_same_parts_give_the_same_numbers_and_others_do_not():
    draw = lambda *p: torch.rand(4, generator=seeds.generator(*p))
    assert torch.equal(draw(0, 1, 2, "order"), draw(0, 1, 2, "order"))
    others = [(1, 1, 2, "order"), (0, 2, 2, "order"), (0, 1, 3, "order"), (0, 1, 2, "probe"), (0, 12, "order"), ("0", 1, 2, "order")]
    assert not any(torch.equal(draw(0, 1, 2, "order"), draw(*p)) for p in others)


def test_a_seed_is_the_same_on_every_machine():
    assert seeds.seed_of(0, 1, "order") == 1815783807564109026


def test_keys_under_vmap_equal_keys_one_by_one():
    clients = torch.arange(5)
    together = vmap(lambda c: seeds.normal(seeds.key(3, 7, c, "noise"), (11,)))(clients)
    alone = torch.stack([seeds.normal(seeds.key(3, 7, c, "noise"), (11,)) for c in clients])
    assert torch.equal(together, alone)
    assert len({tuple(row.tolist()) for row in alone}) == 5


def test_normal_numbers_are_normal():
    x = seeds.normal(seeds.key(1, "check"), (200_000,)).double()
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.std()) - 1) < 0.01
    assert abs(float((x**4).mean()) - 3) < 0.1


def test_code_that_knows_the_global_generator_alone_draws_the_same_in_every_thread():
    def draw(seed):
        with seeds.globally(seed):
            return torch.cat([torch.randn(50) for _ in range(40)])

    before, wanted = torch.get_rng_state(), [draw(s) for s in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for found, want in zip(pool.map(draw, range(8)), wanted, strict=True):
            assert torch.equal(found, want)
    assert torch.equal(torch.get_rng_state(), before)
