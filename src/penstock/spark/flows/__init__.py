"""Flows: the pipelines that a user declares in a Python file, and what keeps them running.

    from penstock.spark import flow, stream, topic

    clicks = stream("clicks", json="user string, page string, at timestamp")

    @flow(inputs=[clicks], output=topic("visits", key="user"))
    def visits(clicks):
        return clicks.where("page is not null")

`declare` is what the user writes with, `load` reads the file, `planning` sees what a flow needs of
Spark, `running` makes it a query, `supervisor` decides when it is started again, `manager` does it,
`folder` keeps what must outlive the process, `control` lets other processes ask and command,
`trouble` says in plain words what went wrong.
"""
