"""The command that checks this installation and this machine: doctor."""

import typer

from coterie.cli.base import _stopping, app
from coterie.core.printing import printable


@app.command()
def doctor() -> None:
    """Look at this installation and machine: versions, devices, threads, memory, disk, extras, and
    what to do about what is missing. Exit code 1 if something has to be done before a run.
    """
    with _stopping("stopped."):
        from coterie.cli.health import examined

        problems = 0
        for check in examined():
            print(f"{'ok ' if check.fine else '-- '} {check.name}: {printable(check.finding)}")
            if check.remedy:
                print(f"      {printable(check.remedy)}")
            problems += check.needed and not check.fine
        if problems:
            print(f"\n{problems} of these must be mended before a run.")
            raise typer.Exit(1)
        print("\nReady: coterie run quickstart")
