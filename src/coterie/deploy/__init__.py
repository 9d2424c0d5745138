"""Server and devices on machines of their own: keys, the proxy, Flower's programs, the submission
of a run.
"""
