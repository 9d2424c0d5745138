"""Flower's two programs, a device's and a server's, and its messages with requests and replies.
Nothing here needs torch: the program of a device hands requests on.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.core.errors import TensorError
from coterie.engines.messages import Request, failed, parsed

# (node's configuration, request, tensors) -> (reply, tensors)
Handle = Callable[[Mapping[str, Any], str, bytes], tuple[str, bytes]]
Main = Callable[[Grid, Mapping[str, Any]], None]  # (grid, run's configuration)
QUERY = "query.coterie"  # the one kind of message; the action is in the request

_TEXT, _TENSORS, _STYPE = "text", "tensors", "safetensors"


def packed(text: str, body: bytes) -> RecordDict:
    """Return the content of a message."""
    array = Array(dtype="uint8", shape=(len(body),), stype=_STYPE, data=body)
    return RecordDict(
        {_TEXT: ConfigRecord({_TEXT: text}), _TENSORS: ArrayRecord({_TENSORS: array})}
    )


def unpacked(content: RecordDict, most: int | None = None) -> tuple[str, bytes]:
    """Return the inverse of `packed`. Raises TensorError for other records or too many bytes."""
    text, arrays = content.get(_TEXT), content.get(_TENSORS)
    if (
        set(content) != {_TEXT, _TENSORS}
        or not isinstance(text, ConfigRecord)
        or not isinstance(arrays, ArrayRecord)
    ):
        raise TensorError(
            f"a message with records {sorted(content)[:5]}, expected {_TEXT} and {_TENSORS}",
            "It did not come from coterie.",
        )
    if (
        set(text) != {_TEXT}
        or not isinstance(text[_TEXT], str)
        or set(arrays) != {_TENSORS}
        or arrays[_TENSORS].stype != _STYPE
    ):
        raise TensorError(
            "a message whose records hold something else than one text and one array of "
            "safetensors",
            "It did not come from coterie.",
        )
    body = arrays[_TENSORS].data
    if most is not None and len(body) > most:
        raise TensorError(
            f"a message with {len(body):,} bytes of tensors, expected at most {most:,}"
        )
    return str(text[_TEXT]), body


def client_app(handle: Handle) -> ClientApp:
    """Return the program of a device. It always answers, since a SuperNode would wait forever."""
    app = ClientApp()

    @app.query("coterie")
    def answer(message: Message, context: Context) -> Message:
        try:
            text, body = unpacked(message.content)
            if parsed(Request, text).masked:
                raise TensorError(
                    "asked without masks for a reply that must be masked",
                    "Install the same version of coterie everywhere.",
                )
            text, body = handle(dict(context.node_config), text, body)
        except Exception as error:
            text, body = failed(f"{type(error).__name__}: {error}").model_dump_json(), b""
        return Message(packed(text, body), reply_to=message)

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
