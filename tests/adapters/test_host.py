from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch.func import grad_and_value, vmap

from isthmus.adapters import frozen
from isthmus.adapters.bias import Biases
from isthmus.adapters.families import FAMILIES, FamilyError, family_of, sites
from isthmus.adapters.host import Host, layer_range
from isthmus.adapters.lora import Lora
from isthmus.adapters.prompt import Prompts
from isthmus.adapters.rows import Rows

from ..conftest import tiny_bert, tiny_text_task

SMALL = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
DISTIL = {"vocab_size": 60, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}
MODELS = {
    "bert": (tf.BertConfig, SMALL),
    "roberta": (tf.RobertaConfig, SMALL | {"max_position_embeddings": 40}),
    "distilbert": (tf.DistilBertConfig, DISTIL),
    "mpnet": (tf.MPNetConfig, SMALL),
    "electra": (tf.ElectraConfig, SMALL | {"embedding_size": 32}),
    "deberta-v2": (tf.DebertaV2Config, SMALL),
    "modernbert": (
        tf.ModernBertConfig,
        SMALL | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "llama": (tf.LlamaConfig, SMALL | {"num_key_value_heads": 2}),
    "qwen2": (tf.Qwen2Config, SMALL | {"num_key_value_heads": 2}),
    "gpt2": (tf.GPT2Config, GPT2),
    "phi3": (tf.Phi3Config, SMALL | {"num_key_value_heads": 2, "pad_token_id": 0}),
    "gpt_neox": (tf.GPTNeoXConfig, SMALL),
    "bloom": (tf.BloomConfig, {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
}


def model(family):
    kind, settings = MODELS[family]
    torch.manual_seed(0)
    return tf.AutoModel.from_config(kind(**settings)).eval()


def inputs():
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (6, 9), generator=g)
    mask = (torch.arange(9) < torch.tensor([9, 5, 9, 7, 4, 9])[:, None]).long()
    return ids, mask


@pytest.mark.parametrize("family", sorted(MODELS))
def test_adapters_of_every_family_change_the_projections_that_they_name(family):
    """The adapted model equals the model whose weights were changed by s B A in the rows of that role."""
    net = model(family)
    plain = copy.deepcopy(net)
    targets = ("query", "value")
    host = Host(net, [Lora(3, targets=targets)])
    params = host.init(0)
    g = torch.Generator().manual_seed(1)
    params = {n: torch.randn(t.shape, generator=g) * 0.3 if n.endswith("lora_b") else t for n, t in params.items()}
    for site in sites(plain, family_of(net.config.model_type), targets, range(2)):
        module = plain.get_submodule(site.path)
        change = 2.0 * params[f"{site.name}.lora_b"] @ params[f"{site.name}.lora_a"]
        weight = module.weight.data.t() if type(module).__name__ == "Conv1D" else module.weight.data
        rows = slice(None) if site.rows is None else site.rows
        weight[rows] += change
    ids, mask = inputs()
    with torch.no_grad():
        expected = plain(input_ids=ids, attention_mask=mask).last_hidden_state
        got = host.hidden(params, Rows(), ids, mask)
        before = model(family)(input_ids=ids, attention_mask=mask).last_hidden_state
    real = mask.bool()
    torch.testing.assert_close(got[real], expected[real], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got[real], before[real], atol=1e-3)


def test_fused_query_and_value_are_what_the_model_splits_off():
    """Changing only the value slice leaves attention weights alone; changing only the query slice does not."""
    for family in ("gpt2", "phi3", "gpt_neox", "bloom", "modernbert"):
        found = {s.name.rsplit(".", 1)[1]: s for s in sites(model(family), FAMILIES[family], ("query", "key", "value"), [0])}
        covered = torch.cat([s.rows for s in found.values()]).sort().values
        width = found["query"].out_features + found["key"].out_features + found["value"].out_features
        assert covered.tolist() == list(range(width))
    # gpt2's attention returns its weights: only query and key may move them
    net = model("gpt2")
    net.set_attn_implementation("eager")
    ids, _ = inputs()
    reference = net(input_ids=ids, output_attentions=True).attentions[0]
    for role, moves in (("query", True), ("key", True), ("value", False)):
        changed = copy.deepcopy(net)
        site = sites(changed, FAMILIES["gpt2"], (role,), [0])[0]
        changed.get_submodule(site.path).weight.data[:, site.rows] += torch.randn(32, 32, generator=torch.Generator().manual_seed(2))
        assert torch.allclose(changed(input_ids=ids, output_attentions=True).attentions[0], reference) is not moves


def test_an_unknown_family_says_which_are_known_and_how_to_describe_one():
    with pytest.raises(FamilyError, match=r"'t5' is not known; known are bert.*\[adapter\.family\]"):
        family_of("t5")
    described = family_of("anything", {"blocks": "encoder.layer", "query": "attention.self.query"})
    assert len(sites(tiny_bert(), described, ("query",), range(2))) == 2
    for table, says in (({"query": "q"}, "needs blocks"), ({"blocks": "x", "qqq": "q"}, "unknown role 'qqq'")):
        with pytest.raises(FamilyError, match=says):
            family_of("anything", table)
    with pytest.raises(FamilyError, match="no 'gate'"):
        sites(tiny_bert(), FAMILIES["bert"], ("gate",), range(2))
    with pytest.raises(FamilyError, match=r"no module 'encoder\.layer\.0\.nothing'"):
        sites(tiny_bert(), family_of("x", {"blocks": "encoder.layer", "query": "nothing"}), ("query",), range(2))


@pytest.mark.parametrize(("which", "layers"), [("all", [0, 1, 2, 3]), ("upper:2", [2, 3]), ("lower:1", [0]), ("0,3", [0, 3]), ("1", [1])])
def test_layers_are_named(which, layers):
    assert layer_range(which, 4) == layers


@pytest.mark.parametrize("which", ["upper:5", "upper:0", "top", "0,4", ""])
def test_layers_that_do_not_exist_are_refused(which):
    with pytest.raises(ValueError, match=r"adapter\.layers"):
        layer_range(which, 4)


def gradients(task, rows):
    start = {n: t + 0.05 * torch.randn(t.shape, generator=torch.Generator().manual_seed(5)) for n, t in task.init(0).items()}
    return grad_and_value(task.loss)(start, task.batch(rows))


def test_gradients_are_those_of_plain_autograd():
    task = tiny_text_task()
    rows = task.train[0][:8]
    start = {n: t + 0.05 * torch.randn(t.shape, generator=torch.Generator().manual_seed(5)) for n, t in task.init(0).items()}
    got, value = grad_and_value(task.loss)(start, task.batch(rows))
    leaves = {n: t.clone().requires_grad_() for n, t in start.items()}
    loss = task._run(leaves, torch.zeros(len(rows), dtype=torch.long), 1, rows)["loss"].mean()
    loss.backward()
    torch.testing.assert_close(value, loss.detach())
    for n in start:
        torch.testing.assert_close(got[n], leaves[n].grad, rtol=1e-4, atol=1e-6)


def test_buckets_are_exact_and_padding_rows_do_not_count():
    plain, bucketed = tiny_text_task(buckets=False), tiny_text_task()
    bucketed.head = type(bucketed.head)(32, bucketed.data, bucketed.head.allowed, budget=30)
    rows = plain.train[0][:10]
    a, loss_a = gradients(plain, rows)
    b, loss_b = gradients(bucketed, rows)
    c, loss_c = gradients(bucketed, torch.cat([rows, torch.full((6,), -1)]))
    torch.testing.assert_close(loss_a, loss_b)
    torch.testing.assert_close(loss_b, loss_c)
    for n in a:
        torch.testing.assert_close(a[n], b[n], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(b[n], c[n], rtol=1e-4, atol=1e-6)


def test_kept_activations_below_the_lowest_adapter_are_exact_and_bounded():
    adapters = [Lora(4, layers="upper:1")]
    kept, computed = tiny_text_task(adapters=adapters, layers=3), tiny_text_task(adapters=adapters, layers=3, keep=0)
    small = tiny_text_task(adapters=adapters, layers=3, keep=1000)
    rows = kept.train[0][:10]
    a, _ = gradients(kept, rows)
    b, _ = gradients(computed, rows)
    gradients(small, rows)
    assert kept._below.shape == (160, 12, 32)
    assert computed._below is None
    assert small._below is None
    for n in a:
        torch.testing.assert_close(a[n], b[n], rtol=1e-5, atol=1e-7)


def test_mapped_clients_with_parameters_of_their_own_equal_single_ones():
    task = tiny_text_task()
    k = 3
    g = torch.Generator().manual_seed(3)
    params = {n: t + 0.1 * torch.randn(k, *t.shape, generator=g) for n, t in task.init(0).items()}
    rows = torch.stack([task.train[c][:6] for c in range(k)])
    together, losses = vmap(grad_and_value(task.loss))(params, task.batch(rows))
    for c in range(k):
        alone, value = grad_and_value(task.loss)({n: t[c] for n, t in params.items()}, task.batch(rows[c]))
        torch.testing.assert_close(losses[c], value)
        for n in alone:
            torch.testing.assert_close(together[n][c], alone[n], rtol=1e-4, atol=1e-6)


def test_what_is_not_differentiated_costs_no_gradient(monkeypatch):
    task = tiny_text_task()
    asked = []
    run = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda out, leaves, *a, **k: (asked.append(len(leaves)), run(out, leaves, *a, **k))[1])
    start = task.init(0)
    some = {n: t for n, t in start.items() if n.endswith("lora_b")}
    rest = {n: t for n, t in start.items() if n not in some}
    grads, _ = grad_and_value(lambda p, b: task.loss({**rest, **p}, b))(some, task.batch(task.train[0][:4]))
    assert set(asked) == {4}
    assert set(grads) == set(some)


def test_biases_add_what_they_say():
    net, plain = tiny_bert(), tiny_bert()
    host = Host(net, [Biases()])
    params = {n: torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) for n, t in host.init(0).items()}
    assert {n.split(".", 2)[2] for n in params} == {"up.bias", "down.bias"}
    for i in range(2):
        plain.encoder.layer[i].intermediate.dense.bias.data += params[f"layers.{i}.up.bias"]
        plain.encoder.layer[i].output.dense.bias.data += params[f"layers.{i}.down.bias"]
    ids, mask = inputs()
    with torch.no_grad():
        torch.testing.assert_close(
            host.hidden(params, Rows(), ids, mask), plain.eval()(input_ids=ids, attention_mask=mask).last_hidden_state
        )


def test_bf16_products_stay_near_fp32():
    exact, fast = tiny_text_task(), tiny_text_task(precision="bf16")
    rows = exact.train[0][:12]
    a, loss_a = gradients(exact, rows)
    b, loss_b = gradients(fast, rows)
    assert float(abs(loss_a - loss_b)) < 0.02
    assert all(t.dtype == torch.float32 for t in b.values())
    flat = lambda t: torch.cat([t[n].flatten() for n in sorted(t)])
    assert float((flat(a) - flat(b)).norm() / flat(a).norm()) < 0.1


def test_short_rows_attention_equals_torchs(monkeypatch):
    from isthmus.adapters.attention import _attention

    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 7, 8, generator=g, dtype=torch.float32)
    k, v = torch.randn(2, 3, 2, 7, 8, generator=g).unbind(0)
    mask = torch.rand(3, 1, 7, 7, generator=g) > 0.3
    mask[..., 0] = True
    module = torch.nn.Module()
    for causal in (False, True):
        module.is_causal = causal
        for m in (None, mask):
            got, _ = _attention(module, q.bfloat16(), k.bfloat16(), v.bfloat16(), m)
            full = [t.repeat_interleave(2, 1) for t in (k, v)]
            expected = F.scaled_dot_product_attention(q, *full, attn_mask=m, is_causal=causal and m is None).transpose(1, 2)
            torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.05)


