"""The process behind a site's door: it builds the task from the site's own recipe and data, once, and answers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..core.batches import Batches
from ..engines.messages import HEAD_BYTES, read_private, read_public
from ..engines.site import Policy, Site
from ..runner import make_method
from ..tasks.build import make_task
from .door import alone, serve
from .files import DeployError, Federation, SiteFile, digest, read_recipe, seated


def open_site(folder: Path) -> Site:
    """The site of a folder.

    Raises:
        DeployError, RecipeError, DataError, ModelError: naming what is wrong.
    """
    about, federation, recipe = SiteFile.read(folder), Federation.read(folder / "federation.json"), read_recipe(folder / "recipe.toml")
    if about.client >= len(federation.clients):
        raise DeployError(f"site.toml: client = {about.client}; the federation has clients 0 to {len(federation.clients) - 1}")
    if digest(recipe) != federation.recipe:
        raise DeployError("recipe.toml is not the recipe that federation.json names")
    mine = seated(recipe, about.client, about.data)
    task = make_task(mine, folder)
    if task.clients != len(federation.clients):
        raise DeployError(f"the recipe deals the data to {task.clients} clients; the federation has {len(federation.clients)}")
    policy = Policy(frozenset({federation.recipe}), **about.policy)
    batches = Batches(mine.train.size, mine.train.epochs, mine.train.steps)
    return Site(
        about.client,
        make_method(mine),
        task,
        mine.seed,
        batches,
        federation.name,
        federation.recipe,
        read_public(federation.coordinator),
        read_private(folder / "node.key"),
        federation.keys(),
        folder / "state",
        policy,
    )


def main() -> None:
    """``python -m isthmus.deploy.worker SITE``: serve until idle for half an hour, or until the process that started it is gone."""
    import torch

    folder, parent = Path(sys.argv[1]), int(os.environ.get("ISTHMUS_PARENT", "0"))
    if (lock := alone(folder, 1.0)) is None:
        print(f"another process serves {folder}", file=sys.stderr, flush=True)
        return
    with lock:
        torch.set_num_threads(int(os.environ.get("ISTHMUS_THREADS", "0")) or torch.get_num_threads())
        site = open_site(folder)
        print(f"client {site.client} of {site.federation}: open", file=sys.stderr, flush=True)
        serve(folder, site.answer, site.policy.message + HEAD_BYTES + 1024, 1800.0, lambda: not parent or _exists(parent))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main()
