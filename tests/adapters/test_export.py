from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from peft import PeftModel

from isthmus.adapters import export
from isthmus.adapters.bias import Biases
from isthmus.adapters.export import ExportError, SequenceClassifier
from isthmus.adapters.families import FamilyError
from isthmus.adapters.host import Host
from isthmus.adapters.lora import Lora
from isthmus.adapters.rows import Rows

from ..conftest import tiny_bert, tiny_text_task
from .test_host import inputs, model

ABOUT = {"base_model": "x", "task": "classification", "pooling": "mean", "labels": ["a", "b", "c"], "max_length": 12}


def disturbed(params):
    g = torch.Generator().manual_seed(4)
    return {n: t + 0.2 * torch.randn(t.shape, generator=g) for n, t in params.items()}


def logits(task, params, ids, mask):
    with torch.no_grad():
        return task.head.logits(params, task.host.hidden(params, Rows(), ids, mask), mask, Rows())


@pytest.mark.parametrize("delta", [False, True])
def test_peft_gives_the_same_logits(tmp_path, delta):
    task = tiny_text_task()
    params = disturbed(task.init(0))
    if delta:  # a merged base, of full rank
        g = torch.Generator().manual_seed(5)
        params |= {f"{s.name}.delta": 0.1 * torch.randn(s.out_features, s.in_features, generator=g) for s, _ in task.host.sites}
    export.save(tmp_path, task.host, params, ABOUT)
    loaded = PeftModel.from_pretrained(SequenceClassifier(tiny_bert().eval(), 3, "mean"), str(tmp_path)).eval()
    ids, mask = inputs()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids, attention_mask=mask), logits(task, params, ids, mask), rtol=1e-4, atol=1e-5)
    ranks = json.loads((tmp_path / "adapter_config.json").read_text())["r"]
    assert ranks == (4 + 32 if delta else 4)


@pytest.mark.parametrize("family", ["gpt2", "phi3", "gpt_neox", "llama"])
def test_causal_models_with_fused_and_separate_projections_come_back_through_peft(tmp_path, family):
    base = model(family)
    causal = tf.AutoModelForCausalLM.from_config(base.config).eval()
    state = {n: t.clone() for n, t in causal.state_dict().items()}
    host = Host(causal, [Lora(3, layers="upper:1")])
    params = disturbed(host.init(0))
    export.save(tmp_path, host, params, ABOUT | {"task": "language"})
    fresh = tf.AutoModelForCausalLM.from_config(base.config).eval()
    fresh.load_state_dict(state)
    loaded = PeftModel.from_pretrained(fresh, str(tmp_path)).eval()
    ids, mask = inputs()
    with torch.no_grad():
        hidden = host.hidden(params, Rows(), ids, mask)
        expected = host.net.get_output_embeddings()(hidden)
        got = loaded(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


def test_a_client_of_a_smaller_rank_exports_what_it_has(tmp_path):
    task = tiny_text_task(ranks=(1, 2, 4, 3))
    params = task.trim(disturbed(task.init(0)), 2)
    export.save(tmp_path, task.host, params, ABOUT)
    loaded = PeftModel.from_pretrained(SequenceClassifier(tiny_bert().eval(), 3, "mean"), str(tmp_path)).eval()
    ids, mask = inputs()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids, attention_mask=mask), logits(task, params, ids, mask), rtol=1e-4, atol=1e-5)


def test_what_peft_cannot_hold_and_what_is_no_export_are_clear(tmp_path):
    host = Host(tiny_bert(), [Biases()])
    with pytest.raises(ExportError, match="only LoRA"):
        export.save(tmp_path, host, host.init(0), ABOUT)
    with pytest.raises(ExportError, match="is not an adapter that Isthmus exported"):
        export.about(Path(tmp_path))


def bert_for(monkeypatch):
    """What a recipe's model.path loads, without a package."""

    class Tokenizer:
        def save_pretrained(self, folder):
            return None

    from isthmus.tasks import build

    def load_pretrained(path, causal):
        where = Path(path)
        return (tf.AutoModel.from_pretrained(where) if (where / "config.json").exists() else tiny_bert()).eval(), Tokenizer()

    monkeypatch.setattr(build, "load_pretrained", load_pretrained)


@pytest.mark.parametrize("kind", ["lora", "bias"])
def test_a_merged_model_is_the_base_with_other_numbers_and_nothing_more(tmp_path, monkeypatch, kind):
    bert_for(monkeypatch)
    task = tiny_text_task(adapters=[Biases() if kind == "bias" else Lora(4)])
    params = disturbed(task.init(0))
    export.merge(tmp_path, task.host, params, ABOUT)
    merged, _, what = export.load(tmp_path)
    ids, mask = inputs()
    with torch.no_grad():
        got = merged(input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(got, logits(task, params, ids, mask), rtol=1e-4, atol=1e-6 if kind == "bias" else 1e-5)
    base, now = tiny_bert().state_dict(), merged.encoder.state_dict()
    assert {n: t.shape for n, t in now.items()} == {n: t.shape for n, t in base.items()}  # the same parameters, so the same work
    changed = {n for n in base if not torch.equal(base[n], now[n])}
    inside = (".intermediate.dense.bias", ".output.dense.bias") if kind == "bias" else (".query.weight", ".value.weight")
    assert changed
    assert all(n.endswith(inside) and "attention.output" not in n for n in changed)
    assert what["merged"]


def test_a_model_without_biases_says_how_to_have_them(tmp_path, monkeypatch):
    from isthmus.tasks import build

    with pytest.raises(FamilyError, match=r"add_bias = true"):
        Host(model("llama"), [Biases()]).init(0)
    host = Host(model("llama"), [Biases(add_bias=True)])
    assert all(float(t.abs().max()) == 0 for t in host.init(0).values())
    monkeypatch.setattr(build, "load_pretrained", lambda path, causal: (model("llama"), None))
    with pytest.raises(ExportError, match="no bias to merge into"):
        export.merge(tmp_path, host, host.init(0), ABOUT)


def test_a_clients_bypass_is_in_its_adapter(tmp_path):
    task = tiny_text_task()
    params = disturbed(task.init(0))
    g = torch.Generator().manual_seed(6)
    for s, _ in task.host.sites:
        params |= {
            f"{s.name}.bypass_b": torch.randn(s.out_features, 2, generator=g),
            f"{s.name}.bypass_a": torch.randn(2, s.in_features, generator=g),
        }
    export.save(tmp_path, task.host, params, ABOUT)
    loaded = PeftModel.from_pretrained(SequenceClassifier(tiny_bert().eval(), 3, "mean"), str(tmp_path)).eval()
    ids, mask = inputs()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids, attention_mask=mask), logits(task, params, ids, mask), rtol=1e-4, atol=1e-5)
