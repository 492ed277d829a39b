"""What the broker counts, and how Prometheus gets it.

`metering` holds the counters that requests raise; `collect` gathers everything into families of
bounded size, `exposition` writes them as text, `http` serves that.
"""
