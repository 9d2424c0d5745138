"""docs/deploy.md, followed literally: every block of commands is typed in at the machine that it
names.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from terminals import MINUTE, Terminal, left, terminals, texts, until

from coterie.deploy.keys import free_port

PAGE = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
BLOCKS = re.findall(
    r"^```bash\n# (?:on )?(?:the )?(\w+)[^\n]*\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
)
STAYS = re.compile(r"coterie (server|client) ")  # a command that does not end


def test_every_block_says_where_it_is_typed_in() -> None:
    assert len(BLOCKS) == PAGE.count("```bash") > 8
    assert {where for where, _ in BLOCKS} == {"anywhere", "server", "ann", "ben"}


def test_files_that_the_page_names_are_there() -> None:
    for name in re.findall(r"\]\(([\w/.-]+\.md)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / name).exists(), name


def test_the_service_is_the_command_of_the_page() -> None:
    (service,) = re.findall(r"^ExecStart=\S*/bin/(.*)$", PAGE, re.MULTILINE)
    assert [
        commands for where, commands in BLOCKS if where == "ann" and commands.strip() == service
    ]


def here(commands: str, folder: Path, ports: dict[str, str]) -> str:
    """The commands with this machine's addresses in the place of the page's."""
    commands = re.sub(r"scp (.*) (\w+)\.example:(\S*)", rf"cp \1 {folder}/\2/\3", commands)
    commands = re.sub(r"(--server )server\.example", r"\g<1>127.0.0.1", commands)
    return re.sub(r"\b950[01]\b", lambda port: ports[port[0]], commands)


@pytest.mark.slow
def test_the_page_works_as_it_is_written(tmp_path: Path) -> None:
    ports = {"9500": str(free_port()), "9501": str(free_port())}
    data = texts(tmp_path / "texts", "ann", "ben")
    ready = {"server": "Ctrl-C stops it.", "client": "asks 127.0.0.1"}
    devices: dict[str, Terminal] = {}
    with terminals(tmp_path) as terminal:
        for where, commands in BLOCKS:
            typed = terminal(where, here(commands.strip(), tmp_path, ports), shell=True)
            if stays := STAYS.match(commands):
                typed.says(ready[stays[1]])
                if stays[1] == "client":
                    devices[where] = typed
                else:
                    server = typed
                continue
            assert typed.ends(15 * MINUTE) == 0, f"{commands}\n{typed.text}"
            for client in ("ann", "ben"):
                if (tmp_path / client / "coterie/texts" / client).is_dir():
                    shutil.copytree(
                        data / client,
                        tmp_path / client / "coterie/texts" / client,
                        dirs_exist_ok=True,
                    )
        assert json.loads((tmp_path / "server/runs/first/result.json").read_text())[
            "clients"
        ].keys() == {"ann", "ben"}
        assert any(
            "In the morning" in path.read_text() for path in (tmp_path / "ann").glob("terminal-*")
        )
        assert not (tmp_path / "server/runs/first/clients").exists()
        said = [f"The device of {client} is registered." for client in ("ann", "ben", "cleo")]
        assert terminal("server", "coterie keys keys --client cleo", shell=True).ends() == 0
        (tmp_path / "server/keys/clients/bad.pub").write_text("no key")
        until(
            lambda: (
                "clients/bad.pub was refused" in server.text
                and all(line in server.text for line in said)
            ),
            "cleo is known",
        )
        (tmp_path / "server/keys/clients/ben.pub").unlink()
        server.says("The device of ben is removed")
        devices["ben"].says("The supernode ended and is started again.")
        assert json.loads((tmp_path / "server/coterie-server/nodes.json").read_text()).keys() == {
            (tmp_path / f"server/keys/clients/{client}.pub").read_text()
            for client in ("ann", "cleo")
        }
        for device in devices.values():
            assert device.stop() == 143
            assert "The client's state is kept." in device.text
    assert not left(tmp_path)
