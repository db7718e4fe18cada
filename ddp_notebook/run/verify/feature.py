"""Declaration of `%ddp_verify`."""

from __future__ import annotations

import functools

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_SESSION


@functools.cache
def verify_line() -> LineParser:
    parser = LineParser(
        "%ddp_verify", "%ddp_verify", "%ddp_verify F.cross_entropy(model(x), y) --batch x,y", "%ddp_verify --micro 4"
    )
    parser.add_argument(
        "loss", metavar="LOSS", nargs="?", help="expression of the loss; by default as in the last cell"
    )
    parser.add_argument("--batch", metavar="x,y", help="variables with each rank's part of the batch")
    parser.add_argument("--model", metavar="NAME", help="variable with the model; by default the first in LOSS")
    parser.add_argument("--micro", metavar="N", default="1", help="micro-steps for each optimizer step (1)")
    return parser


def ddp_verify(commands: Commands, line: str) -> None:
    """Compare a training step of all ranks with one process.

    The ranks compute the step together, each rank its part alone, and one process the whole batch. Afterwards
    everything is restored."""
    from ddp_notebook.run.verify.verifying import read_line

    loss, batch, model, micro = read_line(verify_line(), line)
    print(commands().of_session().verify(loss, batch=batch, model=model, micro=micro))


FEATURE = NotebookFeature(magics={"ddp_verify": FeatureMagic(verify_line, ddp_verify, OF_SESSION["verify"], "session")})
