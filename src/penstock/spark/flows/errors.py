"""What can be wrong with a flow, as errors that say so in plain words.

A flow stops for good on those that are not `retriable`; the supervisor tries again on the others.
"""

from __future__ import annotations

from typing import ClassVar

from penstock.errors import PenstockError


class FlowError(PenstockError):
    """The root of what goes wrong with flows."""


class FlowFileError(FlowError):
    """A file that cannot be read as flows; the message begins with file and line."""


class DeclarationError(FlowError):
    """A flow, an input or an output is declared in a way that cannot work."""


class UserCodeError(FlowError):
    """The user's own function or expression failed: trying again gives the same."""

    advice = (
        "Mend the flow's code, or the view's SQL, then stop `penstock run` and start it again: the "
        "flow goes on where it was. (`penstock flows restart` does not read the file again.)"
    )


class IncompatibleError(FlowError):
    """The flow has changed in a way that what it remembers does not fit any more."""


class UnknownTopicError(FlowError):
    """A flow reads a topic that is not there."""


class TopicChangedError(FlowError):
    """A topic is not what it was when the flow began to read or write it."""


class CheckpointError(FlowError):
    """What a flow remembers on disk is damaged, gone, or cannot be written."""


class CheckpointFullError(CheckpointError):
    """No space is left where the checkpoint is. Goes on by itself once there is."""

    retriable: ClassVar[bool] = True
    advice = "Free disk space there; the flow goes on from its last micro-batch, nothing is lost."


class SparkTroubleError(FlowError):
    """Spark failed in a way that may pass: a lost executor, a broken connection."""

    retriable: ClassVar[bool] = True
    advice = "The whole of Spark's report is in the log; run with --log-level debug."


class AlreadyRunningError(FlowError):
    """Another process runs flows on the same folder."""


class NotRunningError(FlowError):
    """No process runs flows on this folder, or not this flow."""


class UnknownFlowError(FlowError):
    """There is no flow of this name."""