def test_the_frozen_product_has_the_gradient_of_a_linear_map():
    if not frozen.measure()["onednn"]:
        pytest.skip("no oneDNN product on this machine")
    layer = torch.nn.Linear(16, 24)
    fast = frozen.FrozenLinear(layer.weight, layer.bias, fast=True)
    x = torch.randn(3, 5, 16, requires_grad=True)
    y = torch.randn(3, 5, 24)
    (a,) = torch.autograd.grad((fast(x) * y).sum(), x)
    (b,) = torch.autograd.grad((layer(x) * y).sum(), x)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(fast(x), layer(x))


def test_rslora_scales_by_the_root_of_the_rank():
    assert Lora(16).scale == 2.0
    assert Lora(16, alpha=16).scale == 1.0
    assert Lora(16, alpha=16, rslora=True).scale == 4.0


ROTARY = ("modernbert", "llama", "qwen2", "phi3", "gpt_neox")


@pytest.mark.parametrize("family", sorted(set(MODELS) - {*ROTARY, "deberta-v2", "mpnet", "bloom"}))
def test_prompts_are_tokens_before_every_block(family):
    net = model(family)
    host = Host(net, [Prompts(3, layers="upper:1")])
    params = host.init(0)
    assert {t.shape for t in params.values()} == {(3, 32)}
    ids, mask = inputs()
    with torch.no_grad():
        got = host.hidden(params, Rows(), ids, mask)
        assert got.shape == (6, 9, 32)
        # by hand: the last block on rows with three tokens more, and masks that let them be seen
        plain, seen = model(family), []
        hook = host.base.get_submodule(host.sites[0][0].path).block.register_forward_pre_hook(
            lambda m, a, k: seen.append(a[0]), with_kwargs=True
        )
        host.hidden(params, Rows(), ids, mask)
        hook.remove()
        torch.testing.assert_close(seen[0][:, :3], params["layers.1.block.prompt"].expand(6, -1, -1))
        # padding changes nothing, with prompts as without
        short = host.hidden(params, Rows(), ids[1:2, :5], mask[1:2, :5])
        torch.testing.assert_close(got[1, :5], short[0], rtol=1e-4, atol=1e-5)
        before = plain(input_ids=ids, attention_mask=mask).last_hidden_state
    assert not torch.allclose(got[0], before[0], atol=1e-4)


def test_every_client_has_its_own_prompts():
    host = Host(model("bert"), [Prompts(2)])
    a, b = host.init(0), host.init(1)
    ids, mask = inputs()
    owner = torch.tensor([0, 1, 1, 0, 1, 0])
    together = host.hidden({n: torch.stack([a[n], b[n]]) for n in a}, Rows.of(owner, 2), ids, mask)
    for k, params in enumerate((a, b)):
        mine = owner == k
        alone = host.hidden(params, Rows(), ids[mine], mask[mine])
        torch.testing.assert_close(together[mine][mask[mine].bool()], alone[mask[mine].bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ROTARY)
def test_prompts_refuse_rotary_positions(family):
    host = Host(model(family), [Prompts(2)])
    ids, mask = inputs()
    with pytest.raises(FamilyError, match="rotary"):
        host.hidden(host.init(0), Rows(), ids, mask)


def test_prompts_need_a_token():
    with pytest.raises(ValueError, match=r"adapter\.tokens = 0"):
        Prompts(0)
