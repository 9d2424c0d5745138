"""The keyboard of `coterie serve` as a folder of static files, whose models run in the browser."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coterie.export import keyboard_page, onnx_base
from coterie.export.chat_text import ChatText
from coterie.export.format import ClientModel, Options, Written
from coterie.export.graph import own_file
from coterie.export.onnx import Onnx

# the function that templates call for the date
TODAY = "strftime_now"
DATED = "The chat template writes a date, which in the page stays that of this export."


class Web(Onnx):
    """The files of `Onnx` and a page, whose colours need the graph's routing weights."""

    name = "web"
    about = "a keyboard for several clients that runs in a browser, offline, of every base"
    # small rather than exact, because everyone who opens the page downloads the models
    precisions = ("f16", "f32", "int8")
    base_precisions = ("int8", "f32", "w8", "w4")
    routing = True
    chats = True

    def check(self, client: ClientModel, options: Options) -> None:
        """Refuse a chat template whose texts the page could not write. Raises DataError without a
        template.
        """
        if options.chat:
            ChatText.of(client.model.chats)

    def write_base(self, clients: Sequence[ClientModel], folder: Path, options: Options) -> None:
        super().write_base(clients, folder, options)
        keyboard_page.write(
            folder,
            {own_file(client): client.model for client in clients},
            (onnx_base.BASE, onnx_base.WEIGHTS),
            [vars(shape) for shape in self.interface_of(clients[0]).caches],
            options.chat,
        )

    def write(self, client: ClientModel, folder: Path, options: Options) -> Written:
        written = super().write(client, folder, options)
        dated = options.chat and TODAY in str(client.model.chats.template)
        return replace(written, notes=(DATED,)) if dated else written

    def readme(self, clients: Sequence[ClientModel]) -> str:
        names = "\n".join(f"- {client.client}" for client in clients)
        return f"""# A keyboard that runs in the browser, exported from coterie

Any server of static files will do:

```
python -m http.server --bind 127.0.0.1 --directory "this folder"
```

and http://127.0.0.1:8000/ shows what each client would write next. The models run in the page.
Nothing is asked of any other machine, and what is typed goes nowhere. `export.json` says how far
each model is from the personal model, and `licences/` whose programs the page runs on.

{names}
"""
