"""Declaration of `%ddp_forecast`."""

from __future__ import annotations

import functools

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_RECORDING


@functools.cache
def forecast_line() -> LineParser:
    parser = LineParser(
        "%ddp_forecast",
        "%ddp_forecast 8,64,512",
        "%ddp_forecast 64,512 --gpus-per-node 8 --network 300,25 --latency 5,20",
        "%ddp_forecast 64 --bucket-mb 50 --batch x2",
    )
    parser.add_argument("ranks", metavar="RANKS", help="numbers of ranks, such as 8,64,512")
    parser.add_argument("--gpus-per-node", metavar="N", help="ranks of a node (one level without it)")
    parser.add_argument("--network", metavar="GB/S[,GB/S]", help="GB/s that each rank sends: inside, between nodes")
    parser.add_argument("--latency", metavar="US[,US]", help="microseconds per message: inside, between nodes")
    parser.add_argument("--bucket-mb", metavar="MB", help="size of DDP's buckets, as bucket_cap_mb")
    parser.add_argument("--batch", metavar="xN", help="batch of each rank, as a multiple of the recorded one")
    parser.add_argument("--micro", metavar="N", help="forward and backward passes of a step")
    parser.add_argument("--cell", metavar="N", help="number of the recorded cell (the last training cell)")
    return parser


def ddp_forecast(commands: Commands, line: str) -> None:
    """Predict the step time of DDP on more or fewer ranks.

    It uses the recorded order of buckets. First it predicts the recorded run, and gives no forecast if that is off by
    more than 10 %."""
    from IPython.display import display

    parser = forecast_line()
    given = parser.parse_line(line)

    def numbers(kind: type[int] | type[float], name: str, text: str | None) -> list[float] | None:
        what = "list of integers" if kind is int else "number, or two numbers with a comma"
        return None if text is None else [parser.number(kind, name, one, what) for one in text.split(",") if one]

    def number(kind: type[int] | type[float], name: str, text: str | None) -> float | None:
        what = "integer" if kind is int else "number"
        return None if text is None else parser.number(kind, name, text, what)

    batch = number(float, "--batch", None if given.batch is None else given.batch.removeprefix("x"))
    found = (
        commands()
        .recorded()
        .recording.forecast(
            numbers(int, "RANKS", given.ranks),
            cell=number(int, "--cell", given.cell),
            gpus_per_node=number(int, "--gpus-per-node", given.gpus_per_node),
            network=numbers(float, "--network", given.network),
            latency_us=numbers(float, "--latency", given.latency),
            bucket_mb=number(float, "--bucket-mb", given.bucket_mb),
            batch=1.0 if batch is None else batch,
            micro_steps=number(int, "--micro", given.micro),
        )
    )
    print(found)
    if found.predictions:
        display(found.plot())


FEATURE = NotebookFeature(
    magics={
        "ddp_forecast": FeatureMagic(
            forecast_line, ddp_forecast, OF_RECORDING["forecast"], "recording", after="ddp_trace"
        )
    }
)
