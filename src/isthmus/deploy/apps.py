"""The two Flower apps of a federation, for any method, task and channel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RECORD, ENTRY = "isthmus", "message"


def wrapped(data: bytes) -> Any:
    """A Flower record that carries one sealed message as a byte array."""
    from flwr.app import Array, ArrayRecord, RecordDict

    return RecordDict({RECORD: ArrayRecord({ENTRY: Array(dtype="uint8", shape=(len(data),), stype="isthmus.message", data=data)})})


def unwrapped(record: Any) -> bytes:
    """The inverse of `wrapped`.

    Raises:
        ValueError: another record.
    """
    try:
        return bytes(record[RECORD][ENTRY].data)
    except (KeyError, TypeError, AttributeError):
        raise ValueError("not a message of this federation") from None


def client_app() -> Any:
    """Hands every message in at the site's door; which site, the node says (``--node-config 'site="/path"'``), never the coordinator."""
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    from .door import knock

    app = ClientApp()

    def answer(message: Any, context: Any) -> Any:
        folder = context.node_config.get("site")
        if not isinstance(folder, str) or not Path(folder).is_dir():
            raise ValueError("node config: site = is not the folder of a site on this machine")
        return Message(wrapped(knock(Path(folder), unwrapped(message.content))), reply_to=message)

    app.train()(answer)
    app.query()(answer)
    return app


def server_app(folder: Path) -> Any:
    """Runs the recipe in ``folder`` over the nodes of the link."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        from .coordinator import coordinate

        coordinate(grid, folder, Path(str(context.run_config["link"])), str(context.run_config.get("runs", "")), str(context.run_id))

    return app
