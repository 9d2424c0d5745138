"""Server and devices on separate machines: keys, the proxy, Flower's programs, the submission
of a run.
"""

from coterie.core.extras import require

require("a deployment", "flower", "flwr")
