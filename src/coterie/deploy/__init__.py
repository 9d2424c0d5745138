"""Server and devices on separate machines: keys, the proxy, Flower's programs, and runs."""

from coterie.core.importing import require

require("a deployment", "flower")
