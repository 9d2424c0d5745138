"""Flower's two programs: a device's and a server's."""

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.core.errors import TensorError
from coterie.engines.flower.packing import _packed, _unpacked
from coterie.engines.messages import Request, failed, parsed

Handle = Callable[
    [Mapping[str, Any], str, bytes], tuple[str, bytes]
]  # (node's configuration, request, tensors) -> (reply, tensors)
Main = Callable[[Grid, Mapping[str, Any]], None]  # (grid, run's configuration)
QUERY = "query.coterie"  # the one kind of message; the action is in the request


def client_app(handle: Handle) -> ClientApp:
    """Return the program of a device. It always answers with a message: without one a SuperNode
    would wait forever.
    """
    app = ClientApp()

    @app.query("coterie")
    def answer(message: Message, context: Context) -> Message:
        try:
            text, body = _unpacked(message.content)
            if parsed(Request, text).masked:
                raise TensorError(
                    "asked without masks for a reply that must be masked",
                    "Install the same version of coterie everywhere.",
                )
            text, body = handle(dict(context.node_config), text, body)
        except Exception as error:
            text, body = failed(f"{type(error).__name__}: {error}").model_dump_json(), b""
        return Message(_packed(text, body), reply_to=message)

    @app.train()
    def answer_masked(message: Message, context: Context) -> Message:
        from coterie.engines.flower.secagg_device import masked

        return masked(handle, message, context)

    return app


def server_app(main: Main) -> ServerApp:
    """Return the program of a server."""
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(grid, dict(context.run_config))

    return app
