"""Images and what they show in words: a frozen CLIP-style dual encoder whose image tower is adapted.

An image is scored against a prompt for each label ("a picture of a zebra") by the cosine of their embeddings, as CLIP's zero-shot
classification does; the text tower and the prompts stay as they are, and nothing beside the adapters trains.  ``model.path`` is any CLIP
model by folder or name, or "small-clip": a small one that is pretrained here, in about a minute and once, on half of the
packaged animals and captions for them.
"""

from __future__ import annotations

import gzip
import json
import os
import pickletools
import sys
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters.rows import Rows
from ..core.recipe import Recipe
from ..core.seeds import generator, globally
from ..core.tensors import Tensors
from .build import ModelError, deal, make_host
from .hosted import HostTask
from .sources import Corpus, DataError, package_file

SMALL = "small-clip"
ANIMALS = ("bear", "bird", "cat", "cow", "dog", "elephant", "giraffe", "horse", "sheep", "zebra")
TEMPLATES = ("a picture of a {}", "a shape of a {}", "this is a {}", "a {} seen from the side", "the outline of a {}")
_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


@dataclass(frozen=True)
class Images:
    """Pixels (N, 3, side, side) with labels (N,); ``patches`` is what the image tower makes of one, its class token included."""

    pixels: Tensor
    label: Tensor
    patches: int

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def length(self) -> Tensor:
        """The same for all."""
        return torch.full((len(self),), self.patches)

    @property
    def longest(self) -> int:
        """The same for all."""
        return self.patches

    def take(self, at: Tensor, cut: bool) -> tuple[Tensor, Tensor]:
        """Pixels of the rows and a mask of ones."""
        return self.pixels[at], torch.ones(len(at), self.patches, dtype=torch.long)


@dataclass(frozen=True)
class Matching:
    """Cosine of an image's embedding with each label's prompt (labels, d), times CLIP's scale; cross-entropy."""

    data: Images
    norm: nn.Module
    projection: nn.Module
    prompts: Tensor
    scale: float
    budget: int = 4096

    def init(self) -> Tensors:
        """Nothing beside the adapters trains."""
        return {}

    def __call__(self, params: Tensors, hidden: Tensor, at: Tensor, mask: Tensor, rows: Rows) -> Tensors:
        """Every row weighs 1."""
        image = F.normalize(self.projection(self.norm(hidden[:, 0].float())), dim=-1)
        logits = self.scale * image @ self.prompts.T
        label = self.data.label[at]
        loss = F.cross_entropy(logits, label, reduction="none")
        return {"loss": loss, "accuracy": (logits.argmax(1) == label).float(), "weight": torch.ones(len(at))}


def _array(path: Path, dtype: torch.dtype) -> Tensor:
    """The numbers of a packaged array.  Its file is a pickle, which is never executed: the one long run of bytes in it is the array."""
    content = gzip.decompress(path.read_bytes())
    longest = max((value for _, value, _ in pickletools.genops(content) if isinstance(value, bytes)), key=len)
    return torch.frombuffer(bytearray(longest), dtype=dtype)


def animals() -> tuple[Tensor, Tensor]:
    """10,000 silhouettes (N, 28, 28) in [0, 1] of ten animals, and labels (N,) (package animal-mnist)."""
    inside = "animal_mnist/data/Animal_MNIST/animal_{}_version_3.gz"
    file = lambda part: package_file("animal-mnist", "0.4", inside.format(part), plain=False)  # noqa: E731
    return _array(file("data"), torch.uint8).reshape(-1, 28, 28).float() / 255, _array(file("label"), torch.int64)


def _folder(root: Path, side: int) -> tuple[Tensor, Tensor, list[str]]:
    """A folder of label folders of image files."""
    from PIL import Image

    names = sorted(p.name for p in root.iterdir() if p.is_dir())
    found = [(p, i) for i, n in enumerate(names) for p in sorted((root / n).iterdir()) if p.suffix.lower() in _ENDINGS]
    if not found:
        raise DataError(f"data.source: {str(root)!r} has no images; expected a folder for each label with {', '.join(_ENDINGS)} files")
    pixels = torch.empty(len(found), 3, side, side)
    for i, (path, _) in enumerate(found):
        with Image.open(path) as image:
            raw = bytearray(image.convert("RGB").resize((side, side)).tobytes())
        pixels[i] = torch.frombuffer(raw, dtype=torch.uint8).view(side, side, 3).permute(2, 0, 1) / 255
    return pixels, torch.tensor([i for _, i in found]), names


