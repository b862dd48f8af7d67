"""``isthmus deploy``: init, up, link, run, node, certificate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cli import Json, Quiet, Set, _clear_errors, _print_json

app = typer.Typer(no_args_is_help=True, help="The same recipe between machines, over Flower.")
Folder = Annotated[Path, typer.Argument(help="A federation's folder, made by isthmus deploy init.", metavar="FOLDER")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No TLS and no authentication of nodes: for trying on a network that you trust.")
]


@app.command()
def init(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe or a .toml file.")],
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    nodes: Annotated[int, typer.Option(min=2, max=1000, help="Clients.")] = 4,
    names: Annotated[str | None, typer.Option(help="Comma-separated names of the clients, instead of --nodes.")] = None,
    address: Annotated[str, typer.Option(help="Where the nodes reach the SuperLink: host:port.")] = "127.0.0.1:8000",
    own_data: Annotated[bool, typer.Option("--own-data", help="Every site brings its own rows; the recipe must name data.labels.")] = False,
    insecure: Insecure = False,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Write a federation: the Flower app, TLS certificates, one folder with a key for each site, a compose file."""
    with _clear_errors():
        from ..core.recipe import load
        from .files import create

        chosen, _ = load(recipe, set_ or ())
        given = [n.strip() for n in names.split(",")] if names else [f"site-{i}" for i in range(nodes)]
        federation = create(folder, chosen, given, address, own_data, insecure)
        if json_:
            _print_json({"folder": str(folder), "name": federation.name, "clients": given, "recipe": federation.recipe})
            return
        typer.echo(f"{folder}: {len(given)} clients\n")
        typer.echo(f"try it here            isthmus deploy up {folder}")
        typer.echo(f"on the link's machine  isthmus deploy link {folder}, then isthmus deploy run {folder}")
        typer.echo("on each site's         carry sites/NAME there, edit site.toml, isthmus deploy node NAME")


@app.command()
def up(
    recipe: Annotated[str, typer.Argument(help="A federation's folder, or a recipe for which one is made below runs/.")],
    nodes: Annotated[int, typer.Option(min=2, max=64, help="Clients, where the folder is made.")] = 4,
    insecure: Insecure = False,
    set_: Set = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Start a SuperLink and all SuperNodes as processes of this machine, run, and stop them."""
    with _clear_errors():
        from ..core.recipe import RecipeError, load
        from ..report import html
        from ..runner import new_folder
        from .files import create
        from .processes import Trial, free_port

        folder = Path(recipe)
        if not (folder / "app").is_dir():
            chosen, _ = load(recipe, set_ or ())
            Path("runs").mkdir(exist_ok=True)
            folder = new_folder(chosen.updated({"name": f"{chosen.name}-deployed"}), Path("runs"))
            create(folder, chosen, [f"site-{i}" for i in range(nodes)], f"127.0.0.1:{free_port()}", insecure=insecure)
        elif set_:
            raise RecipeError("--set: the recipe of a federation's folder is fixed; make another one")
        with Trial(folder, insecure) as trial:
            trial.run(_sayer(quiet or json_))
        _finish(folder, html, json_)


def _sayer(quiet: bool) -> Any:
    def say(status: dict[str, Any]) -> None:
        if not quiet:
            typer.echo(
                f"{status['state']}: round {status['round']} of {status['rounds']}" + (f" ({status['why']})" if status["why"] else ""),
                err=True,
            )

    return say


def _finish(folder: Path, html: Any, json_: bool) -> None:
    run = folder / "run"
    document = json.loads((run / "result.json").read_text())
    page = html.write(run)
    if json_:
        _print_json(document | {"run_dir": str(run)})
        return
    for which in ("global", "personal"):
        if document[f"accuracy_{which}"] is not None:
            typer.echo(f"accuracy, {which:<9} {100 * document[f'accuracy_{which}']:.1f} %")
    typer.echo(f"report   {page}")


@app.command()
def link(
    folder: Folder,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    insecure: Insecure = False,
) -> None:
    """Run the SuperLink, on the coordinator's machine, until it is stopped; nodes are enrolled when it is up."""
    with _clear_errors():
        import subprocess

        from .processes import environment, link_command, opened, register

        home = str((folder / "link" / "flwr").resolve())
        process = subprocess.Popen(link_command(folder, host, port, insecure), env=environment(FLWR_HOME=home))
        try:
            opened("127.0.0.1" if host in ("0.0.0.0", "::") else host, port, 60.0, process)
            if not insecure:
                register(folder)
                typer.echo("nodes are enrolled", err=True)
            raise typer.Exit(process.wait())
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        finally:
            process.terminate()
            process.wait(20)


@app.command()
def run(folder: Folder, json_: Json = False, quiet: Quiet = False) -> None:
    """Submit the federation's run to its link and follow it; one that was interrupted goes on."""
    with _clear_errors():
        from ..report import html
        from .processes import follow, submit

        follow(folder, submit(folder), _sayer(quiet or json_), lambda: None)
        _finish(folder, html, json_)


@app.command()
def node(
    site: Annotated[Path, typer.Argument(help="A site's folder on this machine.")],
    insecure: Insecure = False,
    threads: Annotated[int, typer.Option(min=0, help="Of torch; 0: as many as it likes.")] = 0,
) -> None:
    """Run a site: its SuperNode, and the process that holds model and data, until it is stopped."""
    with _clear_errors():
        import os
        import sys

        from .processes import kept_up, node_command, run_foreground

        more = {"FLWR_HOME": str((site / "flwr").resolve()), "ISTHMUS_PARENT": str(os.getpid()), "ISTHMUS_THREADS": str(threads)}
        worker = [sys.executable, "-m", "isthmus.deploy.worker", str(site)]
        raise typer.Exit(run_foreground([(kept_up(node_command(site, insecure)), more), (worker, more)]))


@app.command()
def certificate(
    folder: Folder,
    host: Annotated[list[str], typer.Option(help="Name or address of the link; may be given more than once.")],
    days: Annotated[int, typer.Option(min=1)] = 825,
) -> None:
    """A new certificate for the link, from the federation's own authority (folder ca/)."""
    with _clear_errors():
        from .files import DeployError, authority, server_certificate

        if not (folder / "ca" / "ca.key").exists():
            raise DeployError(f"{folder}/ca has no key of an authority")
        server_certificate(folder / "link", authority(folder / "ca", ""), host, days)
        typer.echo(f"{folder / 'link' / 'server.pem'}: valid for {days} days")
