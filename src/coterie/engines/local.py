"""The engines that need nothing but this process, by name: what `engine` of a recipe may be
beside `flower`.
"""

from coterie.engines.inprocess import InProcess
from coterie.engines.loopback import Loopback

ENGINES: dict[str, type[InProcess] | type[Loopback]] = {
    "inprocess": InProcess,
    "loopback": Loopback,
}