def seen_by(pixels: Tensor, client: int) -> Tensor:
    """Images (n, 3, side, side) in [0, 1] as this client's camera gives them, eight kinds in turn."""
    wide = pixels.shape[-1]
    g = generator(client, "camera")
    return [
        lambda x: x,
        lambda x: 1 - x,
        lambda x: F.avg_pool2d(x, 5, 1, 2),
        lambda x: (x + 0.35 * torch.randn(x.shape, generator=g)).clamp(0, 1),
        lambda x: 0.25 * x,
        lambda x: x.flip(3) * torch.linspace(1, 0.2, wide),
        lambda x: F.pad(F.interpolate(x, size=(wide * 3 // 4,) * 2), (wide - wide * 3 // 4, 0, wide - wide * 3 // 4, 0)),
        lambda x: (F.max_pool2d(x, 3, 1, 1) - x).clamp(0, 1),
    ][client % 8](pixels)


def pairs(recipe: Recipe, root: Path | None = None) -> HostTask:
    """Images against prompts for their labels, with a frozen dual encoder; ``task.views`` gives each client a camera of its own."""
    options = recipe.task.options
    if unknown := set(options) - {"views"}:
        raise DataError(f"task.{sorted(unknown)[0]}: no such field; accepted is views")
    model, words = dual_encoder(recipe.model.path)
    side = int(model.config.vision_config.image_size)
    if recipe.data.source == "animals":
        shapes, label = animals()
        # half of them, a random one that the small model never saw, is what the clients have
        _, mine = halves(len(shapes))
        pixels, label, names = F.interpolate(shapes[mine, None], (side, side)).expand(-1, 3, -1, -1), label[mine], list(ANIMALS)
    else:
        sources = [recipe.data.source] if isinstance(recipe.data.source, str) else recipe.data.source
        folder = next((p for p in (Path(sources[0]), (root or Path()) / sources[0]) if p.is_dir()), None)
        if folder is None:
            raise DataError(f"data.source = {sources[0]!r}: neither 'animals' nor a folder of label folders of images")
        pixels, label, names = _folder(folder, side)
    if recipe.data.limit is not None and recipe.data.limit < len(pixels):
        some = torch.randperm(len(pixels), generator=generator(recipe.seed, "pairs", "limit"))[: recipe.data.limit]
        pixels, label = pixels[some], label[some]
    train, test, clients = deal(recipe, [Corpus("images", [""] * len(label))], label, torch.zeros_like(label))
    pixels = pixels.clone()
    if options.get("views"):
        for client, rows in enumerate(zip(train, test, strict=True)):
            both = torch.cat(rows)
            pixels[both] = seen_by(pixels[both], client)
    with torch.no_grad():
        prompts = F.normalize(
            model.text_projection(model.text_model(**words([f"a picture of a {n}" for n in names])).pooler_output), dim=-1
        )
    vision = model.vision_model
    data = Images((pixels - 0.5) / 0.5, label, int(vision.embeddings.position_embedding.num_embeddings))
    head = Matching(
        data, deepcopy(vision.post_layernorm), deepcopy(model.visual_projection), prompts, float(model.logit_scale.detach().exp())
    )
    host = make_host(recipe, vision)
    return HostTask(host, head, data, train, test, keep=recipe.model.keep_bytes, label_names=names, client_names=clients)


def halves(count: int) -> tuple[Tensor, Tensor]:
    """Numbers of the images that the small model is pretrained on, and of the others."""
    order = torch.randperm(count, generator=generator(0, "animals", "halves"))
    return order[: count // 2].sort().values, order[count // 2 :].sort().values


def dual_encoder(path: str) -> tuple[Any, Any]:
    """(CLIP model in fp32, function from texts to its text tower's input).

    Raises:
        ModelError: when it cannot be loaded.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if path == SMALL:
        folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "isthmus" / f"{SMALL}-1"
        if not (folder / "config.json").exists():
            pretrain(folder)
        vocabulary = json.loads((folder / "words.json").read_text())
        return transformers.CLIPModel.from_pretrained(folder).eval(), lambda texts: _numbers(texts, vocabulary)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.CLIPModel.from_pretrained(path, dtype=torch.float32).eval()
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model.path = {path!r}: cannot be loaded as a CLIP model (accepted: {SMALL!r}, a folder, a hub name): {first}"
        ) from error
    return model, lambda texts: tokenizer(texts, padding=True, return_tensors="pt")


def _numbers(texts: list[str], vocabulary: dict[str, int]) -> dict[str, Tensor]:
    """Words to numbers: begin, words, end, padding with the end."""
    wide = 2 + max(len(t.split()) for t in texts)
    end = len(vocabulary) - 1
    rows = [[0, *(vocabulary.get(w, 1) for w in t.split()), end] for t in texts]
    return {"input_ids": torch.tensor([r + [end] * (wide - len(r)) for r in rows])}


def pretrain(folder: Path, epochs: int = 12) -> None:
    """Train the small dual encoder on half of the animals and captions for them, and keep it in ``folder``.

    Symmetric contrastive loss over a batch of images and captions, where captions of the same animal match as well.
    """
    import transformers

    print(f"{SMALL}: pretraining a dual encoder on the packaged animals, once; about a minute", file=sys.stderr)
    shapes, label = animals()
    some, _ = halves(len(shapes))
    pixels, label = (shapes[some, None].expand(-1, 3, -1, -1) - 0.5) / 0.5, label[some]
    captions = [[t.format(a) for t in TEMPLATES] for a in ANIMALS]
    words = ["<begin>", "<unknown>", *sorted({w for c in captions for t in c for w in t.split()}), "<end>"]
    vocabulary = {w: i for i, w in enumerate(words)}
    common = {"projection_dim": 64, "hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4}
    text = {"num_hidden_layers": 2, "vocab_size": len(words), "max_position_embeddings": 12} | common
    text |= {"bos_token_id": 0, "eos_token_id": len(words) - 1, "pad_token_id": 1}
    vision = {"num_hidden_layers": 4, "image_size": 28, "patch_size": 4} | common
    with globally(0):
        model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    draw, size = generator(0, SMALL), 100
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=epochs * (len(pixels) // size))
    for _ in range(epochs):
        for at in torch.randperm(len(pixels), generator=draw).split(size):
            which = torch.randint(0, len(TEMPLATES), (len(at),), generator=draw).tolist()
            texts = [captions[c][w] for c, w in zip(label[at].tolist(), which, strict=True)]
            logits = model(pixel_values=pixels[at], **_numbers(texts, vocabulary)).logits_per_image
            same = (label[at][:, None] == label[at]).float()
            same = same / same.sum(1, keepdim=True)
            loss = (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        here = Path(made) / "model"
        model.save_pretrained(here)
        (here / "words.json").write_text(json.dumps(vocabulary))
        if not folder.exists():
            os.replace(here, folder)
